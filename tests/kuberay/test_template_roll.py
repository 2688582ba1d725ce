"""A changed template rolls slice by slice, under streams, on the whole application.

From a values file to the last token everything is the product's or Kubernetes': manifests, control
plane, the slice provisioner's own process, Ray, Serve, gateway, engines. What stands in for KubeRay
and GKE is this package's; what is not as rendered, `installed` says.
"""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from control_plane.kubectl import Kubectl
from control_plane.server import ControlPlane

from serving.domain.names.gke_names import hash_of_template
from tests.deployments.manifests.examples import shipped
from tests.e2e.application import linked_engines
from tests.e2e.rollout_load import StreamLoad

from .serving_cluster import ServingCluster
from .webhook_server import Webhook

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Json = dict[str, Any]

GROUP = "v6e-2x2-spot"
NUM_SLICES = 2
# One more than is wanted: what a roll makes beside them would find room.
MAX_SLICES = 3
MODEL = "qwen3-8b"
# The engine loads for a while, in which its slice serves nobody.
PACE = {"ttft_ms": 20.0, "tpot_ms": 100.0, "load_ms": 4000.0}
WIDTH = 4
NUM_TOKENS = 120
# At this pace longer than the 120 s that a slice has which is replaced: no stream can stay there.
BOUND = 1900
START_S = 240.0
ROLL_S = 240.0


def values() -> Json:
    """The shipped example with its spot slices alone."""
    raw = shipped("example.yaml")
    (model,) = raw["applications"][0]["args"]["models"]
    (spot,) = [each for each in model["deployments"] if each["compute_class"] == "spot"]
    model["deployments"] = [spot | {"replicas": NUM_SLICES}]
    raw["cluster"]["classes"] = [{"compute_class": "spot", "max_slices": MAX_SLICES}]
    return raw


@pytest.fixture(scope="module")
def cluster(control_plane: ControlPlane, webhook: Webhook) -> Iterator[ServingCluster]:
    with ServingCluster(control_plane, values(), {GROUP: 1.0}, PACE) as running:
        wait_serving(running, START_S)
        yield running


def wait_serving(cluster: ServingCluster, timeout_s: float) -> None:
    """Waits until every slice has an engine that is ready."""
    try:
        cluster.application.wait_fleet(
            lambda fleet: linked_engines(fleet) == {MODEL: NUM_SLICES}, timeout_s
        )
    except AssertionError as error:
        raise AssertionError(f"{error}\n{cluster.logs()}") from error


class Watch(threading.Thread):
    """Looks at engines and pods ten times a second."""

    def __init__(self, cluster: ServingCluster) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self._ending = threading.Event()
        self.fewest_ready = NUM_SLICES
        self.most_pods = 0
        self.num_looks = 0
        self.failures: list[str] = []

    def run(self) -> None:
        while not self._ending.wait(0.1):
            try:
                ready = linked_engines(self._cluster.application.fleet()).get(MODEL, 0)
            except httpx.HTTPError as error:
                self.failures.append(repr(error))
                continue
            self.fewest_ready = min(self.fewest_ready, ready)
            self.most_pods = max(self.most_pods, len(pods(self._cluster)))
            self.num_looks += 1

    def finish(self) -> None:
        self._ending.set()
        self.join(30)


def pods(cluster: ServingCluster) -> list[Json]:
    """The pods of the group that stay."""
    return [pod for pod in cluster.pods(GROUP) if "deletionTimestamp" not in pod["metadata"]]


def image_of(made: Json) -> str:
    """The image of Ray's container in a pod or a template."""
    return str(made["spec"]["containers"][0]["image"])


def changed(cluster: ServingCluster, image: str) -> Json:
    """The RayService as a user has it, with another image of one group's hosts."""
    stored = cluster.rayservice()
    service = {name: stored[name] for name in ("apiVersion", "kind", "spec")}
    service["metadata"] = {name: stored["metadata"][name] for name in ("name", "namespace")}
    (group,) = [
        each
        for each in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        if each["groupName"] == GROUP
    ]
    group["template"]["spec"]["containers"][0]["image"] = image
    return service


def is_rolled(cluster: ServingCluster, image: str) -> bool:
    """Whether every slice is of the new template, and serves."""
    found = pods(cluster)
    return len(found) == NUM_SLICES and all(image_of(pod) == image for pod in found)


def load_on(cluster: ServingCluster, bound: int | None) -> StreamLoad:
    application = cluster.application
    load = StreamLoad(
        application.base_url,
        model=MODEL,
        width=WIDTH,
        num_tokens=NUM_TOKENS,
        seeds=(0,),
        bound=bound,
        api_key=application.api_key,
    )
    load.start()
    return load


def test_changed_image_rolls_slice_by_slice_and_costs_no_stream(
    cluster: ServingCluster, control_plane: ControlPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    application = cluster.application
    before = {pod["metadata"]["name"] for pod in pods(cluster)}
    assert len(before) == cluster.group(GROUP)["replicas"] == NUM_SLICES, cluster.logs()
    engines = {row["engine_id"] for row in application.fleet()["slices"]}
    # Those that could last longer than their slice move, those that cannot finish there.
    loads = [load_on(cluster, BOUND), load_on(cluster, None)]
    watch = Watch(cluster)
    watch.start()
    application.wait_fleet(lambda fleet: fleet["models"][0]["in_flight"] == 2 * WIDTH, 60.0)

    image = "registry/slicewise-tpu:another"
    Kubectl(control_plane.kubeconfig).apply(changed(cluster, image))
    carried_s = cluster.wait(
        lambda: image_of(cluster.group(GROUP)["template"]) == image, "the cluster has the template"
    )
    rolled_s = cluster.wait(lambda: is_rolled(cluster, image), "every pod is of it", ROLL_S)
    wait_serving(cluster, ROLL_S)
    watch.finish()
    outcomes = [load.finish() for load in loads]
    fleet = application.fleet()
    resumes = fleet["models"][0]["resumes"]
    num_streams = sum(outcome.num_streams for outcome in outcomes)
    longest_s = max(outcome.longest_gap_s for outcome in outcomes)
    with capsys.disabled():
        sys.stdout.write(
            f"\n    template in the cluster after {carried_s:.1f} s, {NUM_SLICES} slices replaced "
            f"after {rolled_s:.1f} s more under {2 * WIDTH} streams: {num_streams} answers; never "
            f"fewer than {watch.fewest_ready} engines ready nor more than {watch.most_pods} pods "
            f"({watch.num_looks} looks); {resumes} resumes, longest gap {longest_s:.2f} s\n"
        )

    for outcome in outcomes:
        assert (outcome.failures, outcome.mixed) == ([], [])
        assert outcome.seeds[0] == outcome.num_streams > WIDTH
    assert watch.failures == []
    assert resumes > 0
    assert watch.fewest_ready == NUM_SLICES - 1, cluster.provisioner.log()
    assert watch.most_pods == NUM_SLICES, cluster.provisioner.log()
    # Other slices, other engines, and as many as before.
    assert not before & {pod["metadata"]["name"] for pod in pods(cluster)}
    assert not engines & {row["engine_id"] for row in fleet["slices"]}
    group = cluster.group(GROUP)
    assert {hash_of_template(pod) for pod in pods(cluster)} == {hash_of_template(group["template"])}
    assert group["replicas"] == NUM_SLICES
