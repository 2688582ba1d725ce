"""The nodes of the control pool are replaced, as GKE does it for an upgrade: what holds meanwhile.

Real: the API server with its Eviction API, the controllers of budgets, quotas and stateful sets,
the scheduler. KubeRay is emulated, and KWOK has pods ready at once: nothing runs in them.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deployments.manifests.names import GATEWAY_GROUP, Component, component_labels
from deployments.manifests.redis import redis_labels
from serving.config.slice_settings import longest_replica_stop_s
from serving.domain.names.gke_names import GKE_CHIPS
from serving.domain.topology import slice_shape
from tests.deployments.manifests.examples import raw_values, shipped

from .api import Api, RefusedByServerError, reference, wait
from .kubectl import Kubectl, RefusedByKubectlError
from .kubelet import HELD
from .operated import Operated, disk, operated
from .readiness import ReadinessWatch, is_ready
from .server import ControlPlane

pytestmark = pytest.mark.process

Json = dict[str, Any]
REFUSED = "Cannot evict pod as it would violate the pod's disruption budget."
SINGLETONS = (Component.HEAD, Component.REDIS)
# Of which there are several, so that one at a time may go.
SEVERAL = (Component.GATEWAY, Component.CONTROL)


@pytest.fixture(scope="module")
def example(control_plane: ControlPlane) -> Iterator[Operated]:
    """The example: a head, two gateways, two control pods, a Redis, a reserved slice."""
    api = control_plane.api
    with operated(api, shipped("example.yaml")) as made:
        found = api.create(disk(made.namespace, 8))
        yield made
        api.delete(found)


@pytest.fixture
def installation(example: Operated) -> Operated:
    """It, with every pod running and counted."""
    example.settle()
    wait(lambda: is_counted(example), "the budgets have counted their pods")
    return example


def budget(made: Operated, component: Component) -> Json:
    name = f"{made.values.cluster.name}-{component.value}"
    return made.api.get("PodDisruptionBudget", made.namespace, name)


def is_counted(made: Operated) -> bool:
    """Whether each budget knows the pods that stay, and that they are ready."""
    for component in (*SEVERAL, *SINGLETONS):
        pods, status = pods_of(made, component), budget(made, component).get("status", {})
        if not pods or status.get("currentHealthy") != len(pods):
            return False
    return True


def pods_of(made: Operated, component: Component) -> list[Json]:
    if component != Component.REDIS:
        return made.pods(component)
    return made.api.list("Pod", made.namespace, redis_labels(made.values.cluster))


def names(pods: list[Json]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


def may_go(made: Operated, pod: Json) -> bool:
    """Asks for a pod's eviction; whether it was granted."""
    try:
        made.api.evict(pod)
    except RefusedByServerError as error:
        if (error.code, str(error)) == (429, REFUSED):
            return False
        raise
    return True


def hold(made: Operated, pod: Json) -> None:
    """It will take its time to end, as a pod does in which something runs."""
    made.api.merge(pod, {"metadata": {"annotations": {HELD: "until the test lets it go"}}})


def test_budgets_count_the_pods_that_kuberay_made(installation: Operated) -> None:
    """A budget whose status is not so refuses everything, or protects nothing."""
    counts = {
        component: tuple(
            budget(installation, component)["status"][field]
            for field in ("expectedPods", "currentHealthy", "desiredHealthy", "disruptionsAllowed")
        )
        for component in (*SEVERAL, *SINGLETONS)
    }
    assert counts == {
        Component.GATEWAY: (2, 2, 1, 1),
        Component.CONTROL: (2, 2, 1, 1),
        Component.HEAD: (1, 1, 1, 0),
        Component.REDIS: (1, 1, 1, 0),
    }
    for component in SEVERAL:
        hosts = {pod["spec"]["nodeName"] for pod in installation.pods(component)}
        assert len(hosts) == 2, f"one node has both pods of {component}"


@pytest.mark.parametrize("bound", [{"maxUnavailable": 1}, {"minAvailable": "50%"}], ids=str)
def test_budget_of_a_share_would_refuse_every_eviction(installation: Operated, bound: Json) -> None:
    """Why ours are whole numbers that have to stay: a RayCluster does not tell its scale."""
    body = reference("PodDisruptionBudget", installation.namespace, "a-share")
    labels = component_labels(installation.values.cluster, Component.GATEWAY)
    installation.api.create(body | {"spec": {**bound, "selector": {"matchLabels": labels}}})

    def status() -> Json:
        found = installation.api.get("PodDisruptionBudget", installation.namespace, "a-share")
        return dict(found.get("status", {}))

    def reasons() -> list[str]:
        return [each["reason"] for each in status().get("conditions", ())]

    wait(lambda: "SyncFailed" in reasons(), "the controller has failed to count")
    assert status()["disruptionsAllowed"] == 0
    installation.api.delete(body)


@pytest.mark.parametrize("component", SEVERAL)
def test_second_pod_stays_until_the_first_ones_successor_is_ready(
    installation: Operated, component: Component
) -> None:
    made, api = installation, installation.api
    first, second = made.pods(component)
    hold(made, first)
    assert may_go(made, first)
    leaving = api.get("Pod", made.namespace, first["metadata"]["name"])
    # The time for its answers, or to hand its engines over, which starts with the eviction.
    app = made.values.app
    needed_s = {
        Component.GATEWAY: app.rollout.gateway_drain_s,
        Component.CONTROL: longest_replica_stop_s(app),
    }
    assert leaving["metadata"]["deletionGracePeriodSeconds"] >= needed_s[component]
    assert not may_go(made, second)
    nodes = made.control_nodes()
    for each in nodes:
        made.cordon(each)
    api.delete(leaving)
    made.hand.settle()
    # The successor is there and waits for a node: the other one is all that answers.
    (waiting,) = [each for each in made.pods(component) if not is_ready(each)]
    assert not may_go(made, second)
    for each in nodes:
        made.cordon(each, is_closed=False)
    made.settle()
    assert names(made.pods(component)) == names([waiting, second])
    wait(lambda: budget(made, component)["status"]["disruptionsAllowed"], "it is counted")
    assert may_go(made, second)


def test_gateways_that_serve_nothing_are_no_reason_to_wait(installation: Operated) -> None:
    """Before the first engine none is ready, and a budget that waited for them would for ever."""
    made = installation
    for pod in made.pods(Component.GATEWAY):
        conditions = [
            each | ({"status": "False"} if each["type"] in ("Ready", "ContainersReady") else {})
            for each in pod["status"]["conditions"]
        ]
        made.api.merge(pod, {"status": {"conditions": conditions}}, "status")
    wait(lambda: not budget(made, Component.GATEWAY)["status"]["currentHealthy"], "none is ready")
    assert [may_go(made, pod) for pod in made.pods(Component.GATEWAY)] == [True, True]


def test_whole_control_pool_is_replaced_with_one_of_each_kind_ready_at_every_moment(
    installation: Operated, control_plane: ControlPlane, tmp_path: Path
) -> None:
    """All of its nodes at once, which is more than an upgrade asks for."""
    made, api = installation, installation.api
    labels = {each: component_labels(made.values.cluster, each) for each in SEVERAL}
    slices = {pod["metadata"]["uid"] for pod in made.pods(Component.ENGINE)}
    assert slices
    alone = {component: names(pods_of(made, component)) for component in SINGLETONS}
    old = {each["metadata"]["name"]: each for each in made.control_nodes()}
    with ExitStack() as end:
        watches = {}
        for component in SEVERAL:
            (folder := tmp_path / component).mkdir()
            watch = ReadinessWatch(
                control_plane.kubeconfig, made.namespace, labels[component], folder
            )
            watches[component] = end.enter_context(watch)
            watch.wait_ready(names(made.pods(component)))
        for number, each in enumerate(old.values()):
            made.control_node(f"upgraded-{number}")
            made.cordon(each)
        num_refused = 0
        while on := [pod for each in SEVERAL for pod in made.pods(each) if is_on(pod, old)]:
            num_refused += [may_go(made, pod) for pod in on].count(False)
            made.settle()
        for component, watch in watches.items():
            watch.wait_ready(names(made.pods(component)))
            assert watch.fewest() == 1
    assert num_refused
    # Both have no second: their time is the operator's choice, or GKE's after an hour.
    for component in SINGLETONS:
        assert [may_go(made, pod) for pod in pods_of(made, component)] == [False]
        assert names(pods_of(made, component)) == alone[component]
        (pod,) = pods_of(made, component)
        api.delete(pod, grace_s=None)
    made.settle()
    wait(lambda: is_counted(made), "head and Redis are there again")
    moved = [pod for each in (*SEVERAL, *SINGLETONS) for pod in pods_of(made, each)]
    assert [pod["metadata"]["name"] for pod in moved if is_on(pod, old)] == []
    assert {pod["metadata"]["uid"] for pod in made.pods(Component.ENGINE)} == slices


def test_drain_of_the_heads_node_ends_once_its_pod_is_deleted(
    installation: Operated, control_plane: ControlPlane
) -> None:
    made, kubectl = installation, Kubectl(control_plane.kubeconfig)
    (head,) = made.pods(Component.HEAD)
    made.control_node("for-the-head")
    with pytest.raises(RefusedByKubectlError, match="violate the pod's disruption budget"):
        kubectl.drain(head["spec"]["nodeName"], 3)
    assert made.pods(Component.HEAD) == [head]
    made.api.delete(head, grace_s=None)
    for pod in pods_of(made, Component.REDIS):
        made.api.delete(pod, grace_s=None)
    made.settle()
    kubectl.drain(head["spec"]["nodeName"], 30)


def is_on(pod: Json, nodes: dict[str, Json]) -> bool:
    return pod["spec"].get("nodeName") in nodes


def test_host_of_a_slice_has_no_budget(installation: Operated) -> None:
    """An evicted host drains its slice; a budget would only make GKE end it without notice."""
    (host,) = installation.pods(Component.ENGINE)
    assert may_go(installation, host)


SHAPE = slice_shape("v6e", "2x4", 4)


def test_slice_that_still_ends_keeps_its_chips_and_its_successor_comes_after_it(api: Api) -> None:
    """With a quota of one slice: a successor of several hosts is made while the old one ends."""
    reserved = {"compute_class": "reserved", "reservation": "ours", "max_slices": 1}
    raw = raw_values((SHAPE, "reserved"), name="tight", classes=[reserved | {"min_slices": 1}])
    with operated(api, raw, num_nodes=1) as made:
        group = "v6e-2x4-4t-reserved"
        hosts = made.pods(Component.ENGINE)
        assert len(hosts) == 2
        for pod in hosts:
            hold(made, pod)
        assert may_go(made, hosts[0])
        made.hand.operator.step()
        wait(lambda: made.pods(Component.ENGINE) == [], "the whole slice is being deleted")
        for _ in range(3):
            made.hand.operator.step()
        (refusal, *_) = [
            each["message"]
            for each in api.list("Event", made.namespace)
            if each["reason"] == "FailedToCreateWorkerPod"
        ]
        counted = f"requests.{GKE_CHIPS}"
        assert (
            f"exceeded quota: tight-chips, requested: {counted}=4, used: {counted}=8, "
            f"limited: {counted}=8"
        ) in refusal
        for pod in hosts:
            api.delete(pod)
        made.settle()
        assert made.hand.slices(group) == {f"{group}-0": 2}
        assert not names(made.pods(Component.ENGINE)) & names(hosts)


def test_gateways_need_no_chips(installation: Operated) -> None:
    """So that a full quota, as a reservation always is, does not hold up the control pool."""
    made = installation
    quota = reference("ResourceQuota", made.namespace, "llm-chips")
    made.api.merge(quota, {"spec": {"hard": {f"requests.{GKE_CHIPS}": "4"}}})
    first, _ = made.pods(Component.GATEWAY)
    assert may_go(made, first)
    made.settle()
    assert len(made.hand.pods(GATEWAY_GROUP)) == 2
