"""Every end of a slice is counted once, by its cause, and every cause from zero on."""

from dataclasses import replace

from serving.domain.slice_lifecycle import EndCause, SliceLifecycle, SliceState, Transition
from serving.domain.slice_records import SliceRecord, Snapshot
from serving.ledger.endings import MAX_REMEMBERED, Endings

BEGAN_S = 100.0


def living(replica_id: str = "r") -> SliceRecord:
    life = SliceLifecycle((Transition(SliceState.READY, 50.0, "the test says so"),), "spot-0")
    return SliceRecord(replica_id, "chat", "spot", life)


def ended(record: SliceRecord, cause: EndCause, at_s: float = 120.0) -> SliceRecord:
    return replace(record, life=record.life.end(cause, at_s, "the test says so"))


def happened(endings: Endings) -> dict[EndCause, int]:
    return {cause: count for (_, _, cause), count in endings.counts().items() if count}


def test_class_that_was_seen_is_counted_for_every_cause_from_zero() -> None:
    endings = Endings(BEGAN_S)
    assert endings.counts() == {}
    endings.observe(Snapshot("1", (living(),)))
    assert endings.counts() == {("chat", "spot", cause): 0 for cause in EndCause}


def test_end_is_counted_once_however_often_it_is_listed() -> None:
    endings = Endings(BEGAN_S)
    over = ended(living(), EndCause.PREEMPTED)
    for version in "12":
        endings.observe(Snapshot(version, (), (over,)))
    assert happened(endings) == {EndCause.PREEMPTED: 1}


def test_replica_that_comes_back_and_ends_again_is_counted_once() -> None:
    endings = Endings(BEGAN_S)
    endings.observe(Snapshot("1", (), (ended(living(), EndCause.PREEMPTED),)))
    endings.observe(Snapshot("2", (living(),)))
    endings.observe(Snapshot("3", (), (ended(living(), EndCause.RELEASED, 130.0),)))
    assert happened(endings) == {EndCause.PREEMPTED: 1}


def test_end_before_the_gateway_began_is_not_counted() -> None:
    endings = Endings(BEGAN_S)
    endings.observe(Snapshot("1", (), (ended(living(), EndCause.EXPIRED, BEGAN_S - 1),)))
    assert happened(endings) == {}


def test_memory_is_bounded_and_holds_more_than_a_snapshot() -> None:
    endings = Endings(BEGAN_S)
    overs = tuple(ended(living(f"r{n}"), EndCause.UNHEALTHY) for n in range(MAX_REMEMBERED + 10))
    endings.observe(Snapshot("1", (), overs))
    endings.observe(Snapshot("2", (), overs[-200:]))
    assert happened(endings) == {EndCause.UNHEALTHY: len(overs)}
