import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.domain.slice_lifecycle import EndCause
from serving.slices.notices import DrainOrder, Notice, NoticeKind, combine, plan_drain

NOW_S = 1_000_000.0
DRAIN_NOTICE_S = 60.0


def notice(kind: NoticeKind, deadline_s: float | None, worker_id: int = 0) -> Notice:
    return Notice(kind, worker_id, deadline_s, f"{kind} of host {worker_id}", f"test {kind}")


@pytest.mark.parametrize(
    ("notices", "kind", "deadline_s", "worker_id"),
    [
        ([("expiry", 50.0, 0)], "expiry", 50.0, 0),
        ([("expiry", 50.0, 0), ("preemption", 80.0, 1)], "preemption", 50.0, 1),
        ([("preemption", None, 2), ("maintenance", 70.0, 1)], "preemption", 70.0, 2),
        ([("preemption", None, 2)], "preemption", None, 2),
        ([("preemption", 90.0, 2), ("preemption", 80.0, 3)], "preemption", 80.0, 3),
        ([("host_lost", None, 1), ("preemption", 30.0, 0)], "host_lost", 30.0, 1),
        ([("node_draining", 5.0, 1), ("termination_signal", 9.0, 0)], "termination_signal", 5.0, 0),
    ],
)
def test_combined_notices_have_worst_kind_and_earliest_deadline(
    notices: list[tuple[str, float | None, int]],
    kind: str,
    deadline_s: float | None,
    worker_id: int,
) -> None:
    combined = combine(notice(NoticeKind(name), at_s, host) for name, at_s, host in notices)
    assert combined is not None
    assert (combined.kind, combined.deadline_s, combined.worker_id) == (kind, deadline_s, worker_id)


def test_combining_nothing_is_nothing() -> None:
    assert combine([]) is None
    assert plan_drain([], DRAIN_NOTICE_S, NOW_S) is None


@pytest.mark.parametrize(
    ("kind", "in_s", "ends_in_s", "cause"),
    [
        # What is happening already drains at once, until its own deadline or for the class's time.
        ("preemption", 30.0, 30.0, "preempted"),
        ("preemption", 3600.0, 3600.0, "preempted"),
        ("preemption", None, 60.0, "preempted"),
        ("termination_signal", 15.0, 15.0, "preempted"),
        ("node_draining", None, 60.0, "preempted"),
        ("host_lost", None, 0.0, "preempted"),
        ("host_lost", 500.0, 0.0, "preempted"),
        # What is scheduled drains only shortly before.
        ("maintenance", 60.0, 60.0, "preempted"),
        ("maintenance", 61.0, None, None),
        ("maintenance", None, 60.0, "preempted"),
        ("expiry", 604_800.0, None, None),
        ("expiry", 45.0, 45.0, "expired"),
        # A deadline that has passed leaves no time, not less than none.
        ("maintenance", -10.0, 0.0, "preempted"),
    ],
)
def test_notice_makes_a_slice_drain_when_it_is_due(
    kind: str, in_s: float | None, ends_in_s: float | None, cause: str | None
) -> None:
    deadline_s = None if in_s is None else NOW_S + in_s
    order = plan_drain([notice(NoticeKind(kind), deadline_s)], DRAIN_NOTICE_S, NOW_S)
    if ends_in_s is None:
        assert order is None
    else:
        assert order is not None
        assert (order.deadline_s - NOW_S, order.cause) == (ends_in_s, cause)
        assert kind in order.reason


@pytest.mark.parametrize(
    ("others", "cause"),
    [
        ([NoticeKind.TERMINATION_SIGNAL], EndCause.EXPIRED),
        ([NoticeKind.NODE_DRAINING, NoticeKind.HOST_LOST], EndCause.EXPIRED),
        ([NoticeKind.PREEMPTION], EndCause.PREEMPTED),
        ([NoticeKind.MAINTENANCE], EndCause.PREEMPTED),
    ],
)
def test_expiry_is_the_cause_of_what_carries_it_out(
    others: list[NoticeKind], cause: EndCause
) -> None:
    notices = [notice(NoticeKind.EXPIRY, NOW_S + 10)]
    notices += [notice(kind, NOW_S + 5) for kind in others]
    order = plan_drain(notices, DRAIN_NOTICE_S, NOW_S)
    assert order is not None
    assert order.cause == cause


def test_expiry_far_away_does_not_excuse_a_lost_host() -> None:
    notices = [notice(NoticeKind.EXPIRY, NOW_S + 9999), notice(NoticeKind.HOST_LOST, None, 3)]
    order = plan_drain(notices, DRAIN_NOTICE_S, NOW_S)
    reason = "host 3: host_lost of host 3"
    assert order == DrainOrder(NOW_S, reason, EndCause.PREEMPTED, is_lost=True)


def test_slice_that_we_replace_ourselves_was_not_taken_away() -> None:
    """Or the policy would hold a new image against the market."""
    replaced = notice(NoticeKind.REPLACEMENT, NOW_S + 120)
    order = plan_drain([replaced], DRAIN_NOTICE_S, NOW_S)
    assert order is not None
    assert (order.cause, order.deadline_s) == (EndCause.RELEASED, NOW_S + 120)
    order = plan_drain([replaced, notice(NoticeKind.PREEMPTION, NOW_S + 15)], 15.0, NOW_S)
    assert order is not None
    assert (order.cause, order.deadline_s) == (EndCause.PREEMPTED, NOW_S + 15)


_NOTICES = st.lists(
    st.builds(
        notice,
        st.sampled_from(NoticeKind),
        st.none() | st.floats(NOW_S - 1e5, NOW_S + 1e6),
        st.integers(0, 63),
    ),
    max_size=6,
)


@given(_NOTICES, _NOTICES)
def test_more_notices_never_leave_more_time(few: list[Notice], more: list[Notice]) -> None:
    order = plan_drain(few, DRAIN_NOTICE_S, NOW_S)
    with_more = plan_drain([*few, *more], DRAIN_NOTICE_S, NOW_S)
    if order is not None:
        assert with_more is not None
        assert NOW_S <= with_more.deadline_s <= order.deadline_s
