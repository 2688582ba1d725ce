"""Defines one thing that is wrong, in words that somebody can act on. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_PAGES = "docs/operate/runbooks"


class Severity(StrEnum):
    """How bad it is, the worst first."""

    CRITICAL = "critical"  # requests fail, or nobody looks after the fleet any more
    WARNING = "warning"  # chips or capacity are missing, or paid for in vain
    NOTE = "note"  # somebody wants it so, or it passes by itself


_ORDER = {severity: number for number, severity in enumerate(Severity)}


@dataclass(frozen=True, slots=True)
class FleetFinding:
    """One thing that is wrong. `subject` names it: `slice spot-3`, `pod llm-head-x`, `class spot`.

    `since_s` is for how many seconds it has been so; `None` where nobody knows. `action` is what to
    do: a command, or where to read on.
    """

    severity: Severity
    subject: str
    what: str
    action: str
    since_s: float | None = None


def in_order(findings: Iterable[FleetFinding]) -> tuple[FleetFinding, ...]:
    """Returns each finding once: the worst first, then as they came."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda each: _ORDER[each.severity]))


def runbook(alert: str) -> str:
    """Returns where an alert's page is."""
    return f"{_PAGES}/{alert}.md"


def age_s(at_s: float | None, now_s: float) -> float | None:
    """Returns how long ago that was; `None` where it is not known. Clocks may differ a little."""
    return None if at_s is None else max(0.0, now_s - at_s)


def short(text: str, most: int = 200) -> str:
    """Returns words of somebody else's on one line, cut where they are long."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"
