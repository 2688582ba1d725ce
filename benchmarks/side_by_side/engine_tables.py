"""The tables beside vLLM's own server with a real engine, whichever way it waits. Pure."""

from collections.abc import Sequence

from benchmarks.side_by_side.cells import (
    NONE,
    both,
    compared,
    figures,
    less,
    median,
    over,
    side_cells,
    sides,
    table,
    tokens_per_s,
    ttft_ms,
)
from benchmarks.side_by_side.loads import Comparison, Load
from benchmarks.side_by_side.records import Records


def engine_tables(records: Records, naps: Comparison, spins: Comparison) -> list[str]:
    """The tables, each with its heading."""
    return [
        "### Like for like",
        _like_for_like(records, (naps, spins)),
        "### What the wait of the engine does",
        _waits(records, naps, spins),
    ]


def _like_for_like(records: Records, comparisons: Sequence[Comparison]) -> str:
    head = [
        "streams",
        "both engines",
        "tokens/s, ours",
        "theirs",
        "ours over theirs",
        "TTFT p50 ms, ours",
        "theirs",
        "ours less theirs",
    ]
    rows = []
    for load in comparisons[0].loads:
        for comparison in comparisons:
            readings = both(records.pairs(comparison.key), load)
            row = [str(load.streams), comparison.ours.rpartition(" ")[2]]
            row += side_cells(readings, tokens_per_s, ",.0f")
            row.append(compared(readings, tokens_per_s, over))
            row += side_cells(readings, ttft_ms)
            row.append(compared(readings, ttft_ms, less, "+,.1f"))
            rows.append(row)
    return table(head, rows)


def _waits(records: Records, naps: Comparison, spins: Comparison) -> str:
    """Of medians, because these were not measured one after the other."""
    head = [
        "streams",
        "ours napping over theirs spinning: as each is shipped",
        "ours, napping over spinning",
        "theirs, napping over spinning",
    ]
    rows = []
    for load in naps.loads:
        napping, spinning = (_medians(records, each, load) for each in (naps, spins))
        ratios = (
            _ratio(napping[0], spinning[1]),
            _ratio(napping[0], spinning[0]),
            _ratio(napping[1], spinning[1]),
        )
        rows.append((str(load.streams), *ratios))
    return table(head, rows)


def _medians(records: Records, comparison: Comparison, load: Load) -> list[float | None]:
    readings = both(records.pairs(comparison.key), load)
    return [median(figures(own, tokens_per_s)) for own in sides(readings)]


def _ratio(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:.2f}" if ours is not None and theirs else NONE
