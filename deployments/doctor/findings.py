"""Defines the result of a check: one finding about one subject, with its fix. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"  # true, and good to know: what is simulated, what was not checked
    WARNING = "warning"  # it serves, but worse than it could, or it could not be found out
    ERROR = "error"  # it will not serve, or not what was asked for


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `allowed` and `fix` are empty where there is nothing to do."""

    level: Level
    what: str
    found: str
    allowed: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The reason why a value could not be read in time."""

    reason: str


def ok(what: str, found: str) -> Finding:
    """Reports that there is nothing to do."""
    return Finding(Level.OK, what, found)


def note(what: str, found: str, fix: str = "") -> Finding:
    """Reports a fact that is no fault."""
    return Finding(Level.NOTE, what, found, "", fix)


def warning(what: str, found: str, allowed: str, fix: str) -> Finding:
    """Reports a setting that works, but not well."""
    return Finding(Level.WARNING, what, found, allowed, fix)


def error(what: str, found: str, allowed: str, fix: str) -> Finding:
    """Reports a fault that prevents serving."""
    return Finding(Level.ERROR, what, found, allowed, fix)


def exit_code(findings: Iterable[Finding]) -> int:
    """Returns 1 if there is an error, else 0."""
    return int(any(finding.level == Level.ERROR for finding in findings))
