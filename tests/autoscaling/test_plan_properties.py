"""What holds for every plan, whatever the records, the groups and the past."""

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from provisioning_builders import (
    SPOT,
    carried_out,
    group,
    holding,
    leaving,
    observed,
    released,
    waiting,
)

from autoscaling.provisioning.demand import demand_by_kind
from autoscaling.provisioning.groups import PodPhase, WorkerGroup
from autoscaling.provisioning.plan import (
    Change,
    PlannerState,
    ProvisioningPlan,
    ProvisioningRules,
    plan_slices,
)
from serving.domain.slice_records import LEASE_S, SliceRecord

IDLE_S = 60.0
RULES = ProvisioningRules(idle_s=IDLE_S, min_change_interval_s=0.0)
NAMES = [f"s-{index}" for index in range(5)]


@st.composite
def fleets(draw: st.DrawFn) -> list[SliceRecord]:
    """Replicas that wait, have slices, and are about to lose them; some on slices long gone."""
    records = [waiting() for _ in range(draw(st.integers(0, 3)))]
    for name in NAMES:
        match draw(st.integers(0, 5)):
            case 0:
                records.append(holding(name))
            case 1:
                records.append(leaving(name))
            case 2:
                records.append(released(name))
    return records


@st.composite
def worker_groups(draw: st.DrawFn) -> WorkerGroup:
    """Groups in every condition, those included that nobody should have brought about."""
    phases = st.sampled_from([PodPhase.RUNNING, PodPhase.PENDING, PodPhase.FAILED])
    slices = [
        observed(name, *draw(st.lists(phases, min_size=1, max_size=2)))
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True))
    ]
    bounds = sorted(draw(st.tuples(st.integers(0, 6), st.integers(0, 6))))
    made = group(
        *slices,
        replicas=draw(st.integers(0, 6)),
        min_replicas=bounds[0],
        max_replicas=bounds[1],
        mirrored=draw(st.none() | st.integers(0, 6)),
    )
    pods = [pod.name for each in slices for pod in each.pods]
    is_deleting = draw(st.integers(0, 4)) == 0 and pods
    return replace(made, pods_pending_deletion=frozenset(pods[:1])) if is_deleting else made


@st.composite
def memories(draw: st.DrawFn, of: WorkerGroup) -> PlannerState:
    since_s = {
        each.incarnation: draw(st.floats(0.0, 100.0)) for each in of.slices if draw(st.booleans())
    }
    condemned = frozenset(draw(st.sets(st.sampled_from(NAMES))))
    changed = {of.name: draw(st.floats(0.0, 100.0))} if draw(st.booleans()) else {}
    return PlannerState(since_s, {of.name: condemned}, changed)


situations = worker_groups().flatmap(
    lambda each: st.tuples(fleets(), st.just(each), memories(each), st.floats(100.0, 200.0))
)


def plan_of(
    records: list[SliceRecord],
    each: WorkerGroup,
    state: PlannerState,
    now_s: float,
    rules: ProvisioningRules = RULES,
) -> ProvisioningPlan:
    return plan_slices(demand_by_kind(records), [each], rules, now_s, state)


def check(change: Change, records: list[SliceRecord]) -> None:
    """What must hold of any change."""
    each = change.group
    occupied = {record.life.slice_name for record in records}
    dropped = [drop.slice for drop in change.drops]
    assert not occupied & {one.name for one in dropped}
    assert set(dropped) <= set(each.slices)
    assert len(set(dropped)) == len(dropped)
    # Never more names than the count falls by, measured from what is there.
    assert len(dropped) <= max(0, max(each.replicas, len(each.lasting)) - change.replicas)
    assert min(each.replicas, each.min_replicas) <= change.replicas
    assert change.replicas <= max(each.replicas, each.max_replicas)


@given(situations)
@settings(deadline=None)
def test_change_drops_no_held_slice_and_stays_within_bounds(
    situation: tuple[list[SliceRecord], WorkerGroup, PlannerState, float],
) -> None:
    records, each, state, now_s = situation
    for change in plan_of(records, each, state, now_s).changes:
        check(change, records)


@given(situations, st.data())
@settings(deadline=None)
def test_change_that_keeps_some_slices_stays_within_bounds(
    situation: tuple[list[SliceRecord], WorkerGroup, PlannerState, float], data: st.DataObject
) -> None:
    records, each, state, now_s = situation
    plan = plan_of(records, each, state, now_s)
    drops = [drop.slice.incarnation for change in plan.changes for drop in change.drops]
    kept = data.draw(st.sets(st.sampled_from(drops))) if drops else set()
    for change in plan.keeping(dict.fromkeys(kept, "in use")).changes:
        check(change, records)
        assert not kept & {drop.slice.incarnation for drop in change.drops}


@given(situations)
@settings(deadline=None)
def test_drop_comes_only_after_the_slice_was_unwanted_for_long_or_announced_to_go(
    situation: tuple[list[SliceRecord], WorkerGroup, PlannerState, float],
) -> None:
    records, each, state, now_s = situation
    for change in plan_of(records, each, state, now_s).changes:
        for drop in change.drops:
            since_s = state.unwanted_since_s.get(drop.slice.incarnation, now_s)
            was_announced = drop.slice.name in state.condemned[each.name]
            assert drop.is_condemned <= was_announced
            assert drop.is_condemned or now_s - since_s >= IDLE_S


@given(situations)
@settings(deadline=None)
def test_plan_without_memory_drops_nothing(
    situation: tuple[list[SliceRecord], WorkerGroup, PlannerState, float],
) -> None:
    records, each, _, now_s = situation
    assert not any(change.drops for change in plan_of(records, each, PlannerState(), now_s).changes)


@given(situations)
@settings(deadline=None)
def test_plan_changes_nothing_while_named_pods_are_there(
    situation: tuple[list[SliceRecord], WorkerGroup, PlannerState, float],
) -> None:
    records, each, state, now_s = situation
    if each.pods_pending_deletion:
        changes = plan_of(records, each, state, now_s).changes
        assert not any(change.is_scaling for change in changes)


@given(situations, st.floats(0.0, 300.0))
@settings(deadline=None)
def test_plan_keeps_the_time_between_changes(
    situation: tuple[list[SliceRecord], WorkerGroup, PlannerState, float], interval_s: float
) -> None:
    records, each, state, now_s = situation
    rules = ProvisioningRules(idle_s=LEASE_S, min_change_interval_s=interval_s)
    changes = plan_of(records, each, state, now_s, rules).changes
    if any(change.is_scaling for change in changes):
        assert now_s - state.changed_at_s.get(each.name, float("-inf")) >= interval_s


@given(situations)
@settings(deadline=None)
def test_plan_carried_out_and_planned_again_asks_for_nothing(
    situation: tuple[list[SliceRecord], WorkerGroup, PlannerState, float],
) -> None:
    records, each, state, now_s = situation
    # What KubeRay itself deletes and makes anew meanwhile is a new situation.
    assume(not each.pods_pending_deletion and each.lasting == each.slices)
    plan = plan_of(records, each, state, now_s)
    (after,) = carried_out([each], plan)
    assert plan_of(records, after, plan.state, now_s).changes == ()


@given(situations)
@settings(max_examples=50, deadline=None)
def test_plans_settle_at_what_is_wanted(
    situation: tuple[list[SliceRecord], WorkerGroup, PlannerState, float],
) -> None:
    """Under constant demand: within two rounds of patience, and then nothing moves."""
    records, each, state, now_s = situation
    demand = demand_by_kind(records).get(SPOT)
    wanted = demand.num_to_exist if demand else 0
    for _ in range(4):
        plan = plan_of(records, each, state, now_s)
        (each,) = carried_out([each], plan)
        state, now_s = plan.state, now_s + IDLE_S
    assert plan_of(records, each, state, now_s).changes == ()
    assert each.replicas >= min(wanted, each.max_replicas)
    assert each.replicas <= max(wanted, each.min_replicas, len(each.lasting))
