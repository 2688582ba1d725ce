"""Draws cost over service: a line per policy, its points the values of its knob."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter

from autoscaling.simulator.policies import POLICIES, SLICEWISE
from benchmarks.policies.figures import CurvePoint
from loadtest.report.plot_style import (
    PATTERNS,
    SERIES,
    THEME_CSS,
    colour,
    new_figure,
    styled,
    to_svg,
)

_HEIGHT_IN = 4.6
_SHADES = (*SERIES, "quiet")
_MARKERS = ("o", "s")
# A curve whose points all kept every request has no place on a logarithmic axis.
_LEAST_MISSED = 1e-5


def drawn(curves: Mapping[str, Sequence[CurvePoint]], name: str, days: str) -> str:
    """The drawing of curves by policy, an SVG file's text.

    `name` tells its ids from those of another drawing, and `days` says what the points are of.
    """
    with styled():
        figure = new_figure(_HEIGHT_IN)
        axes = figure.subplots()
        for number, policy in enumerate(POLICIES):
            points = curves.get(policy, ())
            if not points:
                continue
            shade = number % len(_SHADES)
            axes.plot(
                np.array([max(_LEAST_MISSED, 1 - each.slo_ratio) for each in points]) * 100,
                [each.cost_usd for each in points],
                marker=_MARKERS[number // len(_SHADES) % len(_MARKERS)],
                markersize=4,
                linewidth=2.4 if policy == SLICEWISE else 1.2,
                linestyle=PATTERNS[number % len(PATTERNS)],
                color=colour(_SHADES[shade]),
                label=policy,
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.invert_xaxis()
        axes.axvline(1.0, color=colour("event"), linewidth=1)
        axes.set_xlabel("requests outside an objective, % (line: 1 %)")
        axes.set_ylabel("USD per day")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda usd, _: f"{usd:,.0f}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda usd, _: f"{usd:,.0f}"))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:g}"))
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), fontsize=8, ncols=4, frameon=False)
        svg = to_svg(
            figure,
            name,
            f"Cost and service of policies on {days}",
            "Per policy, the cost of a day over the share of requests outside an objective, one "
            "point for each value of its knob; to the right is better service.",
        )
    head = svg.index(">") + 1
    style = f"<style>{THEME_CSS} svg {{ font-family: sans-serif; }}</style>"
    return svg[:head] + style + svg[head:] + "\n"
