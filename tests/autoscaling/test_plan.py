"""What a plan does, rule by rule."""

from dataclasses import replace

import pytest
from provisioning_builders import (
    RESERVED,
    SPOT,
    Entry,
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

from autoscaling.provisioning.groups import WorkerGroup
from autoscaling.provisioning.plan import (
    DRY_AFTER_S,
    PENDING_IDLE_S,
    Change,
    PlannerState,
    ProvisioningPlan,
    ProvisioningRules,
    plan_slices,
)
from serving.domain.slice_records import LEASE_S
from serving.domain.supply.pods import PodPhase
from serving.domain.supply.records import SupplyHost, SupplyReport, SupplyState

RULES = ProvisioningRules(idle_s=60.0, min_change_interval_s=5.0)


class Planner:
    """Plans again and again with what it remembers."""

    def __init__(self, rules: ProvisioningRules = RULES) -> None:
        self._rules = rules
        self.state = PlannerState()

    def plan(
        self,
        entries: list[Entry],
        *groups: WorkerGroup,
        at_s: float = 0.0,
        frozen: str | None = None,
    ) -> ProvisioningPlan:
        report = replace(report_of(entries, groups), frozen=frozen)
        plan = plan_slices(report, groups, self._rules, at_s, self.state)
        self.state = plan.state
        return plan


def only(plan: ProvisioningPlan) -> Change:
    (change,) = plan.changes
    return change


def dropped(change: Change) -> list[str]:
    return [drop.slice.name for drop in change.drops]


def reasons(plan: ProvisioningPlan) -> str:
    return "\n".join(f"{refusal.about}: {refusal.reason}" for refusal in plan.refusals)


def test_plan_adds_what_replicas_wait_for() -> None:
    change = only(Planner().plan([holding("s-0"), waiting(), waiting()], group("s-0")))
    assert (change.replicas, change.drops) == (3, ())
    assert "1 held + 2 waiting" in change.reason


def test_plan_with_enough_slices_changes_nothing() -> None:
    assert Planner().plan([holding("s-0"), waiting()], group("s-0", "s-1")) == ProvisioningPlan()


def test_frozen_plan_drops_nothing_that_is_unwanted_and_replaces_what_is_condemned() -> None:
    planner, have = Planner(), group("s-0", "s-1", "s-2")
    entries = [holding("s-0"), condemned("s-2")]
    planner.plan([holding("s-0")], have, frozen="freeze ordered by ada: a drill")
    plan = planner.plan(entries, have, at_s=100.0, frozen="freeze ordered by ada: a drill")
    assert dropped(only(plan)) == ["s-2"]
    assert "not dropped though unwanted: s-1; freeze ordered by ada" in reasons(plan)
    thawed = planner.plan(entries, have, at_s=200.0)
    assert sorted(dropped(only(thawed))) == ["s-1", "s-2"]


def test_plan_asks_for_the_replacement_at_the_notice() -> None:
    change = only(Planner().plan([leaving("s-0"), waiting()], group("s-0")))
    assert (change.replicas, change.drops) == (2, ())


def test_plan_replaces_nothing_for_a_replica_that_is_given_up() -> None:
    assert not Planner().plan([leaving("s-0")], group("s-0")).changes


def test_plan_does_not_take_a_leaving_slice_for_one_that_could_be_had() -> None:
    change = only(Planner().plan([leaving("s-0"), leaving("s-1"), waiting()], group("s-0", "s-1")))
    assert change.replicas == 3


def test_plan_drops_a_slice_only_when_it_has_been_unwanted_for_long() -> None:
    planner, groups = Planner(), group("s-0", "s-1")
    for at_s in (0.0, 30.0, 59.9):
        assert not planner.plan([holding("s-0")], groups, at_s=at_s).changes
    change = only(planner.plan([holding("s-0")], groups, at_s=60.0))
    assert (change.replicas, dropped(change)) == (1, ["s-1"])
    assert change.drops[0].reason == "nobody has wanted it for 60 s"


def test_plan_slice_that_is_wanted_in_between_starts_anew() -> None:
    planner, groups = Planner(), group("s-0", "s-1")
    planner.plan([holding("s-0")], groups, at_s=0.0)
    planner.plan([holding("s-0"), waiting()], groups, at_s=50.0)
    planner.plan([holding("s-0")], groups, at_s=55.0)
    assert not planner.plan([holding("s-0")], groups, at_s=100.0).changes
    assert planner.plan([holding("s-0")], groups, at_s=115.0).changes


def test_plan_replacement_under_the_same_name_is_another_slice() -> None:
    planner = Planner()
    planner.plan([], group("s-0"), at_s=0.0)
    assert not planner.plan([], group("s-0"), at_s=60.0).changes


def test_plan_drops_first_what_is_still_to_come() -> None:
    planner = Planner()
    pending = observed("s-0", PodPhase.PENDING, PodPhase.PENDING)
    groups = group(pending, "s-1", "s-2")
    planner.plan([waiting()], groups)
    change = only(planner.plan([waiting()], groups, at_s=60.0))
    assert (change.replicas, dropped(change)) == (1, ["s-0", "s-2"])


def test_plan_drops_a_condemned_slice_at_once_when_its_replica_has_left() -> None:
    planner = Planner()
    before = group("s-0")
    plan = planner.plan([leaving("s-0"), waiting()], before)
    (after,) = carried_out([before], plan)
    change = only(planner.plan([condemned("s-0"), waiting()], after, at_s=10.0))
    assert (change.replicas, dropped(change)) == (1, ["s-0"])
    assert change.drops[0].reason == "the test says so"


def test_plan_replaces_a_condemned_slice_by_name_where_it_is_needed() -> None:
    """The count stays, so KubeRay makes another one, also where the bound allows no more."""
    full = group("s-0", "s-1", max_replicas=2)
    change = only(Planner().plan([condemned("s-0"), holding("s-1"), waiting()], full))
    assert (change.replicas, dropped(change), change.is_scaling) == (2, ["s-0"], True)


def test_plan_does_not_take_a_condemned_slice_for_supply() -> None:
    change = only(Planner().plan([condemned("s-0"), waiting(), waiting()], group("s-0", "s-1")))
    assert (change.replicas, dropped(change)) == (2, ["s-0"])


def test_plan_gives_a_successor_up_that_nobody_wants_before_it_has_machines() -> None:
    """GKE took the slice before we dropped it, and KubeRay has asked for another in its place."""
    planner = Planner()
    pending = group(observed("s-0", PodPhase.PENDING, PodPhase.PENDING), "s-1")
    assert not planner.plan([holding("s-1")], pending).changes
    assert not planner.plan([holding("s-1")], pending, at_s=PENDING_IDLE_S - 1).changes
    change = only(planner.plan([holding("s-1")], pending, at_s=PENDING_IDLE_S))
    assert dropped(change) == ["s-0"]


@pytest.mark.parametrize("entry", [holding("s-0"), leaving("s-0"), released("s-0"), leased("s-0")])
def test_plan_never_drops_a_slice_that_somebody_has(entry: Entry) -> None:
    planner = Planner()
    # Nothing may exist here, and still the slice stays until its replica lets go.
    groups = group("s-0", max_replicas=0)
    for at_s in (0.0, 100.0, 1000.0):
        assert not planner.plan([entry], groups, at_s=at_s).changes


def test_plan_knows_a_held_slice_by_the_address_of_its_host() -> None:
    alone = group(observed("pod-7", num_hosts=1, address="10.0.0.7"), num_hosts=1, max_replicas=0)
    (held,) = report_of([holding("node-a1b2")], []).slices
    host = SupplyHost(0, node_id="a1b2", address="10.0.0.7")
    report = SupplyReport("test:1", (replace(held, incarnation="node-a1b2", hosts=(host,)),))
    state = PlannerState()
    for at_s in (0.0, 100.0):
        plan = plan_slices(report, [alone], RULES, at_s, state)
        assert not plan.changes
        state = plan.state


def test_plan_stays_within_max_replicas_and_says_what_it_refused() -> None:
    plan = Planner().plan([waiting()] * 5, group(max_replicas=3))
    assert only(plan).replicas == 3
    assert "maxReplicas is 3: 2 refused" in reasons(plan)


def test_plan_asks_for_joined_slices_together_or_not_at_all() -> None:
    three = group("s-0", max_replicas=3)
    assert only(Planner().plan([waiting(num_slices=2)], three)).replicas == 2
    plan = Planner().plan([waiting(num_slices=2), waiting(num_slices=2)], three)
    assert only(plan).replicas == 2
    assert "2 more would be part" not in reasons(plan)
    assert "1 more would be part of what a replica joins, and serve nobody" in reasons(plan)


def test_plan_stays_above_min_replicas() -> None:
    planner, groups = Planner(), group("s-0", "s-1", min_replicas=1)
    planner.plan([], groups)
    change = only(planner.plan([], groups, at_s=60.0))
    assert (change.replicas, dropped(change)) == (1, ["s-1"])


def test_plan_waits_until_named_pods_are_gone() -> None:
    planner = Planner()
    deleting = group("s-0", "s-1", doomed=("pod-1",))
    plan = planner.plan([waiting()] * 5, deleting)
    assert not plan.changes
    assert "until the pods named for deletion are gone: pod-1" in reasons(plan)


def test_plan_leaves_time_between_two_changes_of_a_group() -> None:
    planner, empty = Planner(), group()
    assert planner.plan([waiting()], empty, at_s=0.0).changes
    plan = planner.plan([waiting()], empty, at_s=4.0)
    assert not plan.changes
    assert "waits another 1.0 s" in reasons(plan)
    assert planner.plan([waiting()], empty, at_s=5.0).changes


def test_plan_time_between_changes_is_each_groups_own() -> None:
    planner = Planner()
    planner.plan([waiting()], group(), group(kind=RESERVED), at_s=0.0)
    plan = planner.plan([waiting(), waiting(RESERVED)], group(), group(kind=RESERVED), at_s=1.0)
    assert [change.group.kind for change in plan.changes] == [RESERVED]


def test_plan_adds_before_it_drops() -> None:
    planner = Planner()
    groups = (group("s-0"), group(kind=RESERVED))
    planner.plan([], *groups)
    plan = planner.plan([waiting(RESERVED)], *groups, at_s=60.0)
    assert [change.group.kind for change in plan.changes] == [RESERVED, SPOT]


def test_plan_raises_a_count_that_was_lowered_without_a_name() -> None:
    """Else the choice of what goes would be KubeRay's."""
    change = only(Planner().plan([holding("s-0")], group("s-0", "s-1", "s-2", replicas=1)))
    assert (change.replicas, change.drops) == (3, ())


def test_plan_does_not_count_a_slice_that_lacks_a_host() -> None:
    """KubeRay deletes it; to raise the count now would ask for one more afterwards."""
    planner = Planner()
    torn = group("s-0", observed("s-1", PodPhase.RUNNING), replicas=1)
    assert not planner.plan([holding("s-0")], torn).changes
    assert not planner.plan([holding("s-0")], torn, at_s=100.0).changes


def test_plan_of_a_kind_nobody_makes_is_refused() -> None:
    plan = Planner().plan([waiting(RESERVED)], group())
    assert reasons(plan) == "reserved v6e 2x4: no worker group makes slices of this kind"


def two_zones(*slices: str, max_replicas: int = 10) -> tuple[WorkerGroup, WorkerGroup]:
    """Two groups of one kind; the first has `slices`."""
    first = group(*slices, name="spot-a", zone="us-a", max_replicas=max_replicas)
    return first, group(name="spot-b", zone="us-b", max_replicas=max_replicas)


def counts(plan: ProvisioningPlan) -> dict[str, int]:
    return {change.group.name: change.replicas for change in plan.changes}


def test_plan_counts_who_waits_in_one_of_two_groups_of_the_kind() -> None:
    assert counts(Planner().plan([waiting()], *two_zones())) == {"spot-a": 1}
    # Where there is a slice to spare, nothing is asked for.
    assert counts(Planner().plan([waiting()], *two_zones("s-0"))) == {}


def test_plan_goes_on_in_the_other_group_where_one_is_full() -> None:
    groups = two_zones("s-0", max_replicas=1)
    assert counts(Planner().plan([holding("s-0"), waiting()], *groups)) == {"spot-b": 1}


def test_plan_asks_for_a_slice_of_a_zone_in_the_group_of_that_zone() -> None:
    groups = two_zones("s-0")
    assert counts(Planner().plan([waiting(zone="us-b")], *groups)) == {"spot-b": 1}
    plan = Planner().plan([waiting(zone="us-c")], *groups)
    assert "no worker group makes slices of this kind" in reasons(plan)


def test_plan_asks_another_group_of_the_kind_when_one_is_dry_for_long() -> None:
    planner = Planner()
    pending = observed("s-0", PodPhase.PENDING, PodPhase.PENDING)
    first, second = group(pending, name="spot-a"), group(name="spot-b")
    assert counts(planner.plan([waiting()], first, second)) == {}
    assert counts(planner.plan([waiting()], first, second, at_s=DRY_AFTER_S - 1)) == {}
    asked = planner.plan([waiting()], first, second, at_s=DRY_AFTER_S)
    assert counts(asked) == {"spot-b": 1}
    # The old wish is given up, unless its slice comes first.
    both = first, group(observed("s-1", PodPhase.PENDING, PodPhase.PENDING), name="spot-b")
    later_s = DRY_AFTER_S + PENDING_IDLE_S
    dropping = only(planner.plan([waiting()], *both, at_s=later_s))
    assert (dropping.group.name, dropping.replicas, dropped(dropping)) == ("spot-a", 0, ["s-0"])


def test_plan_drops_in_the_group_that_has_the_slice_and_in_no_other_of_the_kind() -> None:
    planner = Planner()
    groups = group("s-0", name="spot-a"), group("s-0", name="spot-b")
    entries: list[Entry] = []
    planner.plan(entries, *groups)
    plan = planner.plan(entries, *groups, at_s=60.0)
    assert counts(plan) == {"spot-a": 0, "spot-b": 0}


def test_plan_drops_first_what_has_failed() -> None:
    planner, groups = Planner(), group("s-0", "s-1", "s-2")
    failed = replace(holding("s-0"), state=SupplyState.QUARANTINED, holder=None, num_failures=2)
    planner.plan([failed, waiting(), waiting()], groups)
    change = only(planner.plan([failed, waiting(), waiting()], groups, at_s=60.0))
    assert dropped(change) == ["s-0"]


def test_plan_after_a_restart_forgets_how_long_slices_were_idle_and_nothing_else() -> None:
    groups = group("s-0", "s-1")
    planner = Planner()
    planner.plan([holding("s-0")], groups, at_s=0.0)
    restarted = Planner()
    assert not restarted.plan([holding("s-0")], groups, at_s=60.0).changes
    assert dropped(only(restarted.plan([holding("s-0")], groups, at_s=120.0))) == ["s-1"]


def test_plan_keeping_a_slice_keeps_its_place_in_the_count() -> None:
    planner, groups = Planner(), group("s-0", "s-1", "s-2")
    planner.plan([], groups)
    plan = planner.plan([], groups, at_s=60.0)
    second = plan.changes[0].drops[1].slice
    kept = plan.keeping({second.incarnation: "host 0 is in use"})
    change = only(kept)
    assert (change.replicas, dropped(change)) == (1, ["s-2", "s-0"])
    assert f"{second.name} is not dropped: host 0 is in use" in reasons(kept)


def test_plan_keeping_everything_changes_nothing() -> None:
    planner, groups = Planner(), group("s-0")
    planner.plan([], groups)
    plan = planner.plan([], groups, at_s=60.0)
    assert plan.keeping({groups.slices[0].incarnation: "host 0 is in use"}).changes == ()


def test_rules_shorter_than_a_lease_are_refused() -> None:
    with pytest.raises(ValueError, match=r"idle_s is 4.9; allowed: at least 5, one lease"):
        ProvisioningRules(idle_s=LEASE_S - 0.1)
    with pytest.raises(ValueError, match="min_change_interval_s"):
        ProvisioningRules(min_change_interval_s=-1.0)


def test_plan_drops_a_condemned_slice_that_was_kept_as_soon_as_it_may() -> None:
    """Its replica has left it a moment ago, and its hosts do not know yet."""
    planner = Planner()
    planner.plan([leaving("s-0")], group("s-0"))
    both = group("s-0", "s-1")
    left = [condemned("s-0"), holding("s-1")]
    plan = planner.plan(left, both, at_s=10.0)
    planner.state = plan.keeping({both.slices[0].incarnation: "host 0 is in use"}).state
    change = only(planner.plan(left, both, at_s=20.0))
    assert dropped(change) == ["s-0"]
