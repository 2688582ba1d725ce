"""The tables of `docs/results/conversations.md`, from the record beside it.

`python -m benchmarks.conversations.report` writes them anew from the record, without a run.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.conversations.loads import PACED_LOADS
from benchmarks.conversations.records import (
    BEFORE,
    OURS,
    REPORT,
    SIMULATED,
    Part,
    Record,
    Run,
    read_record,
)
from benchmarks.measured_part import with_measured

_COMMAND = "python -m benchmarks conversations --only"
Figure = Callable[[Run], float]
# How each is said, and how a run has it: times in ms, shares in percent.
_FIGURES: tuple[tuple[str, Figure], ...] = (
    ("TTFT p50 ms", lambda run: 1e3 * run.ttft_s(0.5)),
    ("TTFT p90 ms", lambda run: 1e3 * run.ttft_s(0.9)),
    ("TTFT p99 ms", lambda run: 1e3 * run.ttft_s(0.99)),
    ("whole answer p50 ms", lambda run: 1e3 * run.whole_s(0.5)),
    ("whole answer p90 ms", lambda run: 1e3 * run.whole_s(0.9)),
    ("cached %", lambda run: 100 * run.cached_ratio),
)


def said_of(run: Run) -> str:
    """A line about one run."""
    figures = ", ".join(f"{name} {figure(run):.0f}" for name, figure in _FIGURES)
    return f"{run.load} of {run.system}, pair {run.pair}: {len(run.turns)} requests, {figures}"


def write_report() -> Path:
    """Puts the tables of the record into the page; raises as `updated`."""
    REPORT.write_text(updated(REPORT.read_text(encoding="utf-8"), read_record()), encoding="utf-8")
    return REPORT


def updated(page: str, record: Record) -> str:
    """Returns the page with the tables of the record in place of its old ones.

    Raises:
        ValueError: the lines that they stand between are not there.
    """
    return with_measured(page, lambda: "\n\n".join(_sections(record)))


def _sections(record: Record) -> Iterator[str]:
    if record.paced is not None:
        yield "## Paced engines, real and simulated"
        yield _conditions(record.paced, "paced")
        yield _paced_table(record.paced.runs)
    if record.vllm is not None:
        yield "## vLLM on CPU, beside a07807c"
        yield _conditions(record.vllm, "vllm")
        yield _vllm_table(record.vllm.runs)


def _conditions(part: Part, name: str) -> str:
    others = [each.other_cores for each in part.runs if each.other_cores is not None]
    return (
        f"Measured on {part.date}, {part.machine}, Python {part.python}, commit {part.commit}, by "
        f"`{_COMMAND} {name}`. Other processes used {min(others):.2f} to {max(others):.2f} cores."
    )


def _paced_table(runs: Sequence[Run]) -> str:
    names = " | ".join(name for name, _ in _FIGURES)
    lines = [
        f"| load | conversations/s | requests | | {names} |",
        "|---|---|---|---|" + "---|" * len(_FIGURES),
    ]
    for load in PACED_LOADS:
        of_load = {each.system: each for each in runs if each.load == load.name}
        live, twin = of_load[OURS], of_load[SIMULATED]
        named = f"| {load.name} | {load.conversations_per_s:g} | {len(live.turns)}"
        rows = {
            "real": [f"{figure(live):.1f}" for _, figure in _FIGURES],
            "simulated": [f"{figure(twin):.1f}" for _, figure in _FIGURES],
            "difference": [f"{figure(live) - figure(twin):+.1f}" for _, figure in _FIGURES],
        }
        lines += [f"{named} | {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join(lines)


def _vllm_table(runs: Sequence[Run]) -> str:
    pairs = sorted({each.pair for each in runs})
    ours = [_of(runs, OURS, pair) for pair in pairs]
    theirs = [_of(runs, BEFORE, pair) for pair in pairs]
    counts = [f"{sum(len(each.turns) for each in runs):,}" for runs in (ours, theirs)]
    lines = [
        f"{len(pairs)} pairs, {' and '.join(counts)} requests. Medians of the pairs (smallest to "
        "largest).",
        "",
        "| | Slicewise | a07807c | Slicewise over a07807c |",
        "|---|---|---|---|",
    ]
    for name, figure in _FIGURES:
        ratios = [figure(one) / figure(other) for one, other in zip(ours, theirs, strict=True)]
        own, before = _middle(map(figure, ours), ".0f"), _middle(map(figure, theirs), ".0f")
        lines.append(f"| {name} | {own} | {before} | **{_middle(ratios, '.2f')}** |")
    return "\n".join(lines)


def _of(runs: Sequence[Run], system: str, pair: int) -> Run:
    (found,) = (each for each in runs if (each.system, each.pair) == (system, pair))
    return found


def _middle(values: Iterator[float] | list[float], form: str) -> str:
    known = sorted(values)
    low, high = (format(each, form) for each in (known[0], known[-1]))
    return f"{format(statistics.median(known), form)} ({low} to {high})"


if __name__ == "__main__":
    write_report()
