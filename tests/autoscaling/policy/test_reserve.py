"""A need keeps as much of its reserve as service takes; all of it where nobody judges service."""

import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policy_world import ON_DEMAND, PROFILE, RULES, World, load

from autoscaling.policy.memory import decode_memory, encode_memory, slice_shape_of
from autoscaling.policy.need.reserve import LEAST_SHARE, Reserve
from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.profiles import Profiles
from autoscaling.policy.rules import Rules
from autoscaling.records import ModelLoad

ALLOWED = 0.002
# More than twice the slices that 3.6 slices' work takes on average.
SPREAD = replace(RULES, spread=8.0, forecast_share=0.0, late_ratio=ALLOWED)
MET = {"num_ttft_met": 1000, "num_tpot_met": 1000}
LATE = {"num_ttft_met": 900, "num_ttft_missed": 100, "num_tpot_met": 1000}


def judged(num_met: int, num_missed: int, at_s: float = 0.0) -> ModelLoad:
    return load(40.0, at_s, num_tpot_met=num_met, num_tpot_missed=num_missed)


def told(reserve: Reserve, seen: ModelLoad, for_s: float, from_s: float = 0.0) -> float:
    """Time goes on by ten seconds at a time; returns the share that is kept at the end."""
    for at in range(round(for_s / 10) + 1):
        reserve.look(from_s + 10.0 * at, seen)
    return reserve.share


def test_reserve_goes_over_hours_and_comes_back_within_minutes() -> None:
    reserve = Reserve(ALLOWED)
    assert told(reserve, judged(1000, 0), 3600) == pytest.approx(2 / 3)
    assert told(reserve, judged(1000, 0), 9000, from_s=3600) == LEAST_SHARE
    assert told(reserve, judged(900, 100), 240, from_s=12600) == 1.0
    assert told(reserve, judged(998, 2), 7200, from_s=12840) == 1.0, "as many as may"


@pytest.mark.parametrize(
    ("late_ratio", "seen"),
    [
        (0.0, judged(1000, 0)),
        (ALLOWED, load(40.0)),
        (ALLOWED, replace(judged(1000, 0), late=("gateway g1 is 9 s late",))),
    ],
    ids=["not looked at", "nobody judges", "a gateway is late"],
)
def test_nothing_is_given_up_by_what_says_nothing(late_ratio: float, seen: ModelLoad) -> None:
    assert told(Reserve(late_ratio), seen, 86_400) == 1.0


def test_silence_counts_as_one_look() -> None:
    reserve = Reserve(ALLOWED)
    reserve.look(0.0, judged(1000, 0))
    reserve.look(86_400.0, judged(1000, 0))
    assert reserve.share > 0.99


def test_all_is_kept_where_nothing_may_miss_whatever_was_learned_before() -> None:
    assert Reserve(0.0, LEAST_SHARE).share == 1.0
    assert told(Reserve(0.0, LEAST_SHARE), judged(1000, 0), 86_400) == 1.0


def test_reserve_comes_back_within_minutes_where_requests_come_and_nobody_judges_them() -> None:
    reserve = Reserve(ALLOWED, LEAST_SHARE)
    assert told(reserve, load(40.0), 600) == LEAST_SHARE, "one in ten minutes may be unjudged"
    assert told(reserve, load(40.0), 600, from_s=600) == 1.0


def test_reserve_stays_as_learned_where_few_come_or_none() -> None:
    quiet = Reserve(ALLOWED, LEAST_SHARE)
    assert told(quiet, load(0.0), 86_400) == LEAST_SHARE
    rare = Reserve(ALLOWED, LEAST_SHARE)
    for at in range(100):  # one judged in eight minutes, and others whose judgement is to come
        told(rare, load(0.03), 470, from_s=480.0 * at)
        told(rare, judged(1, 0), 0, from_s=480.0 * (at + 1))
    assert rare.share == LEAST_SHARE


@pytest.mark.parametrize(
    ("rules", "judges"),
    [(replace(SPREAD, late_ratio=0.0), MET), (SPREAD, {})],
    ids=["nothing may miss", "nobody judges"],
)
def test_policy_that_has_no_judgement_any_more_buys_the_whole_reserve_again(
    rules: Rules, judges: dict[str, int]
) -> None:
    world = World.of(ON_DEMAND, rules=SPREAD)
    world.run(36, 4 * 3600, **MET)
    few = world.targets["on-demand"]
    memory = world.policy.to_record(world.now_s)
    world.policy = SlicewisePolicy(PROFILE, [ON_DEMAND], rules, memory)
    world.run(36, 1800, **judges)
    without_memory = World.of(ON_DEMAND, rules=replace(SPREAD, late_ratio=0.0))
    assert world.targets == without_memory.run(36, 1800).targets
    assert world.targets["on-demand"] > few


@settings(max_examples=60, deadline=None)
@example([(0.0, 0, 1)], 5e-324, 0.0, 0.0)  # of no time, and more than may by any factor
@given(
    st.lists(st.tuples(st.floats(0, 1e5), st.integers(0, 99), st.integers(0, 99)), max_size=40),
    st.floats(0, 1),
    st.floats(0, 1e4),
    st.floats(0, 1e4),
)
def test_what_is_kept_is_between_the_work_of_now_and_all_of_it(
    looks: list[tuple[float, int, int]], late_ratio: float, held: float, mean: float
) -> None:
    reserve, now_s = Reserve(late_ratio), 0.0
    for elapsed_s, num_met, num_missed in looks:
        now_s += elapsed_s
        reserve.look(now_s, judged(num_met, num_missed))
        assert LEAST_SHARE <= reserve.share <= 1.0
    kept, rounding = reserve.kept(held, mean), 1e-9 * (held + mean)
    assert min(held, mean) - rounding <= kept <= held + rounding


@pytest.mark.parametrize("enough", [0.3, 0.5, 0.7])
def test_no_more_miss_than_may_over_a_long_time(enough: float) -> None:
    """In a world where the fewer miss the more is kept, and `enough` of the reserve is enough.

    What misses comes in bursts: one minute in fifty has all of the misses.
    """
    chance = random.Random(1)
    reserve = Reserve(ALLOWED)
    missed, kept, looks = 0, 0.0, 6 * 60 * 24 * 30
    is_burst = False
    for at in range(looks):
        if at % 6 == 0:
            is_burst = chance.random() < 0.02
        likely = min(1.0, 0.1 * (enough / reserve.share) ** 3) if is_burst else 0.0
        num_missed = sum(chance.random() < likely for _ in range(100))
        missed += num_missed
        kept += reserve.share
        reserve.look(10.0 * at, judged(100 - num_missed, num_missed, 10.0 * at))
    assert missed / (100 * looks) < 1.1 * ALLOWED
    assert kept / looks < enough + 0.1, "and no more is kept than it takes"


def test_slices_for_chance_go_where_nobody_misses_and_come_back_where_some_do() -> None:
    world = World.of(ON_DEMAND, rules=SPREAD)
    world.run(36.0, 600, **MET)
    whole = world.targets["on-demand"]
    assert whole >= 6
    plan = world.run(36.0, 14_400, **MET)
    assert world.targets == {"on-demand": 4}, "3.6 slices of work, and what is always kept"
    assert "10% of the reserve is kept" in plan.arithmetic
    world.run(36.0, 300, **LATE)
    assert world.targets["on-demand"] >= whole


def test_rise_is_answered_as_before_however_little_is_kept() -> None:
    world = World.of(ON_DEMAND, rules=replace(RULES, late_ratio=ALLOWED))
    world.run(38.0, 14_400, **MET)
    assert world.policy.to_record(0.0).reserve_share == LEAST_SHARE
    world.run(98.0, 60, **MET)
    assert world.targets == {"on-demand": 10}


def test_what_waits_or_is_late_is_no_reserve() -> None:
    """What a backlog adds is bought whole, also with little of the reserve kept."""
    more = []
    for late_ratio in (0.0, ALLOWED):
        world = World.of(ON_DEMAND, rules=replace(RULES, late_ratio=late_ratio))
        world.run(38.0, 14_400, **MET)
        before = world.targets["on-demand"]
        world.run(38.0, 100, num_waiting=1000, oldest_wait_s=1.0, **MET)
        more.append(world.targets["on-demand"] - before)
    assert more[0] == more[1] > 0


def test_share_survives_a_restart_and_older_records_have_all_of_it() -> None:
    world = World.of(ON_DEMAND, rules=SPREAD)
    world.run(38.0, 7200, **MET)
    record = world.policy.to_record(world.now_s)
    shape = slice_shape_of(Profiles(PROFILE))
    again = decode_memory(encode_memory(record), shape, world.now_s)
    policy = SlicewisePolicy(PROFILE, (ON_DEMAND,), SPREAD, again)
    assert policy.to_record(world.now_s).reserve_share == record.reserve_share < 0.5
    older = record.model_dump_json(exclude={"reserve_share"}).encode()
    assert decode_memory(older, shape, world.now_s).reserve_share == 1.0
