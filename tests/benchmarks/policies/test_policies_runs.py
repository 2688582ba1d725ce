"""The days and the worlds of the table of policies, and a run of each kind, on minutes of load."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from autoscaling.prices.table import price_table
from autoscaling.simulator.comparison import simulate_policy
from autoscaling.simulator.preparation import PreparedRun, Replacements, prepare_run
from autoscaling.simulator.scenario import Scenario, read_scenario
from autoscaling.simulator.world.arrivals import Requests
from benchmarks.policies.batches import batches_of, cost_on_spot
from benchmarks.policies.cases import (
    REPORTING,
    TUNING,
    hour_of,
    most_per_prompt_token_s,
    prepared_case,
    recorded_scenario,
    with_first_fleet,
)
from benchmarks.policies.jobs import HINDSIGHT, LOWER_BOUND, Job
from benchmarks.policies.run import Runner, slo_after
from benchmarks.policies.worlds import AS_BELIEVED, WORLDS, doubled, situation, with_long_prompts


@pytest.fixture(scope="module")
def ramp() -> PreparedRun:
    return prepare_run(read_scenario("llmd-ramp"), 1, price_table(), Replacements())


def test_batches_are_a_fifth_of_all_tokens_and_one_follows_the_other(ramp: PreparedRun) -> None:
    batches = batches_of(ramp, 600.0)

    duration_s = ramp.scenario.duration_s
    # A window that would be cut short is left out.
    assert [each.submitted_s for each in batches] == [600.0 * n for n in range(len(batches))]
    assert duration_s - 600.0 < 600.0 * len(batches) <= duration_s
    of_lines = sum(each.lines.output_tokens.sum() for each in batches)
    whole_s = 600.0 * len(batches)
    of_requests = ramp.requests.output_tokens.sum() * whole_s / duration_s
    assert of_lines / (of_lines + of_requests) == pytest.approx(0.2, abs=0.01)


def test_tokens_of_batches_cost_the_time_of_spot_slices_that_they_take() -> None:
    run = prepared_case("spot-drought", 1, None)
    (one,) = batches_of(run, 12 * 3600.0)
    # A quarter of the work of 8 slices, for twelve hours; lengths are drawn.
    spot = min(each.price for each in run.terms if each.is_revocable)
    assert cost_on_spot(run, (one,)) == pytest.approx(
        0.25 * run.offered.mean_slices * 12 * spot, rel=0.03
    )


def test_case_of_two_days_is_the_scenario_for_twice_the_time() -> None:
    run = prepared_case("spot-drought-48h", 1, None)

    assert run.scenario.duration_s == 172_800.0
    assert run.requests.arrival_s[-1] > 172_000.0


def evenly(num: int, duration_s: float) -> Requests:
    arrival_s = np.linspace(0.0, duration_s, num, endpoint=False)
    return Requests(arrival_s, np.full(num, 100, np.int32), np.full(num, 10, np.int32))


def test_sets_to_choose_on_and_to_report_have_nothing_in_common() -> None:
    assert not TUNING.keys() & REPORTING.keys()
    chosen, reported = ({zone for each in cases.values() for zone in each.zones}
                        for cases in (TUNING, REPORTING))  # fmt: skip
    assert chosen
    assert not chosen & reported


@pytest.mark.parametrize("name", [*TUNING, *REPORTING])
def test_recorded_case_has_two_zones_of_spot_and_an_objective_that_grows(name: str) -> None:
    recorded = {**TUNING, **REPORTING}[name]
    scenario = recorded_scenario(name, recorded)

    names = [each.name for each in scenario.classes]
    assert names == ["spot-a", "spot-b", "flex-start", "on-demand"]
    objectives = scenario.objectives.objectives
    assert (objectives.ttft_s, objectives.tpot_s) == (recorded.ttft_s, recorded.tpot_s)
    assert objectives.ttft_per_prompt_token_s == most_per_prompt_token_s(scenario.profile) > 0


def test_fleet_at_the_beginning_is_what_the_first_minutes_take(ramp: PreparedRun) -> None:
    begun = with_first_fleet(ramp)

    busiest = float(ramp.offered.slices[:10].max())
    assert busiest > 1
    assert begun.scenario.initial_slices == {"on-demand": math.ceil(busiest)}


def test_recorded_case_without_a_folder_of_traces_is_refused() -> None:
    with pytest.raises(ValueError, match="azure-code is made from recorded traces; --traces"):
        prepared_case("azure-code", 1, None)


def test_arrivals_on_a_grid_are_spread_over_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 3000 * (row // 20), "input_length": 600, "output_length": 5,
         "hash_ids": [row, row + 1]}
        for row in range(100)
    ]  # fmt: skip
    path.write_text("\n".join(json.dumps(row) for row in rows))

    hour = hour_of(path, 1)

    assert len(np.unique(hour.arrival_s)) == 100
    assert (np.floor(hour.arrival_s / 3.0) == np.repeat(np.arange(5), 20)).all()


def test_traffic_doubles_within_a_minute_and_for_a_twelfth_of_the_time() -> None:
    day_s = 43_200.0
    requests = evenly(432_000, day_s)

    more = doubled(requests, day_s, np.random.default_rng(1))

    def per_s(from_s: float, until_s: float) -> float:
        within = (more.arrival_s >= from_s) & (more.arrival_s < until_s)
        return float(within.sum()) / (until_s - from_s)

    begins_s = 0.4 * day_s
    assert per_s(0.0, begins_s) == pytest.approx(10.0)
    assert per_s(begins_s + 60, begins_s + 3600) == pytest.approx(20.0, rel=0.01)
    assert per_s(begins_s, begins_s + 30) < 14
    assert per_s(begins_s + 3602, day_s) == pytest.approx(10.0)


def test_one_request_in_a_thousand_gets_a_long_prompt() -> None:
    requests = evenly(200_000, 3600.0)

    some = with_long_prompts(requests, 3600.0, np.random.default_rng(1))

    assert (some.input_tokens == 100_000).mean() == pytest.approx(0.001, rel=0.2)
    assert requests.input_tokens.max() == 100


def test_objective_grows_with_prompts_where_they_are_long(ramp: PreparedRun) -> None:
    where = situation(ramp, "100k-token prompts")

    grown = ramp.rules.objectives.ttft_s + 100_000 * most_per_prompt_token_s(ramp.scenario.profile)
    assert where.setup.objectives.ttft_of(100_000) == pytest.approx(grown)
    assert where.believed.rules.objectives == where.setup.objectives


def test_wrong_profile_is_believed_and_not_true(ramp: PreparedRun) -> None:
    where = situation(ramp, "profile +50 %")

    believed, true = where.believed.scenario.profile, where.setup.profile
    ratio = believed.max_requests_per_s(4000, 1000, 0.1) / true.max_requests_per_s(4000, 1000, 0.1)
    # The ramp's slices run out of sequences too, which the profile does not say otherwise.
    assert 1.0 < ratio <= 1.5
    assert true == ramp.scenario.profile
    assert where.run is ramp


def test_wrong_terms_are_true_and_not_believed(ramp: PreparedRun) -> None:
    slow, lossy = situation(ramp, "leads x3"), situation(ramp, "losses x5")

    before, after = ramp.classes[0], slow.setup.classes[0]
    assert after.terms == before.terms
    assert after.conditions.provisioning_s == 3 * before.conditions.provisioning_s
    assert after.conditions.load_s == 3 * before.conditions.load_s
    losses = [each.setup.classes[0].conditions.losses_per_hour for each in (slow, lossy)]
    assert losses == [before.conditions.losses_per_hour, 5 * before.conditions.losses_per_hour]


@pytest.mark.parametrize("world", WORLDS)
def test_every_world_can_be_played(world: str) -> None:
    record = Runner(None, "abc", str.upper).run(Job("llmd-ramp", world, "slicewise", None, 1))

    assert (record.commit, record.source) == ("abc", "SLICEWISE")
    assert record.cost_usd is not None
    assert record.cost_usd > 0
    assert record.served_ratio == pytest.approx(1.0, abs=0.2)


def test_yardsticks_have_no_figures_but_their_own() -> None:
    runner = Runner(None, "abc", str.upper)

    bound, known = (
        runner.run(Job("llmd-ramp", AS_BELIEVED, name, None, 1))
        for name in (LOWER_BOUND, HINDSIGHT)
    )

    assert bound.slo_ratio is None
    assert bound.cost_usd is not None
    assert known.cost_usd is not None
    assert bound.cost_usd < known.cost_usd
    assert known.slo_ratio is not None
    assert known.slo_ratio >= 0.99


def test_knob_changes_what_a_policy_does() -> None:
    runner = Runner(None, "abc", str.upper)

    spare, tight = (
        runner.run(Job("llmd-ramp", AS_BELIEVED, "hpa", value, 1)) for value in (0.5, 1.0)
    )

    assert spare.cost_usd is not None
    assert tight.cost_usd is not None
    assert spare.cost_usd > tight.cost_usd


def test_slo_after_an_hour_leaves_out_what_came_before() -> None:
    raw = read_scenario("llmd-ramp").model_dump()
    stages = [
        {"seconds": 600.0, "requests_per_s": 8.0},
        {"seconds": 900.0, "requests_per_s": 1.0},
    ]
    changes = {"load": raw["load"] | {"stages": stages}, "duration_s": 1500.0}
    scenario = Scenario.model_validate(raw | changes)
    run = prepare_run(scenario, 1, price_table(), Replacements())

    outcome = simulate_policy(run, "hpa")

    later = slo_after(outcome, 900.0)
    assert later is not None
    assert later > 0.99 > outcome.service.slo_ratio
    assert slo_after(outcome, 1500.0) is None
