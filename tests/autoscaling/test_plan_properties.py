"""What holds for every plan, whatever the records, the groups and the past."""

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from provisioning_builders import (
    Entry,
    Said,
    carried_out,
    condemned,
    group,
    holding,
    leased,
    leaving,
    observed,
    released,
    report_of,
    waiting,
)

from autoscaling.provisioning.demand import demands_of
from autoscaling.provisioning.groups import WorkerGroup
from autoscaling.provisioning.plan import (
    PENDING_IDLE_S,
    Change,
    PlannerState,
    ProvisioningPlan,
    ProvisioningRules,
    plan_slices,
)
from serving.domain.slice_records import LEASE_S
from serving.domain.supply.pods import PodPhase

IDLE_S = 60.0
RULES = ProvisioningRules(idle_s=IDLE_S, min_change_interval_s=0.0)
NAMES = [f"s-{index}" for index in range(5)]


@st.composite
def fleets(draw: st.DrawFn) -> list[Entry]:
    """Replicas that wait, have slices, and are about to lose them; some on slices long gone."""
    records: list[Entry] = [waiting() for _ in range(draw(st.integers(0, 3)))]
    for name in NAMES:
        made = draw(st.sampled_from([holding, leaving, released, condemned, leased, None, None]))
        if made is not None:
            records.append(made(name))
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
    )
    pods = [pod.name for each in slices for pod in each.pods]
    is_deleting = draw(st.integers(0, 4)) == 0 and pods
    return replace(made, pods_pending_deletion=frozenset(pods[:1])) if is_deleting else made


@st.composite
def memories(draw: st.DrawFn, of: WorkerGroup) -> PlannerState:
    since_s = {
        each.incarnation: draw(st.floats(0.0, 100.0)) for each in of.slices if draw(st.booleans())
    }
    changed = {of.name: draw(st.floats(0.0, 100.0))} if draw(st.booleans()) else {}
    return PlannerState(since_s, {}, changed)


situations = worker_groups().flatmap(
    lambda each: st.tuples(fleets(), st.just(each), memories(each), st.floats(100.0, 200.0))
)


def plan_of(
    records: list[Entry],
    each: WorkerGroup,
    state: PlannerState,
    now_s: float,
    rules: ProvisioningRules = RULES,
) -> ProvisioningPlan:
    return plan_slices(report_of(records, [each]), [each], rules, now_s, state)


def said(records: list[Entry]) -> list[Said]:
    return [each for each in records if isinstance(each, Said)]


def after_drops(records: list[Entry]) -> list[Entry]:
    """Once all condemned slices have gone: what comes under their names is another slice."""
    going = condemned_names(records)
    return [each for each in records if not (isinstance(each, Said) and each.name in going)]


def condemned_names(records: list[Entry]) -> set[str]:
    """Of those that nobody has."""
    return {each.name for each in said(records) if each == condemned(each.name)}


def check(change: Change, records: list[Entry]) -> None:
    """What must hold of any change."""
    each = change.group
    going = condemned_names(records)
    occupied = {each.name for each in said(records)} - going
    dropped = [drop.slice for drop in change.drops]
    assert not occupied & {one.name for one in dropped}
    assert set(dropped) <= set(each.slices)
    assert len(set(dropped)) == len(dropped)
    # The count covers all that are not named: none of them is left for others to choose.
    num_left = len(each.lasting) - len(dropped)
    assert change.replicas >= min(num_left, max(each.replicas, each.max_replicas))
    # What goes although it is not condemned is not asked for again.
    idle = [one for one in dropped if one.name not in going]
    exist = max(each.replicas, len(each.lasting))
    assert not idle or change.replicas <= exist - len(idle)
    assert min(each.replicas, each.min_replicas) <= change.replicas
    assert change.replicas <= max(each.replicas, each.max_replicas)


@given(situations)
@settings(deadline=None)
def test_change_drops_no_held_slice_and_stays_within_bounds(
    situation: tuple[list[Entry], WorkerGroup, PlannerState, float],
) -> None:
    records, each, state, now_s = situation
    for change in plan_of(records, each, state, now_s).changes:
        check(change, records)


@given(situations, st.data())
@settings(deadline=None)
def test_change_that_keeps_some_slices_stays_within_bounds(
    situation: tuple[list[Entry], WorkerGroup, PlannerState, float], data: st.DataObject
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
    situation: tuple[list[Entry], WorkerGroup, PlannerState, float],
) -> None:
    records, each, state, now_s = situation
    for change in plan_of(records, each, state, now_s).changes:
        for drop in change.drops:
            since_s = state.unwanted_since_s.get(drop.slice.incarnation, now_s)
            assert drop.is_condemned == (drop.slice.name in condemned_names(records))
            is_pending = any(pod.phase == PodPhase.PENDING for pod in drop.slice.pods)
            idle_s = PENDING_IDLE_S if is_pending else IDLE_S
            assert drop.is_condemned or now_s - since_s >= idle_s


@given(situations)
@settings(deadline=None)
def test_plan_without_memory_drops_only_what_is_condemned(
    situation: tuple[list[Entry], WorkerGroup, PlannerState, float],
) -> None:
    records, each, _, now_s = situation
    for change in plan_of(records, each, PlannerState(), now_s).changes:
        assert {drop.slice.name for drop in change.drops} <= condemned_names(records)


@given(situations)
@settings(deadline=None)
def test_plan_changes_nothing_while_named_pods_are_there(
    situation: tuple[list[Entry], WorkerGroup, PlannerState, float],
) -> None:
    records, each, state, now_s = situation
    if each.pods_pending_deletion:
        changes = plan_of(records, each, state, now_s).changes
        assert not any(change.is_scaling for change in changes)


@given(situations, st.floats(0.0, 300.0))
@settings(deadline=None)
def test_plan_keeps_the_time_between_changes(
    situation: tuple[list[Entry], WorkerGroup, PlannerState, float], interval_s: float
) -> None:
    records, each, state, now_s = situation
    rules = ProvisioningRules(idle_s=LEASE_S, min_change_interval_s=interval_s)
    changes = plan_of(records, each, state, now_s, rules).changes
    if any(change.is_scaling for change in changes):
        assert now_s - state.changed_at_s.get(each.name, float("-inf")) >= interval_s


@given(situations)
@settings(deadline=None)
def test_plan_carried_out_and_planned_again_asks_for_nothing(
    situation: tuple[list[Entry], WorkerGroup, PlannerState, float],
) -> None:
    records, each, state, now_s = situation
    # What KubeRay itself deletes and makes anew meanwhile is a new situation.
    assume(not each.pods_pending_deletion and each.lasting == each.slices)
    plan = plan_of(records, each, state, now_s)
    (after,) = carried_out([each], plan)
    assert plan_of(after_drops(records), after, plan.state, now_s).changes == ()


@given(situations)
@settings(max_examples=50, deadline=None)
def test_plans_settle_at_what_is_wanted(
    situation: tuple[list[Entry], WorkerGroup, PlannerState, float],
) -> None:
    """Under constant demand: within two rounds of patience, and then nothing moves."""
    records, each, state, now_s = situation
    demands = demands_of(report_of(records, [each]), [each])
    wanted = demands.by_group[each.name].num_to_exist
    for _ in range(4):
        plan = plan_of(records, each, state, now_s)
        (each,) = carried_out([each], plan)
        state, now_s = plan.state, now_s + IDLE_S
        if not each.pods_pending_deletion and plan.changes:
            records = after_drops(records)
    assert plan_of(records, each, state, now_s).changes == ()
    assert each.replicas >= min(wanted, each.max_replicas)
    assert each.replicas <= max(wanted, each.min_replicas, len(each.lasting))
