"""Each baseline does what its published formula says, on observations made by hand."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from autoscaling.prices.table import price_table
from autoscaling.records import Fleet, ModelLoad, Observation, Plan, Policy, SliceLoss, SliceView
from autoscaling.simulator.baselines.dynamo_planner import DynamoPlanner, KalmanTrend
from autoscaling.simulator.baselines.hpa import HorizontalPodAutoscaler
from autoscaling.simulator.baselines.ladder import ClassLadder
from autoscaling.simulator.baselines.llmd_slo import LlmdSlo
from autoscaling.simulator.baselines.ray_serve_default import RayServeDefault
from autoscaling.simulator.baselines.single_class import SingleClassLayout
from autoscaling.simulator.baselines.sizing import Sizing, size
from autoscaling.simulator.baselines.spothedge import (
    AUTHORS_SETTINGS,
    QUICK_SETTINGS,
    SpotHedge,
)
from autoscaling.simulator.baselines.static_on_demand import StaticOnDemand
from autoscaling.simulator.comparison import simulate_policy
from autoscaling.simulator.offered import Offered
from autoscaling.simulator.policies import POLICIES
from autoscaling.simulator.preparation import Replacements, prepare_run
from autoscaling.simulator.scenario import Scenario, read_scenario
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.compute_class import ComputeClass
from serving.domain.slice_lifecycle import SliceState

PROFILE = CapacityProfile(
    model="m",
    engine="paced",
    base_s=0.02,
    per_sequence_s=0.0001,
    per_prompt_token_s=0.0001,
    max_num_seqs=100,
    measured_on="2026-11-21",
    source="made up",
)
OBJECTIVES = Objectives(ttft_s=2.0, tpot_s=0.1)
TEN_EACH = Sizing(requests_per_s=1.0, in_flight=10.0)
ON_DEMAND = ComputeClass("od", 10.0, max_slices=50)
ONLY_ON_DEMAND = SingleClassLayout.of((ON_DEMAND,))
ZONES = tuple(
    ComputeClass(f"spot-{zone}", 3.0, is_revocable=True, correlation_group=zone, max_slices=10)
    for zone in "abc"
)


class Desk:
    """A fleet on which every slice that was asked for is ready at the next look."""

    def __init__(
        self,
        policy: Policy,
        *,
        zones_that_fail: Sequence[str] = (),
        ready_at_start: Mapping[str, int] | None = None,
    ) -> None:
        self.policy = policy
        self.failing = set(zones_that_fail)
        self.plan = Plan(0.0, ready_at_start or {})
        self.now_s = 0.0

    def look(
        self,
        seconds: float,
        *,
        in_flight: int = 0,
        rate: float = 0.0,
        losses: Sequence[SliceLoss] = (),
        ready: int | None = None,
        wait_s: float = 0.0,
    ) -> Plan:
        self.now_s += seconds
        slices = self._slices(in_flight, ready)
        load = ModelLoad(
            self.now_s, rate, 1000.0, 100.0, num_in_flight=in_flight, oldest_wait_s=wait_s
        )
        fleet = Fleet(slices, self.plan.targets, tuple(losses))
        self.plan = self.policy.decide(Observation(self.now_s, load, fleet))
        return self.plan

    def until(self, seconds: float, step_s: float = 10.0, **load: float | int) -> Plan:
        for _ in range(round(seconds / step_s)):
            self.look(step_s, **load)  # type: ignore[arg-type]
        return self.plan

    def _slices(self, in_flight: int, ready: int | None) -> tuple[SliceView, ...]:
        total = sum(self.plan.targets.values())
        up = total if ready is None else ready
        views: list[SliceView] = []
        for name, count in self.plan.targets.items():
            for number in range(count):
                is_up = len(views) < up and name not in self.failing
                state = SliceState.READY if is_up else SliceState.PROVISIONING
                each = in_flight // max(1, up) if is_up else 0
                views.append(SliceView(f"{name}-{number}", name, state, 0.0, 0.0, each))
        return tuple(views)


def test_sizing_aims_below_the_limit_and_counts_who_is_there_by_littles_law() -> None:
    sizing = size(PROFILE, OBJECTIVES, 1000, 100)

    assert sizing.requests_per_s == pytest.approx(0.8 * (1 - 0.02 / 0.1) / 0.11)
    step_s = 0.02 / (1 - sizing.requests_per_s * 0.11)
    assert sizing.in_flight == pytest.approx(sizing.requests_per_s * (0.1 + 100 * step_s))


def test_layout_keeps_prepaid_whole_and_takes_the_rest_on_demand() -> None:
    reserved = ComputeClass("reserved", 5.0, is_prepaid=True, max_slices=4)
    layout = SingleClassLayout.of((reserved, *ZONES, ON_DEMAND))
    nothing = Observation(0.0, None, Fleet((), {}))

    plan = layout.plan(nothing, 6, "why")

    assert plan.targets == {"reserved": 4, "od": 2, "spot-a": 0, "spot-b": 0, "spot-c": 0}
    assert (layout.min_slices, layout.max_slices) == (4, 54)


def test_layout_without_anything_lasting_is_refused() -> None:
    with pytest.raises(ValueError, match="neither revocable nor limited"):
        SingleClassLayout.of(ZONES)


def test_static_holds_the_peak_over_the_share_that_a_slice_is_aimed_at() -> None:
    desk = Desk(StaticOnDemand((ON_DEMAND,), Offered(60.0, np.array([1.0, 7.9, 3.0]))))

    assert desk.look(10).targets == {"od": 10}
    assert desk.look(10, in_flight=10_000).targets == {"od": 10}


class TestHpa:
    def test_follows_the_ratio_and_stays_within_the_tolerance(self) -> None:
        desk = Desk(HorizontalPodAutoscaler(ONLY_ON_DEMAND, TEN_EACH))

        assert desk.look(15, in_flight=35).targets["od"] == 4
        assert desk.look(15, in_flight=43).targets["od"] == 4  # ratio 1.075
        assert desk.look(15, in_flight=45).targets["od"] == 5

    def test_rises_by_the_larger_of_doubling_and_four_per_period(self) -> None:
        desk = Desk(HorizontalPodAutoscaler(ONLY_ON_DEMAND, TEN_EACH))

        rise = [desk.look(15, in_flight=5000).targets["od"] for _ in range(5)]

        assert rise == [5, 10, 20, 40, 50]

    def test_acts_only_at_its_sync_period(self) -> None:
        desk = Desk(HorizontalPodAutoscaler(ONLY_ON_DEMAND, TEN_EACH))
        desk.look(15, in_flight=20)

        assert desk.look(10, in_flight=50).targets["od"] == 2
        assert desk.look(5, in_flight=50).targets["od"] == 5

    def test_acts_four_times_a_minute_though_it_is_asked_every_ten_seconds(self) -> None:
        desk = Desk(HorizontalPodAutoscaler(ONLY_ON_DEMAND, TEN_EACH))

        rise = [desk.look(10, in_flight=5000).targets["od"] for _ in range(8)]

        assert rise == [5, 5, 10, 20, 20, 40, 50, 50]

    def test_falls_to_the_highest_recommendation_of_five_minutes(self) -> None:
        desk = Desk(HorizontalPodAutoscaler(ONLY_ON_DEMAND, TEN_EACH))
        desk.until(60, 15, in_flight=100)

        assert desk.until(300, 15, in_flight=20).targets["od"] == 10
        assert desk.look(15, in_flight=20).targets["od"] == 2


class TestRayServeDefault:
    def test_scales_up_after_thirty_seconds_of_the_same_wish(self) -> None:
        desk = Desk(RayServeDefault(ONLY_ON_DEMAND, TEN_EACH))
        desk.look(10, in_flight=10)
        desk.look(10, in_flight=10)

        waits = [desk.look(10, in_flight=40).targets["od"] for _ in range(3)]

        assert waits == [1, 1, 1]
        assert desk.until(30, in_flight=40).targets["od"] == 4

    def test_scales_down_after_ten_minutes(self) -> None:
        desk = Desk(RayServeDefault(ONLY_ON_DEMAND, TEN_EACH))
        desk.until(120, in_flight=40)

        assert desk.until(590, in_flight=10).targets["od"] == 4
        assert desk.until(60, in_flight=10).targets["od"] == 1

    def test_keeps_its_bounds(self) -> None:
        desk = Desk(RayServeDefault(ONLY_ON_DEMAND, TEN_EACH))

        assert desk.until(300, in_flight=9000).targets["od"] == 50


class TestLlmdSlo:
    def test_idle_pool_walks_down_one_replica_in_two_minutes(self) -> None:
        floor = ComputeClass("od", 10.0, min_slices=3, max_slices=8)
        desk = Desk(LlmdSlo(SingleClassLayout.of((floor,)), PROFILE, OBJECTIVES))
        desk.until(300, 15, in_flight=2400, rate=100.0)
        assert desk.plan.targets["od"] == 8

        steps = [desk.until(120, 15).targets["od"] for _ in range(5)]

        # The stabilisation holds for three minutes; then one goes every two.
        assert steps == [8, 7, 6, 5, 4]

    def test_hysteresis_band_holds(self) -> None:
        desk = Desk(LlmdSlo(ONLY_ON_DEMAND, PROFILE, OBJECTIVES))
        # One slice, 100 sequences: step = 0.03 / (1 - 0.4) = 0.05 s, half of the objective.
        plan = desk.until(600, 15, in_flight=100, rate=4.0)

        assert plan.targets["od"] == 1
        assert "saturation 0.50" in plan.arithmetic

    def test_overload_asks_for_the_clamped_ratio_and_credits_what_is_warming(self) -> None:
        desk = Desk(LlmdSlo(ONLY_ON_DEMAND, PROFILE, OBJECTIVES))

        # 1 of n is ready and its signal is clamped at 2: n grows until 2 / n / 0.55 is below 1.
        assert desk.until(600, 15, in_flight=500, rate=30.0, ready=1).targets["od"] == 4
        assert desk.until(600, 15, in_flight=9000, rate=30.0).targets["od"] == 50


class TestSpotHedge:
    def test_places_the_target_and_its_spare_in_every_zone(self) -> None:
        desk = Desk(SpotHedge((*ZONES, ON_DEMAND), TEN_EACH, QUICK_SETTINGS))

        plan = desk.until(120, rate=7.0)

        placed = [plan.targets[zone.name] for zone in ZONES]
        assert sum(placed) == 9
        assert min(placed) >= 1
        assert plan.targets["od"] == 0

    def test_takes_the_cheapest_zone_once_each_has_one(self) -> None:
        zones = [
            ComputeClass(zone.name, 3.0 + number, is_revocable=True)
            for number, zone in enumerate(ZONES)
        ]
        desk = Desk(SpotHedge((*zones, ON_DEMAND), TEN_EACH, QUICK_SETTINGS))

        plan = desk.until(120, rate=7.0)

        assert [plan.targets[zone.name] for zone in zones] == [7, 1, 1]

    def test_takes_the_youngest_away_wherever_they_are(self) -> None:
        policy = SpotHedge((*ZONES, ON_DEMAND), TEN_EACH, QUICK_SETTINGS)
        slices = tuple(
            SliceView(f"{zone.name}-{number}", zone.name, SliceState.READY, 0.0, 100.0 * number)
            for number, zone in enumerate((ZONES[0], ZONES[1], ZONES[1], ZONES[2]))
        )
        targets = {"spot-a": 1, "spot-b": 2, "spot-c": 1}

        def decide(now_s: float) -> Plan:
            load = ModelLoad(now_s, 0.5, 1000.0, 100.0)
            return policy.decide(Observation(now_s, load, Fleet(slices, targets)))

        plans = [decide(1000.0 + 10.0 * number) for number in range(70)]

        assert plans[-1].targets["spot-c"] == 0
        assert plans[-1].drain_order == ("spot-c-3", "spot-b-2", "spot-b-1", "spot-a-0")

    def test_falls_back_on_demand_for_spot_that_is_not_ready(self) -> None:
        desk = Desk(SpotHedge((*ZONES, ON_DEMAND), TEN_EACH, QUICK_SETTINGS))

        plan = desk.until(60, rate=7.0, ready=0)

        assert plan.targets["od"] == 7  # and nothing for the spare

    def test_avoids_the_zone_that_preempted_until_one_is_ready_there(self) -> None:
        desk = Desk(SpotHedge((*ZONES, ON_DEMAND), TEN_EACH, QUICK_SETTINGS))
        desk.until(120, rate=7.0)
        desk.failing = {"spot-a"}

        lost = [SliceLoss(f"spot-a-{n}", "spot-a", desk.now_s, "preempted") for n in range(3)]
        plan = desk.look(10, rate=7.0, losses=lost)

        placed = [plan.targets[zone.name] for zone in ZONES]
        assert placed[0] == 0
        assert sum(placed) == 9

    def test_wish_that_never_comes_true_is_moved(self) -> None:
        zones = tuple(
            ComputeClass(f"spot-{zone}", 3.0, is_revocable=True, provisioning_s=30.0)
            for zone in "abc"
        )
        desk = Desk(
            SpotHedge((*zones, ON_DEMAND), TEN_EACH, QUICK_SETTINGS), zones_that_fail=["spot-a"]
        )

        plan = desk.until(300, rate=7.0)

        assert plan.targets["spot-a"] == 0
        assert plan.targets["spot-b"] + plan.targets["spot-c"] == 9

    def test_waits_before_it_follows_the_load_down(self) -> None:
        desk = Desk(SpotHedge((*ZONES, ON_DEMAND), TEN_EACH, QUICK_SETTINGS))
        desk.until(120, rate=7.0)

        assert sum(desk.until(600, rate=1.0).targets.values()) == 9
        assert sum(desk.until(120, rate=1.0).targets.values()) == 3

    def test_authors_settings_wait_longer_and_keep_one_spare(self) -> None:
        desk = Desk(SpotHedge((*ZONES, ON_DEMAND), TEN_EACH, AUTHORS_SETTINGS))

        assert sum(desk.until(280, rate=7.0).targets.values()) == 2
        assert sum(desk.until(60, rate=7.0).targets.values()) == 8


class TestDynamoPlanner:
    def test_decides_once_an_interval_for_what_one_slice_carries(self) -> None:
        desk = Desk(DynamoPlanner(ONLY_ON_DEMAND, PROFILE, OBJECTIVES))
        best = PROFILE.max_requests_per_s(1000.0, 100.0, 0.1)

        assert desk.until(180, rate=4.5 * best).targets["od"] == 1
        assert desk.until(20, rate=4.5 * best).targets["od"] == 5

    def test_stricter_objective_than_the_real_one_asks_for_more(self) -> None:
        told = Desk(DynamoPlanner(ONLY_ON_DEMAND, PROFILE, OBJECTIVES, 0.4))
        best = PROFILE.max_requests_per_s(1000.0, 100.0, 0.1)

        assert told.until(200, rate=4.5 * best).targets["od"] == 8

    def test_predictor_follows_a_trend_after_five_values(self) -> None:
        predictor = KalmanTrend()

        rising = [predictor.next_after(100.0 * number) for number in range(1, 31)]

        assert rising[:4] == [100.0, 200.0, 300.0, 400.0]
        assert rising[-1] == pytest.approx(3100.0, rel=0.01)


class TestLadder:
    def test_takes_spot_first_and_spreads_it(self) -> None:
        desk = on_ladder(migrates=False)

        plan = desk.look(15, in_flight=70)

        assert [plan.targets[zone.name] for zone in ZONES] == [2, 2, 1]
        assert plan.targets["flex"] == plan.targets["od"] == 0

    def test_falls_through_what_does_not_deliver_rule_by_rule(self) -> None:
        desk = on_ladder(migrates=False, failing=["spot-a", "spot-b", "spot-c", "flex"])
        desk.until(60, 15, in_flight=40, ready=0)
        assert sum(desk.plan.targets[zone.name] for zone in ZONES) == 4

        desk.until(240, in_flight=40, ready=0)
        assert desk.plan.targets["flex"] > 0

        assert desk.until(700, in_flight=40, ready=0).targets["od"] == 4

    def test_backs_off_longer_each_time(self) -> None:
        ladder = ClassLadder((SLOW_SPOT, ON_DEMAND), migrates=True)
        targets: Mapping[str, int] = {"od": 1}
        asked_s: list[float] = []
        for now_s in np.arange(0.0, 9000.0, 10.0).tolist():
            lives = [SliceView("od-1", "od", SliceState.READY, 0.0, 0.0)]
            if targets.get("slow"):
                asked = SliceView("s", "slow", SliceState.PROVISIONING, asked_s[-1], asked_s[-1])
                lives.append(asked)
            before = targets.get("slow", 0)
            seen = Observation(now_s, None, Fleet(tuple(lives), targets))
            targets = ladder.plan(seen, 1, "").targets
            asked_s += [now_s] * (targets["slow"] - before)

        # Each request is given up after 70 s, the first instant at which it is late.
        waits_s = np.diff(asked_s) - 70
        assert waits_s.tolist() == [300, 600, 1200, 1800, 1800, 1800]
        assert targets["od"] == 1

    def test_what_runs_on_a_worse_rule_stays_without_migration(self) -> None:
        desk = on_ladder(migrates=False, ready_at_start={"od": 4})

        assert desk.until(3600, 15, in_flight=40).targets["od"] == 4

    def test_migration_moves_it_back_and_is_ready_before_the_old_one_goes(self) -> None:
        desk = on_ladder(migrates=True, ready_at_start={"od": 4})
        totals = []
        for _ in range(60):
            desk.look(15, in_flight=40)
            totals.append(sum(desk.plan.targets.values()))

        assert desk.plan.targets["od"] == 0
        assert sum(desk.plan.targets.values()) == 4
        assert min(totals) == 4
        assert max(totals) == 5

    def test_gives_up_what_was_ready_last_whatever_it_costs(self) -> None:
        ladder = ClassLadder((*ZONES, ON_DEMAND), migrates=False)
        old = SliceView("od-0", "od", SliceState.READY, 0.0, 0.0)
        young = SliceView("spot-a-0", "spot-a", SliceState.READY, 50.0, 0.0)
        fleet = Fleet((old, young), {"od": 1, "spot-a": 1})

        plan = ladder.plan(Observation(100.0, None, fleet), 1, "")

        assert plan.targets["od"] == 1
        assert plan.targets["spot-a"] == 0
        assert plan.drain_order == ("spot-a-0",)

    def test_keeps_prepaid_whole(self) -> None:
        reserved = ComputeClass("reserved", 5.0, is_prepaid=True, max_slices=3)
        ladder = ClassLadder((reserved, *ZONES, ON_DEMAND), migrates=True)

        plan = ladder.plan(Observation(0.0, None, Fleet((), {})), 5, "")

        assert plan.targets["reserved"] == 3
        assert sum(plan.targets.values()) == 5


SLOW_SPOT = ComputeClass("slow", 3.0, is_revocable=True, provisioning_s=30.0, max_slices=10)


def on_ladder(
    *,
    migrates: bool,
    failing: Sequence[str] = (),
    ready_at_start: Mapping[str, int] | None = None,
) -> Desk:
    flex = ComputeClass("flex", 5.0, max_run_s=86_400.0, max_slices=10, patience_s=300.0)
    ladder = ClassLadder((*ZONES, flex, ON_DEMAND), migrates=migrates)
    return Desk(
        HorizontalPodAutoscaler(ladder, TEN_EACH),
        zones_that_fail=failing,
        ready_at_start=ready_at_start,
    )


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_begins_with_the_fleet_that_is_there(name: str) -> None:
    raw = read_scenario("azure-day").model_dump()
    on_demand = [each for each in raw["classes"] if each["name"] == "on-demand"]
    stage = {"seconds": 600.0, "requests_per_s": 12.4}
    load = {"kind": "stages", "stages": [stage], "input_tokens": 1200, "output_tokens": 210}
    changes = {"classes": on_demand, "load": load, "duration_s": 170.0}
    changes["initial_slices"] = {"on-demand": 6}
    scenario = Scenario.model_validate(raw | changes)

    outcome = simulate_policy(prepare_run(scenario, 1, price_table(), Replacements()), name)

    # Nothing was asked for less than is there before anybody can have seen that it is too much.
    assert int(outcome.timeline.num_ready.min()) == 6
    assert outcome.service.slo_ratio > 0.99
