"""What we ship for Prometheus and Grafana, as tests read it: rules, dashboards, runbooks, docs."""

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
PROMETHEUS = ROOT / "deployments" / "prometheus"
GRAFANA = ROOT / "deployments" / "grafana"
RULE_FILES = sorted((PROMETHEUS / "rules").glob("*.rules.yml"))
RULE_TESTS = sorted((Path(__file__).parent / "promtool").glob("*.test.yml"))
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))
RUNBOOKS = sorted((ROOT / "docs/operate/runbooks").glob("[A-Z]*.md"))
PROMQL_BLOCK = re.compile(r"^ *```promql\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Query:
    """An expression and where it stands."""

    place: str
    expression: str


@functools.cache
def loaded(path: Path) -> Any:
    """A YAML file."""
    return yaml.safe_load(path.read_text())


def rules(kind: str) -> list[dict[str, Any]]:
    """All rules of a kind, `alert` or `record`."""
    groups = [group for path in RULE_FILES for group in loaded(path)["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def rule_tests() -> list[dict[str, Any]]:
    """All tests of rules."""
    return [test for path in RULE_TESTS for test in loaded(path)["tests"]]


def rule_queries() -> list[Query]:
    """The expression of every rule."""
    return [
        Query(f"rule {rule[kind]}", rule["expr"])
        for kind in ("alert", "record")
        for rule in rules(kind)
    ]


def dashboard_queries() -> list[Query]:
    """Every expression of every dashboard, those of its variables too; macros stand in it."""
    found = []
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        found += [
            Query(f"{path.stem} ${variable['name']}", variable["definition"])
            for variable in board["templating"]["list"]
            if variable["type"] == "query"
        ]
        found += [
            Query(f"{path.stem} {panel['title']!r}", target["expr"])
            for panel in board["panels"]
            for target in panel.get("targets", ())
        ]
    return found


def text_queries() -> list[Query]:
    """Every `promql` block of the docs, one query for each line that begins one."""
    found = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        for block in PROMQL_BLOCK.findall(path.read_text()):
            found += [Query(str(path.relative_to(ROOT)), each) for each in _split(block)]
    return found


def filled(expression: str, values: str = ".+") -> str:
    """The expression as Grafana would send it, with `values` for its variables."""
    macros = {"$__rate_interval": "1m", "$__interval": "1m", "$__range": "1h"}
    for macro, duration in macros.items():
        expression = expression.replace(macro, duration)
    if variable := re.fullmatch(r"label_values\((.*), *\w+\)", expression, re.DOTALL):
        expression = variable[1]
    return re.sub(r"\$\{?\w+\}?", values, expression)


def _split(block: str) -> Iterator[str]:
    """A line that is indented, or begins with an operator, goes on with the one before."""
    lines: list[str] = []
    for line in block.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if lines and re.match(r"\s|[-+*/]", line):
            lines[-1] += "\n" + line
        else:
            lines.append(line)
    yield from lines
