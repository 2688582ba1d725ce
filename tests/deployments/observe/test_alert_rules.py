"""The rules are what Prometheus takes, each alert is tested both ways and has its runbook."""

import re
import subprocess
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml
from shipped import PROMETHEUS, RULE_FILES, RULE_TESTS, RUNBOOKS, loaded, rule_tests, rules

from deployments.cli import COMMAND_GROUP, build_cli

_SECTIONS = ["Meaning", "What users feel", "Confirm", "Do", "When it clears"]


def run_promtool(*arguments: str | Path) -> None:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def firings(alert: str) -> list[list[dict[str, str]]]:
    """For each test of an alert the labels of those that are firing; none where it is silent."""
    found = []
    for test in rule_tests():
        for case in test["promql_expr_test"]:
            named = re.search(r'alertname=~?"([\w.*]+)"', case["expr"])
            if named and re.fullmatch(named[1], alert):
                samples = [each["labels"] for each in case["exp_samples"]]
                found.append([dict(re.findall(r'(\w+)="([^"]*)"', each)) for each in samples])
    return found


@pytest.mark.needs("promtool")
def test_promtool_accepts_every_rule_file() -> None:
    run_promtool("check", "rules", *RULE_FILES)


@pytest.mark.needs("promtool")
@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.name)
def test_alerts_fire_when_they_should_and_only_then(path: Path) -> None:
    run_promtool("test", "rules", path)


@pytest.mark.needs("promtool")
@pytest.mark.parametrize("name", ["laptop.yml", "gke.yml"])
def test_promtool_accepts_the_scrape_configs(name: str, tmp_path: Path) -> None:
    config = yaml.safe_load((PROMETHEUS / name).read_text())
    for job in config["scrape_configs"]:
        # Debian's build has no discovery in Kubernetes; the rest is judged without.
        for discovery in job.pop("kubernetes_sd_configs", ()):
            assert set(discovery) == {"role", "namespaces", "selectors"}
    (tmp_path / name).write_text(yaml.safe_dump(config))
    run_promtool("check", "config", "--syntax-only", tmp_path / name)


def test_every_rule_file_is_tested() -> None:
    named = {Path(each).name for path in RULE_TESTS for each in loaded(path)["rule_files"]}
    assert named == {path.name for path in RULE_FILES}


@pytest.mark.parametrize("alert", [rule["alert"] for rule in rules("alert")])
def test_alert_is_tested_firing_and_silent(alert: str) -> None:
    cases = firings(alert)
    assert any(cases), "no test in which it fires"
    # Every firing case stands beside series on which it is silent; a case of its own is best.
    inputs = sum(len(test["input_series"]) for test in _tests_of(alert))
    assert inputs > sum(len(case) for case in cases)


def _tests_of(alert: str) -> list[dict[str, Any]]:
    return [
        test
        for test in rule_tests()
        if any(f'alertname="{alert}"' in case["expr"] for case in test["promql_expr_test"])
    ]


@pytest.mark.parametrize("rule", rules("alert"), ids=lambda rule: rule["alert"])
def test_alert_says_what_happens_where_and_what_to_do(rule: dict[str, Any]) -> None:
    name, notes = rule["alert"], rule["annotations"]
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert set(notes) == {"summary", "description", "runbook"}
    assert notes["runbook"] == f"docs/operate/runbooks/{name}.md"
    told = set().union(*(labels for case in firings(name) for labels in case))
    used = set(re.findall(r"\$labels\.(\w+)", notes["summary"] + notes["description"]))
    assert used <= told


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    alerts = Counter(rule["alert"] for rule in rules("alert"))
    assert max(alerts.values()) == 1
    pages = {path.stem for path in RUNBOOKS} - {"README"}
    assert pages == set(alerts)


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.stem)
def test_runbook_has_its_sections_and_no_broken_link(path: Path) -> None:
    text = path.read_text()
    if path.stem != "README":
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == _SECTIONS
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (path.parent / link).exists(), link


def test_runbooks_name_only_commands_that_exist() -> None:
    own = build_cli(())
    commands = {each.name for each in (*own.registered_commands, *own.registered_groups)}
    commands |= {each.name for each in entry_points(group=COMMAND_GROUP)}
    named = [
        (path.name, command)
        for path in RUNBOOKS
        for command in re.findall(r"slicewise ([a-z-]+)(?=[ `\n])", path.read_text())
    ]
    assert len(named) > 5
    assert [each for each in named if each[1] not in commands] == []
