"""What is wrong with slices: each fault is told once, with its name, since when, and what to do."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from supply_builders import host

from deployments.status.findings.finding import Severity
from deployments.status.findings.join import StatusReadings, find_faults
from serving.domain.slice_lifecycle import SliceState
from serving.domain.supply.faults import FailedHosts, FaultCause
from serving.domain.supply.orders import OperatorOrder, OrderKind
from tests.deployments.status.staged import (
    GROUP,
    LONG_S,
    NOW_S,
    Scene,
    StagedSlice,
    gateway_pod,
    instant,
    ready,
)

Fault = Callable[[Scene, StagedSlice], None]


def stuck(_: Scene, one: StagedSlice) -> None:
    one.pods[1]["metadata"] |= {"deletionTimestamp": instant(900), "finalizers": ["them.io/hold"]}


def machine_does_not_let_go(_: Scene, one: StagedSlice) -> None:
    one.pods[1]["metadata"]["deletionTimestamp"] = instant(900)


def failed(_: Scene, one: StagedSlice) -> None:
    one.pods[0]["status"] |= {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}


def half(_: Scene, one: StagedSlice) -> None:
    del one.pods[1]


def machine_is_gone(scene: Scene, one: StagedSlice) -> None:
    machine = one.pods[0]["spec"]["nodeName"]
    others = {f"machine-{index}-{number}": True for index in (0, 1) for number in (0, 1)}
    scene.cluster_parts["machines"] = {name: True for name in others if name != machine}


def machine_is_silent(scene: Scene, one: StagedSlice) -> None:
    machine = one.pods[0]["spec"]["nodeName"]
    others = {f"machine-{index}-{number}": True for index in (0, 1) for number in (0, 1)}
    scene.cluster_parts["machines"] = others | {machine: False}


def image_is_missing(scene: Scene, one: StagedSlice) -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    one.pods[0]["status"] = {
        "phase": "Pending",
        "conditions": [ready("False", 700)],
        "containerStatuses": [{"name": "ray-worker", "state": {"waiting": waiting}}],
    }
    _leave(scene, one)


def unschedulable(scene: Scene, one: StagedSlice) -> None:
    reason = {"type": "PodScheduled", "status": "False", "message": "0/9 nodes are available"}
    for pod in one.pods:
        pod["spec"].pop("nodeName")
        pod["status"] = {"phase": "Pending", "conditions": [reason]}
    _leave(scene, one)


def not_joined(scene: Scene, one: StagedSlice) -> None:
    _leave(scene, one)
    one.hosts = [replace(one.hosts[0], num_free_chips=4)]


def pods_are_gone(_: Scene, one: StagedSlice) -> None:
    one.pods.clear()


def chipless(scene: Scene, one: StagedSlice) -> None:
    _leave(scene, one)
    one.hosts = [
        replace(one.hosts[0], num_free_chips=4),
        host(one.pod_name(1), 1, num_chips=0, num_free_chips=0),
    ]


def doubled(scene: Scene, one: StagedSlice) -> None:
    twin = scene.add()
    for pod in twin.pods:
        pod["metadata"]["labels"]["ray.io/worker-group-replica-index"] = f"{one.index}"


def lost_by_its_replica(scene: Scene, one: StagedSlice) -> None:
    scene.lives = [each for each in scene.lives if each.replica_id != f"replica-{one.index}"]


def failing(scene: Scene, one: StagedSlice) -> None:
    _leave(scene, one)
    one.hosts = [replace(each, num_free_chips=4) for each in one.hosts]
    hosts = FailedHosts(one.pod_name(0), one.name, frozenset(each.node_id for each in one.hosts))
    scene.faults.note_failure(hosts, FaultCause.PROBE, "no HBM", NOW_S - 10)


def failed_before(scene: Scene, one: StagedSlice) -> None:
    hosts = FailedHosts(one.pod_name(0), one.name, frozenset(each.node_id for each in one.hosts))
    scene.faults.note_failure(hosts, FaultCause.PROBE, "no HBM", NOW_S - 400)
    held = scene.lives[one.index]
    began = held.life.enter(SliceState.READY, NOW_S - 30.0, "the engine serves")
    scene.lives[one.index] = replace(held, life=began)


def quarantined_by_order(scene: Scene, one: StagedSlice) -> None:
    _order(scene, one, OrderKind.QUARANTINE, until_s=NOW_S + 1800)


def condemned_by_order(scene: Scene, one: StagedSlice) -> None:
    _order(scene, one, OrderKind.CONDEMN)


def preempted(scene: Scene, one: StagedSlice) -> None:
    _leave(scene, one)
    one.hosts = [replace(each, is_draining=True) for each in one.hosts]


def _leave(scene: Scene, one: StagedSlice) -> None:
    """Its replica has gone elsewhere, and its Ray nodes with it."""
    lost_by_its_replica(scene, one)
    if one.pods[0]["status"]["phase"] == "Pending":
        one.hosts = []


def _order(scene: Scene, one: StagedSlice, kind: OrderKind, until_s: float | None = None) -> None:
    order = OperatorOrder(
        kind, "anna", "slow links", NOW_S - 60, one.pod_name(0), one.name, until_s
    )
    scene.orders = (order,)


# What is told of the slice, the end of what is done, since when.
CASES: dict[Fault, tuple[Severity, str, str, float | None]] = {
    stuck: (
        Severity.WARNING,
        "its pod {1} should have ended and is still there; finalizers hold it: them.io/hold",
        "kubectl -n serving patch pod {1} --type=merge "
        """-p '{{"metadata":{{"finalizers":null}}}}'""",
        900,
    ),
    machine_does_not_let_go: (
        Severity.WARNING,
        "its pod {1} should have ended and is still there",
        "kubectl -n serving delete pod {1} --force --grace-period=0",
        900,
    ),
    failed: (
        Severity.WARNING,
        "its pod {0} has ended (Failed: Evicted: low on memory)",
        "why it ended: kubectl -n serving describe pod {0}",
        LONG_S,
    ),
    half: (
        Severity.WARNING,
        "1 of its 2 pods is there, none of host 1: no engine can run on it; Ray still lists the "
        "node of host 1",
        "docs/operate/runbooks/SlicesNotCreated.md",
        None,
    ),
    machine_is_gone: (
        Severity.WARNING,
        "machine machine-1-0 under its pod {0} is gone",
        "kubectl -n serving delete pod {0} --force",
        None,
    ),
    machine_is_silent: (
        Severity.WARNING,
        "machine machine-1-0 under its pod {0} is not ready: its kubelet does not answer",
        "kubectl describe node machine-1-0",
        None,
    ),
    image_is_missing: (
        Severity.WARNING,
        "a container of its pod {0} cannot start: ImagePullBackOff: no such image",
        "kubectl -n serving describe pod {0}; docs/operate/runbooks/SlicePodsCannotStart.md",
        700,
    ),
    unschedulable: (
        Severity.WARNING,
        "its pod {0} has no machine: 0/9 nodes are available",
        "kubectl -n serving describe pod {0}; docs/operate/runbooks/SlicePodsPending.md",
        LONG_S,
    ),
    not_joined: (
        Severity.WARNING,
        "its pod {1} is ready, and Ray has no node of it: its chips are paid for and of no use",
        "slicewise order condemn {name}",
        LONG_S,
    ),
    chipless: (
        Severity.WARNING,
        "host 1 (pod {1} on machine-1-1) has joined with 0 of 4 chips",
        "to have it replaced: slicewise order condemn {name}",
        0,
    ),
    lost_by_its_replica: (
        Severity.WARNING,
        "its engine has nobody who commands it: its chips are taken, and no replica says that it "
        "has it",
        "slicewise order condemn {name}",
        LONG_S,
    ),
    failing: (
        Severity.WARNING,
        "it is kept from replicas for another 20s: it failed 1 times, last: no HBM",
        "if the cause is gone: slicewise order release {name}",
        LONG_S,
    ),
    failed_before: (
        Severity.NOTE,
        "it failed once and is held again; three failures in a row condemn it",
        "slicewise order condemn {name}",
        None,
    ),
    quarantined_by_order: (
        Severity.NOTE,
        "it is kept from replicas for another 30m00s, ordered by anna: slow links; replica-1 "
        "still has it and leaves it first",
        "slicewise order release {name}",
        60,
    ),
    condemned_by_order: (
        Severity.NOTE,
        "it is to be replaced, ordered by anna: slow links; replica-1 still has it and leaves it "
        "first",
        "slicewise order release {name}",
        60,
    ),
    preempted: (
        Severity.WARNING,
        "it has to go and is still there: Ray drains host 0",
        "docs/operate/runbooks/ChangesRefused.md, docs/operate/runbooks/ProvisionerFailing.md",
        LONG_S,
    ),
}


@pytest.mark.parametrize("fault", CASES, ids=lambda fault: fault.__name__)
def test_fault_of_a_slice_is_told_once_and_nothing_else_is_blamed(fault: Fault) -> None:
    severity, what, action, since_s = CASES[fault]
    scene = Scene()
    scene.add()
    one = scene.add()
    names = [one.pod_name(0), one.pod_name(1)]
    fault(scene, one)
    (found,) = scene.found()
    assert (found.severity, found.subject) == (severity, f"slice {GROUP}-1")
    assert found.what == what.format(*names)
    assert found.action.endswith(action.format(*names, name=one.name))
    assert found.since_s == since_s


def test_node_in_ray_whose_pods_are_gone_is_told() -> None:
    scene = Scene(replicas=1)
    scene.add()
    one = scene.add()
    name = one.pod_name(0)
    pods_are_gone(scene, one)
    (found,) = scene.found()
    assert found.what == (
        f"Ray lists a node at address-of-{name} (host 0), and its pod {name} is gone"
    )


def test_two_slices_of_one_name_are_told_apart_by_their_first_pods() -> None:
    scene = Scene()
    one = scene.add()
    doubled(scene, one)
    spare = scene.slices[1]
    lost_by_its_replica(scene, spare)
    spare.hosts = [replace(each, num_free_chips=4) for each in spare.hosts]
    (found,) = scene.found()
    twin = spare.pod_name(0)
    assert found.subject == f"slice {GROUP}-0"
    assert found.what == f"two slices have this name: {twin} (free) and {one.pod_name(0)}"
    assert found.action == f"if one is too many: slicewise order condemn {twin}"


def test_what_replaces_a_slice_that_goes_is_no_double() -> None:
    scene = Scene()
    one = scene.add()
    doubled(scene, one)
    _order(scene, one, OrderKind.CONDEMN)
    assert [each.severity for each in scene.found()] == [Severity.NOTE]


def test_healthy_fleet_has_no_findings() -> None:
    scene = Scene()
    for _ in range(3):
        scene.add()
    scene.add(is_held=False)
    assert scene.found() == ()


@pytest.mark.parametrize(
    "fault", [unschedulable, not_joined, lost_by_its_replica, machine_does_not_let_go]
)
def test_what_may_be_on_its_way_is_told_when_patience_ends(fault: Fault) -> None:
    scene = Scene()
    one = scene.add()
    fault(scene, one)
    assert [each.subject for each in scene.found()] == [f"slice {GROUP}-0"]
    on_its_way = find_faults(scene.readings(), NOW_S, LONG_S + 1)
    assert not any(
        "no machine" in each.what or "is still there" in each.what for each in on_its_way
    )
    assert not any("Ray has no node" in each.what for each in on_its_way)


def test_without_a_gateway_the_pods_are_told_and_nothing_is_said_of_records() -> None:
    scene = Scene(control=[])
    failed(scene, scene.add())
    unjoined = scene.add()
    unjoined.hosts = []
    readings = StatusReadings(None, scene.cluster(), fleet_problem="connection refused")
    found = find_faults(readings, NOW_S)
    assert [each.subject for each in found] == ["gateway", "head", "gateways", f"slice {GROUP}-0"]
    assert found[0].what.endswith("connection refused")


def test_without_kubernetes_the_records_are_told() -> None:
    scene = Scene()
    unschedulable(scene, scene.add())
    failing(scene, scene.add())
    problem = "RayService serving/llm: forbidden"
    found = find_faults(StatusReadings(scene.fleet(), None, cluster_problem=problem), NOW_S)
    subjects = [(each.subject, each.what) for each in found if each.severity == Severity.WARNING]
    assert subjects == [
        ("kubectl", f"the cluster was not read, so only the fleet is looked at: {problem}"),
        (f"slice {GROUP}-0", "it is not whole: host 0 has no machine yet"),
        (
            f"slice {GROUP}-1",
            "it is kept from replicas for another 20s: it failed 1 times, last: no HBM",
        ),
    ]


def test_node_that_has_left_ray_is_told_since_then() -> None:
    scene = Scene(looked_ago_s=900)
    not_joined(scene, scene.add())
    (found,) = scene.found()
    assert "Ray has no node of it" in found.what
    assert found.since_s == 900
    assert scene.found(patience_s=901) == ()


@pytest.mark.parametrize(("num_chips", "is_told"), [(4, False), (3, True)])
def test_chips_of_a_host_are_judged_by_the_topology_where_no_group_is_known(
    num_chips: int, is_told: bool
) -> None:
    scene = Scene()
    one = scene.add()
    one.hosts = [replace(one.hosts[0], num_chips=num_chips)]
    found = find_faults(StatusReadings(scene.fleet(), None), NOW_S)
    assert any("of 4 chips" in each.what for each in found) == is_told


def test_worst_comes_first() -> None:
    scene = Scene(control=[gateway_pod("gateway-1"), gateway_pod("gateway-2")])
    one = scene.add()
    failed(scene, one)
    quarantined_by_order(scene, scene.add())
    assert [each.severity for each in scene.found()] == [
        Severity.CRITICAL,
        Severity.WARNING,
        Severity.NOTE,
    ]
