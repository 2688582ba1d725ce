"""A clock that is set back makes nothing wait for longer, and takes nothing that was learned."""

from dataclasses import dataclass, replace

import closed_loop
import pytest
from closed_loop import ClosedLoop, law
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_world import ON_DEMAND, RULES, SPOT, TICK_S, World

from autoscaling.policy.classes.class_history import ClassHistory
from autoscaling.policy.memory import PolicyRecord
from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.steady_time import SteadyTime
from autoscaling.records import Fleet, Observation, Plan, SliceView
from serving.domain.slice_lifecycle import SliceState

HOUR_S = 3600.0
TWO = (SPOT, ON_DEMAND)


@dataclass
class SetBack:
    """A policy whose clock is `back_s` behind; with `hosts_too` those of all hosts are."""

    policy: SlicewisePolicy
    back_s: float = 0.0
    hosts_too: bool = False

    name = "slicewise"

    def decide(self, seen: Observation) -> Plan:
        load, fleet = seen.load, seen.fleet
        assert load is not None
        if self.hosts_too:
            fleet = replace(fleet, slices=tuple(self._behind(each) for each in fleet.slices))
        plan = self.policy.decide(
            Observation(
                seen.now_s - self.back_s, replace(load, at_s=load.at_s - self.back_s), fleet
            )
        )
        assert plan.at_s == pytest.approx(seen.now_s - self.back_s), "plans are by its clock"
        return plan

    def _behind(self, each: SliceView) -> SliceView:
        """A slice that is told after the clocks were set back has earlier instants."""
        return replace(
            each,
            since_s=each.since_s - self.back_s,
            requested_at_s=each.requested_at_s - self.back_s,
        )

    def to_record(self, now_s: float) -> PolicyRecord:
        return self.policy.to_record(now_s - self.back_s)


def pair(*, hosts_too: bool = False) -> tuple[World, World, SetBack]:
    """Two equal worlds; the clock of the policy in the second one may be set back."""
    steady, other = World.of(*TWO), World.of(*TWO)
    clock = SetBack(other.policy, hosts_too=hosts_too)
    other.policy = clock  # type: ignore[assignment]
    return steady, other, clock


@pytest.mark.parametrize("hosts_too", [False, True])
@pytest.mark.parametrize("back_s", [60.0, HOUR_S, 24 * HOUR_S])
def test_surplus_goes_as_soon_as_ever(back_s: float, hosts_too: bool) -> None:
    steady, other, clock = pair(hosts_too=hosts_too)
    for world in (steady, other):
        world.run(98, 900)
        world.run(48, 120)
    before = dict(other.targets)
    clock.back_s = back_s
    for world in (steady, other):
        world.run(48, 2 * RULES.drain_delay_s + 2 * TICK_S)
    assert sum(other.targets.values()) == sum(steady.targets.values())
    assert sum(other.targets.values()) < sum(before.values())


@pytest.mark.parametrize("hosts_too", [False, True])
@pytest.mark.parametrize("back_s", [60.0, HOUR_S, 24 * HOUR_S])
def test_class_is_relied_on_again_as_soon_as_ever(
    back_s: float,
    hosts_too: bool,
) -> None:
    steady, other, clock = pair(hosts_too=hosts_too)
    returned_s = []
    for world in (steady, other):
        world.run(98, 900)
        world.lose("spot")
        world.step(98)
    clock.back_s = back_s
    for world in (steady, other):
        world.run(98, 60)
        began_s = world.now_s
        while world.targets["on-demand"] and world.now_s < began_s + HOUR_S:
            world.step(98)
        returned_s.append(world.now_s)
    assert abs(returned_s[0] - returned_s[1]) <= 2 * TICK_S


def test_order_of_a_host_whose_clock_is_ahead_is_late_by_when_it_was_seen() -> None:
    _, other, clock = pair()
    other.run(28, 900)
    clock.back_s = HOUR_S
    other.dry.add("spot")
    other.run(98, 60)
    assert other.targets["on-demand"] == 0
    # It may take half again of a minute.
    other.run(98, 60)
    assert other.targets["on-demand"] >= 7, "spot does not bring what is asked of it"


@pytest.mark.parametrize("back_s", [5.0, 60.0, 120.0, 180.0, HOUR_S])
def test_what_slices_carry_is_believed_as_before(back_s: float) -> None:
    terms = [replace(closed_loop.ON_DEMAND, max_slices=200)]
    policy = SlicewisePolicy(law(12.0), terms, closed_loop.RULES)
    clock = SetBack(policy)
    loop = ClosedLoop(clock, law(10.0), num_ready=10)  # type: ignore[arg-type]
    loop.run(1200)
    loop.rate = 345.0
    loop.run(60)
    before = policy.learned.factor({"on-demand": 20})
    assert before < 0.9, "slices were seen to carry less than their profile"
    clock.back_s = back_s
    for _ in range(24):
        loop.run(5)
        assert policy.learned.factor({"on-demand": 20}) == pytest.approx(before, abs=0.03)
        assert loop.target >= 35, "as many as the load takes"
    clock.to_record(loop.now_s)


def test_record_has_the_instants_of_the_clock() -> None:
    _, other, clock = pair()
    other.run(98, 900)
    other.lose("spot")
    other.step(98)
    clock.back_s = HOUR_S
    other.run(98, 30)
    now_s = other.now_s - HOUR_S
    record = clock.to_record(other.now_s)
    assert record.written_at_s == now_s
    backoff = record.classes["spot"].backoff
    assert backoff.failed_at_s is not None
    assert backoff.until_s is not None
    assert now_s - 60 <= backoff.failed_at_s <= now_s
    assert backoff.until_s <= now_s + RULES.backoff_s
    last_s = record.forecast.since_s + 60 * len(record.forecast.rates)
    assert now_s - 120 <= last_s <= now_s + 120


@given(
    st.lists(st.integers(-20_000, 20_000), min_size=1, max_size=20),
    st.lists(st.integers(-20_000, 20_000), min_size=1, max_size=20),
)
def test_time_never_runs_back_and_no_slice_is_of_the_future(
    clock: list[int], since: list[int]
) -> None:
    steady, latest_s = SteadyTime(), -1e9
    for now_s in clock:
        slices = tuple(
            SliceView(str(place), "spot", SliceState.LOADING, float(at_s), float(at_s))
            for place, at_s in enumerate(since)
        )
        seen = steady.observed(Observation(float(now_s), None, Fleet(slices, {})))
        assert seen.now_s >= latest_s
        assert all(
            max(each.since_s, each.requested_at_s) <= seen.now_s for each in seen.fleet.slices
        )
        latest_s = seen.now_s


@settings(deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=2, max_size=30))
def test_experience_of_a_class_is_never_of_less_than_no_time(clock: list[int]) -> None:
    history = ClassHistory(SPOT, RULES)
    for now_s in clock:
        history.observe(now_s, [SliceView("a", "spot", SliceState.READY, 0.0, 0.0)], [])
        record = history.to_record()
        assert record.held_hours >= 0
        assert record.had_hours >= 0
