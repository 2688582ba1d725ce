"""Nothing is scaled down while work waits that must not; batch work is not such work."""

from dataclasses import replace
from itertools import pairwise

import pytest
from closed_loop import ON_DEMAND, ClosedLoop, law
from closed_loop import RULES as LOOP_RULES
from policy_world import PROFILE, RULES, SPOT, TICK_S, World
from policy_world import load as load_at

from autoscaling.policy.need.scale_down import MOST_TURNS, NeedTurns, why_nothing_may_go
from autoscaling.policy.policy import SlicewisePolicy

CALM = replace(RULES, forecast_share=0.0)  # without a margin for past errors
WAITS = {"num_waiting": 5, "oldest_wait_s": 4.0}


def test_need_stands_while_work_has_waited_longer_than_its_objective() -> None:
    world = World.of(rules=CALM)
    world.run(48.0, 600)
    plan = world.run(8.0, 3 * RULES.drain_delay_s, **WAITS)
    assert sum(world.targets.values()) >= 5
    reasons = [each.reason for each in plan.refusals if each.delta < 0]
    assert reasons == ["none goes while 5 requests wait, the first for 4.0 s; the objective is 3 s"]
    assert reasons[0] in plan.arithmetic
    world.run(8.0, 3 * RULES.drain_delay_s)
    assert sum(world.targets.values()) == 1, "it goes once nothing waits"


def test_need_stands_while_engines_are_full_and_work_waits() -> None:
    world = World.of(rules=CALM)
    world.run(48.0, 600)
    world.run(8.0, 3 * RULES.drain_delay_s, num_waiting=1, full_ratio=0.9)
    assert sum(world.targets.values()) >= 5
    # What is through within its objective, while an engine has room, is no sign of anything.
    world.run(8.0, 3 * RULES.drain_delay_s, num_waiting=1, oldest_wait_s=1.0)
    assert sum(world.targets.values()) < 5


def test_policy_that_has_just_begun_takes_nothing_from_work_that_waits() -> None:
    world = World.of(rules=CALM)
    world.run(48.0, 600)
    world.policy = World.of(rules=CALM).policy
    world.run(8.0, 3 * RULES.drain_delay_s, **WAITS)
    assert sum(world.targets.values()) >= 5


def test_gateway_that_is_late_now_and_then_does_not_hold_slices_for_ever() -> None:
    """Each time the surplus cannot be seen; that says nothing of how long it has lasted."""
    rules = replace(CALM, drain_delay_s=300.0)
    world = World.of(ON_DEMAND, rules=rules)
    world.run(98.0, 900)
    assert world.targets == {"on-demand": 10}
    for number in range(1, 90):
        # One tick in twenty-four, so every four minutes.
        late = ("gateway b is late: its load is 21 s old",) if number % 24 == 0 else ()
        targets = world.targets
        plan = world.step(38.0, late=late)
        assert not late or plan.targets == targets
    assert world.targets == {"on-demand": 4}


def test_time_in_which_a_gateway_is_late_counts_for_nothing_before_slices_go() -> None:
    rules = replace(CALM, drain_delay_s=300.0)
    ticks = []
    for num_late in (0, 20):
        world = World.of(ON_DEMAND, rules=rules)
        world.run(98.0, 900)
        world.run(38.0, 400)
        for _ in range(num_late):
            world.step(38.0, late=("gateway b is late: its load is 21 s old",))
        num = 0
        while world.targets["on-demand"] == 10:
            world.step(38.0)
            num += 1
        ticks.append(num)
    assert ticks[1] in (ticks[0], ticks[0] + 1)
    assert ticks[0] > 5


def test_classes_are_exchanged_while_work_waits() -> None:
    world = World.of(rules=CALM)
    world.run(48.0, 600)
    world.lose("spot")
    world.dry.add("spot")
    world.run(48.0, 600)
    assert (world.ready("spot"), world.ready("flex-start")) == (0, 3)
    ready = world.ready()
    world.dry.clear()
    while world.targets["flex-start"]:
        world.step(48.0, num_waiting=1, oldest_wait_s=4.0)
        assert world.ready() >= ready
        assert world.now_s < 10_000


def test_batch_work_holds_nothing_and_buys_nothing() -> None:
    batch = {"batch_requests_per_s": 90.0, "num_batch_waiting": 500, "num_batch_in_flight": 900}
    world = World.of(rules=CALM)
    world.run(48.0, 600, **batch)
    assert sum(world.targets.values()) == 5
    world.run(8.0, 3 * RULES.drain_delay_s, **batch)
    assert sum(world.targets.values()) == 1
    world.run(0.0, RULES.idle_s + 2 * RULES.drain_delay_s, **batch)
    assert sum(world.targets.values()) == 1, "there is work, and one slice for it"


def test_backlog_may_cost_more_the_longer_it_lasts() -> None:
    world = World.of(rules=CALM)
    world.run(18.0, 900)
    assert sum(world.step(18.0, num_waiting=500).targets.values()) == 3
    # A slice that was asked for at once takes 120 s; after twice as long it was not enough.
    world.run(18.0, 240, num_waiting=500)
    assert sum(world.targets.values()) == 4
    world.run(18.0, 240, num_waiting=500)
    assert sum(world.targets.values()) == 6
    world.run(18.0, 2 * TICK_S)
    assert world.step(18.0, num_waiting=500).demand_slices == 6, "what was bought is held"


def test_saturated_clients_lose_no_slice_though_the_profile_is_twice_too_good() -> None:
    policy = SlicewisePolicy(law(19.2, 0.001, 256), [ON_DEMAND], LOOP_RULES)
    loop = ClosedLoop(policy, law(9.6, 0.001, 256), num_clients=2 * 10 * 256)
    loop.run(1800)
    assert all(waiting > 0 for _, _, waiting in loop.counts[:20])
    counts = [count for _, count, waiting in loop.counts if waiting > 0]
    assert counts == sorted(counts)
    assert counts[0] == 10


def test_need_turns_six_times_an_hour_at_most_and_never_waits_to_rise() -> None:
    turns = NeedTurns()
    needs = [turns.bounded(60.0 * minute, 9 if minute // 2 % 2 else 4) for minute in range(240)]
    changes = [
        (minute, after - before)
        for minute, (before, after) in enumerate(pairwise(needs))
        if after != before
    ]
    for minute, _ in changes:
        assert sum(minute - 60 < other <= minute for other, _ in changes) <= MOST_TURNS
    assert sum(delta < 0 for _, delta in changes) >= 3 * 3
    steps = NeedTurns()
    for need in (4, 9, 3, 9, 3, 9, 3, 9, 3, 20):
        kept = steps.bounded(0.0, need)
        assert kept >= need
    assert kept == 20


def test_need_that_falls_step_by_step_turns_once() -> None:
    turns = NeedTurns()
    assert [turns.bounded(float(step), 30 - step) for step in range(20)] == [*range(30, 10, -1)]


def test_bound_on_turns_is_told() -> None:
    world = World.of(rules=replace(CALM, drain_delay_s=0.0))
    plans = [world.step(48.0 if tick // 12 % 2 else 18.0) for tick in range(240)]
    reason = "none goes while it has turned 6 times in an hour, or would"
    assert any(reason in each.reason for plan in plans for each in plan.refusals)
    assert any(reason in plan.arithmetic for plan in plans)


def test_profile_of_the_world_is_what_the_numbers_here_are_made_of() -> None:
    assert PROFILE.max_requests_per_s(100.0, 100.0, RULES.objectives.tpot_s) == 10.0


def test_long_prompts_may_wait_as_long_as_their_objective_allows() -> None:
    objectives = replace(RULES.objectives, ttft_per_prompt_token_s=0.01)
    load = load_at(8.0, num_waiting=5, oldest_wait_s=4.0, input_tokens_mean=200.0)
    assert why_nothing_may_go(load, RULES) is not None
    assert why_nothing_may_go(load, replace(RULES, objectives=objectives)) is None


def hears_nothing(world: World, for_s: float) -> None:
    """Time in which no load is known."""
    for _ in range(round(for_s / TICK_S)):
        seen = world.tick(0.0)
        world.carry_out(world.policy.decide(replace(seen, load=None)))


def is_surplus(world: World) -> bool:
    return any(each.compute_class and each.delta < 0 for each in world.plans[-1].refusals)


@pytest.mark.parametrize("hole_s", [120.0, 600.0, 7200.0])
@pytest.mark.parametrize("is_called", [True, False])
def test_time_in_which_no_load_was_known_is_no_time_of_surplus(
    hole_s: float, is_called: bool
) -> None:
    rules = replace(CALM, spread=1.0)
    world = World.of(SPOT, rules=rules)
    world.run(198, 1800)
    while not is_surplus(world):
        world.step(178)
    world.run(178, 20)
    before = world.targets["spot"]
    if is_called:
        hears_nothing(world, hole_s)
    else:  # the controller was away
        world.now_s += hole_s
    # Traffic comes back, at a tenth at first.
    for _ in range(12):
        assert world.step(20).targets["spot"] == before
    assert world.run(198, 600).targets["spot"] >= 20


def test_surplus_goes_once_it_was_seen_for_long_enough_beside_a_hole() -> None:
    world = World.of(SPOT, rules=CALM)
    world.run(198, 1800)
    world.run(58, 120)
    hears_nothing(world, 900)
    # A load is known for up to `max_load_age_s` after it was told.
    seen_s = 120.0 + RULES.max_load_age_s
    world.run(58, RULES.drain_delay_s - seen_s)
    assert world.targets["spot"] == 20, "the need of before is held as long as ever"
    world.run(58, RULES.drain_delay_s + 4 * TICK_S)
    assert world.targets["spot"] == 6
