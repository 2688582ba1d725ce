"""The plots of one run: what is drawn. How it looks is `plot_style`'s."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from loadtest.histogram import added, seconds_of
from loadtest.report.plot_style import (
    PATTERNS,
    SERIES,
    EventMark,
    add_legend,
    colour,
    mark_events,
    new_figure,
    shade_time,
    styled,
    time_axis,
    to_svg,
)
from loadtest.scorecard import latency
from loadtest.scorecard.fleet_cost import STATES, num_slices, paid_chips
from loadtest.scorecard.formats import (
    counted,
    format_number,
    format_ratio,
    format_seconds,
    format_usd,
)
from loadtest.scorecard.measure import Scorecard
from loadtest.scorecard.spread import Spread
from loadtest.scorecard.stored_run import StoredRun

# A curve of more points looks no different.
_CURVE_POINTS = 400
# Buckets of 1 % are drawn five at a time.
_BUCKETS_PER_BAR = 5
# What serves lies at the bottom, what is furthest from it on top.
_STACK = ("ready", "draining", *(state for state in reversed(STATES[:-2])))


@dataclass(frozen=True, slots=True)
class Plot:
    """The SVG element of one plot and the words around it."""

    name: str
    title: str
    note: str
    svg: str


def draw_plots(card: Scorecard, run: StoredRun) -> tuple[Plot, ...]:
    """Returns every plot that `run` has data for, in the order of the page."""
    with styled():
        over_time = [
            _latency_over_time(card, "ttft", "TTFT over time", card.timeline.ttft_scheduled_s),
            _latency_over_time(card, "tpot", "TPOT over time", card.timeline.tpot_s),
            _rates(card),
            _throughput(card),
            _in_flight(card),
            _errors(card),
        ]
        fleet = [_slices(card, name) for name in _classes(card)]
        cost = [_cost(card)] if card.fleet else []
        spreads = [_cdf(card, run), _gaps(run)]
    return tuple(plot for plot in (*over_time, *fleet, *cost, *spreads) if plot is not None)


def _over_time(
    card: Scorecard, height_in: float = 2.3, *, has_legend: bool = True
) -> tuple[Figure, Axes]:
    figure = new_figure(height_in, has_legend=has_legend)
    axes = figure.subplots()
    time_axis(axes, card.timeline.edges_s[-1])
    shade_time(axes, 0.0, card.run.warmup_s, "warm-up")
    mark_events(axes, [EventMark(event.number, event.at_s, event.until_s) for event in card.events])
    return figure, axes


def _latency_over_time(
    card: Scorecard, name: str, title: str, spreads: Sequence[Spread]
) -> Plot | None:
    if not any(spread.n for spread in spreads):
        return None
    figure, axes = _over_time(card, 2.6)
    worst_s: dict[str, float] = {}
    for point, tint, pattern in zip(("p50", "p95", "p99"), SERIES, PATTERNS, strict=False):
        values: list[float | None] = [getattr(spread, point) for spread in spreads]
        known = [value for value in values if value is not None]
        worst_s[point] = max(known)
        axes.plot(
            card.timeline.middles_s,
            [np.nan if value is None else value for value in values],
            color=colour(tint), linestyle=pattern, label=point,
            # A lone interval between two empty ones is no line.
            marker=".", markersize=3,
        )  # fmt: skip
    _seconds_axis(axes, "y")
    axes.set_ylabel(name.upper())
    add_legend(figure, axes)
    highest = ", ".join(f"{point} {format_seconds(value)}" for point, value in worst_s.items())
    note = "By the instant requests were due; logarithmic."
    return _plot(figure, name, title, note, f"Highest of any interval: {highest}.")


def _rates(card: Scorecard) -> Plot:
    figure, axes = _over_time(card)
    timeline = card.timeline
    series = {"asked": timeline.asked_per_s, "achieved": timeline.achieved_per_s}
    _steps(axes, timeline.edges_s, series, "requests/s")
    add_legend(figure, axes)
    rates = card.throughput
    asked, achieved = rates.asked_requests_per_s, rates.achieved_requests_per_s
    seen = f"In the steady window {format_number(asked)} requests/s were asked for and "
    seen += f"{format_number(achieved)} achieved."
    note = "Requests due and requests sent; where the lines part, the client was late."
    return _plot(figure, "rates", "Asked and achieved rate", note, seen)


def _throughput(card: Scorecard) -> Plot:
    figure, axes = _over_time(card, has_legend=False)
    series = {"output tokens/s": card.timeline.output_tokens_per_s}
    _steps(axes, card.timeline.edges_s, series, "tokens/s")
    mean = format_number(card.throughput.output_tokens_per_s)
    seen = f"On average {mean} output tokens/s in the steady window."
    note = "Of whole answers, spread evenly between their first and last token."
    return _plot(figure, "throughput", "Output throughput", note, seen)


def _in_flight(card: Scorecard) -> Plot:
    figure, axes = _over_time(card, has_legend=False)
    _steps(axes, card.timeline.edges_s, {"in flight": card.timeline.in_flight}, "requests")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    seen = f"At most {max(card.timeline.in_flight):,} at the end of an interval."
    return _plot(figure, "in-flight", "Requests in flight", "Sent and not ended.", seen)


def _errors(card: Scorecard) -> Plot | None:
    errors = _commonest(card.timeline.errors)
    if not errors:
        return None
    figure, axes = _over_time(card)
    middles_s, edges_s = card.timeline.middles_s, card.timeline.edges_s
    floor = np.zeros(len(middles_s))
    for index, (kind, counts) in enumerate(errors.items()):
        axes.bar(
            middles_s, counts, width=edges_s[1] - edges_s[0], bottom=floor, label=kind,
            color=colour(SERIES[index % len(SERIES)]), linewidth=0,
        )  # fmt: skip
        floor = floor + np.array(counts)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("requests")
    add_legend(figure, axes)
    totals = ", ".join(f"{sum(counts):,} {kind}" for kind, counts in errors.items())
    note = "When they ended, by kind; the warm-up's too."
    return _plot(figure, "errors", "Failed requests", note, f"In all: {totals}.")


def _commonest(errors: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns as many kinds as there are colours, with the rest as one."""
    ranked = sorted(errors.items(), key=lambda kind_and_counts: -sum(kind_and_counts[1]))
    if len(ranked) <= len(SERIES):
        return dict(ranked)
    shown, rest = ranked[: len(SERIES) - 1], ranked[len(SERIES) - 1 :]
    others = tuple(map(sum, zip(*(counts for _, counts in rest), strict=True)))
    return {**dict(shown), "other": others}


def _slices(card: Scorecard, compute_class: str) -> Plot:
    figure, axes = _over_time(card, 2.0)
    at_s = _fleet_edges_s(card)
    floor = np.zeros(len(card.fleet))
    for state in _STACK:
        counts = np.array([num_slices(sample, compute_class, state) for sample in card.fleet])
        if counts.any():
            axes.stairs(
                floor + counts, at_s, baseline=floor, fill=True, label=state,
                color=colour(state), linewidth=0,
            )  # fmt: skip
            floor = floor + counts
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("slices")
    axes.set_ylim(0, max(1.0, float(floor.max()) * 1.15))
    add_legend(figure, axes)
    ready = [num_slices(sample, compute_class, "ready") for sample in card.fleet]
    fewest, most = min(ready), max(ready)
    seen = f"Always {counted(most, 'ready slice')}."
    if fewest != most:
        seen = f"Between {fewest} and {counted(most, 'ready slice')}."
    title = f"Slices of compute class {compute_class}"
    return _plot(figure, f"slices-{_classes(card).index(compute_class)}", title, "By state.", seen)


def _cost(card: Scorecard) -> Plot:
    """Draws the cost in USD where every class has a price, otherwise in chips."""
    figure, axes = _over_time(card)
    prices = {
        class_use.compute_class: class_use.usd_per_chip_hour for class_use in card.cost.classes
    }
    is_priced = all(prices.get(name) is not None for name in _classes(card))
    series: dict[str, Sequence[float]] = {}
    for name in _classes(card):
        price = prices.get(name) if is_priced else 1.0
        series[name] = [paid_chips(sample, name) * (price or 0.0) for sample in card.fleet]
    _steps(axes, _fleet_edges_s(card), series, "USD per hour" if is_priced else "chips")
    add_legend(figure, axes)
    hours = f"{format_number(card.cost.chip_hours)} chip-hours in the steady window"
    seen = f"{hours}, {format_usd(card.cost.usd)}." if card.cost.usd is not None else f"{hours}."
    title = "Cost over time" if is_priced else "Paid chips over time"
    return _plot(figure, "cost", title, "From reservation to release, by compute class.", seen)


def _cdf(card: Scorecard, run: StoredRun) -> Plot | None:
    """Draws all three in one frame, since they are durations of the same requests."""
    laws: dict[str, tuple[latency.Latency, Spread]] = {
        "TTFT": (latency.ttft_scheduled_s, card.ttft_scheduled_s),
        "TPOT": (latency.tpot_s, card.tpot_s),
        "E2E": (latency.e2e_scheduled_s, card.e2e_scheduled_s),
    }
    if not any(spread.n for _, spread in laws.values()):
        return None
    figure = new_figure(3.2)
    axes = figure.subplots()
    seen: list[str] = []
    for (name, (law, spread)), tint, pattern in zip(laws.items(), SERIES, PATTERNS, strict=False):
        ordered = np.sort([value for request in run.judged if (value := law(request)) is not None])
        if not len(ordered):
            continue
        shares = np.arange(1, len(ordered) + 1) / len(ordered)
        kept = np.unique(np.linspace(0, len(ordered) - 1, _CURVE_POINTS).astype(int))
        axes.step(
            ordered[kept], shares[kept] * 100, where="post", label=name,
            color=colour(tint), linestyle=pattern,
        )  # fmt: skip
        seen.append(f"{name} p50 {format_seconds(spread.p50)}, p99 {format_seconds(spread.p99)}")
    axes.set_ylim(0, 101)
    axes.set_ylabel("% of requests")
    axes.set_xlabel("at most this long")
    _seconds_axis(axes, "x")
    add_legend(figure, axes)
    note = "TTFT and E2E from the scheduled instant; logarithmic."
    return _plot(figure, "cdf", "Distribution of latencies", note, f"{'; '.join(seen)}.")


def _gaps(run: StoredRun) -> Plot | None:
    counts = added(request.gap_counts for request in run.judged if request.is_ok)
    if not counts:
        return None
    bars: dict[int, int] = {}
    for bucket, count in counts.items():
        bar = bucket // _BUCKETS_PER_BAR
        bars[bar] = bars.get(bar, 0) + count
    total = sum(bars.values())
    first, last = min(bars), max(bars)
    edges_s = [seconds_of(bar * _BUCKETS_PER_BAR) for bar in range(first, last + 2)]
    shares = [100 * bars.get(bar, 0) / total for bar in range(first, last + 1)]
    figure = new_figure(2.6, has_legend=False)
    axes = figure.subplots()
    axes.stairs(shares, edges_s, fill=True, color=colour("blue"), linewidth=0)
    axes.set_ylabel("% of gaps, log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:g}"))
    axes.set_xlabel("gap between two events that carry tokens")
    _seconds_axis(axes, "x")
    commonest = max(bars, key=lambda bar: bars[bar])
    middle_s = seconds_of(commonest * _BUCKETS_PER_BAR + _BUCKETS_PER_BAR // 2)
    seen = f"{total:,} gaps; most, {format_ratio(bars[commonest] / total)}, "
    seen += f"are about {format_seconds(middle_s)}."
    note = "ICL; equal to ITL only where each event carries one token."
    return _plot(figure, "gaps", "Gaps between tokens", note, seen)


def _classes(card: Scorecard) -> list[str]:
    return sorted({name for sample in card.fleet for name in sample.slices})


def _fleet_edges_s(card: Scorecard) -> list[float]:
    """Returns where each sample begins to hold, and where the last one ends."""
    return [*(sample.at_s for sample in card.fleet), max(card.run.ended_s, card.fleet[-1].at_s)]


def _steps(
    axes: Axes, edges_s: Sequence[float], series: Mapping[str, Sequence[float]], unit: str
) -> None:
    for (name, values), tint, pattern in zip(series.items(), SERIES, PATTERNS, strict=False):
        axes.stairs(
            values, edges_s, baseline=None, label=name,
            color=colour(tint), linestyle=pattern, linewidth=1.6,
        )  # fmt: skip
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)


def _seconds_axis(axes: Axes, which: str) -> None:
    """Makes an axis logarithmic, with durations in words at 1, 2 and 5 of each power of ten."""
    axis = axes.yaxis if which == "y" else axes.xaxis
    set_scale: Callable[[str], None] = axes.set_yscale if which == "y" else axes.set_xscale
    set_scale("log")
    low, high = axes.get_ylim() if which == "y" else axes.get_xlim()
    steps = (1.0,) if high > 1000 * low else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
    axis.set_minor_formatter(NullFormatter())


def _plot(figure: Figure, name: str, title: str, note: str, seen: str) -> Plot:
    svg = to_svg(figure, f"plot-{name}", title, f"{note} {seen}")
    return Plot(name, title, f"{note} {seen}", svg)
