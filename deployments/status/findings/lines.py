"""Prints findings for people: what is wrong on one line or more, what to do below. Pure."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from deployments.status.durations import format_duration
from deployments.status.findings.finding import FleetFinding, Severity
from deployments.terminal import printable

# Wide enough for a pod's name and a command, and no wider than a terminal beside another one.
_WIDTH = 110
_INDENT = " " * 10
_PLURALS = {
    Severity.CRITICAL: "critical",
    Severity.WARNING: "warnings",
    Severity.NOTE: "notes",
}


def finding_lines(findings: Sequence[FleetFinding]) -> Iterator[str]:
    """Yields the findings, with how many there are of each severity; one line if there are none."""
    if not findings:
        yield "nothing is wrong"
        return
    counts = Counter(each.severity for each in findings)
    words = [
        f"{counts[each]} {_PLURALS[each] if counts[each] > 1 else each}"
        for each in Severity
        if counts[each]
    ]
    yield f"found: {', '.join(words)}"
    for each in findings:
        since = "" if each.since_s is None else f" [{format_duration(each.since_s)}]"
        head = f"{each.severity.upper():<10}{each.subject}{since}: {each.what}"
        yield from _wrapped(printable(head), _INDENT)
        yield from _wrapped(f"{_INDENT}-> {printable(each.action)}", f"{_INDENT}   ")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
