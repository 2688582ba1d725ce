"""Each baseline does what its published formula says, on observations made by hand."""

from collections.abc import Sequence

import numpy as np
import pytest

from autoscaling.records import Fleet, ModelLoad, Observation, Plan, Policy, SliceLoss, SliceView
from autoscaling.simulator.baselines.hpa import HorizontalPodAutoscaler
from autoscaling.simulator.baselines.llmd_slo import LlmdSlo
from autoscaling.simulator.baselines.ray_serve_default import RayServeDefault
from autoscaling.simulator.baselines.single_class import SingleClassLayout
from autoscaling.simulator.baselines.sizing import Sizing, size
from autoscaling.simulator.baselines.spothedge import SpotHedge
from autoscaling.simulator.baselines.static_on_demand import StaticOnDemand
from autoscaling.simulator.offered import Offered
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
ZONES = tuple(
    ComputeClass(f"spot-{zone}", 3.0, is_revocable=True, correlation_group=zone, max_slices=10)
    for zone in "abc"
)


class Desk:
    """A fleet on which every slice that was asked for is ready at the next look."""

    def __init__(self, policy: Policy, *, zones_that_fail: Sequence[str] = ()) -> None:
        self.policy = policy
        self.failing = set(zones_that_fail)
        self.plan = Plan(0.0, {})
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
        desk = Desk(HorizontalPodAutoscaler((ON_DEMAND,), TEN_EACH))

        assert desk.look(15, in_flight=35).targets["od"] == 4
        assert desk.look(15, in_flight=43).targets["od"] == 4  # ratio 1.075
        assert desk.look(15, in_flight=45).targets["od"] == 5

    def test_rises_by_the_larger_of_doubling_and_four_per_period(self) -> None:
        desk = Desk(HorizontalPodAutoscaler((ON_DEMAND,), TEN_EACH))

        rise = [desk.look(15, in_flight=5000).targets["od"] for _ in range(5)]

        assert rise == [5, 10, 20, 40, 50]

    def test_acts_only_at_its_sync_period(self) -> None:
        desk = Desk(HorizontalPodAutoscaler((ON_DEMAND,), TEN_EACH))
        desk.look(15, in_flight=20)

        assert desk.look(10, in_flight=50).targets["od"] == 2
        assert desk.look(5, in_flight=50).targets["od"] == 5

    def test_falls_to_the_highest_recommendation_of_five_minutes(self) -> None:
        desk = Desk(HorizontalPodAutoscaler((ON_DEMAND,), TEN_EACH))
        desk.until(60, 15, in_flight=100)

        assert desk.until(300, 15, in_flight=20).targets["od"] == 10
        assert desk.look(15, in_flight=20).targets["od"] == 2


class TestRayServeDefault:
    def test_scales_up_after_thirty_seconds_of_the_same_wish(self) -> None:
        desk = Desk(RayServeDefault((ON_DEMAND,), TEN_EACH))
        desk.look(10, in_flight=10)
        desk.look(10, in_flight=10)

        waits = [desk.look(10, in_flight=40).targets["od"] for _ in range(3)]

        assert waits == [1, 1, 1]
        assert desk.until(30, in_flight=40).targets["od"] == 4

    def test_scales_down_after_ten_minutes(self) -> None:
        desk = Desk(RayServeDefault((ON_DEMAND,), TEN_EACH))
        desk.until(120, in_flight=40)

        assert desk.until(590, in_flight=10).targets["od"] == 4
        assert desk.until(60, in_flight=10).targets["od"] == 1

    def test_keeps_its_bounds(self) -> None:
        desk = Desk(RayServeDefault((ON_DEMAND,), TEN_EACH))

        assert desk.until(300, in_flight=9000).targets["od"] == 50


class TestLlmdSlo:
    def test_idle_pool_walks_down_one_replica_in_two_minutes(self) -> None:
        floor = ComputeClass("od", 10.0, min_slices=3, max_slices=8)
        desk = Desk(LlmdSlo((floor,), PROFILE, OBJECTIVES))
        desk.until(300, 15, in_flight=2400, rate=100.0)
        assert desk.plan.targets["od"] == 8

        steps = [desk.until(120, 15).targets["od"] for _ in range(5)]

        # The stabilisation holds for three minutes; then one goes every two.
        assert steps == [8, 7, 6, 5, 4]

    def test_hysteresis_band_holds(self) -> None:
        desk = Desk(LlmdSlo((ON_DEMAND,), PROFILE, OBJECTIVES))
        # One slice, 100 sequences: step = 0.03 / (1 - 0.4) = 0.05 s, half of the objective.
        plan = desk.until(600, 15, in_flight=100, rate=4.0)

        assert plan.targets["od"] == 1
        assert "saturation 0.50" in plan.arithmetic

    def test_overload_asks_for_the_clamped_ratio_and_credits_what_is_warming(self) -> None:
        desk = Desk(LlmdSlo((ON_DEMAND,), PROFILE, OBJECTIVES))

        # 1 of n is ready and its signal is clamped at 2: n grows until 2 / n / 0.55 is below 1.
        assert desk.until(600, 15, in_flight=500, rate=30.0, ready=1).targets["od"] == 4
        assert desk.until(600, 15, in_flight=9000, rate=30.0).targets["od"] == 50


class TestSpotHedge:
    def test_spreads_the_target_and_its_spare_over_the_zones(self) -> None:
        desk = Desk(SpotHedge((*ZONES, ON_DEMAND), TEN_EACH))

        plan = desk.until(120, rate=7.0)

        assert [plan.targets[zone.name] for zone in ZONES] == [3, 3, 3]
        assert plan.targets["od"] == 0

    def test_falls_back_on_demand_for_spot_that_is_not_ready(self) -> None:
        desk = Desk(SpotHedge((*ZONES, ON_DEMAND), TEN_EACH))

        plan = desk.until(60, rate=7.0, ready=0)

        assert plan.targets["od"] == 7  # and nothing for the spare

    def test_avoids_the_zone_that_preempted_until_one_is_ready_there(self) -> None:
        desk = Desk(SpotHedge((*ZONES, ON_DEMAND), TEN_EACH))
        desk.until(120, rate=7.0)
        desk.failing = {"spot-a"}

        lost = [SliceLoss(f"spot-a-{n}", "spot-a", desk.now_s, "preempted") for n in range(3)]
        plan = desk.look(10, rate=7.0, losses=lost)

        assert [plan.targets[zone.name] for zone in ZONES] == [0, 5, 4]

    def test_wish_that_never_comes_true_is_moved(self) -> None:
        zones = tuple(
            ComputeClass(f"spot-{zone}", 3.0, is_revocable=True, provisioning_s=30.0)
            for zone in "abc"
        )
        desk = Desk(SpotHedge((*zones, ON_DEMAND), TEN_EACH), zones_that_fail=["spot-a"])

        plan = desk.until(300, rate=7.0)

        assert plan.targets["spot-a"] == 0
        assert plan.targets["spot-b"] + plan.targets["spot-c"] == 9

    def test_waits_before_it_follows_the_load_down(self) -> None:
        desk = Desk(SpotHedge((*ZONES, ON_DEMAND), TEN_EACH))
        desk.until(120, rate=7.0)

        assert sum(desk.until(600, rate=1.0).targets.values()) == 9
        assert sum(desk.until(120, rate=1.0).targets.values()) == 3
