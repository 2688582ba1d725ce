"""Batch work comes through the stats as it was told, and is never told later than it is due."""

from hypothesis import given
from hypothesis import strategies as st

from serving.domain.capacity.batch_due import (
    MOST_DATES,
    NOTHING_DUE,
    BatchDue,
    DueWork,
    coalesced,
    due_of_stats,
    due_stats,
)

MODEL = "chat"
works = st.lists(
    st.builds(DueWork, st.integers(0, 10**6).map(float), st.integers(0, 50_000)), max_size=40
)


@given(works, st.floats(0, 1e4), st.none() | st.floats(0, 1e4))
def test_what_is_told_is_read(work: list[DueWork], given: float, output: float | None) -> None:
    due = BatchDue(coalesced(work), given, output)
    stats = due_stats(MODEL, due) | due_stats("other", BatchDue((DueWork(5.0, 9),)))
    stats |= {"load|chat|requests_per_s": 3.0}
    assert due_of_stats(MODEL, stats) == (due if due.work else NOTHING_DUE)


@given(works)
def test_dates_are_few_and_no_work_is_told_too_late(work: list[DueWork]) -> None:
    told = coalesced(work)
    assert len(told) <= MOST_DATES
    assert sum(each.num_requests for each in told) == sum(each.num_requests for each in work)
    assert list(told) == sorted(told, key=lambda each: each.due_at_s)
    for at_s in {each.due_at_s for each in work}:
        by_then = sum(each.num_requests for each in work if each.due_at_s <= at_s)
        assert sum(each.num_requests for each in told if each.due_at_s <= at_s) >= by_then


def test_dates_become_one_where_that_brings_least_forward() -> None:
    work = [DueWork(0.0, 10), DueWork(100.0, 10), DueWork(101.0, 10), DueWork(200.0, 1)]
    assert coalesced(work, 3) == (DueWork(0.0, 10), DueWork(100.0, 20), DueWork(200.0, 1))


def test_nothing_is_due_where_nothing_is_told() -> None:
    assert due_stats(MODEL, NOTHING_DUE) == {}
    assert due_of_stats(MODEL, {"load|chat|num_waiting": 2.0}) == NOTHING_DUE
