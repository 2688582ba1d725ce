"""The report's drawings: load, slices, cost, latency and goodput over time, policies compared."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MultipleLocator

from autoscaling.simulator.comparison import PolicyComparison, PolicyResult
from loadtest.report.plot_style import (
    PATTERNS,
    SERIES,
    add_legend,
    colour,
    new_figure,
    styled,
    to_svg,
)
from serving.domain.slice_lifecycle import HELD_STATES, WAITING, SliceState

_HOUR_S = 3600.0
# A screen has no more columns than that; a drawing of every tick would only be larger.
_MOST_POINTS = 1200
_F64 = npt.NDArray[np.float64]


def draw_plots(comparison: PolicyComparison, shown: PolicyResult) -> Iterator[str]:
    """Yields each drawing as an SVG element, in the order of the page."""
    with styled():
        yield _load(shown)
        yield _slices(shown)
        yield _states(shown)
        yield _cost(comparison)
        yield _ttft(comparison, shown)
        yield _goodput(shown)
        yield _policies(comparison)


def _load(shown: PolicyResult) -> str:
    timeline = shown.course.timeline
    figure = new_figure(2.6)
    axes = figure.subplots()
    at_s, rate = _thinned(timeline.at_s, timeline.requests_per_s)
    axes.plot(at_s, rate, color=colour("blue"), label="requests/s", linewidth=1.0)
    axes.set_ylabel("requests/s")
    _over_hours(figure, axes, timeline.end_s)
    return to_svg(figure, "load", "Load", "Requests per second over the run")


def _slices(shown: PolicyResult) -> str:
    """Draws held slices by class, stacked, with the demand as a line."""
    timeline = shown.course.timeline
    figure = new_figure(3.2)
    axes = figure.subplots()
    classes = sorted({name for name, _ in timeline.slices})
    held = []
    for name in classes:
        parts = [counts for (each, state), counts in timeline.slices.items()
                 if each == name and state in HELD_STATES]  # fmt: skip
        held.append(np.sum(parts, axis=0) if parts else np.zeros(len(timeline.at_s)))
    thin = [_thinned(timeline.at_s, each)[1] for each in held]
    at_s, demand = _thinned(timeline.at_s, timeline.demand_slices)
    shades = [colour(SERIES[number % len(SERIES)]) for number in range(len(classes))]
    axes.stackplot(at_s, *thin, labels=classes, colors=shades, alpha=0.75, linewidth=0, step="post")
    if not np.isnan(demand).all():
        axes.plot(at_s, demand, color=colour("ink"), linewidth=1.0, label="demand")
    axes.set_ylabel("slices held")
    _over_hours(figure, axes, timeline.end_s)
    return to_svg(figure, "slices", "Slices by compute class", "Slices held of each class, stacked")


def _states(shown: PolicyResult) -> str:
    timeline = shown.course.timeline
    figure = new_figure(2.8)
    axes = figure.subplots()
    order = [each for each in SliceState if each in HELD_STATES or each in WAITING]
    # The state that most slices are in lies at the bottom.
    order = [SliceState.READY, *(each for each in order if each != SliceState.READY)]
    present = [each for each in order if any(state == each for _, state in timeline.slices)]
    stacks = []
    for state in present:
        parts = [counts for (_, each), counts in timeline.slices.items() if each == state]
        stacks.append(_thinned(timeline.at_s, np.sum(parts, axis=0))[1])
    at_s = _thinned(timeline.at_s, timeline.at_s)[0]
    shades = [colour(str(each)) for each in present]
    names = [str(each) for each in present]
    axes.stackplot(at_s, *stacks, labels=names, colors=shades, linewidth=0, step="post")
    axes.set_ylabel("slices")
    _over_hours(figure, axes, timeline.end_s)
    return to_svg(figure, "states", "Slices by state", "Wanted and held slices by state, stacked")


def _cost(comparison: PolicyComparison) -> str:
    figure = new_figure(3.0)
    axes = figure.subplots()
    for number, result in enumerate(comparison.policies):
        timeline = result.course.timeline
        at_s, usd = _thinned(timeline.at_s, timeline.usd_per_hour, 400)
        line = PATTERNS[number % len(PATTERNS)]
        axes.plot(at_s, usd, label=result.name, linewidth=1.2, color=_shade(number), linestyle=line)
    axes.set_ylabel("USD per hour")
    axes.set_ylim(bottom=0)
    _over_hours(figure, axes, comparison.duration_s)
    return to_svg(figure, "cost", "Cost per hour", "Dollars per hour of every policy over the run")


def _ttft(comparison: PolicyComparison, shown: PolicyResult) -> str:
    service = shown.course.service
    figure = new_figure(2.6)
    axes = figure.subplots()
    axes.plot(service.at_s, service.ttft_p50_s, color=colour("blue"), label="p50")
    axes.plot(service.at_s, service.ttft_p99_s, color=colour("orange"), label="p99",
              linestyle=PATTERNS[1])  # fmt: skip
    # Of the shortest prompts, where it depends on them.
    axes.axhline(comparison.objectives.ttft_s, color=colour("event"), linewidth=1,
                 label="objective")  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("TTFT, s")
    _over_hours(figure, axes, comparison.duration_s)
    return to_svg(figure, "ttft", "Time to first token", "TTFT p50 and p99, and the objective")


def _goodput(shown: PolicyResult) -> str:
    service = shown.course.service
    figure = new_figure(2.4)
    axes = figure.subplots()
    axes.plot(service.at_s, service.arrivals_per_s, color=colour("quiet"), label="arrivals/s")
    axes.plot(service.at_s, service.goodput_per_s, color=colour("teal"), linestyle=PATTERNS[1],
              label="goodput/s (TTFT and TPOT both met)")  # fmt: skip
    axes.set_ylabel("requests/s")
    axes.set_ylim(bottom=0)
    _over_hours(figure, axes, shown.course.timeline.end_s)
    return to_svg(figure, "goodput", "Goodput", "Arrivals per second and those that met both")


def _policies(comparison: PolicyComparison) -> str:
    """Draws bars: the cost over the lower bound, and the share that missed an objective."""
    figure = new_figure(0.9 + 0.32 * len(comparison.policies))
    left, right = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=0.15, wspace=0.08)
    names = [each.name for each in comparison.policies]
    costs = [each.spread("vs_lower_bound") for each in comparison.policies]
    met = [each.spread("slo_ratio") for each in comparison.policies]
    shades = [_shade(number) for number in range(len(names))]
    ink = {"ecolor": colour("ink"), "elinewidth": 1.0}
    cost_margins = [each.margin or 0.0 for each in costs]
    left.barh(names, [each.mean for each in costs], xerr=cost_margins, color=shades, error_kw=ink)
    left.axvline(1.0, color=colour("ink"), linewidth=1)
    left.set_xlabel("cost, as a multiple of the lower bound")
    missed = [100 * (1 - each.mean) for each in met]
    met_margins = [100 * (each.margin or 0.0) for each in met]
    right.barh(names, missed, xerr=met_margins, color=shades, error_kw=ink)
    right.axvline(1.0, color=colour("event"), linewidth=1)
    right.set_xlim(left=0)
    right.set_xlabel("requests that missed an objective, % (line: 1 %)")
    left.invert_yaxis()
    description = "Per policy, the cost over the lower bound and the share outside the objectives"
    return to_svg(figure, "policies", "Policies compared", description)


def _shade(number: int) -> str:
    palette = (*SERIES, "quiet")
    return colour(palette[number % len(palette)])


def _over_hours(figure: Figure, axes: Axes, end_s: float) -> None:
    """Labels the time in hours (in tenths where the run is short) and the series."""
    add_legend(figure, axes)
    axes.set_xlim(0, end_s)
    axes.set_xlabel("hours after the start")
    step_h = next(each for each in (0.1, 0.25, 1.0, 2.0, 6.0, 24.0) if end_s / _HOUR_S / each <= 14)
    axes.xaxis.set_major_locator(MultipleLocator(step_h * _HOUR_S))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at_s, _: f"{at_s / _HOUR_S:g}"))


def _thinned(
    at_s: npt.NDArray[np.float64], values: npt.ArrayLike, most: int = _MOST_POINTS
) -> tuple[_F64, _F64]:
    """Returns the first instants of at most `most` equal stretches, and the means over them."""
    series = np.asarray(values, np.float64)
    width = -(-len(series) // most)
    whole = len(series) // width * width
    means = series[:whole].reshape(-1, width).mean(axis=1)
    return at_s[:whole:width], means
