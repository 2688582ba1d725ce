"""The emulation itself: what operator and cloud do about slices of several hosts. No Ray.

What the operator writes is held against recordings in `test_conformance.py`.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_plane.server import ControlPlane

from serving.domain.names.gke_names import GKE_COMPUTE_CLASS
from serving.domain.topology import slice_shape

from .by_hand import ClusterByHand
from .cloud import NAMESPACE_LABEL, Loss
from .objects import raycluster, replica_pods, worker_group
from .webhook import NAME, told_to
from .webhook_server import Webhook
from .worker_groups import look

pytestmark = pytest.mark.process

SHAPE = slice_shape("v6e", "2x4", 4)
GROUP = "v6e-spot"


def group(max_replicas: int = 4) -> dict:
    return worker_group(GROUP, SHAPE, "spot", max_replicas=max_replicas)


@pytest.fixture
def cluster(
    control_plane: ControlPlane, webhook: Webhook, tmp_path: Path
) -> Iterator[ClusterByHand]:
    with ClusterByHand(control_plane, raycluster(group()), tmp_path) as running:
        yield running


def set_replicas(cluster: ClusterByHand, count: int, *doomed: str) -> None:
    with cluster.edit() as stored:
        stored["spec"]["workerGroupSpecs"][0].update(
            replicas=count, scaleStrategy={"workersToDelete": list(doomed)}
        )
    cluster.settle()


def test_operator_new_replicas_take_the_lowest_free_index(cluster: ClusterByHand) -> None:
    set_replicas(cluster, 3)
    first = cluster.pods(GROUP)[0]
    set_replicas(cluster, 2, first["metadata"]["name"])
    assert told_to(first)[NAME] not in cluster.slices(GROUP)
    set_replicas(cluster, 3)
    assert cluster.slices(GROUP) == {f"{GROUP}-{index}": 2 for index in range(3)}


def test_operator_naming_one_pod_deletes_its_whole_slice(cluster: ClusterByHand) -> None:
    set_replicas(cluster, 2)
    doomed = cluster.pods(GROUP)[1]
    set_replicas(cluster, 1, doomed["metadata"]["name"])
    left = {told_to(pod)[NAME] for pod in cluster.pods(GROUP)}
    assert len(left) == 1
    assert told_to(doomed)[NAME] not in left


def test_operator_lower_count_without_a_name_deletes_nothing(cluster: ClusterByHand) -> None:
    set_replicas(cluster, 2)
    set_replicas(cluster, 0)
    assert len(cluster.slices(GROUP)) == 2


def test_operator_without_autoscaler_deletes_surplus_at_random() -> None:
    """A lower count without a name takes a slice that nobody chose: a held one, by chance."""
    made = group() | {"replicas": 1}
    pods = replica_pods(made, 0) + replica_pods(made, 1)
    deleted = set()
    for seed in range(8):
        step = look(made, pods, has_autoscaler=False, dice=random.Random(seed))
        (name,) = {told_to(each.pod)[NAME] for each in step.deletions}
        assert len(step.deletions) == SHAPE.num_hosts
        deleted.add(name)
    assert deleted == {f"{GROUP}-0", f"{GROUP}-1"}


@pytest.mark.parametrize("how", [Loss.GONE, Loss.FAILED])
def test_operator_lost_host_replaces_the_whole_slice(cluster: ClusterByHand, how: Loss) -> None:
    set_replicas(cluster, 1)
    before = {pod["metadata"]["name"] for pod in cluster.pods(GROUP)}
    cluster.lose(f"{GROUP}-0", host=1, how=how)
    cluster.settle()
    after = {pod["metadata"]["name"] for pod in cluster.pods(GROUP)}
    assert len(after) == SHAPE.num_hosts
    assert not before & after
    assert cluster.slices(GROUP) == {f"{GROUP}-0": 2}


def test_hosts_of_a_slice_are_in_one_node_pool_of_their_own(cluster: ClusterByHand) -> None:
    set_replicas(cluster, 2)
    pools: dict[str, set[str]] = {}
    for pod in cluster.pods(GROUP):
        node = cluster.api.get("Node", None, pod["spec"]["nodeName"])
        pool = node["metadata"]["labels"]["cloud.google.com/gke-nodepool"]
        pools.setdefault(told_to(pod)[NAME], set()).add(pool)
    assert [len(found) for found in pools.values()] == [1, 1]
    assert len(set().union(*pools.values())) == 2


def test_cloud_delivers_a_slice_whole_and_late(cluster: ClusterByHand) -> None:
    cluster.cloud.delays_s[GROUP] = 30.0
    set_replicas(cluster, 1)
    cluster.settle(now_s=29.0)
    assert cluster.slices(GROUP) == {f"{GROUP}-0": 0}
    cluster.settle(now_s=30.0)
    assert cluster.slices(GROUP) == {f"{GROUP}-0": 2}


def test_slices_that_come_one_after_the_other_all_come(cluster: ClusterByHand) -> None:
    """The scheduler gives the hosts that came for the first to whoever is first in its queue."""
    cluster.cloud.delays_s[GROUP] = 10.0
    set_replicas(cluster, 2)
    with cluster.edit() as stored:
        stored["spec"]["workerGroupSpecs"][0]["replicas"] = 4
    cluster.settle(now_s=5.0)
    for now_s in (10.0, 15.0):
        cluster.settle(now_s=now_s)
    assert cluster.slices(GROUP) == {f"{GROUP}-{index}": 2 for index in range(4)}


def test_node_pool_that_another_slice_has_begun_is_kept_for_its_last_host(
    control_plane: ControlPlane, webhook: Webhook, tmp_path: Path
) -> None:
    """A scheduler places hosts one by one, on whatever has come for slices of their kind."""
    placed_by_hand = group()
    placed_by_hand["template"]["spec"]["schedulerName"] = "this-test"
    with ClusterByHand(control_plane, raycluster(placed_by_hand), tmp_path) as cluster:
        cluster.cloud.delays_s[GROUP] = 10.0
        for count in range(1, 4):
            with cluster.edit() as stored:
                stored["spec"]["workerGroupSpecs"][0]["replicas"] = count
            cluster.settle(now_s=float(count))
        first, second, third = (
            [pod for pod in cluster.pods(GROUP) if told_to(pod)[NAME] == f"{GROUP}-{index}"]
            for index in range(3)
        )
        cluster.cloud.step(11.0)
        (of_first,) = node_pools(cluster)
        cluster.cloud.step(12.0)
        (of_second,) = (nodes for nodes in node_pools(cluster) if nodes != of_first)
        cluster.api.bind(third[0], of_first[0])
        for pod, node in zip(first, of_second, strict=True):
            cluster.api.bind(pod, node)
        cluster.cloud.step(12.0)
        (another,) = (nodes for nodes in node_pools(cluster) if nodes not in (of_first, of_second))
        for pod, node in zip(second, another, strict=True):
            cluster.api.bind(pod, node)
        cluster.cloud.step(12.0)
        cluster.api.bind(third[1], of_first[1])
        cluster.settle(now_s=12.0)
        assert cluster.slices(GROUP) == {f"{GROUP}-{index}": 2 for index in range(3)}


def node_pools(cluster: ClusterByHand) -> list[list[str]]:
    """The names of the nodes of each pool of the group."""
    labels = {NAMESPACE_LABEL: cluster.namespace, GKE_COMPUTE_CLASS: GROUP}
    pools: dict[str, list[str]] = {}
    for node in cluster.api.list("Node", None, labels):
        pool = node["metadata"]["labels"]["cloud.google.com/gke-nodepool"]
        pools.setdefault(pool, []).append(node["metadata"]["name"])
    return list(pools.values())


def test_cloud_in_a_stock_out_delivers_nothing(cluster: ClusterByHand) -> None:
    cluster.cloud.delays_s[GROUP] = None
    set_replicas(cluster, 1)
    cluster.settle(now_s=1e6)
    assert cluster.slices(GROUP) == {f"{GROUP}-0": 0}
    cluster.cloud.delays_s[GROUP] = 0.0
    cluster.settle(now_s=1e6)
    assert cluster.slices(GROUP) == {f"{GROUP}-0": 2}


def test_emulation_that_moves_by_itself_replaces_what_is_lost(cluster: ClusterByHand) -> None:
    set_replicas(cluster, 2)
    with cluster.running():
        for name, how in ((f"{GROUP}-0", Loss.GONE), (f"{GROUP}-1", Loss.FAILED)):
            lost = {pod["metadata"]["name"] for pod in cluster.pods(GROUP)}
            cluster.lose(name, how=how)
            cluster.wait(lambda lost=lost: is_replaced(cluster, lost), f"{name} is replaced")


def is_replaced(cluster: ClusterByHand, lost: set[str]) -> bool:
    """One slice of two hosts has come for one that was lost, and both run."""
    names = {pod["metadata"]["name"] for pod in cluster.pods(GROUP)}
    return len(names - lost) == SHAPE.num_hosts and cluster.slices(GROUP) == {
        f"{GROUP}-0": 2,
        f"{GROUP}-1": 2,
    }


def test_host_that_is_not_there_cannot_be_lost(cluster: ClusterByHand) -> None:
    set_replicas(cluster, 1)
    with pytest.raises(LookupError, match=f"no host 2 of a slice {GROUP}-0"):
        cluster.lose(f"{GROUP}-0", host=2)
