"""`slicewise simulate` and `slicewise plan` as an operator calls them, on minutes of load."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from autoscaling.simulator.command import plan_command, simulate_command
from autoscaling.simulator.policies import POLICIES

pytestmark = pytest.mark.slow

NAMES = list(POLICIES)

_cli = typer.Typer()
_cli.command("simulate")(simulate_command)
_cli.command("plan")(plan_command)


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> str:
    raw: dict[str, Any] = {
        "name": "small",
        "description": "Half an hour of <chat>.",
        "profile": {
            "model": "m",
            "engine": "paced",
            "generation": "v6e",
            "topology": "2x4",
            "base_s": 0.02,
            "per_sequence_s": 0.001,
            "per_prompt_token_s": 0.0002,
            "max_num_seqs": 32,
            "load_s": 30.0,
            "measured_on": "2026-11-21",
            "source": "made up",
        },
        "region": "us-east1",
        "objectives": {"ttft_s": 5.0, "tpot_s": 0.2},
        "classes": [
            {"name": "spot", "market": "spot", "max_slices": 9, "provisioning_s": 20.0},
            {"name": "on-demand", "market": "on_demand", "max_slices": 9, "provisioning_s": 20.0},
        ],
        "load": {"kind": "day", "trace": "azure-conv", "mean_slices": 4.0},
        "duration_s": 1800.0,
        "initial_slices": {"on-demand": 3},
        "seeds": [1, 2],
    }
    path = tmp_path_factory.mktemp("scenario") / "small.yaml"
    path.write_text(yaml.safe_dump(raw))
    return str(path)


@pytest.fixture(scope="module")
def shapes(scenario: str) -> str:
    """The same, with on-demand slices of half the size besides."""
    raw = yaml.safe_load(Path(scenario).read_text())
    half = raw["profile"] | {"topology": "2x2", "per_sequence_s": 0.002, "max_num_seqs": 16}
    raw["classes"].append(raw["classes"][1] | {"name": "small", "profile": half})
    path = Path(scenario).with_name("shapes.yaml")
    path.write_text(yaml.safe_dump(raw))
    return str(path)


@pytest.fixture(scope="module")
def simulated(scenario: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp("out")
    answer = CliRunner().invoke(_cli, ["simulate", scenario, "--json", "--out", str(out)])
    assert answer.exit_code == 0, answer.output
    return answer.stdout, out


def test_json_is_all_that_is_printed_and_has_every_policy(simulated: tuple[str, Path]) -> None:
    document = json.loads(simulated[0])

    assert list(document["policies"]) == NAMES
    for figures in document["policies"].values():
        assert figures["cost_usd"] > 0
        assert 0 <= figures["slo_ratio"] <= figures["served_ratio"] <= 1
        assert figures["mean_slices"] <= figures["peak_slices"]
        assert [each["seed"] for each in figures["by_seed"]] == [1, 2]
        spread = figures["spread"]["cost_usd"]
        assert spread["lowest"] <= figures["cost_usd"] <= spread["highest"]
        assert spread["margin_95"] >= 0
    assert len(document["lower_bound"]["by_seed"]) == 2
    assert document["hindsight"]["by_seed"]
    for kept in document["hindsight"]["by_seed"]:
        assert kept["slo_ratio"] >= 0.99
        assert kept["margin"] >= 1
        assert kept["cost_usd"] >= document["lower_bound"]["cost_usd"]


def test_prices_used_are_named_with_source_and_date(simulated: tuple[str, Path]) -> None:
    prices = {each["compute_class"]: each for each in json.loads(simulated[0])["prices"]}

    assert prices["spot"]["usd_per_slice_hour"] == pytest.approx(8 * 0.593)
    assert prices["spot"]["read"] == "2026-11-20"
    assert "skypilot-catalog" in prices["spot"]["source"]


def test_out_folder_holds_the_same_json_and_a_page_that_needs_nothing_else(
    simulated: tuple[str, Path],
) -> None:
    printed, out = simulated
    page = (out / "report.html").read_text()

    assert json.loads((out / "result.json").read_text()) == json.loads(printed)
    assert page.count('<svg class="plot"') == 7
    assert all(name in page for name in NAMES)
    assert "Half an hour of &lt;chat&gt;." in page
    assert "prefers-color-scheme: dark" in page
    for outside in ("<script", "<link", 'src="http', "@import"):
        assert outside not in page


def test_page_shows_every_decision_with_its_reason(scenario: str, tmp_path: Path) -> None:
    arguments = ["simulate", scenario, "--seed", "1", "--policy", "hpa", "--out", str(tmp_path)]
    answer = CliRunner().invoke(_cli, arguments)

    assert answer.exit_code == 0, answer.output
    page = (tmp_path / "report.html").read_text()
    assert "Decisions of hpa" in page
    assert "after stabilisation</td>" in page


def test_table_names_chosen_policies_the_yardsticks_and_the_prices(scenario: str) -> None:
    arguments = ["simulate", scenario, "--seed", "1", "--policy", "hpa", "--policy", "spothedge"]
    answer = CliRunner().invoke(_cli, arguments)

    assert answer.exit_code == 0, answer.output
    for words in (
        "hpa",
        "spothedge",
        "hindsight",
        "lower bound",
        "Simulated, not measured",
        "read 2026-11-20",
    ):
        assert words in answer.stdout
    assert "llmd-slo" not in answer.stdout


def test_price_file_changes_the_cost(scenario: str, tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(
        "tables:\n  - market: on_demand\n    read: '2027-01-01'\n    source: a contract\n"
        "    usd_per_chip_hour: {v6e: {any: 27.0}}\n"
    )
    arguments = ["simulate", scenario, "--json", "--seed", "1", "--policy", "static-on-demand"]

    listed, ours = (
        json.loads(CliRunner().invoke(_cli, [*arguments, *more]).stdout)
        for more in ([], ["--prices", str(file)])
    )

    name = "static-on-demand"
    usd = [each["policies"][name]["cost_usd"] for each in (listed, ours)]
    assert usd[1] == pytest.approx(10 * usd[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such"], "neither a file"),
        (["{scenario}", "--policy", "magic"], "policy is magic; allowed: slicewise"),
        (["{scenario}", "--trace", "/nowhere.csv"], "nowhere.csv"),
        (["{scenario}", "--prices", "/nowhere.yaml"], "nowhere.yaml"),
        (["{scenario}", "--spot", "/nowhere.json"], "nowhere.json"),
    ],
)
def test_wrong_argument_is_one_line_and_status_2(
    scenario: str, arguments: list[str], words: str
) -> None:
    given = [each.format(scenario=scenario) for each in arguments]
    answer = CliRunner().invoke(_cli, ["simulate", *given])

    assert answer.exit_code == 2
    assert words in answer.stderr
    assert answer.stdout == ""


def test_slices_of_two_shapes_are_simulated_with_the_policy_that_knows_them(shapes: str) -> None:
    answer = CliRunner().invoke(_cli, ["simulate", shapes, "--json", "--seed", "1"])
    assert answer.exit_code == 0, answer.output
    document = json.loads(answer.stdout)
    assert list(document["policies"]) == ["slicewise"]
    assert document["policies"]["slicewise"]["vs_lower_bound"] >= 1.0
    refused = CliRunner().invoke(_cli, ["simulate", shapes, "--policy", "hpa"])
    assert refused.exit_code == 2
    assert "policy is hpa; allowed: slicewise" in refused.stderr


def test_plan_says_classes_cost_and_what_without_spot(scenario: str) -> None:
    arguments = ["plan", "--scenario", scenario, "--rate", "3", "--slo", "ttft=4,tpot=0.3"]
    answer = CliRunner().invoke(_cli, [*arguments, "--json"])

    assert answer.exit_code == 0, answer.output
    document = json.loads(answer.stdout)
    assert document["objectives"] == {
        "ttft_s": 4.0,
        "tpot_s": 0.3,
        "ttft_per_prompt_token_s": 0.0,
    }
    usual, without_spot = document["situations"]
    assert usual["classes"]["spot"]["mean_slices"] > 0
    assert without_spot["classes"]["spot"]["mean_slices"] == 0
    assert without_spot["usd_per_month"] > usual["usd_per_month"]
    for each in (usual, without_spot):
        assert each["usd_per_month"] == pytest.approx(
            sum(use["usd_per_month"] for use in each["classes"].values())
        )
        assert each["usd_per_million_tokens"] > 0


def test_plan_refuses_objectives_of_another_form(scenario: str) -> None:
    answer = CliRunner().invoke(_cli, ["plan", "--scenario", scenario, "--slo", "fast"])

    assert answer.exit_code == 2
    assert "slo is 'fast'; allowed: as ttft=2,tpot=0.1" in answer.stderr


def test_plan_for_a_model_without_its_profile_is_refused() -> None:
    app = typer.Typer()
    app.command()(plan_command)
    result = CliRunner().invoke(app, ["--model", "other", "--scenario", "llmd-ramp"])
    assert result.exit_code != 0
    assert "the profile is of 'Qwen/Qwen3-32B'" in result.output
