"""What a check says: one finding about one thing, with the way out. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"  # true, and good to know: what is simulated, what was not looked at
    WARNING = "warning"  # it serves, but worse than it could, or it could not be found out
    ERROR = "error"  # it will not serve, or not what was asked for


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    `allowed` and `fix` are empty where there is nothing to do.
    """

    level: Level
    what: str
    found: str
    allowed: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that could not be had in its time, and why."""

    reason: str


def ok(what: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(Level.OK, what, found)


def note(what: str, found: str, fix: str = "") -> Finding:
    """Nothing wrong, but worth saying."""
    return Finding(Level.NOTE, what, found, "", fix)


def warning(what: str, found: str, allowed: str, fix: str) -> Finding:
    """Worse than it could be."""
    return Finding(Level.WARNING, what, found, allowed, fix)


def error(what: str, found: str, allowed: str, fix: str) -> Finding:
    """It will not serve like this."""
    return Finding(Level.ERROR, what, found, allowed, fix)


def exit_code(findings: Iterable[Finding]) -> int:
    """1 if there is an error, else 0."""
    return int(any(finding.level == Level.ERROR for finding in findings))
