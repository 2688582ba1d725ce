"""Single-host slices as KubeRay and the TPU webhook have named them: the recordings, through us.

Older webhooks name them so whatever our manifests say.
"""

from dataclasses import replace

import pytest
from kuberay.recordings import Recording, environment, node_id, recording

from autoscaling.provisioning.groups import WorkerGroup
from autoscaling.provisioning.plan import (
    Change,
    PlannerState,
    ProvisioningPlan,
    ProvisioningRules,
    plan_slices,
)
from autoscaling.provisioning.reconcile import pods_of as pods_of_group
from serving.config.slice_spec import SliceSpec, slice_request
from serving.directory.pending_grants import PendingGrants, SliceWish
from serving.directory.supply_book import SupplyBook
from serving.domain.inventory import Slice, SliceRequest
from serving.domain.slice_lifecycle import SliceState
from serving.domain.slice_records import SliceRecord
from serving.domain.supply.faults import FaultCause, SliceFaults
from serving.domain.supply.found import find_slices, match_slices
from serving.domain.supply.pods import ObservedSlice
from serving.domain.supply.records import SupplyReport
from serving.domain.supply.survey import waiting_replicas
from serving.domain.topology import slice_shape
from tests.supply_builders import life

GROUP = "v6e-2x2-spot"
SHAPE = slice_shape("v6e", "2x2")
WANT = slice_request(SliceSpec("spot", SHAPE, {"ray.io/market-type": "spot"}))
# Recording, slices of the group, pairs of them that the webhook gave one name.
NAMED_TWICE = [
    ("02-host-of-slice-0-lost", 3, 1),
    ("02-after-termination", 3, 1),
    ("09-ten-slices-four-lost", 10, 3),
]


def free_slices(
    found: Recording, want: SliceRequest = WANT, groups: tuple[WorkerGroup, ...] = ()
) -> dict[str, Slice]:
    """The free slices of the recorded hosts, by name; none may be refused."""
    seen = match_slices(find_slices(found.observed(), map(pods_of_group, groups)), want)
    assert dict(seen.refused) == {}
    return {each.name: each for each in seen.free}


def webhook_names(found: Recording) -> list[str]:
    pods = [pod for pod in found.hosts() if pod["metadata"]["labels"]["ray.io/group"] == GROUP]
    return [environment(pod)["TPU_NAME"] for pod in pods]


def holder(whole: Slice, *, is_leaving: bool = False) -> SliceRecord:
    """What the directory knows of a replica that holds a slice as it was found."""
    state = SliceState.DRAINING if is_leaving else SliceState.READY
    deadline_s = 100.0 if is_leaving else None
    made = life(f"of-{whole.hosts[0].node_id}", whole.hosts, state, drain_deadline_s=deadline_s)
    shape = whole.hosts[0].shape
    assert shape is not None
    return replace(made, generation=str(shape.generation), topology=shape.topology)


def waiting() -> SliceRecord:
    return replace(life("who waits"), topology="2x2")


class Directory:
    """The directory and the provisioner over one recording, whose hosts stay as they are."""

    def __init__(self, found: Recording, group: WorkerGroup) -> None:
        self._found = found
        self._group = group
        self.book = SupplyBook(SliceFaults())
        self.state = PlannerState()

    def plan(self, records: list[SliceRecord], now_s: float) -> ProvisioningPlan:
        self.book.look(self._found.observed(), [pods_of_group(self._group)], records, now_s)
        report = SupplyReport("test:1", self.book.records, waiting_replicas(records))
        rules = ProvisioningRules(idle_s=60.0)
        plan = plan_slices(report, [self._group], rules, now_s, self.state)
        self.state = plan.state
        return plan


def settled(found: Recording, records: list[SliceRecord], group: WorkerGroup) -> Change | None:
    """What is changed once everything that nobody wants has been idle for long."""
    directory = Directory(found, group)
    directory.plan(records, 0.0)
    directory.state = replace(directory.state, changed_at_s={})
    changes = directory.plan(records, 100.0).changes
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
    wishes = [SliceWish(f"replica-{number}", WANT, 0.0) for number in range(num_slices)]
    one_more = SliceWish("one more", WANT, 1.0)
    grants = PendingGrants().share(
        [*wishes, one_more], lambda want: match_slices(find_slices(found.observed()), want), 0.0
    )
    assert grants.pop("one more").slices == ()
    records = [holder(whole) for grant in grants.values() for whole in grant.slices]
    assert len({host.node_id for record in records for host in record.hosts}) == num_slices
    group = replace(found.group(GROUP), replicas=num_slices)
    assert settled(found, records, group) is None


@pytest.mark.parametrize(("name", "num_slices", "num_pairs"), NAMED_TWICE)
def test_replica_that_waits_beside_namesakes_gets_a_slice(
    name: str, num_slices: int, num_pairs: int
) -> None:
    found = recording(name)
    records = [holder(whole) for whole in free_slices(found).values()]
    group = replace(found.group(GROUP), replicas=num_slices, max_replicas=num_slices + 1)
    change = settled(found, [*records, waiting()], group)
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
        change = settled(found, [holder(whole) for whole in free if whole is not idle], group)
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
        directory = Directory(found, group)
        assert directory.plan([*stay, holder(doomed, is_leaving=True)], 0.0).changes == ()
        directory.book.note_leaving(doomed, 100.0, "preemption", 5.0)
        (change,) = directory.plan(stay, 10.0).changes
        assert [drop.is_condemned for drop in change.drops] == [True]
        dropped = pods_of([drop.slice for drop in change.drops])
        assert dropped == {by_address[doomed.hosts[0].address]}


@pytest.mark.parametrize(("name", "num_slices", "num_pairs"), NAMED_TWICE)
def test_slice_that_fails_is_kept_off_alone(name: str, num_slices: int, num_pairs: int) -> None:
    found = recording(name)
    for failed in free_slices(found).values():
        book = SupplyBook(SliceFaults())
        book.look(found.observed(), [], [], 0.0)
        book.note_failure(failed, frozenset(), FaultCause.PROBE, "no chip", 0.0)
        book.look(found.observed(), [], [], 1.0)
        seen = book.match(WANT, 1.0)
        assert set(seen.refused) == {failed.name}
        assert len(seen.free) == num_slices - 1


@pytest.mark.parametrize(("name", "num_slices", "num_pairs"), NAMED_TWICE)
def test_slices_have_one_name_each_once_the_directory_knows_their_pods(
    name: str, num_slices: int, num_pairs: int
) -> None:
    """Whatever the webhook told their hosts: KubeRay's index is given once."""
    found = recording(name)
    free = free_slices(found, groups=(found.group(GROUP),))
    assert sorted(free) == sorted(f"{GROUP}-{index}" for index in range(num_slices))
    assert sorted(free) == [each.name for each in found.group(GROUP).slices]


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
    directory = Directory(found, replace(group, replicas=len(free)))
    assert directory.plan([holder(each) for each in free.values()], 0.0).changes == ()
    assert {each.incarnation for each in directory.book.records} == {
        each.incarnation for each in group.slices
    }
