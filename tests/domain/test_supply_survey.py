"""One record for each incarnation of a slice, in every state. Pure."""

from dataclasses import replace

import pytest

from serving.domain.inventory import ObservedHost, SliceRequest
from serving.domain.slice_lifecycle import SliceState
from serving.domain.slice_records import SliceRecord
from serving.domain.supply.faults import FaultCause, SliceFaults
from serving.domain.supply.found import find_slices, match_slices
from serving.domain.supply.pods import (
    GroupPods,
    ObservedSlice,
    PodPhase,
    decode_pods,
    encode_pods,
)
from serving.domain.supply.records import (
    SupplyRecord,
    SupplyReport,
    SupplyState,
    decode_supply,
    encode_supply,
)
from serving.domain.supply.survey import failed_hosts, survey, waiting_replicas
from tests.supply_builders import group_of, host, hosts_of, life, pods_of

BOOT_S = 600.0


class Surveyor:
    """Looks again and again, and remembers as the directory does."""

    def __init__(self) -> None:
        self.faults = SliceFaults()
        self.records: tuple[SupplyRecord, ...] = ()

    def look(
        self,
        hosts: list[ObservedHost],
        *groups: GroupPods,
        lives: tuple[SliceRecord, ...] = (),
        at_s: float = 0.0,
    ) -> dict[str, SupplyRecord]:
        before = {record.incarnation: record for record in self.records}
        self.records = survey(
            find_slices(hosts, groups), lives, self.faults, before, at_s, boot_s=BOOT_S
        )
        return {record.incarnation: record for record in self.records}

    def only(self, *arguments: object, **options: object) -> SupplyRecord:
        (record,) = self.look(*arguments, **options).values()  # type: ignore[arg-type]
        return record


def test_engine_without_a_replica_leaves_its_slice_taken_and_handed_on() -> None:
    hosts = hosts_of("s-0", num_free_chips=0)
    orphan = replace(life("r", hosts), is_orphan=True)
    record = Surveyor().only(hosts, group_of(pods_of("s-0")), lives=(orphan,))
    assert (record.state, record.reason) == (
        SupplyState.LEASED, "r is gone, and its engine goes on",
    )  # fmt: skip
    assert record.is_taken
    assert record.holder is not None
    assert record.holder.is_handing_over


def test_slice_goes_from_pending_to_booting_to_free() -> None:
    surveyor = Surveyor()
    group = group_of(pods_of("s-0", machine=None, phase=PodPhase.PENDING))
    record = surveyor.only([], group)
    assert (record.state, record.reason) == (SupplyState.PENDING, "host 0 has no machine yet")
    record = surveyor.only([], group_of(pods_of("s-0", phase=PodPhase.PENDING)), at_s=100.0)
    assert (record.state, record.until_s) == (SupplyState.BOOTING, 700.0)
    record = surveyor.only(hosts_of("s-0")[:1], group_of(pods_of("s-0")), at_s=200.0)
    assert (record.state, record.reason) == (SupplyState.BOOTING, "host 1 of 2 is missing")
    assert (record.since_s, record.until_s) == (100.0, 700.0)
    record = surveyor.only(hosts_of("s-0"), group_of(pods_of("s-0")), at_s=300.0)
    assert (record.state, record.since_s, record.until_s) == (SupplyState.FREE, 300.0, None)
    assert (record.incarnation, record.name, record.num_chips) == ("s-0-pod-0", "s-0", 8)
    assert [each.machine for each in record.hosts] == ["machine-of-s-0-0", "machine-of-s-0-1"]


def test_slice_that_does_not_boot_in_time_is_condemned_with_what_its_container_waits_for() -> None:
    surveyor = Surveyor()
    stuck = group_of(pods_of("s-0", phase=PodPhase.PENDING, waiting="ImagePullBackOff: no such"))
    assert surveyor.only([], stuck).state == SupplyState.BOOTING
    assert surveyor.only([], stuck, at_s=BOOT_S - 1).state == SupplyState.BOOTING
    record = surveyor.only([], stuck, at_s=BOOT_S)
    assert record.state == SupplyState.CONDEMNED
    assert record.reason.startswith("not usable within its time to boot: host 0 of 2 is missing")
    assert record.reason.endswith("its container waits: ImagePullBackOff: no such")


def test_host_without_chips_in_ray_is_no_supply() -> None:
    surveyor = Surveyor()
    group = group_of(pods_of("s-0"))
    # Ray lists no TPU on worker 1, so it is no host of a slice.
    for at_s, state in ((0.0, SupplyState.BOOTING), (BOOT_S, SupplyState.CONDEMNED)):
        assert surveyor.only(hosts_of("s-0")[:1], group, at_s=at_s).state == state


def test_slice_that_waits_for_capacity_has_no_deadline() -> None:
    surveyor = Surveyor()
    group = group_of(pods_of("s-0", machine=None, phase=PodPhase.PENDING))
    for at_s in (0.0, 7 * 24 * 3600.0):
        assert surveyor.only([], group, at_s=at_s).state == SupplyState.PENDING


def test_held_slice_names_its_replica() -> None:
    hosts = hosts_of("s-0", num_free_chips=0)
    record = Surveyor().only(hosts, group_of(pods_of("s-0")), lives=(life("r1", hosts),))
    assert (record.state, record.is_taken) == (SupplyState.HELD, True)
    assert record.holder is not None
    assert (record.holder.life_id, record.holder.state) == ("r1", SliceState.READY)


@pytest.mark.parametrize("lost", [0, 1])
def test_held_slice_of_which_a_pod_has_gone_is_one_slice(lost: int) -> None:
    """Ray shows both nodes for a while. To count each would buy a slice for both."""
    hosts = hosts_of("s-0", num_free_chips=0)
    left = pods_of("s-0").pods[1 - lost]
    group = group_of(ObservedSlice("s-0", (left,)), pods_of("s-1"))
    records = Surveyor().look(
        [*hosts, *hosts_of("s-1")], group, lives=(life("r1", hosts, drain_deadline_s=9.0),)
    )
    assert [records[each].state for each in sorted(records)] == [
        SupplyState.HELD,
        SupplyState.FREE,
    ]
    (record,) = (each for each in records.values() if each.holder is not None)
    assert (record.incarnation, record.name) == (left.name, "s-0")
    assert [(each.worker_id, each.pod) for each in record.hosts] == [
        (0, "s-0-pod-0"),
        (1, "s-0-pod-1"),
    ]
    # What is known of the machine is that of the pod that is there.
    machines = [None, None]
    machines[1 - lost] = left.machine  # type: ignore[call-overload]
    assert [each.machine for each in record.hosts] == machines


def test_slice_whose_chips_are_taken_and_that_nobody_reports_is_leased() -> None:
    """The directory has just started, or the replica's process is away and its engine is not."""
    surveyor = Surveyor()
    hosts = [host("s-0-pod-0", 0, num_free_chips=0), host("s-0-pod-1", 1)]
    for at_s, is_changing in ((0.0, True), (59.0, True), (60.0, False), (61.0, False)):
        record = surveyor.only(hosts, group_of(pods_of("s-0")), at_s=at_s)
        assert (record.state, record.is_taken) == (SupplyState.LEASED, True)
        assert record.is_changing_hands == is_changing
    # Each time anew: a replica that takes it has as long as the one before had.
    assert surveyor.only(hosts_of("s-0"), group_of(pods_of("s-0"))).state == SupplyState.FREE
    assert surveyor.only(hosts, group_of(pods_of("s-0")), at_s=99.0).is_changing_hands


@pytest.mark.parametrize("deadline_s", [130.0, None])
def test_leaving_slice_is_condemned_only_if_it_is_taken_away(deadline_s: float | None) -> None:
    hosts = hosts_of("s-0", num_free_chips=0)
    leaving = life("r1", hosts, SliceState.DRAINING, drain_deadline_s=deadline_s)
    record = Surveyor().only(hosts, group_of(pods_of("s-0")), lives=(leaving,))
    expected = SupplyState.HELD if deadline_s is None else SupplyState.CONDEMNED
    assert (record.state, record.is_taken) == (expected, True)


def test_free_slice_whose_host_ray_drains_is_condemned() -> None:
    hosts = [host("s-0-pod-0", 0), host("s-0-pod-1", 1, is_draining=True)]
    record = Surveyor().only(hosts, group_of(pods_of("s-0")))
    assert (record.state, record.reason) == (SupplyState.CONDEMNED, "Ray drains host 1")


def test_slice_that_failed_is_in_quarantine_and_then_free() -> None:
    surveyor = Surveyor()
    hosts, group = hosts_of("s-0"), group_of(pods_of("s-0"))
    record = surveyor.only(hosts, group)
    surveyor.faults.note_failure(failed_hosts(record), FaultCause.ENGINE, "no HBM", 10.0)
    record = surveyor.only(hosts, group, at_s=39.0)
    assert (record.state, record.until_s) == (SupplyState.QUARANTINED, 40.0)
    assert record.reason == "it failed 1 times, last: no HBM"
    record = surveyor.only(hosts, group, at_s=40.0)
    assert (record.state, record.num_failures, record.failed_at_s) == (SupplyState.FREE, 1, 10.0)


def test_condemned_slice_without_kubernetes_is_only_kept_off() -> None:
    """Nobody could replace it, and it may be the only one."""
    surveyor = Surveyor()
    hosts = hosts_of("s-0")
    record = surveyor.only(hosts)
    for at_s in (0.0, 1.0, 2.0):
        surveyor.faults.note_failure(failed_hosts(record), FaultCause.PROBE, "ICI", at_s)
    assert surveyor.only(hosts, at_s=3.0).state == SupplyState.QUARANTINED
    assert surveyor.only(hosts, group_of(pods_of("s-0")), at_s=3.0).state == SupplyState.CONDEMNED


def test_replacement_beside_the_slice_that_ends_is_a_record_of_its_own() -> None:
    """Recorded: the successor's pods are there, under the name that is given again."""
    old = replace(pods_of("old"), name="s-0")
    new = replace(pods_of("new", machine=None, phase=PodPhase.PENDING), name="s-0")
    hosts = hosts_of("old", num_free_chips=0)
    records = Surveyor().look(hosts, group_of(old, new), lives=(life("r1", hosts),))
    assert {each.incarnation: each.state for each in records.values()} == {
        "old-pod-0": SupplyState.HELD,
        "new-pod-0": SupplyState.PENDING,
    }


def test_holder_of_a_slice_that_is_gone_stays_listed_until_it_has_noticed() -> None:
    surveyor = Surveyor()
    hosts = hosts_of("s-0", num_free_chips=0)
    holder = life("r1", hosts)
    surveyor.look(hosts, group_of(pods_of("s-0")), lives=(holder,))
    successor = group_of(replace(pods_of("new", machine=None), name="s-0"))
    records = surveyor.look([], successor, lives=(holder,), at_s=5.0)
    assert {each.incarnation: each.state for each in records.values()} == {
        "s-0-pod-0": SupplyState.CONDEMNED,
        "new-pod-0": SupplyState.PENDING,
    }
    lost = records["s-0-pod-0"]
    assert lost.is_taken
    assert lost.holder is not None
    assert lost.holder.life_id == "r1"
    waits = life("r1", at_s=6.0)
    assert list(surveyor.look([], successor, lives=(waits,), at_s=6.0)) == ["new-pod-0"]


def test_single_hosts_that_were_told_one_name_have_the_names_of_their_pods() -> None:
    """An old webhook called the second `g-2` too, and its worker 1."""
    labels = {"ray.io/tpu-pod-type": "v6e-4", "ray.io/tpu-topology": "2x2"}
    hosts = [
        replace(host(f"g-{index}-pod-0", worker_id), labels=labels, slice_name="g-2")
        for index, worker_id in ((0, 1), (2, 0))
    ]
    pods = tuple(
        replace(pods_of(f"g-{index}"), pods=pods_of(f"g-{index}").pods[:1]) for index in (0, 2)
    )
    group = replace(group_of(*pods), topology="2x2", num_hosts=1)
    records = Surveyor().look(hosts, group)
    assert [(each.name, each.state) for each in records.values()] == [
        ("g-0", SupplyState.FREE),
        ("g-2", SupplyState.FREE),
    ]
    assert [each.hosts[0].worker_id for each in records.values()] == [0, 0]


def test_host_that_told_ray_no_pod_is_known_by_its_address() -> None:
    hosts = hosts_of("s-0", instance_id="")
    record = Surveyor().only(hosts, group_of(pods_of("s-0")))
    assert (record.incarnation, record.state) == ("s-0-pod-0", SupplyState.FREE)


@pytest.mark.parametrize(
    ("compute_class", "is_theirs"), [("spot", True), ("spot-b", False), (None, True)]
)
def test_slice_of_another_class_of_the_same_market_is_no_candidate(
    compute_class: str | None, is_theirs: bool
) -> None:
    """Hosts that name no class, of a cluster made by hand, go by the other labels alone."""
    hosts = hosts_of("s-0", compute_class=compute_class)
    request = SliceRequest("spot", "v6e-8", "2x4", 2, 4)
    assert bool(match_slices(find_slices(hosts), request).free) == is_theirs


def test_who_waits_is_listed_once_and_the_oldest_first() -> None:
    joined = life("r2", at_s=5.0)
    lives = [
        life("r3", at_s=9.0),
        joined,
        replace(joined, replica_id="r2+1", part=1),
        life("r1", hosts_of("s-0")),
    ]
    waiting = waiting_replicas(lives)
    assert [(each.life_id, each.num_slices, each.since_s) for each in waiting] == [
        ("r2", 2, 5.0),
        ("r3", 1, 9.0),
    ]


def test_reports_survive_being_stored() -> None:
    hosts, groups = hosts_of("s-0"), (group_of(pods_of("s-0")),)
    surveyor = Surveyor()
    surveyor.look(hosts, *groups, lives=(life("r1", hosts),))
    report = SupplyReport("v:1", surveyor.records, waiting_replicas([life("r2")]))
    assert decode_supply(encode_supply(report)) == report
    assert decode_pods(encode_pods(groups)) == groups
