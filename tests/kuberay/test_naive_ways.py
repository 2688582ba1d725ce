"""What Ray's own ways of lowering a slice count do to a slice that somebody uses.

Each of these loses it: Ray's autoscaler reasons about hosts, KubeRay deletes whole slices. They are
the reason why the provisioner exists, and they tell us when a later Ray no longer does this; then
`docs/adr/0009` is to be read again. Which host goes first follows from Ray 2.60's own order (idle
longest, or least useful for what is requested), so that each scenario ends the same way every time.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import ray
from control_plane.server import ControlPlane
from ray.autoscaler.sdk import request_resources
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serving.domain.topology import slice_shape

from .cluster import EmulatedCluster
from .objects import NEVER_IDLE_S, raycluster, worker_group
from .webhook_server import Webhook

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore::ResourceWarning")]

SHAPE = slice_shape("v6e", "2x4", 4)
GROUPS = ("idle-timeout", "min-replicas", "requested")
_IDLE_S = 2
# Launching, raylets and all: Ray's way up takes longer than ours.
_UP_S = 150.0


@pytest.fixture(scope="module")
def cluster(control_plane: ControlPlane, webhook: Webhook) -> Iterator[EmulatedCluster]:
    # No idle timeout until the scenario is set up: a slice is not to go before.
    groups = [worker_group(name, SHAPE, name, max_replicas=2) for name in GROUPS]
    delays: dict[str, float | None] = dict.fromkeys(GROUPS, 0.5)
    with EmulatedCluster(control_plane, raycluster(*groups), delays) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_slice_is_left(cluster: EmulatedCluster) -> Iterator[None]:
    """Two cores are not enough for the slices of several scenarios."""
    yield
    request_resources(bundles=[])
    for name in GROUPS:
        pods = [pod["metadata"]["name"] for pod in cluster.pods(name)]
        named = {"workersToDelete": pods}
        cluster.edit_group(
            name, replicas=0, minReplicas=0, idleTimeoutSeconds=NEVER_IDLE_S, scaleStrategy=named
        )
    cluster.wait(lambda: not any(map(cluster.pods, GROUPS)), "no pod is left")


@pytest.mark.long
def test_one_busy_host_does_not_keep_a_slice_from_the_idle_timeout(
    cluster: EmulatedCluster,
) -> None:
    """The engine's actor is on one host. The other one is idle, and takes the slice with it."""
    cluster.edit_group("idle-timeout", replicas=1)
    (used,) = wait_slices(cluster, "idle-timeout", 1)
    node_ids = cluster.whole_slices("idle-timeout")[used]
    engine = start_engine(hosts_of("idle-timeout", used)["0"])

    cluster.edit_group("idle-timeout", idleTimeoutSeconds=_IDLE_S)

    wait_lost(cluster, engine)
    cluster.wait(lambda: not node_ids & live_nodes(), "the whole slice is gone")


@pytest.mark.long
def test_lowered_min_replicas_takes_the_slice_in_use(cluster: EmulatedCluster) -> None:
    """Two slices, one in use by its first host, one idle. One is to go, and it is the wrong one.

    The host idle longest goes first, and that is the engine's idle neighbour.
    """
    cluster.edit_group("min-replicas", minReplicas=2)
    used, idle = wait_slices(cluster, "min-replicas", 2)
    node_ids = cluster.whole_slices("min-replicas")[used]
    engine = start_engine(hosts_of("min-replicas", used)["0"])
    for node_id in hosts_of("min-replicas", idle).values():
        touch(node_id)

    cluster.edit_group("min-replicas", minReplicas=1, idleTimeoutSeconds=_IDLE_S)

    wait_lost(cluster, engine)
    cluster.wait(lambda: not node_ids & live_nodes(), "the whole slice is gone")


@pytest.mark.long
def test_lowered_request_takes_both_slices(cluster: EmulatedCluster) -> None:
    """`request_resources` for two slices, then for one: a host of each is kept, and so neither is.

    Ray keeps the hosts that the request uses up most; worker 0 has a resource more than others.
    """
    request_slices("requested", 2)
    used, _ = wait_slices(cluster, "requested", 2)
    node_ids = frozenset[str]().union(*cluster.whole_slices("requested").values())
    engine = start_engine(hosts_of("requested", used)["1"])

    request_slices("requested", 1)
    cluster.edit_group("requested", idleTimeoutSeconds=_IDLE_S)

    wait_lost(cluster, engine)
    cluster.wait(lambda: not node_ids & live_nodes(), "both slices are gone")


def wait_slices(cluster: EmulatedCluster, group: str, count: int) -> list[str]:
    """The names of the group's slices once there are so many."""
    cluster.wait(lambda: len(cluster.whole_slices(group)) == count, f"{count} slices", _UP_S)
    return sorted(cluster.whole_slices(group))


def live_nodes() -> frozenset[str]:
    """The ids of all nodes that Ray takes for alive."""
    return frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])


def hosts_of(group: str, slice_name: str) -> dict[str, str]:
    """Node ids of a slice by worker id."""
    labels = {node["NodeID"]: node["Labels"] for node in ray.nodes() if node["Alive"]}
    return {
        each["ray.io/tpu-worker-id"]: node_id
        for node_id, each in labels.items()
        if each.get("ray.io/node-group") == group and each["ray.io/tpu-slice-name"] == slice_name
    }


def request_slices(group: str, count: int) -> None:
    """As many hosts as that many slices have, of the group's market."""
    num_hosts = count * SHAPE.num_hosts
    selector = {"ray.io/market-type": group}
    request_resources(
        bundles=[{"TPU": SHAPE.chips_per_host}] * num_hosts,
        bundle_label_selectors=[selector] * num_hosts,
    )


def start_engine(node_id: str) -> Any:
    """An actor with every chip of one host, which is how one might hold a slice."""

    @ray.remote(num_cpus=0, resources={"TPU": SHAPE.chips_per_host})
    class Engine:
        def ping(self) -> str:
            return "here"

    place = NodeAffinitySchedulingStrategy(node_id, soft=False)
    engine = Engine.options(scheduling_strategy=place).remote()
    assert ray.get(engine.ping.remote(), timeout=30) == "here"
    return engine


def touch(node_id: str) -> None:
    """The host is no longer idle for a moment, and so idle for less long than the others."""

    @ray.remote(num_cpus=0, resources={"TPU": 1})
    def nothing() -> None:
        return None

    place = NodeAffinitySchedulingStrategy(node_id, soft=False)
    ray.get(nothing.options(scheduling_strategy=place).remote(), timeout=30)


def wait_lost(cluster: EmulatedCluster, engine: Any) -> None:
    """The engine dies, though nobody preempted anything."""

    def is_lost() -> bool:
        try:
            ray.get(engine.ping.remote(), timeout=1.0)
        except ray.exceptions.GetTimeoutError:
            return False
        except ray.exceptions.RayActorError:
            return True
        return False

    took_s = cluster.wait(is_lost, "the engine is lost", 60.0)
    print(f"engine lost after {took_s:.1f} s")  # noqa: T201 - shown with `pytest -s`
