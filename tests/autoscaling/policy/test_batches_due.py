"""Batch work waits for room that is paid for, and gets slices of its own when its time runs out."""

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policy_world import ALL, FLEX, OBJECTIVES, ON_DEMAND, PROFILE, RULES, SPOT, TICK_S, World

from autoscaling.policy.need.batches import BatchCapacity, BatchInputs, BatchPatience
from autoscaling.policy.rules import Rules
from autoscaling.records import Plan
from serving.domain.capacity.batch_due import NOTHING_DUE, BatchDue, DueWork
from serving.domain.capacity.batch_lines import STEP_SHARE

HOUR_S = 3600.0
PER_SLICE = 10.0  # requests per second, of either kind of work
# The same with steps as long as lines may make them.
BESIDE_LINES = PROFILE.max_requests_per_s(100.0, 100.0, STEP_SHARE * OBJECTIVES.tpot_s)
TOKENS = (100.0, 100.0)


def due(*work: tuple[float, int]) -> BatchDue:
    return BatchDue(tuple(DueWork(at_s, count) for at_s, count in work), *TOKENS)


def asked(work: BatchDue, need: int = 8, busy: float = 8.0, **changes: float) -> BatchCapacity:
    inputs = BatchInputs(0.0, work, PER_SLICE, need, busy, lead_s=0.0)
    return BatchPatience().capacity(replace(inputs, **changes))


def test_nothing_is_asked_for_where_nothing_is_due() -> None:
    assert asked(NOTHING_DUE) == BatchCapacity(0, "")


def test_work_that_has_room_is_given_none_of_its_own() -> None:
    # 10 hours of one slice, in 20 hours, with half a slice free and a tenth over.
    work = due((20 * HOUR_S, round(10 * HOUR_S * PER_SLICE)))
    assert asked(work, busy=7.4).slices == 0
    assert "they have room on 0.60 slices" in asked(work, busy=7.4).words


def test_work_without_room_waits_for_it_while_there_is_time() -> None:
    # At ease it has two of eight slices: 5 hours of work, for which 10 have to be left.
    work = due((11 * HOUR_S, round(10 * HOUR_S * PER_SLICE)))
    assert asked(work).words == "360000 requests of batches are due: they can wait for room"
    begun = asked(work, now_s=1.5 * HOUR_S)
    assert begun.slices == math.ceil(1.1 * 10 / 9.5)
    assert "10.0 h of work by 9.5 h from now" in begun.words


def test_time_that_a_slice_takes_to_come_is_no_time_to_work() -> None:
    work = due((11 * HOUR_S, round(10 * HOUR_S * PER_SLICE)))
    assert asked(work, lead_s=1.5 * HOUR_S).slices == asked(work, now_s=1.5 * HOUR_S).slices == 2


def test_of_several_dates_the_tightest_counts_with_what_is_due_before() -> None:
    early, late = (HOUR_S, round(0.4 * HOUR_S * PER_SLICE)), (2 * HOUR_S, 5 * 36_000)
    assert asked(due(early)).slices == 0
    # 5.4 hours of a slice in two.
    assert asked(due(early, late)).slices == math.ceil(1.1 * 5.4 / 2)


def test_work_that_is_too_late_gets_what_would_do_it_in_a_minute() -> None:
    assert asked(due((-5.0, 600))).slices == math.ceil(1.1 * 600 / PER_SLICE / 60.0)


def test_work_that_has_begun_keeps_its_slices_though_it_is_ahead() -> None:
    patience = BatchPatience()

    def at(now_s: float, count: int) -> int:
        inputs = BatchInputs(now_s, due((HOUR_S * 10, count)), PER_SLICE, 8, 8.0, 0.0)
        return patience.capacity(inputs).slices

    assert at(0.0, 8 * 36_000) == 0
    assert at(2.5 * HOUR_S, 8 * 36_000) == 2
    # Ahead of its time: a new batch of the same size would wait.
    assert at(3.0 * HOUR_S, 6 * 36_000) == 1
    assert at(3.0 * HOUR_S, 0) == 0
    assert at(3.0 * HOUR_S, 6 * 36_000) == 0


@dataclass
class Lane:
    """Batch work beside a world's requests: it is done on what slices have over, as a fluid."""

    world: World
    left: list[DueWork]
    own_s: float = 0.0  # slice-seconds beyond what the requests need
    late: list[DueWork] = field(default_factory=list)
    plan: Plan | None = None

    def step(self, rate: float) -> None:
        """A tick: a decision, then work by who is due first."""
        told = BatchDue(tuple(self.left), *TOKENS)
        self.plan = self.world.step(rate, batch_due=told)  # type: ignore[arg-type]
        ready = self.world.ready()
        self.own_s += max(0, ready - math.ceil(rate / PER_SLICE)) * TICK_S
        room = max(0.0, ready * BESIDE_LINES - rate) * TICK_S
        left = []
        for each in self.left:
            done = min(room, each.num_requests)
            room -= done
            if each.num_requests > done:
                left.append(replace(each, num_requests=math.ceil(each.num_requests - done)))
        self.late += [each for each in left if each.due_at_s <= self.world.now_s]
        self.left = [each for each in left if each.due_at_s > self.world.now_s]

    def run(self, rate: float, for_s: float) -> None:
        for _ in range(round(for_s / TICK_S)):
            self.step(rate)


def lane_of(
    *work: tuple[float, int], warm_s: float = 600.0, rate: float = 25.0, rules: Rules = RULES
) -> Lane:
    """A lane in a world that has run for a while; work is due so long after that."""
    world = World.of(*ALL, rules=rules)
    world.run(rate, warm_s)
    return Lane(world, [DueWork(world.now_s + after_s, count) for after_s, count in work])


def test_batch_with_room_buys_no_slice() -> None:
    # Six slices for 25 requests/s: beside them 9/s are free, and 4/s are needed.
    lane = lane_of((4 * HOUR_S, 4 * 4 * 3600), rules=replace(RULES, min_slices=6))
    before = dict(lane.world.targets)
    lane.run(25.0, 4 * HOUR_S)
    assert (lane.left, lane.late) == ([], [])
    assert lane.world.targets == before


def test_batch_without_room_is_in_time_on_spot_and_gives_its_slices_back() -> None:
    lane = lane_of((4 * HOUR_S, 12 * 4 * 3600))
    before = dict(lane.world.targets)
    most: dict[str, int] = {}
    for _ in range(round(4 * HOUR_S / TICK_S)):
        lane.step(25.0)
        most = {name: max(count, most.get(name, 0)) for name, count in lane.world.targets.items()}
    assert (lane.left, lane.late) == ([], [])
    assert {name for name in most if most[name] > before.get(name, 0)} == {SPOT.name}
    # It pays for what others and lines take together with such steps, beyond the three slices.
    assert lane.own_s / HOUR_S < 1.1 * 4 * ((25 + 12) / BESIDE_LINES - 3)
    lane.run(25.0, 1200.0)
    assert lane.world.targets == before


def test_batch_gets_other_slices_where_spot_gives_none() -> None:
    lane = lane_of((4 * HOUR_S, 12 * 4 * 3600))
    lane.world.dry = {SPOT.name}
    lane.run(25.0, 4 * HOUR_S)
    assert (lane.left, lane.late) == ([], [])
    bought = {name for plan in lane.world.plans for name, count in plan.targets.items() if count}
    assert bought & {FLEX.name, ON_DEMAND.name}


def test_slices_of_batches_have_no_floor_to_keep() -> None:
    """Half of what others need is kept when spot is lost; of what batches need, nothing."""
    world = World.of(*ALL, rules=replace(RULES, floor_ratio=0.5))
    world.run(40.0, 600.0)
    before = dict(world.targets)
    lane = Lane(world, [DueWork(world.now_s + HOUR_S, 40 * 3600)])
    lane.run(40.0, 300.0)
    after = lane.world.targets
    more = {n: after[n] - before.get(n, 0) for n in after if after[n] > before.get(n, 0)}
    assert set(more) == {SPOT.name}
    assert more[SPOT.name] >= 4


def test_plan_says_why() -> None:
    lane = lane_of((HOUR_S, 20 * 3600))
    lane.run(25.0, 60.0)
    assert lane.plan is not None
    assert "72000 requests of batches are due" in lane.world.plans[-6].arithmetic
    assert any(
        "slices for them" in decision.reason
        for plan in lane.world.plans
        for decision in plan.decisions
    )


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
# Others need more slices beside lines than they do alone: lines need those as well.
@example(batches=[(1.0, 0.43), (4.0, 0.075), (2.0, 0.385)], rates=[57.9])
@given(
    st.lists(
        st.tuples(st.sampled_from([1.0, 2.0, 4.0, 8.0]), st.floats(0.05, 0.9)),
        min_size=1,
        max_size=3,
    ),
    st.lists(st.floats(0.0, 60.0), min_size=1, max_size=4),
)
def test_what_could_be_done_at_ease_is_done_in_time(
    batches: list[tuple[float, float]], rates: list[float]
) -> None:
    """Each batch is a share of what one slice does in half of its window; the load changes."""
    work = [
        (hours * HOUR_S, round(share * hours / 2 / len(batches) * HOUR_S * PER_SLICE))
        for hours, share in batches
    ]
    lane = lane_of(*sorted(work), rate=rates[0])
    for rate in rates:
        lane.run(rate, 8 * HOUR_S / len(rates))
    assert (lane.left, lane.late) == ([], [])


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_model_without_other_work_gets_a_slice_for_its_batch(rate: float) -> None:
    lane = lane_of((2 * HOUR_S, 8 * 3600), rate=rate)
    lane.run(rate, 2 * HOUR_S)
    assert (lane.left, lane.late) == ([], [])
