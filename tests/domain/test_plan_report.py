"""The plan report: whole after its way through the store, and what a refused client is told."""

import pytest

from serving.domain.plan_report import (
    STALE_AFTER_S,
    ModelPlan,
    PlanChange,
    PlanReport,
    PlanReportError,
    decode_report,
    encode_report,
)

NOW_S = 1000.0


def board(next_slice_at_s: float | None = NOW_S + 90.0) -> PlanReport:
    plan = ModelPlan(
        model="demo",
        decided_at_s=NOW_S,
        changed_at_s=None,
        targets={"spot": 2},
        demand_slices=1.5,
        next_slice_at_s=next_slice_at_s,
        arithmetic="two are needed",
        changes=(PlanChange(compute_class="spot", delta=1, reason="need 2"),),
        refusals=(),
        alerts=("the load is 70 s old",),
        num_failures=0,
        drain_order=("spot#2", "spot#1~2"),
    )
    return PlanReport(written_at_s=NOW_S, models=(plan,))


def test_board_comes_back_as_it_was_written() -> None:
    assert decode_report(encode_report(board())) == board()


@pytest.mark.parametrize("text", [b"", b"[]", b'{"written_at_s": 1}', b'{"models": [], "x": 1}'])
def test_text_that_is_no_board_is_refused(text: bytes) -> None:
    with pytest.raises(PlanReportError, match="not a plan report"):
        decode_report(text)


@pytest.mark.parametrize(
    ("next_slice_at_s", "seconds"),
    [
        (NOW_S + 90.0, 90.0),
        (NOW_S + 0.2, 1.0),
        (NOW_S + 1e6, 3600.0),
        (NOW_S, None),
        (NOW_S - 5.0, None),
        (None, None),
    ],
)
def test_client_is_told_when_the_next_slice_comes(
    next_slice_at_s: float | None, seconds: float | None
) -> None:
    assert board(next_slice_at_s).retry_after_s("demo", NOW_S) == seconds


def test_slices_are_given_up_by_a_plan_that_is_not_old() -> None:
    assert board().drain_order("demo", NOW_S + STALE_AFTER_S) == ("spot#2", "spot#1~2")
    assert board().drain_order("demo", NOW_S + STALE_AFTER_S + 1) == ()
    assert board().drain_order("other", NOW_S) == ()


def test_nothing_is_known_of_another_model_or_from_an_old_plan() -> None:
    late = board(NOW_S + 1e6)
    assert late.retry_after_s("other", NOW_S) is None
    assert late.retry_after_s("demo", NOW_S + STALE_AFTER_S + 1) is None
