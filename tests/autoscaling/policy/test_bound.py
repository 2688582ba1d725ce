"""A model never has more slices than its maximum, nor a class more than its own, in any world."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_world import (
    ANY_PRICE,
    FLEX,
    OBJECTIVES,
    ON_DEMAND,
    PROFILE,
    RESERVED,
    RULES,
    SPOT,
    World,
    load,
)

from autoscaling.policy.mix.bound import SliceClaim, granted
from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.rules import Rules
from autoscaling.records import Fleet, Observation, Plan
from serving.domain.compute_class import ComputeClass
from serving.domain.slice_lifecycle import WAITING

Chance = random.Random


def zone(name: str) -> ComputeClass:
    """A zone of spot that is lost every ten hours."""
    terms = {"losses_per_hour": 0.1, "provisioning_s": 120.0, "load_s": 180.0}
    return replace(SPOT, name=f"spot-{name}", correlation_group=name, **terms)


def terms_of(chance: Chance, name: str, most_in_all: int) -> ComputeClass:
    max_slices = chance.choice([2, 3, 5, 20])
    return ComputeClass(
        name,
        chance.choice([0.0, 3.0, 5.0, 11.0, 20.0]),
        is_prepaid=chance.random() < 0.2,
        is_revocable=chance.random() < 0.5,
        correlation_group=chance.choice(["", "a", "b"]),
        min_slices=chance.choice([0, 0, 0, 1]) if most_in_all > 4 else 0,
        max_slices=max_slices,
        provisioning_s=chance.choice([30.0, 60.0, 600.0, 1800.0]),
        load_s=chance.choice([30.0, 120.0]),
        losses_per_hour=chance.choice([0.0, 0.1, 1.0]),
        max_run_s=chance.choice([None, None, 1800.0, 3600.0]),
    )


@dataclass
class Weather:
    """What happens to a world by chance: loads, losses, droughts, ends, lines of requests."""

    chance: Chance
    world: World
    rate: float = 0.0
    check: Callable[[Plan], None] = field(default=lambda _: None)

    def blow(self, num_ticks: int) -> None:
        for _ in range(num_ticks):
            self._change()
            waiting = self.chance.choice([0, 0, 0, 5, 200])
            plan = self.world.policy.decide(
                self.world.tick(
                    self.rate,
                    num_waiting=waiting,
                    oldest_wait_s=self.chance.choice([0, 10]),
                    full_ratio=self.chance.choice([0, 1]),
                    num_in_flight=self.chance.choice([0, 50]),
                )
            )
            self.check(plan)
            self.world.carry_out(plan)

    def _change(self) -> None:
        chance, world = self.chance, self.world
        if chance.random() < 0.05:
            self.rate = chance.choice([0.0, chance.uniform(0, 60), chance.uniform(0, 200)])
        if chance.random() < 0.03:
            world.dry ^= {chance.choice(world.terms).name}
        if chance.random() < 0.02:
            world.lose(chance.choice(world.terms).name)
        runs_s = {each.name: each.max_run_s for each in world.terms}
        for place, each in enumerate(world.slices):
            run_s = runs_s[each.compute_class]
            if run_s is None or each.state in WAITING:
                continue
            if each.expires_at_s is None:
                world.slices[place] = replace(each, expires_at_s=each.since_s + run_s)
            elif each.expires_at_s <= world.now_s:
                world.slices[place] = world._wish(each.compute_class)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 14), st.booleans())
def test_no_world_takes_more_slices_than_the_model_or_a_class_may_have(
    seed: int, max_slices: int, is_zone_floor: bool
) -> None:
    chance = Chance(seed)
    count = chance.randint(1, 4)
    terms = tuple(terms_of(chance, f"c{number}", max_slices) for number in range(count))
    rules = replace(
        RULES,
        floor_ratio=0.6 if is_zone_floor else 0.25,
        floor_price_ratio=ANY_PRICE if is_zone_floor else 1.5,
        spread=2.8,
        min_slices=chance.choice([0, 0, max_slices]),
        max_slices=max_slices,
    )
    world = World(SlicewisePolicy(PROFILE, terms, rules), terms)

    def check(plan: Plan) -> None:
        assert sum(plan.targets.values()) <= max_slices, plan
        for each in terms:
            assert plan.targets[each.name] <= each.max_slices, plan
        assert all(each.reason for each in (*plan.decisions, *plan.refusals))
        moved = {name: n - world.targets.get(name, 0) for name, n in plan.targets.items()}
        told = dict.fromkeys(moved, 0)
        for each in plan.decisions:
            told[each.compute_class] += each.delta
        assert told == moved

    Weather(chance, world, chance.uniform(0, 100), check).blow(150)


@pytest.mark.parametrize("rate", [80, 120, 200, 300])
def test_maximum_holds_whatever_the_load_would_have_safety_worth(rate: float) -> None:
    terms = (zone("a"), zone("b"), ON_DEMAND)
    rules = Rules(OBJECTIVES, max_slices=10)
    world = World(SlicewisePolicy(PROFILE, terms, rules), terms)
    for _ in range(120):
        assert sum(world.step(rate).targets.values()) <= 10
    assert world.ready() == 10 or rate == 80


def test_class_that_waits_for_another_is_asked_for_no_more_than_it_may_have() -> None:
    cheap = ComputeClass("a", 3.0, max_slices=2, provisioning_s=60, load_s=60)
    sooner = ComputeClass("b", 20.0, max_slices=6, provisioning_s=300, load_s=60)
    slower = ComputeClass("c", 5.0, max_slices=5, provisioning_s=1500, load_s=60)
    world = World.of(cheap, sooner, slower)
    for tick in range(300):
        plan = world.step(min(120.0, 15.0 + max(0, tick - 60)))
        assert plan.targets["b"] <= 6
    assert plan.targets["b"] == 6


def test_order_of_a_class_that_backs_off_stays_open_where_there_is_room_for_it() -> None:
    rules = replace(RULES, max_slices=12)
    world = World.of(SPOT, FLEX, rules=rules)
    world.run(98, 900)
    world.dry.add("spot")
    world.lose("spot")
    plan = world.run(98, 600)
    assert plan.targets == {"flex-start": 10, "spot": 2}
    assert any("max_slices is 12" in each.reason for each in plan.refusals)
    assert any(
        each.reason.startswith("withdrawn: max_slices") for p in world.plans for each in p.decisions
    )
    world.dry.clear()
    most = 0
    for _ in range(360):
        world.step(98)
        there = [s for s in world.slices if s.state not in WAITING]
        most = max(most, len(there))
    assert world.targets == {"flex-start": 0, "spot": 10}, "exchanged as far as there is room"
    assert most <= 12


def test_lower_maximum_asks_for_nothing_and_gives_up_what_is_beyond_after_the_usual_delay() -> None:
    world = World.of(ON_DEMAND)
    world.run(98, 900)
    assert world.ready() == 10
    lower = replace(RULES, max_slices=6)
    memory = world.policy.to_record(world.now_s)
    world.policy = SlicewisePolicy(PROFILE, [ON_DEMAND], lower, memory)
    assert world.run(198, RULES.drain_delay_s).targets["on-demand"] == 10
    assert world.run(198, 30).targets["on-demand"] == 6


@pytest.mark.parametrize(("max_slices", "exchanged"), [(10, True), (3, False)])
def test_class_is_exchanged_one_by_one_where_a_model_needs_all_that_it_may_have(
    max_slices: int, exchanged: bool
) -> None:
    rules = replace(RULES, min_slices=max_slices, max_slices=max_slices)
    world = World.of(SPOT, ON_DEMAND, rules=rules)
    world.run(5, 900)
    world.dry.add("spot")
    world.lose("spot")
    world.run(5, 900)
    assert world.ready("on-demand") == max_slices
    world.dry.clear()
    # Spot is asked again six hours after it failed last.
    fewest = max_slices
    for _ in range(9 * 360):
        world.step(5)
        fewest = min(fewest, world.ready())
    assert (world.targets["on-demand"] == 0) == exchanged
    assert fewest == max_slices - exchanged
    if not exchanged:
        assert any("max_slices is 3" in each.reason for each in world.plans[-1].refusals)


def test_nothing_is_added_beyond_the_maximum_while_slices_are_unknown() -> None:
    rules = replace(RULES, max_slices=6)
    policy = SlicewisePolicy(PROFILE, [RESERVED, SPOT, ON_DEMAND], rules)
    targets = {"reserved": 0, "spot": 0, "on-demand": 5}
    for at in range(10):
        fleet = Fleet((), targets, late="nobody tells the slices")
        now_s = 10.0 * at
        plan = policy.decide(Observation(now_s, load(98.0, now_s), fleet))
        targets = dict(plan.targets)
        assert sum(targets.values()) <= 6
    assert targets["on-demand"] >= 5


def test_what_is_there_comes_first_then_what_is_urgent_then_what_is_cheap() -> None:
    claims = [
        SliceClaim("dear", 2, (2, 4, 4), 9.0),
        SliceClaim("cheap", 0, (3, 3, 8), 1.0),
        SliceClaim("fair", 1, (0, 1, 9), 2.0),
    ]
    assert granted(100, claims) == {"dear": 4, "cheap": 8, "fair": 9}
    assert granted(8, claims) == {"dear": 4, "cheap": 3, "fair": 1}
    assert granted(9, claims) == {"dear": 4, "cheap": 4, "fair": 1}
    assert granted(2, claims) == {"dear": 2, "cheap": 0, "fair": 1}, "nothing is taken away here"
