"""`slicewise replay`: what it prints, and its exit status."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.quotas.records import NOTHING_SHARED
from autoscaling.policy.rules import Rules
from autoscaling.records import Fleet, ModelLoad, Observation
from autoscaling.replay import DecisionLog
from autoscaling.replay_command import replay_command
from serving.domain.capacity.batch_due import BatchDue, DueWork
from serving.domain.capacity.objectives import Objectives
from serving.domain.compute_class import ComputeClass
from tests.autoscaling.policy.policy_world import PROFILE

ALL = (ComputeClass("reserved", 0.0, is_prepaid=True, max_slices=1), ComputeClass("spot", 4.0))
RULES = Rules(Objectives(ttft_s=3.0, tpot_s=0.05))
APP = typer.Typer()
APP.command()(replay_command)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(APP, [str(each) for each in arguments])


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Five decisions of a growing load, as a policy wrote them."""
    path = tmp_path / "decisions.jsonl"
    policy = SlicewisePolicy(PROFILE, ALL, RULES)
    writing = DecisionLog(path)
    writing.begin("m", PROFILE, ALL, RULES, None, {})
    for tick in range(5):
        now_s = 1_795_226_400.0 + 10 * tick
        due = BatchDue((DueWork(now_s + 3600.0, 90_000 * tick),) if tick else (), 50.0)
        load = ModelLoad(now_s, 15.0 * tick, 100.0, 100.0, batch_due=due)
        observation = Observation(now_s, load, Fleet((), {}))
        writing.decided("m", observation, NOTHING_SHARED, policy.decide(observation))
    writing.close()
    return path


def tampered(log: Path, position: int, targets: dict[str, int]) -> Path:
    lines = log.read_text().splitlines()
    entry: dict[str, Any] = json.loads(lines[position])
    entry["plan"]["targets"] = targets
    lines[position] = json.dumps(entry)
    log.write_text("\n".join(lines) + "\n")
    return log


def test_log_of_todays_policy_has_no_difference(log: Path) -> None:
    result = run(log)
    assert (result.exit_code, result.output) == (0, "5 decisions, 0 would be planned otherwise\n")


def test_log_of_before_memories_outlived_a_restart_is_read(log: Path) -> None:
    first, *others = log.read_text().splitlines()
    begin = json.loads(first) | {"format": 1}
    del begin["memory"]
    log.write_text("\n".join((json.dumps(begin), *others)) + "\n")
    assert run(log).output == "5 decisions, 0 would be planned otherwise\n"


def test_difference_is_shown_and_told_by_the_exit_status(log: Path) -> None:
    result = run(tampered(log, 5, {"spot": 9}))
    assert result.exit_code == 3
    assert "5 decisions, 1 would be planned otherwise" in result.output
    assert "spot: 9" in result.output


def test_json_names_the_difference(log: Path) -> None:
    result = run(tampered(log, 5, {"spot": 9}), "--json")
    assert result.exit_code == 3
    (difference,) = json.loads(result.output)["differences"]
    assert difference["logged"] == {"spot": 9}
    assert difference["today"].keys() == {each.name for each in ALL}
    assert difference["at_s"] == 1_795_226_440.0


def test_json_without_a_difference(log: Path) -> None:
    result = run(log, "--json")
    assert (result.exit_code, json.loads(result.output)) == (
        0,
        {"num_decisions": 5, "differences": []},
    )


@pytest.mark.parametrize("text", [None, "no json\n", '{"kind": "decision", "model": "m"}\n'])
def test_what_is_no_log_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "log"
    if text is not None:
        path.write_text(text)
    result = run(path)
    assert result.exit_code == 2
    assert "slicewise replay:" in result.output
