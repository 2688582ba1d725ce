"""What the directory remembers of slices, and holds against them. Pure."""

from dataclasses import replace

import pytest

from serving.directory.supply_book import SupplyBook, life_key
from serving.domain.inventory import ObservedHost, Slice, SliceRequest
from serving.domain.slice_lifecycle import EndCause, SliceState
from serving.domain.slice_records import SliceRecord
from serving.domain.supply.faults import (
    ABSOLVE_AFTER_S,
    REPRIEVE_AFTER_S,
    FaultCause,
    SliceFaults,
    decode_faults,
)
from serving.domain.supply.pods import PodPhase
from serving.domain.supply.records import SupplyState
from serving.domain.supply.survey import BOOT_S
from tests.supply_builders import ended, group_of, host, hosts_of, life, pods_of

WANT = SliceRequest("spot", "v6e-8", "2x4", 2, 4)
GROUPS = (group_of(pods_of("s-0"), pods_of("s-1")),)


def all_hosts(**changes: object) -> list[ObservedHost]:
    return [*hosts_of("s-0", **changes), *hosts_of("s-1", **changes)]


def looked(*lives: SliceRecord, book: SupplyBook | None = None, at_s: float = 0.0) -> SupplyBook:
    book = book or SupplyBook(SliceFaults())
    book.look(all_hosts(), GROUPS, lives, at_s)
    return book


def state_of(book: SupplyBook, name: str) -> SupplyState:
    (record,) = [record for record in book.records if record.name == name]
    return record.state


@pytest.mark.parametrize(
    ("cause", "is_held_against"),
    [
        (EndCause.BOOT_FAILED, True),
        (EndCause.UNHEALTHY, True),
        (EndCause.PREEMPTED, False),
        (EndCause.EXPIRED, False),
        (EndCause.RELEASED, False),
    ],
)
def test_engine_that_fails_is_held_against_the_slice_and_no_other_end_is(
    cause: EndCause, is_held_against: bool
) -> None:
    holder = life("r1", hosts_of("s-0"))
    book = looked(holder)
    book.note_end(ended(holder, cause), 10.0)
    looked(book=book, at_s=11.0)
    found = book.match(WANT, 11.0)
    assert [each.name for each in found.free] == (["s-1"] if is_held_against else ["s-0", "s-1"])
    if is_held_against:
        assert found.refused["s-0"].startswith("in quarantine for another 29 s: it failed 1 times")


def test_failed_probe_and_the_end_that_follows_are_one_failure() -> None:
    holder = life("r1", hosts_of("s-0"))
    book = looked(holder)
    whole = Slice("s-0", tuple(hosts_of("s-0")))
    suspects = frozenset({"node-of-s-0-pod-1"})
    book.note_failure(whole, suspects, FaultCause.PROBE, "no chip", 10.0, life_id=life_key(holder))
    book.note_end(ended(holder, EndCause.BOOT_FAILED), 10.5)
    (fault,) = book.faults.all()
    assert (fault.count, fault.hosts.suspects) == (1, suspects)
    assert fault.hosts.suspect_machines == {"machine-of-s-0-1"}


def test_slice_on_which_engines_fail_while_another_serves_is_condemned_and_stays_so() -> None:
    serving = life("r2", hosts_of("s-1"))
    book = looked()
    for number in range(3):
        failing = life("r1", hosts_of("s-0"), at_s=float(number))
        looked(failing, serving, book=book, at_s=float(number))
        book.note_end(ended(failing, EndCause.BOOT_FAILED), number + 0.5)
    looked(serving, book=book, at_s=4.0)
    assert state_of(book, "s-0") == SupplyState.CONDEMNED
    assert "demo serves on other slices" in book.match(WANT, 4.0).refused["s-0"]
    # Another directory, an hour later.
    later = SupplyBook(decode_faults(book.faults.encode()))
    looked(serving, book=later, at_s=3600.0)
    assert state_of(later, "s-0") == SupplyState.CONDEMNED


def test_engine_that_has_served_for_long_clears_its_slice() -> None:
    holder = life("r1", hosts_of("s-0"))
    book = looked(holder)
    book.note_end(ended(holder, EndCause.UNHEALTHY), 10.0)
    serving = life("r2", hosts_of("s-0"), at_s=20.0)
    looked(serving, book=book, at_s=20.0 + ABSOLVE_AFTER_S - 1)
    assert len(book.faults.all()) == 1
    looked(serving, book=book, at_s=20.0 + ABSOLVE_AFTER_S)
    assert book.faults.all() == ()


def test_slice_that_is_taken_away_is_no_candidate_though_ray_finds_it_free() -> None:
    book = looked()
    book.note_leaving(Slice("s-0", tuple(hosts_of("s-0"))), 130.0, "host 1: preemption", 100.0)
    looked(book=book, at_s=101.0)
    found = book.match(WANT, 101.0)
    assert [each.name for each in found.free] == ["s-1"]
    assert found.refused["s-0"] == "condemned: host 1: preemption"


def test_slice_that_is_taken_away_stays_condemned_when_its_replica_is_gone_without_a_word() -> None:
    leaving = life("r1", hosts_of("s-0"), SliceState.DRAINING, drain_deadline_s=130.0)
    book = looked(leaving)
    looked(book=book, at_s=1.0)
    assert state_of(book, "s-0") == SupplyState.CONDEMNED
    # It was not taken away after all.
    looked(book=book, at_s=130.0 + REPRIEVE_AFTER_S)
    looked(book=book, at_s=131.0 + REPRIEVE_AFTER_S)
    assert state_of(book, "s-0") == SupplyState.FREE


def test_slice_that_its_replica_took_for_lost_is_tried_again_after_its_quarantine() -> None:
    # Only the agent had died: all of the slice is still there.
    leaving = life("r1", hosts_of("s-0"), SliceState.DRAINING, drain_deadline_s=5.0)
    book = looked(leaving, at_s=5.0)
    assert state_of(book, "s-0") == SupplyState.CONDEMNED
    whole = Slice("s-0", tuple(hosts_of("s-0")))
    book.note_failure(whole, frozenset(), FaultCause.HOST, "host 1: the host is lost", 6.0)
    looked(book=book, at_s=7.0)
    assert state_of(book, "s-0") == SupplyState.QUARANTINED
    looked(book=book, at_s=60.0)
    assert state_of(book, "s-0") == SupplyState.FREE


def test_slice_that_does_not_boot_stays_condemned_over_a_restart_of_the_directory() -> None:
    stuck = group_of(pods_of("s-0", phase=PodPhase.PENDING))
    book = SupplyBook(SliceFaults())
    for at_s in (0.0, BOOT_S):
        book.look([], [stuck], [], at_s)
    assert state_of(book, "s-0") == SupplyState.CONDEMNED
    later = SupplyBook(decode_faults(book.faults.encode()))
    later.look([], [stuck], [], BOOT_S + 1)
    assert state_of(later, "s-0") == SupplyState.CONDEMNED


def test_slice_that_comes_back_on_the_machines_that_did_not_boot_has_longer() -> None:
    book = SupplyBook(SliceFaults())
    stuck = pods_of("s-0", phase=PodPhase.PENDING)
    for at_s in (0.0, BOOT_S):
        book.look([], [group_of(stuck)], [], at_s)
    pods = tuple(replace(pod, name=f"new-{pod.name}") for pod in stuck.pods)
    book.look([], [group_of(replace(stuck, pods=pods))], [], BOOT_S)
    (record,) = book.records
    assert (record.state, record.until_s) == (SupplyState.BOOTING, 3 * BOOT_S)


def test_failure_on_hosts_that_have_gone_already_is_held_against_those_hosts() -> None:
    book = SupplyBook(SliceFaults())
    gone = [host("old-pod", 0), host("older-pod", 1)]
    book.note_end(ended(life("r1", gone), EndCause.UNHEALTHY), 10.0)
    (fault,) = book.faults.all()
    assert fault.hosts.node_ids == {"node-of-old-pod", "node-of-older-pod"}


def test_replica_of_a_slice_that_is_replaced_is_told_to_leave_it_and_no_other() -> None:
    replaced = replace(pods_of("s-0"), leave_reason="its pods are of an older template")
    book = SupplyBook(SliceFaults())
    lives = [life("r1", hosts_of("s-0")), life("r2", hosts_of("s-1"))]
    book.look(all_hosts(), [group_of(replaced, pods_of("s-1"))], lives, 0.0)
    assert book.leave_reason("r1") == "its pods are of an older template"
    assert book.leave_reason("r2") is None
    # It is no supply from now on, whoever has it.
    assert (state_of(book, "s-0"), state_of(book, "s-1")) == (
        SupplyState.CONDEMNED,
        SupplyState.HELD,
    )
    # The provisioner has thought better of it.
    book.look(all_hosts(), GROUPS, lives, 1.0)
    assert book.leave_reason("r1") is None
    assert state_of(book, "s-0") == SupplyState.HELD
