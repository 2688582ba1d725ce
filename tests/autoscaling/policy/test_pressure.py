"""Missed objectives and full caches hold a need or raise it a little, and never lower it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_world import ON_DEMAND, RULES, World, load

from autoscaling.policy.need.pressure import Pressure, pressure_reason
from serving.domain.capacity.engine_rates import EngineRate

CALM = replace(RULES, forecast_share=0.0)
BUSY = {"num_in_flight": 40}  # several for each slice, and fewer than they run at once
LATE = BUSY | {"num_ttft_met": 80, "num_ttft_missed": 20}
SLOW = BUSY | {"num_tpot_met": 80, "num_tpot_missed": 20}


def caches(*usage: float) -> tuple[EngineRate, ...]:
    return tuple(
        EngineRate(f"e{place}", "on-demand", 100.0, 100.0, 0.04, ratio)
        for place, ratio in enumerate(usage)
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (LATE, "20 of 100 first tokens were late"),
        (SLOW, "20 of 100 answers were slow"),
        (
            BUSY | {"engines": caches(0.1, 0.95, 0.93)},
            "93% of the KV cache of the median engine is in use",
        ),
        (BUSY, None),
        (BUSY | {"num_ttft_met": 96, "num_ttft_missed": 4}, None),
        (BUSY | {"num_ttft_met": 3, "num_ttft_missed": 3}, None),  # who knows
        (BUSY | {"engines": caches(0.1, 0.95)}, None),  # one with a long prompt
        (LATE | {"num_in_flight": 4}, None),  # each has a slice to itself
    ],
)
def test_reason_is_what_another_slice_would_help(
    fields: dict[str, int | tuple[EngineRate, ...]], reason: str | None
) -> None:
    seen = load(40.0, **fields)  # type: ignore[arg-type]
    assert pressure_reason(seen, 4.0, 4) == reason
    assert pressure_reason(seen, 4.0, 9) is None, "nine have little to do"


@pytest.mark.parametrize("fields", [LATE, SLOW])
def test_pressure_that_lasts_adds_a_slice_or_a_tenth(fields: dict[str, int]) -> None:
    for rate, before, after in ((38.0, 4, 5), (295.0, 30, 33)):
        world = World.of(ON_DEMAND, rules=CALM)
        world.run(rate, 600)
        assert world.targets == {"on-demand": before}
        plan = world.run(rate, 50, **fields)
        assert world.targets == {"on-demand": before}, "a burst needs no slice"
        plan = world.run(rate, 30, **fields)
        assert world.targets == {"on-demand": after}
        assert "pressure" in plan.arithmetic
        world.run(rate, 3600, **fields)
        assert world.targets == {"on-demand": after}, "it is bounded"
        world.run(rate, 1200, **BUSY)
        assert world.targets == {"on-demand": before}


def test_nothing_goes_while_another_slice_would_help() -> None:
    world = World.of(ON_DEMAND, rules=CALM)
    world.run(95.0, 600)
    plan = world.run(60.0, 900, **LATE)
    assert world.targets == {"on-demand": 10}
    reason = "none goes while 20 of 100 first tokens were late"
    assert next(each.reason for each in plan.refusals if each.delta < 0) == reason
    world.run(30.0, 900, **LATE)
    assert world.targets["on-demand"] <= 6, "with half of their work slices are not what is short"


def test_pressure_beside_a_backlog_is_for_the_same_work() -> None:
    needs = []
    for fields in (BUSY, LATE):
        world = World.of(ON_DEMAND, rules=CALM)
        world.run(38.0, 600)
        plan = world.run(38.0, 100, num_waiting=1000, oldest_wait_s=1.0, **fields)
        needs.append(plan.demand_slices)
    assert needs[0] == needs[1]


COUNTS = st.integers(0, 200)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(0, 200), COUNTS, COUNTS, COUNTS, st.floats(0, 1), COUNTS),
        min_size=1,
        max_size=40,
    )
)
def test_it_never_lowers_a_need(
    looks: list[tuple[float, int, int, int, float, int]],
) -> None:
    """The same load with and without what it shows, look by look."""
    told, untold = (World.of(ON_DEMAND, rules=CALM) for _ in range(2))
    for rate, met, missed, slow, usage, in_flight in looks:
        seen = {"num_in_flight": in_flight}
        shown = seen | {
            "num_ttft_met": met,
            "num_ttft_missed": missed,
            "num_tpot_missed": slow,
            "engines": caches(usage, usage),
        }
        most = told.run(rate, 60, **shown)  # type: ignore[arg-type]
        least = untold.run(rate, 60, **(seen | {"engines": caches(0.0, 0.0)}))  # type: ignore[arg-type]
        assert (most.demand_slices or 0) >= (least.demand_slices or 0)


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(0, 500), st.booleans()), max_size=50))
def test_what_it_adds_is_bounded(looks: list[tuple[float, float, bool]]) -> None:
    pressure, now_s = Pressure(), 0.0
    for elapsed_s, mean, is_pressed in looks:
        now_s += elapsed_s
        added = pressure.added_slices(now_s, mean, "late" if is_pressed else None)
        assert 0 <= added <= max(1.0, 0.1 * mean)
        assert is_pressed or added == 0
