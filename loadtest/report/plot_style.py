"""Styles our plots: colours that follow the reader's scheme, one frame, marks of events.

A plot is drawn with matplotlib's own objects inside `styled()` and becomes an SVG element to stand
in a page. Its colours are names in the drawing and CSS variables in the SVG, so that one drawing
serves light and dark; the page includes `THEME_CSS`. Knows nothing of load tests.
"""

import io
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

MINUTE_S = 60.0
# From here on an axis counts minutes.
_LONG_S = 15 * MINUTE_S


@dataclass(frozen=True, slots=True)
class _Colour:
    """The colour of a page, light and dark, and the one that stands for it in a drawing.

    Against its ground each has a contrast of at least 3 (4.5 for those of words).
    """

    name: str
    stand_in: str
    light: str
    dark: str


# A stand-in is only a label: no colour that is drawn may have the same value by chance.
_COLOURS = {
    colour.name: colour
    for colour in (
        _Colour("ink", "#0a0b01", "#16191d", "#e7eaee"),
        _Colour("quiet", "#0a0b02", "#5a6370", "#9aa5b3"),
        _Colour("grid", "#0a0b03", "#d8dce2", "#2a313b"),
        _Colour("event", "#0a0b04", "#b42318", "#ff8a80"),
        _Colour("blue", "#0a0b05", "#1d5fd1", "#7fb0ff"),
        _Colour("orange", "#0a0b06", "#b45309", "#ffb35c"),
        _Colour("teal", "#0a0b07", "#0f766e", "#4fd1c0"),
        _Colour("magenta", "#0a0b08", "#a21caf", "#e58cf0"),
        _Colour("olive", "#0a0b09", "#5f6f0a", "#c3d45a"),
        _Colour("requested", "#0a0b0a", "#7b8794", "#8391a3"),
        _Colour("provisioning", "#0a0b0b", "#8b5cf6", "#a78bfa"),
        _Colour("reserved", "#0a0b0c", "#0284c7", "#38bdf8"),
        _Colour("probing", "#0a0b0d", "#0d9488", "#2dd4bf"),
        _Colour("loading", "#0a0b0e", "#3b82f6", "#60a5fa"),
        _Colour("ready", "#0a0b0f", "#16a34a", "#34c46c"),
        _Colour("draining", "#0a0b10", "#c27400", "#f5a524"),
    )
}

SERIES = ("blue", "orange", "teal", "magenta", "olive")
# Beside its colour a line has a pattern, for readers who cannot distinguish colours.
PATTERNS = ("solid", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (2.5, 1)))


def _theme(variant: str) -> str:
    return " ".join(
        f"--plot-{colour.name}: {getattr(colour, variant)};" for colour in _COLOURS.values()
    )


THEME_CSS = f"""
:root {{ {_theme("light")} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_theme("dark")} }} }}
svg.plot {{ display: block; width: 100%; height: auto; font-family: inherit; }}
"""


def colour(name: str) -> str:
    """Returns what to draw with, for the colour `name` of the page."""
    return _COLOURS[name].stand_in


_WIDTH_IN = 10.0
_LEFT_IN, _RIGHT_IN, _TOP_IN, _BOTTOM_IN = 0.85, 0.15, 0.25, 0.5
_LEGEND_IN = 0.25


@contextmanager
def styled() -> Iterator[None]:
    """Applies our style inside. Settings are the process's: one thread at a time."""
    with matplotlib.rc_context(
        {
            "axes.axisbelow": True,
            "axes.edgecolor": colour("quiet"),
            "axes.grid": True,
            "axes.labelcolor": colour("ink"),
            "axes.labelsize": 9,
            "axes.linewidth": 0.8,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlelocation": "left",
            "axes.titlesize": 9,
            "axes.titlecolor": colour("ink"),
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "grid.color": colour("grid"),
            "grid.linewidth": 0.6,
            "legend.borderaxespad": 0,
            "legend.fontsize": 9,
            "legend.frameon": False,
            "legend.handlelength": 2.2,
            "lines.linewidth": 1.6,
            "svg.fonttype": "none",
            # Names come from files and servers: a dollar sign in one is no formula.
            "text.parse_math": False,
            "text.color": colour("ink"),
            "xtick.color": colour("quiet"),
            "xtick.labelsize": 8.5,
            "ytick.color": colour("quiet"),
            "ytick.labelsize": 8.5,
        }
    ):
        yield


def new_figure(height_in: float = 2.6, *, has_legend: bool = True) -> Figure:
    """Returns an empty drawing. Its axes lie in one frame, so that stacked plots line up."""
    top_in = _TOP_IN + (_LEGEND_IN if has_legend else 0.0)
    figure = Figure(figsize=(_WIDTH_IN, height_in))
    figure.subplots_adjust(
        left=_LEFT_IN / _WIDTH_IN,
        right=1 - _RIGHT_IN / _WIDTH_IN,
        top=1 - top_in / height_in,
        bottom=_BOTTOM_IN / height_in,
    )
    return figure


def add_legend(figure: Figure, axes: Axes) -> None:
    """Names the series in one line above the axes."""
    handles, labels = axes.get_legend_handles_labels()
    top_left = (_LEFT_IN / _WIDTH_IN, 1.0)
    figure.legend(
        handles, labels, loc="upper left", bbox_to_anchor=top_left, ncols=len(labels) or 1
    )


@dataclass(frozen=True, slots=True)
class EventMark:
    """The event on a time axis, by its number; `until_s` is `None` for an instant."""

    number: int
    at_s: float
    until_s: float | None = None


def mark_events(axes: Axes, marks: Iterable[EventMark]) -> None:
    """Draws a line with a number at each event, and a shade for as long as it lasts."""
    listed = list(marks)
    for mark in listed:
        if mark.until_s is not None:
            axes.axvspan(mark.at_s, mark.until_s, color=colour("event"), alpha=0.12, linewidth=0)
        axes.axvline(
            mark.at_s, color=colour("event"), linewidth=1.2, linestyle=(0, (3, 2)), zorder=3
        )
    for at_s, numbers in _together(axes, listed):
        axes.annotate(
            numbers,
            (at_s, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            color=colour("event"),
            fontsize=8.5,
            fontweight="bold",
        )


def shade_time(axes: Axes, from_s: float, until_s: float, words: str) -> None:
    """Shades a stretch of time, such as the warm-up; `words` stand inside it."""
    if until_s <= from_s:
        return
    axes.axvspan(from_s, until_s, color=colour("quiet"), alpha=0.14, linewidth=0)
    axes.annotate(
        words,
        (from_s, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(3, -3),
        textcoords="offset points",
        va="top",
        color=colour("quiet"),
        fontsize=8,
    )


def time_axis(axes: Axes, until_s: float) -> None:
    """Sets up the axis of time after the start of a run that took `until_s`."""
    axes.set_xlim(0, until_s)
    if until_s < _LONG_S:
        axes.set_xlabel("seconds after the start")
        return
    axes.set_xlabel("minutes after the start")
    axes.xaxis.set_major_locator(_MinuteLocator(nbins=10, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at_s, _: f"{at_s / MINUTE_S:g}"))


def to_svg(figure: Figure, name: str, title: str, description: str) -> str:
    """The drawing as one SVG element for a page; `name` is unique in it.

    `description` is what there is to see, for readers who cannot. Call it inside `styled()`.
    """
    written = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    svg = written.getvalue()
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    # Counted names such as `text_3` would stand in the page once per plot.
    body = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", body)
    body = re.sub(r" font-family: [^;]*;", "", body)
    body = re.sub(r' transform="rotate\(-0 [^"]*"', "", body)
    for colour in _COLOURS.values():
        body = body.replace(colour.stand_in, f"var(--plot-{colour.name})")
    width, height = (72 * inches for inches in figure.get_size_inches())
    return (
        f'<svg class="plot" role="img" aria-labelledby="{name}-title {name}-description"'
        f' viewBox="0 0 {width:g} {height:g}" xmlns="http://www.w3.org/2000/svg"'
        ' xmlns:xlink="http://www.w3.org/1999/xlink">'
        f'<title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-description">{escape(description)}</desc>{body}'
    )


class _MinuteLocator(MaxNLocator):
    """Places ticks at round minutes of an axis in seconds."""

    def tick_values(self, vmin: float, vmax: float) -> list[float]:  # type: ignore[override]
        minutes = super().tick_values(vmin / MINUTE_S, vmax / MINUTE_S)
        return [float(minute) * MINUTE_S for minute in minutes]


def _together(axes: Axes, marks: list[EventMark]) -> list[tuple[float, str]]:
    """Returns where the numbers stand; those of events too close to distinguish stand together."""
    first_s, last_s = axes.get_xlim()
    apart_s = (last_s - first_s) / 50
    placed: list[tuple[float, str]] = []
    for mark in sorted(marks, key=lambda sorted_mark: sorted_mark.at_s):
        if placed and mark.at_s - placed[-1][0] < apart_s:
            placed[-1] = (placed[-1][0], f"{placed[-1][1]},{mark.number}")
        else:
            placed.append((mark.at_s, str(mark.number)))
    return placed
