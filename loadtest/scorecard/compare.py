"""Compares two runs: every difference, and whether it is more than chance. Pure.

A difference is shown when the 95 % interval of its bootstrap leaves zero out. The interval knows
the spread within each run, not that from one run to the next: that takes several pairs of runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np

from loadtest.errors import ExitCode
from loadtest.scorecard import latency
from loadtest.scorecard.bootstrap import Figure, mean_figure, percentile_figure, share_figure
from loadtest.scorecard.formats import DASH, format_number, format_ratio, format_seconds
from loadtest.scorecard.measure import Scorecard, is_good, measure
from loadtest.scorecard.slo import ServiceLevel
from loadtest.scorecard.spread import SHARES
from loadtest.scorecard.stored_run import StoredRun, plan_lines
from loadtest.scorecard.token_flow import TokenFlow

VERSION = 1
# Throughput is drawn by stretches of time: long against a token, short against a run.
STRETCH_S = 5.0
_MORE_IS_BETTER = frozenset({"throughput", "goodput"})
_POINTS = ("p50", "p95", "p99")
_INTERVAL = (2.5, 97.5)  # percentiles of the draws: the middle 95 %
# What two runs are compared for, or what no request notices.
_PLACES = frozenset({"url", "answers_file", "api_key_env"})


class ComparisonOutcome(StrEnum):
    """The outcome of a comparison of one metric, for run B."""

    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE_SHOWN = "no_difference_shown"
    NOT_JUDGED = "not_judged"  # a run is invalid, or has too few samples


class DifferenceUnit(StrEnum):
    """The unit of a metric."""

    SECONDS = "s"
    RATIO = "ratio"
    TOKENS_PER_S = "tokens/s"


@dataclass(frozen=True, slots=True)
class Difference:
    """The values of one metric in both runs; `None` without samples. `n_a` and `n_b` count samples.

    `low` and `high` bound the 95 % interval of `difference`, which is B less A.
    """

    metric: str
    unit: DifferenceUnit
    a: float | None
    b: float | None
    n_a: int
    n_b: int
    difference: float | None
    low: float | None
    high: float | None
    outcome: ComparisonOutcome


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two runs.

    `invalid` states why nothing is judged, `cautions` what to beware of. `plan_differences` are
    differences between the plans of the runs. `sentences` state every difference in words.
    """

    version: int
    a: str
    b: str
    invalid: tuple[str, ...]
    cautions: tuple[str, ...]
    plan_differences: tuple[str, ...]
    differences: tuple[Difference, ...]
    sentences: tuple[str, ...]

    @property
    def exit_code(self) -> ExitCode:
        """The exit code: `CLIENT_INVALID` when a run is, else `OK`: a difference is no failure."""
        return ExitCode.CLIENT_INVALID if self.invalid else ExitCode.OK

    def to_json(self) -> bytes:
        """The comparison as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


@dataclass(frozen=True, slots=True)
class NamedRun:
    """The run and its name."""

    name: str
    run: StoredRun


def compare(a: NamedRun, b: NamedRun, level: ServiceLevel, seed: int) -> Comparison:
    """Compares run B with run A. Goodput is that of `level`, if it has any."""
    measured = [(named, measure(named.run, level, None)) for named in (a, b)]
    invalid = tuple(
        f"{named.name}: {reason}" for named, card in measured for reason in card.client.reasons
    )
    plan_differences = tuple(_plan_differences(a.run, b.run))
    metrics_a, metrics_b = (_metrics(named.run, card, level) for named, card in measured)
    chance = np.random.default_rng(seed)
    differences = tuple(
        _difference(name, unit, figure_a, metrics_b[name][1], chance, is_judged=not invalid)
        for name, (unit, figure_a) in metrics_a.items()
    )
    cautions = [f"{named.name}: {warning}" for named, card in measured for warning in card.warnings]
    if plan_differences:
        cautions.append("the runs were asked for different things: " + "; ".join(plan_differences))
    sentences = tuple(map(_sentence, differences))
    return Comparison(
        VERSION, a.name, b.name, invalid, tuple(cautions), plan_differences, differences, sentences
    )


def format_value(value: float | None, unit: DifferenceUnit) -> str:
    """Returns a value of a metric, for a reader."""
    match unit:
        case DifferenceUnit.SECONDS:
            return format_seconds(value)
        case DifferenceUnit.RATIO:
            return format_ratio(value)
        case DifferenceUnit.TOKENS_PER_S:
            return format_number(value)


def format_signed(value: float | None, unit: DifferenceUnit) -> str:
    """Returns a difference of a metric, for a reader."""
    if value is None:
        return DASH
    sign = "+" if value > 0 else "\N{MINUS SIGN}" if value < 0 else ""
    words = format_value(abs(value), unit)
    # Of two shares, per cent would leave open what they are per cent of.
    return sign + (words.replace("%", "points") if unit is DifferenceUnit.RATIO else words)


def format_interval(found: Difference) -> str:
    """The interval of a difference, for a reader."""
    if found.low is None or found.high is None:
        return DASH
    return f"{format_signed(found.low, found.unit)} to {format_signed(found.high, found.unit)}"


def _metrics(
    run: StoredRun, card: Scorecard, level: ServiceLevel
) -> dict[str, tuple[DifferenceUnit, Figure]]:
    """Returns everything that is compared, by name; the same names for every run."""
    judged = run.judged
    metrics: dict[str, tuple[DifferenceUnit, Figure]] = {}
    laws: dict[str, latency.Latency] = {
        "TTFT": latency.ttft_scheduled_s,
        "TPOT": latency.tpot_s,
        "E2E": latency.e2e_scheduled_s,
    }
    for name, law in laws.items():
        values = [law(request) for request in judged]
        for point in _POINTS:
            figure = percentile_figure(values, SHARES[point])
            metrics[f"{name} {point}"] = DifferenceUnit.SECONDS, figure
        metrics[f"{name} mean"] = DifferenceUnit.SECONDS, mean_figure(values)
    metrics["throughput"] = DifferenceUnit.TOKENS_PER_S, mean_figure(_stretches(run))
    if level.goodput is not None:
        good = sum(is_good(request, level.goodput) for request in judged)
        metrics["goodput"] = DifferenceUnit.RATIO, share_figure(good, card.requests.total)
    errors = share_figure(card.requests.failed, card.requests.total)
    metrics["error ratio"] = DifferenceUnit.RATIO, errors
    return metrics


def _stretches(run: StoredRun) -> list[float]:
    """Returns output tokens per second in equal stretches of the steady window."""
    flow = TokenFlow(run.requests)
    if flow.is_empty or not run.window_length_s:
        return []
    num = max(1, round(run.window_length_s / STRETCH_S))
    edges_s = np.linspace(*run.window_s, num + 1)
    received = [flow.received_by(float(edge_s)) for edge_s in edges_s]
    return [float(rate) for rate in np.diff(received) * num / run.window_length_s]


def _difference(
    name: str,
    unit: DifferenceUnit,
    figure_a: Figure,
    figure_b: Figure,
    chance: np.random.Generator,
    *,
    is_judged: bool,
) -> Difference:
    difference = low = high = None
    if figure_a.value is not None and figure_b.value is not None:
        difference = figure_b.value - figure_a.value
    if figure_a.draw is not None and figure_b.draw is not None:
        drawn = figure_b.draw(chance) - figure_a.draw(chance)
        low, high = (float(bound) for bound in np.percentile(drawn, _INTERVAL))
    outcome = ComparisonOutcome.NOT_JUDGED
    if is_judged and low is not None and high is not None:
        outcome = _outcome(low, high, is_more_better=name in _MORE_IS_BETTER)
    return Difference(
        name, unit, figure_a.value, figure_b.value, figure_a.n, figure_b.n,
        difference, low, high, outcome,
    )  # fmt: skip


def _outcome(low: float, high: float, *, is_more_better: bool) -> ComparisonOutcome:
    if low <= 0 <= high:
        return ComparisonOutcome.NO_DIFFERENCE_SHOWN
    return ComparisonOutcome.BETTER if (low > 0) == is_more_better else ComparisonOutcome.WORSE


def _sentence(found: Difference) -> str:
    a, b = format_value(found.a, found.unit), format_value(found.b, found.unit)
    counts = f"n {found.n_a:,} and {found.n_b:,}"
    if found.difference is None:
        return f"{found.metric}: {a} and {b}; not both runs have samples ({counts})"
    if found.low is None or found.high is None:
        return f"{found.metric}: {a} and {b}; too few samples to tell ({counts})"
    change = format_signed(found.difference, found.unit)
    proof = f"{change}, 95 % interval {format_interval(found)}; {counts}"
    match found.outcome:
        case ComparisonOutcome.NOT_JUDGED:
            return f"{found.metric}: {a} and {b}, not judged ({proof})"
        case ComparisonOutcome.NO_DIFFERENCE_SHOWN:
            return f"{found.metric}: no difference shown, {a} and {b} ({proof})"
        case ComparisonOutcome.BETTER | ComparisonOutcome.WORSE:
            return f"{found.metric} is {found.outcome}: {b} instead of {a} ({proof})"


def _plan_differences(a: StoredRun, b: StoredRun) -> Iterator[str]:
    lines_a, lines_b = (_comparable(stored) for stored in (a, b))
    for name in sorted(lines_a.keys() | lines_b.keys()):
        if lines_a.get(name) != lines_b.get(name):
            yield f"{name} {lines_a.get(name, DASH)} and {lines_b.get(name, DASH)}"


def _comparable(run: StoredRun) -> Mapping[str, str]:
    start = run.start
    lines = {
        "duration_s": f"{start.duration_s:g}",
        "warmup_s": f"{start.warmup_s:g}",
        "num_workers": str(start.num_workers),
        "seed": str(start.seed),
    }
    plan = dict(plan_lines(start.plan))
    return {name: words for name, words in (plan | lines).items() if name not in _PLACES}
