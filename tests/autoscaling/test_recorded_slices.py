"""Single-host slices as KubeRay and the TPU webhook have named them: the recordings, through us.

Older webhooks name them so whatever our manifests say.
"""

from dataclasses import replace

import pytest
from kuberay.recordings import Recording, environment, node_id, recording
from provisioning_builders import waiting

from autoscaling.provisioning.demand import SliceDemand, SliceKind, TakenSlice, demand_by_kind
from autoscaling.provisioning.groups import ObservedSlice, WorkerGroup
from autoscaling.provisioning.plan import (
    Change,
    PlannerState,
    ProvisioningPlan,
    ProvisioningRules,
    plan_slices,
)
from serving.config.slice_spec import SliceSpec, slice_request
from serving.directory.pending_grants import PendingGrants
from serving.directory.quarantine import Quarantine
from serving.domain.inventory import Slice, SliceRequest, match_slices
from serving.domain.slice_lifecycle import SliceLifecycle, SliceState
from serving.domain.slice_records import HostRecord, SliceRecord
from serving.domain.topology import slice_shape

GROUP = "v6e-2x2-spot"
KIND = SliceKind("spot", "v6e", "2x2")
WANT = slice_request(SliceSpec("spot", slice_shape("v6e", "2x2"), {"ray.io/market-type": "spot"}))
# Recording, slices of the group, pairs of them that the webhook gave one name.
NAMED_TWICE = [
    ("02-host-of-slice-0-lost", 3, 1),
    ("02-after-termination", 3, 1),
    ("09-ten-slices-four-lost", 10, 3),
]


def free_slices(found: Recording, want: SliceRequest = WANT) -> dict[str, Slice]:
    """The free slices of the recorded hosts, by name; none may be refused."""
    seen = match_slices(found.observed(), want)
    assert dict(seen.refused) == {}
    return {each.name: each for each in seen.free}


def webhook_names(found: Recording) -> list[str]:
    pods = [pod for pod in found.hosts() if pod["metadata"]["labels"]["ray.io/group"] == GROUP]
    return [environment(pod)["TPU_NAME"] for pod in pods]


def holder(whole: Slice, *, is_leaving: bool = False) -> SliceRecord:
    """What the directory knows of a replica that holds a slice as it was found."""
    hosts = tuple(
        HostRecord(host.worker_id, host.node_id, host.address, host.num_chips)
        for host in whole.hosts
    )
    life = SliceLifecycle.begin(0.0)
    states = [SliceState.PROVISIONING, SliceState.RESERVED, SliceState.LOADING, SliceState.READY]
    for state in states + [SliceState.DRAINING] * is_leaving:
        life = life.enter(state, 0.0, "the test says so", slice_name=whole.name)
    record = replace(waiting(KIND), life=life, hosts=hosts)
    return replace(record, drain_deadline_s=100.0) if is_leaving else record


def planned(
    records: list[SliceRecord], group: WorkerGroup, state: PlannerState, now_s: float
) -> ProvisioningPlan:
    return plan_slices(
        demand_by_kind(records), [group], ProvisioningRules(idle_s=60.0), now_s, state
    )


def settled(records: list[SliceRecord], group: WorkerGroup) -> Change | None:
    """What is changed once everything that nobody wants has been idle for long."""
    first = planned(records, group, PlannerState(), 0.0)
    changes = planned(records, group, replace(first.state, changed_at_s={}), 100.0).changes
    assert len(changes) <= 1
    return changes[0] if changes else None


def pods_of(slices: list[ObservedSlice]) -> set[str]:
    return {pod.name for each in slices for pod in each.pods}


@pytest.mark.parametrize(("name", "num_slices", "num_pairs"), NAMED_TWICE)
def test_living_slices_of_one_name_are_all_there_and_free(
    name: str, num_slices: int, num_pairs: int
) -> None:
    found = recording(name)
    told = webhook_names(found)
    assert (len(told), len(told) - len(set(told))) == (num_slices, num_pairs)
    free = free_slices(found)
    assert len(free) == num_slices
    assert {host.node_id for each in free.values() for host in each.hosts} == {
        node_id(pod) for pod in found.hosts() if pod["metadata"]["labels"]["ray.io/group"] == GROUP
    }
    # Each is of one host, its first, and those that share no name keep theirs.
    assert {host.worker_id for each in free.values() for host in each.hosts} == {0}
    assert set(told) <= set(free)


@pytest.mark.parametrize(("name", "num_slices", "num_pairs"), NAMED_TWICE)
def test_provisioner_sees_each_slice_once(name: str, num_slices: int, num_pairs: int) -> None:
    group = recording(name).group(GROUP)
    assert len(group.lasting) == num_slices
    assert len({each.name for each in group.slices}) == num_slices
    assert len({each.incarnation for each in group.slices}) == num_slices


@pytest.mark.parametrize(("name", "num_slices", "num_pairs"), NAMED_TWICE)
def test_every_slice_is_given_to_one_replica_and_none_is_bought_or_dropped(
    name: str, num_slices: int, num_pairs: int
) -> None:
    found = recording(name)
    seen, grants = match_slices(found.observed(), WANT), PendingGrants()
    taken = []
    for number in range(num_slices):
        (whole,) = grants.grant(f"replica-{number}", seen, 0.0, lambda _: None).slices
        taken.append(whole)
    assert grants.grant("one more", seen, 0.0, lambda _: None).slices == ()
    records = [holder(whole) for whole in taken]
    assert demand_by_kind(records)[KIND].num_to_exist == num_slices
    group = replace(found.group(GROUP), replicas=num_slices)
    assert settled(records, group) is None


@pytest.mark.parametrize(("name", "num_slices", "num_pairs"), NAMED_TWICE)
def test_replica_that_waits_beside_namesakes_gets_a_slice(
    name: str, num_slices: int, num_pairs: int
) -> None:
    found = recording(name)
    records = [holder(whole) for whole in free_slices(found).values()]
    group = replace(found.group(GROUP), replicas=num_slices, max_replicas=num_slices + 1)
    change = settled([*records, waiting(KIND)], group)
    assert change is not None
    assert (change.replicas, change.drops) == (num_slices + 1, ())


@pytest.mark.parametrize(("name", "num_slices", "num_pairs"), NAMED_TWICE)
def test_idle_slice_is_dropped_and_never_its_namesake(
    name: str, num_slices: int, num_pairs: int
) -> None:
    """Each in turn is the one that nobody has."""
    found = recording(name)
    free = list(free_slices(found).values())
    group = replace(found.group(GROUP), replicas=num_slices)
    by_address = {pod["status"]["podIP"]: pod["metadata"]["name"] for pod in found.hosts()}
    for idle in free:
        change = settled([holder(whole) for whole in free if whole is not idle], group)
        assert change is not None
        dropped = pods_of([drop.slice for drop in change.drops])
        assert dropped == {by_address[idle.hosts[0].address]}
        assert change.replicas == num_slices - 1


@pytest.mark.parametrize(("name", "num_slices", "num_pairs"), NAMED_TWICE)
def test_slice_that_is_taken_away_does_not_condemn_its_namesake(
    name: str, num_slices: int, num_pairs: int
) -> None:
    """Its replica drains, then has left it; only then is a slice dropped at once, and that one."""
    found = recording(name)
    free = list(free_slices(found).values())
    group = replace(found.group(GROUP), replicas=num_slices)
    by_address = {pod["status"]["podIP"]: pod["metadata"]["name"] for pod in found.hosts()}
    for doomed in free:
        stay = [holder(whole) for whole in free if whole is not doomed]
        first = planned([*stay, holder(doomed, is_leaving=True)], group, PlannerState(), 0.0)
        assert first.changes == ()
        (change,) = planned(stay, group, first.state, 10.0).changes
        assert [drop.is_condemned for drop in change.drops] == [True]
        dropped = pods_of([drop.slice for drop in change.drops])
        assert dropped == {by_address[doomed.hosts[0].address]}


@pytest.mark.parametrize(("name", "num_slices", "num_pairs"), NAMED_TWICE)
def test_slice_that_fails_is_kept_off_alone(name: str, num_slices: int, num_pairs: int) -> None:
    free = free_slices(recording(name))
    for failed in free.values():
        quarantine = Quarantine()
        quarantine.note_failure(failed.name, failed.node_ids, 0.0)
        barred = {
            each.name
            for each in free.values()
            if quarantine.quarantined_until_s(each.node_ids, 1.0) is not None
        }
        assert barred == {failed.name}
        # Another one serves, and is forgiven; this one is not.
        for each in free.values():
            if each is not failed:
                quarantine.note_success(each.name)
        assert quarantine.quarantined_until_s(failed.node_ids, 1.0) is not None


def test_names_follow_kuberays_index_where_the_template_has_a_host_index() -> None:
    found = recording("10-with-host-index")
    free = free_slices(found)
    assert sorted(free) == [f"{GROUP}-{index}" for index in range(3)]
    assert sorted(free) == [each.name for each in found.group(GROUP).slices]
    assert sorted(webhook_names(found)) == sorted(free)


def test_slices_of_several_hosts_go_by_their_name() -> None:
    found = recording("07-host-of-two-lost")
    group = found.group("tpu7x-2x2x2-spot")
    shape = slice_shape("tpu7x", "2x2x2")
    want = slice_request(SliceSpec("spot", shape, {"ray.io/market-type": "spot"}))
    free = free_slices(found, want)
    assert sorted(free) == [each.name for each in group.slices]
    assert all([host.worker_id for host in each.hosts] == [0, 1] for each in free.values())
    records = [holder(each) for each in free.values()]
    assert demand_by_kind(records)[KIND] == SliceDemand(
        KIND,
        held=frozenset(TakenSlice(name) for name in free),
        addresses=frozenset(host.address for each in free.values() for host in each.hosts),
    )
