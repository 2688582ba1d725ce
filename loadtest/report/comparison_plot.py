"""The plot of a comparison: every difference in per cent of run A, with its interval."""

from matplotlib.ticker import FuncFormatter

from loadtest.report.plot_style import colour, new_figure, styled, to_svg
from loadtest.report.plots import Plot
from loadtest.scorecard.compare import Comparison, ComparisonOutcome, Difference, DifferenceUnit

_COLOURS = {ComparisonOutcome.BETTER: "ready", ComparisonOutcome.WORSE: "event"}
_MARKERS = {ComparisonOutcome.BETTER: "D", ComparisonOutcome.WORSE: "X"}
_ROW_IN = 0.28


def draw_comparison(comparison: Comparison) -> Plot | None:
    """Draws the comparison; `None` when nothing can be related to run A."""
    rows = [found for found in comparison.differences if _is_relative(found)]
    if not rows:
        return None
    with styled():
        figure = new_figure(1.0 + _ROW_IN * len(rows), has_legend=False)
        axes = figure.subplots()
        axes.axvline(0, color=colour("quiet"), linewidth=1)
        for place, found in enumerate(rows):
            low, middle, high = _percents(found)
            tint = colour(_COLOURS.get(found.outcome, "quiet"))
            axes.plot([low, high], [place, place], color=tint, linewidth=2)
            marker = _MARKERS.get(found.outcome, "o")
            axes.plot([middle], [place], marker=marker, markersize=6, color=tint)
        axes.set_yticks(range(len(rows)), [found.metric for found in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.xaxis.set_major_formatter(FuncFormatter(_format_percent))
        axes.set_xlabel("B less A, in per cent of A")
        note = "With 95 % intervals; shares are left out. Diamond: better; cross: worse; dot: "
        note += "no difference shown, or not judged."
        title = "Relative differences"
        seen = "; ".join(f"{row.metric} {_percents(row)[1]:+.1f} %" for row in rows)
        return Plot("comparison", title, note, to_svg(figure, "plot-comparison", title, seen))


def _is_relative(found: Difference) -> bool:
    """Returns whether it can be shown in per cent of run A; shares differ in points instead."""
    return found.unit is not DifferenceUnit.RATIO and bool(found.a) and found.low is not None


def _format_percent(percent: float, _place: int) -> str:
    sign = "+" if percent > 0 else "\N{MINUS SIGN}" if percent < 0 else ""
    return f"{sign}{abs(percent):g} %"


def _percents(found: Difference) -> tuple[float, float, float]:
    assert found.a
    bounds = (found.low, found.difference, found.high)
    low, middle, high = (100 * (bound or 0.0) / found.a for bound in bounds)
    return low, middle, high
