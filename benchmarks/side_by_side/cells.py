"""Cells of the page's tables: figures of many pairs, in words. Pure."""

import statistics
from collections.abc import Callable, Iterable, Sequence

from benchmarks.side_by_side.loads import Load
from benchmarks.side_by_side.reading import Reading
from benchmarks.side_by_side.records import Pair, Visit
from benchmarks.side_by_side.spread import spread_of

NONE = "-"
Figure = Callable[[Reading], float | None]
Readings = list[tuple[Reading, Reading]]


def both(pairs: Iterable[Pair], load: Load) -> Readings:
    """The readings of one load, ours and theirs, of every pair."""
    return [(_of(pair.ours, load), _of(pair.theirs, load)) for pair in pairs]


def _of(visit: Visit, load: Load) -> Reading:
    return next(each for each in visit.readings if each.load == load.name)


def figures(readings: Iterable[Reading], figure: Figure) -> list[float]:
    """The figure of each, without those that have none."""
    return [value for value in map(figure, readings) if value is not None]


def cell(values: Sequence[float], shown: str = ",.1f") -> str:
    """The median and the range of values."""
    spread = spread_of(values)
    if spread is None:
        return NONE
    middle, low, high = (format(value, shown) for value in (spread.median, spread.low, spread.high))
    return middle if low == high else f"{middle} ({low} to {high})"


def sides(readings: Readings) -> tuple[list[Reading], list[Reading]]:
    """All readings of ours, and all of theirs."""
    return [ours for ours, _ in readings], [theirs for _, theirs in readings]


def side_cells(readings: Readings, figure: Figure, shown: str = ",.1f") -> list[str]:
    """The cell of ours and that of theirs."""
    return [cell(figures(own, figure), shown) for own in sides(readings)]


def compared(
    readings: Readings,
    figure: Figure,
    made: Callable[[float, float], float],
    shown: str = ".2f",
) -> str:
    """What `made` makes of ours and theirs in each pair: median, interval and range."""
    values = []
    for reading_of_ours, reading_of_theirs in readings:
        ours, theirs = figure(reading_of_ours), figure(reading_of_theirs)
        if ours is not None and theirs is not None:
            values.append(made(ours, theirs))
    spread = spread_of(values)
    if spread is None:
        return NONE
    words = f"**{spread.median:{shown}}**"
    if spread.interval is not None:
        words += f" [{spread.interval[0]:{shown}}, {spread.interval[1]:{shown}}]"
    return f"{words} ({spread.low:{shown}} to {spread.high:{shown}})"


def over(ours: float, theirs: float) -> float:
    """Ours over theirs; not a number where theirs is none."""
    return ours / theirs if theirs else float("nan")


def less(ours: float, theirs: float) -> float:
    """Ours less theirs."""
    return ours - theirs


def median(values: Sequence[float]) -> float | None:
    """The median; `None` of none."""
    return statistics.median(values) if values else None


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in markdown."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def ttft_ms(reading: Reading) -> float | None:
    """The median time to first token; `None` where no token came."""
    return None if reading.ttft_ms is None else reading.ttft_ms[0]


def tokens_per_s(reading: Reading) -> float | None:
    """Output tokens per second of the window."""
    return reading.tokens_per_s
