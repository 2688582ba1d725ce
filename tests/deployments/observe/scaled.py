"""The shipped rules at the scale of a test: the same expressions over shorter times."""

import re
from pathlib import Path
from typing import Any

import yaml
from shipped import PROMETHEUS, RULE_FILES

_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"\[(\d+)([smhd])\]")


def write_scaled(folder: Path, factor: float = 1.0, shortest_s: int = 15) -> Path:
    """A folder for `--config-dir` whose windows and waits are shorter by `factor`.

    No window and no wait is shorter than `shortest_s`: a rate needs scrapes, and a busy machine
    misses some. Rules are evaluated every second whatever they say.
    """
    (folder / "rules").mkdir(parents=True)
    (folder / "laptop.yml").write_text((PROMETHEUS / "laptop.yml").read_text())
    for path in RULE_FILES:
        document = yaml.safe_load(path.read_text())
        for group in document["groups"]:
            group["interval"] = "1s"
            for rule in group["rules"]:
                _shorten(rule, factor, shortest_s)
        (folder / "rules" / path.name).write_text(yaml.safe_dump(document))
    return folder


def _shorten(rule: dict[str, Any], factor: float, shortest_s: int) -> None:
    def window(match: re.Match[str]) -> str:
        seconds = int(match[1]) * _UNIT_S[match[2]]
        return f"[{seconds if factor == 1.0 else max(shortest_s, round(seconds / factor))}s]"

    rule["expr"] = _DURATION.sub(window, rule["expr"])
    if rule.get("record", "").startswith("model:slo_bad:count"):
        # A sample stands for the time to the next.
        rule["expr"] = rule["expr"].replace("* 15", "* 1")
    if "for" in rule:
        value, unit = re.fullmatch(r"(\d+)([smhd])", rule["for"]).groups()  # type: ignore[union-attr]
        seconds = int(value) * _UNIT_S[unit]
        rule["for"] = f"{min(seconds, max(shortest_s, round(seconds / factor)))}s"
