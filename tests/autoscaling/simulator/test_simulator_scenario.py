"""Scenarios: what ships can be staged without files, what is wrong is refused by its field."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from autoscaling.prices.table import price_table
from autoscaling.simulator.preparation import Replacements, prepare_run, requests_of_file
from autoscaling.simulator.scenario import ScenarioError, read_scenario, shipped_scenarios
from autoscaling.simulator.world.synthetic_traces import TRACE_LAWS, synthetic_hour

DATA = Path(__file__).parents[3] / "../shared/data/traces"
AZURE = DATA / "azure2023"


def small(**changes: Any) -> dict[str, Any]:
    return {
        "name": "small",
        "description": "Ten minutes.",
        "profile": {
            "model": "m",
            "engine": "paced",
            "generation": "v6e",
            "topology": "2x4",
            "base_s": 0.02,
            "per_sequence_s": 0.001,
            "per_prompt_token_s": 0.0001,
            "max_num_seqs": 32,
            "measured_on": "2026-11-21",
            "source": "made up",
        },
        "region": "us-east1",
        "objectives": {"ttft_s": 2.0, "tpot_s": 0.1},
        "classes": [
            {
                "name": "on-demand",
                "market": "on_demand",
                "max_slices": 10,
                "provisioning_s": 30.0,
            }
        ],
        "load": {
            "kind": "stages",
            "stages": [{"seconds": 600.0, "requests_per_s": 2.0}],
            "input_tokens": 100,
            "output_tokens": 50,
        },
        "duration_s": 600.0,
        "seeds": [1],
    } | changes


def written(folder: Path, raw: dict[str, Any]) -> str:
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(raw))
    return str(path)


def test_the_scenarios_that_are_promised_ship() -> None:
    assert {
        "azure-day",
        "azure-day-reserved",
        "azure-code-day",
        "llmd-ramp",
        "spot-drought",
        "scale-1000",
    } == set(shipped_scenarios())


@pytest.mark.parametrize("name", sorted(shipped_scenarios()))
def test_objective_of_a_shipped_scenario_is_the_same_for_every_prompt(name: str) -> None:
    """Their published figures are of a flat one; the part per token came later."""
    assert read_scenario(name).objectives.ttft_per_prompt_token_s == 0.0


@pytest.mark.parametrize("name", sorted(set(shipped_scenarios()) - {"scale-1000"}))
def test_shipped_scenario_stages_with_a_price_for_every_class(name: str) -> None:
    scenario = read_scenario(name)

    run_setup = prepare_run(scenario, scenario.seeds[0], price_table(), Replacements())

    assert len(run_setup.requests) > 1000
    assert all(each.usd_per_slice_hour > 0 for each in run_setup.terms)
    load = scenario.load
    if load.kind == "day" and load.mean_slices is not None and scenario.duration_s >= 86_400:
        assert run_setup.offered.mean_slices == pytest.approx(load.mean_slices, rel=0.03)


def test_price_of_a_slice_is_that_of_its_chips(tmp_path: Path) -> None:
    run_setup = prepare_run(
        read_scenario(written(tmp_path, small())), 1, price_table(), Replacements()
    )

    assert run_setup.terms[0].usd_per_slice_hour == pytest.approx(8 * 2.70)
    assert run_setup.prices[0].price is not None
    assert run_setup.prices[0].price.read == "2026-11-20"


def test_class_may_have_slices_of_another_shape(tmp_path: Path) -> None:
    raw = small()
    (large,) = raw["classes"]
    half = raw["profile"] | {"topology": "2x2", "per_sequence_s": 0.002, "load_s": 7.0}
    raw["classes"] = [large, large | {"name": "small", "profile": half}]
    run_setup = prepare_run(read_scenario(written(tmp_path, raw)), 1, price_table(), Replacements())
    assert [each.usd_per_slice_hour for each in run_setup.terms] == [
        pytest.approx(8 * 2.70),
        pytest.approx(4 * 2.70),
    ]
    assert run_setup.terms[1].load_s == 7.0
    assert {name: each.topology for name, each in run_setup.profiles.items()} == {"small": "2x2"}
    wrong = raw["classes"][1] | {"profile": half | {"base_s": 0.5}}
    with pytest.raises(ScenarioError, match=r"more than classes\.small\.profile\.base_s, 0\.5"):
        read_scenario(written(tmp_path, raw | {"classes": [large, wrong]}))


def test_staging_is_the_same_with_the_same_seed_and_differs_with_another(tmp_path: Path) -> None:
    scenario = read_scenario(written(tmp_path, small()))

    one, again, other = (
        prepare_run(scenario, seed, price_table(), Replacements()).requests.arrival_s
        for seed in (1, 1, 2)
    )

    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"colour": "blue"}, "colour"),
        ({"duration_s": 0.0}, "duration_s"),
        ({"objectives": {"ttft_s": 2.0, "tpot_s": 0.01}}, "objectives.tpot_s is 0.01"),
        ({"initial_slices": {"spot": 1}}, "initial_slices names spot"),
        ({"classes": []}, "classes"),
        (
            {"load": {"kind": "day", "trace": "azure-conv"}},
            "either mean_requests_per_s or mean_slices",
        ),
        ({"load": {"kind": "tide"}}, "load"),
    ],
)
def test_wrong_scenario_is_refused_by_field(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ScenarioError, match=named):
        read_scenario(written(tmp_path, small(**changes)))


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ScenarioError, match="azure-day"):
        read_scenario("azure-night")


def test_capacity_steps_must_begin_at_zero_and_rise(tmp_path: Path) -> None:
    raw = small()
    raw["classes"][0]["capacity"] = {"kind": "steps", "steps": [{"from_s": 5.0, "slices": 1}]}

    with pytest.raises(ScenarioError, match="begin at 0 and rise"):
        read_scenario(written(tmp_path, raw))


def test_unknown_regime_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    raw = small()
    raw["classes"][0]["capacity"] = {"kind": "regime", "regime": "monsoon"}

    with pytest.raises(ScenarioError, match="'monsoon'; allowed: calm"):
        prepare_run(read_scenario(written(tmp_path, raw)), 1, price_table(), Replacements())


def test_more_spot_files_than_spot_classes_are_refused(tmp_path: Path) -> None:
    scenario = read_scenario(written(tmp_path, small()))

    with pytest.raises(ScenarioError, match="1 spot files; allowed: up to 0"):
        prepare_run(scenario, 1, price_table(), Replacements(spot=(tmp_path / "x.json",)))


def test_spot_file_takes_the_place_of_the_first_spot_class_capacity(tmp_path: Path) -> None:
    raw = small()
    raw["classes"].append(
        {"name": "spot", "market": "spot", "max_slices": 4, "provisioning_s": 30.0}
    )
    file = tmp_path / "spot.json"
    file.write_text('{"metadata": {"gap_seconds": 100}, "data": [1, 0, 1]}')

    scenario = read_scenario(written(tmp_path, raw))
    run_setup = prepare_run(scenario, 1, price_table(), Replacements(spot=(file,)))

    series = run_setup.classes[1].conditions.capacity
    assert series is not None
    assert (series.at(50.0), series.at(150.0), series.at(250.0)) == (4, 0, 4)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_spot_files_are_read_at_one_time(tmp_path: Path, seed: int) -> None:
    """One zone has slices when the other has none, and changes last long before it ends."""
    raw = small()
    files = []
    ticks = [number // 3 % 2 for number in range(200)]
    for name, data in (("a", ticks), ("b", [1 - tick for tick in ticks[:150]] + [0] * 50)):
        raw["classes"].append(
            {"name": name, "market": "spot", "max_slices": 4, "provisioning_s": 30.0}
        )
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"metadata": {"gap_seconds": 50}, "data": data}))

    scenario = read_scenario(written(tmp_path, raw))
    run_setup = prepare_run(scenario, seed, price_table(), Replacements(spot=tuple(files)))

    one, other = (each.conditions.capacity for each in run_setup.classes[1:])
    assert one is not None
    assert other is not None
    assert all(one.at(at_s) + other.at(at_s) in (0, 4) for at_s in np.arange(0.0, 600.0, 10.0))


@pytest.mark.skipif(not AZURE.exists(), reason="the Azure traces are not here")
@pytest.mark.parametrize(("name", "file"), [("azure-conv", "conv"), ("azure-code", "code")])
def test_synthetic_hour_is_like_the_trace(name: str, file: str) -> None:
    real = requests_of_file(AZURE / f"AzureLLMInferenceTrace_{file}.csv")
    hours = [synthetic_hour(TRACE_LAWS[name], seed) for seed in range(6)]

    made_input = np.concatenate([each.input_tokens for each in hours])
    made_output = np.concatenate([each.output_tokens for each in hours])
    assert made_input.mean() == pytest.approx(real.input_tokens.mean(), rel=0.1)
    assert made_output.mean() == pytest.approx(real.output_tokens.mean(), rel=0.2)
    rate = np.mean([len(each) / 3600 for each in hours])
    assert rate == pytest.approx(len(real) / real.arrival_s[-1], rel=0.05)
    for width_s in (10.0, 60.0):
        made_cv = np.mean([_variation(each.arrival_s, width_s) for each in hours])
        assert made_cv == pytest.approx(_variation(real.arrival_s, width_s), rel=0.3)


def _variation(arrival_s: np.ndarray[Any, np.dtype[np.float64]], width_s: float) -> float:
    counts = np.histogram(arrival_s, np.arange(0.0, 3480.0, width_s))[0]
    return float(counts.std() / counts.mean())
