"""The tables of `docs/results/load-test-clients.md`: what each client reports, and its error."""

import datetime
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.client_figures import Figures, Pair, Truth
from benchmarks.clients import Case, Client, Reported
from benchmarks.measured_part import with_measured

REPORT = Path(__file__).resolve().parents[1] / "docs/results/load-test-clients.md"
_SERVER = "the server itself"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Within so much of the true value, as a ratio of it or in its own unit, whichever is more."""

    ratio: float
    absolute: float

    def holds(self, value: float, true: float) -> bool:
        """Whether `value` is near enough to `true`."""
        return abs(value - true) <= max(self.ratio * true, self.absolute)


# The p50 of latencies is what our own tests hold our client to against its golden server; p99 of
# 200 requests is the third worst, which one pause of a shared machine decides. TPOT is a mean over
# an answer already.
_TOLERANCES = {
    "TTFT": (Tolerance(0.02, 2.0), Tolerance(0.05, 10.0)),
    "TPOT": (Tolerance(0.02, 0.0), Tolerance(0.05, 0.0)),
    "E2E": (Tolerance(0.02, 2.0), Tolerance(0.05, 10.0)),
}
_THROUGHPUT = Tolerance(0.03, 0.0)

_Figure = Callable[[Reported], float]


@dataclass(frozen=True, slots=True)
class _Compared:
    """A figure of a client, and what it ought to be."""

    name: str
    tolerance: Tolerance
    said: _Figure
    true: _Figure


def write_report(found: Sequence[Reported]) -> None:
    """Puts the tables into `REPORT`; raises as `updated`."""
    REPORT.write_text(updated(REPORT.read_text(encoding="utf-8"), found), encoding="utf-8")


def updated(page: str, found: Sequence[Reported]) -> str:
    """The page with the tables of `found` in place of its old ones.

    Raises:
        ValueError: the lines that they stand between are not there.
    """
    parts = [_conditions()]
    for case in dict.fromkeys(each.case for each in found):
        runs = [each for each in found if each.case == case]
        parts += [f"### {case.name[0].upper()}{case.name[1:]}", _table(runs), _verdicts(case, runs)]
    parts += ["### Beside the figures", _beside(found)]
    return with_measured(page, lambda: "\n\n".join(parts))


def _conditions() -> str:
    today = datetime.datetime.now(datetime.UTC).date()
    return (
        f"Measured on {today}, {os.cpu_count()} CPU cores ({platform.machine()}), "
        f"Python {platform.python_version()}. Median of the rounds (and their range)."
    )


def _table(runs: Sequence[Reported]) -> str:
    lines = [
        "| | requests | TTFT p50 ms | p99 | TPOT p50 ms | p99 | E2E p50 ms | p99 | tokens/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for client, of_client in _by_client(runs):
        said = [each.said for each in of_client]
        counts = _range([each.requests for each in said], 0)
        rate = _range([each.tokens_per_s for each in said], 0)
        lines.append(f"| {client} | {counts} | {_latencies(said)} | {rate} |")
        truths = [each.truth for each in of_client if each.truth is not None]
        if truths:
            steady = _range([each.steady_tokens_per_s for each in truths], 0)
            whole = _range([each.whole_tokens_per_s for each in truths], 0)
            words = f"steady {steady}, whole {whole}"
            lines.append(f"| {_SERVER} | {counts} | {_latencies(truths)} | {words} |")
    return "\n".join(lines)


def _latencies(rows: Sequence[Figures] | Sequence[Truth]) -> str:
    columns = [
        _pairs([each.ttft_ms for each in rows], 1),
        _pairs([each.tpot_ms for each in rows], 2),
        _pairs([each.e2e_ms for each in rows], 0),
    ]
    return " | ".join(columns)


def _verdicts(case: Case, runs: Sequence[Reported]) -> str:
    """Per client and figure the difference that is largest over the rounds."""
    compared = list(_compared(case, runs))
    reference = _SERVER if case.is_golden else f"{Client.SLICEWISE} (median)"
    lines = [
        f"| largest difference from {reference} | {' | '.join(each.name for each in compared)} |",
        "|---|" + "---|" * len(compared),
    ]
    for client, of_client in _by_client(runs):
        if case.is_golden or client is not Client.SLICEWISE:
            cells = [_worst(each, of_client) for each in compared]
            lines.append(f"| {client} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _compared(case: Case, runs: Sequence[Reported]) -> Iterator[_Compared]:
    """What is compared: with the truth of the same requests, or with the median of our runs."""
    latencies: dict[str, Callable[[Figures | Truth], Pair]] = {
        "TTFT": lambda each: each.ttft_ms,
        "TPOT": lambda each: each.tpot_ms,
        "E2E": lambda each: each.e2e_ms,
    }
    for name, pair_of in latencies.items():
        for at, point in enumerate(("p50", "p99")):
            yield _latency(f"{name} {point} ms", _TOLERANCES[name][at], pair_of, at, runs)
    if case.is_golden:
        yield _Compared("tokens/s", _THROUGHPUT, lambda run: run.said.tokens_per_s, _tokens_per_s)


def _latency(
    name: str,
    tolerance: Tolerance,
    pair_of: Callable[[Figures | Truth], Pair],
    at: int,
    runs: Sequence[Reported],
) -> _Compared:
    ours = [pair_of(run.said)[at] for run in runs if run.client is Client.SLICEWISE]

    def true(run: Reported) -> float:
        return statistics.median(ours) if run.truth is None else pair_of(run.truth)[at]

    return _Compared(name, tolerance, lambda run: pair_of(run.said)[at], true)


def _tokens_per_s(run: Reported) -> float:
    """By the client's own definition: ours is of the steady window, the others' has the tail."""
    assert run.truth is not None, "asked of a golden server alone"
    is_steady = run.client is Client.SLICEWISE
    return run.truth.steady_tokens_per_s if is_steady else run.truth.whole_tokens_per_s


def _worst(compared: _Compared, runs: Sequence[Reported]) -> str:
    worst = max(runs, key=lambda run: abs(compared.said(run) - compared.true(run)))
    said, true = compared.said(worst), compared.true(worst)
    is_in_ms = compared.name.endswith("ms")
    difference = f"{said - true:+.2f}" if is_in_ms else f"{said / true - 1:+.1%}"
    return difference if compared.tolerance.holds(said, true) else f"**{difference}**"


def _beside(found: Sequence[Reported]) -> str:
    """What stands in no column: the clients' own queues, prompts, and guidellm's own TPOT."""
    lines = [
        "| | | sent late by, p99 ms | prompt tokens | failed | says of itself |",
        "|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(each.case for each in found):
        for client, runs in _by_client([each for each in found if each.case == case]):
            said = [each.said for each in runs]
            faults = sorted({each.fault for each in said if each.fault is not None})
            lines.append(
                f"| {case.name} | {client} | {_range([each.queue_p99_ms for each in said])} "
                f"| {_range([each.input_tokens for each in said], 0)} "
                f"| {sum(each.failed for each in said)} | {'; '.join(faults) or 'nothing'} |"
            )
    mixed = [each.said.mixed_tpot_ms[0] for each in found if each.said.mixed_tpot_ms is not None]
    if mixed:
        words = "guidellm's own TPOT, which has the first token in it"
        lines += ["", f"{words}: p50 {_range(mixed, 2)} ms."]
    return "\n".join(lines)


def _by_client(runs: Sequence[Reported]) -> Iterator[tuple[Client, list[Reported]]]:
    for client in Client:
        of_client = [each for each in runs if each.client is client]
        if of_client:
            yield client, of_client


def _pairs(pairs: Sequence[Pair], places: int) -> str:
    return " | ".join(_range([each[at] for each in pairs], places) for at in (0, 1))


def _range(values: Sequence[float], places: int = 1) -> str:
    """The median, and the range where there is one to speak of."""
    low, middle, high = (
        f"{value:,.{places}f}" for value in (min(values), statistics.median(values), max(values))
    )
    return middle if low == high else f"{middle} ({low} to {high})"
