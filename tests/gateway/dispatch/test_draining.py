"""Who leaves a draining engine, and who may stay to finish."""

import pytest

from serving.domain.limits import migrate_by_s
from serving.gateway.dispatch.choice.routing import to_migrate
from serving.gateway.dispatch.requests import InFlightRequest
from serving.gateway.telemetry.request_telemetry import ModelTelemetry

NOW_S = 1000.0


def running(
    max_tokens: int | None, num_emitted: int, *, age_s: float, before: int = 0
) -> InFlightRequest:
    """A request that was dispatched `age_s` ago, when it had `before` tokens."""
    return InFlightRequest(
        request_id="r",
        prompt_token_ids=[1],
        max_tokens=max_tokens,
        payload=[],
        telemetry=ModelTelemetry("demo", 0.0).arrived("r", 1, 0.0),
        emitted=list(range(num_emitted)),
        num_emitted_at_dispatch=before,
        dispatched_at_s=NOW_S - age_s,
    )


@pytest.mark.parametrize(
    ("request_", "stays"),
    [
        (running(100, 50, age_s=5.0), True),  # 50 tokens to go at 0.1 s: 5 s of the 10
        (running(150, 50, age_s=5.0), True),  # exactly in time
        (running(151, 50, age_s=5.0), False),
        (running(None, 50, age_s=5.0), False),  # nobody knows when it ends
        (running(100, 0, age_s=5.0), False),  # still in its prefill: no pace to go by
        (running(100, 50, age_s=5.0, before=50), False),  # resumed here, and not a token yet
        (running(100, 60, age_s=5.0, before=50), False),  # 40 to go at 0.5 s
        (running(70, 60, age_s=5.0, before=50), True),
    ],
)
def test_request_stays_only_if_its_pace_brings_it_home(
    request_: InFlightRequest, stays: bool
) -> None:
    left = to_migrate([request_], NOW_S, NOW_S + 10.0)
    assert left == ([] if stays else [request_])


def test_nobody_stays_once_the_time_is_over() -> None:
    almost_done = running(100, 99, age_s=1.0)
    assert to_migrate([almost_done], NOW_S, NOW_S) == [almost_done]


@pytest.mark.parametrize(("grace_s", "stay_s"), [(0.0, 0.0), (0.4, 0.0), (1.0, 0.5), (12.0, 9.0)])
def test_time_to_move_is_kept_back(grace_s: float, stay_s: float) -> None:
    assert migrate_by_s(NOW_S, grace_s) == pytest.approx(NOW_S + stay_s)
