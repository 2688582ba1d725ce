"""The tables of what was measured with a paced engine, where the offered rate is known. Pure."""

from collections.abc import Callable, Iterator, Sequence

from benchmarks.servers import ENGINE_HOST, GATEWAY, HAPROXY, REST
from benchmarks.side_by_side.cells import (
    NONE,
    Readings,
    both,
    cell,
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
from benchmarks.side_by_side.loads import (
    ANSWER_S,
    ANSWER_TOKENS,
    MIN_SHARE,
    TTFT_MS,
    Comparison,
    Load,
    offered_per_s,
)
from benchmarks.side_by_side.reading import CLIENT, Reading
from benchmarks.side_by_side.records import Records

# The Python processes on a token's way: our gateway, and what stands there in Ray Serve LLM.
FRONTENDS = (GATEWAY, "model replica", "ingress", "router", "proxy")
_AROUND, _CLIENT, _REST = (HAPROXY, ENGINE_HOST), (CLIENT,), (REST,)
_CHUNKS_SHOWN = (64, 128)
_Row = tuple[Comparison, Load, Readings]


def paced_tables(records: Records, comparisons: Sequence[Comparison]) -> list[str]:
    """The tables, each with its heading."""
    rows = _rows(records, comparisons, lambda load: not load.is_burst and load.output_tokens > 1)
    bursts = _rows(records, comparisons, lambda load: load.is_burst)
    requests = _rows(records, comparisons, lambda load: load.output_tokens == 1)
    return [
        "### Streams carried",
        _carried(rows),
        "### What of the offered rate arrives",
        _shares(rows),
        "### CPU by process",
        _cpu(rows),
        "### First tokens of streams that begin at once",
        _bursts(bursts),
        "### A request besides its tokens",
        _requests(requests),
        "### Tokens per event, and the gaps between events",
        _chunks(rows),
    ]


def _rows(
    records: Records, comparisons: Sequence[Comparison], belongs: Callable[[Load], bool]
) -> list[_Row]:
    return [
        (comparison, load, both(records.pairs(comparison.key), load))
        for comparison in comparisons
        for load in comparison.loads
        if belongs(load)
    ]


def _carried(rows: Sequence[_Row]) -> str:
    found = []
    for comparison in dict.fromkeys(comparison for comparison, _, _ in rows):
        ladder = [(load, readings) for each, load, readings in rows if each == comparison]
        knees = [_knee(ladder, side) for side in (0, 1)]
        found.append((comparison.theirs, *knees))
    return table(("beside", "streams of the most asked, ours", "theirs"), found)


def _knee(ladder: Sequence[tuple[Load, Readings]], side: int) -> str:
    """The most streams up to which every step had its share in the median; 0 if none."""
    most = 0
    for load, readings in ladder:
        share = median([_share(load, each) for each in sides(readings)[side]])
        if share is None:
            return NONE
        if share < MIN_SHARE:
            break
        most = load.streams
    return f"{most} of {ladder[-1][0].streams}"


def _share(load: Load, reading: Reading) -> float:
    return reading.tokens_per_s / offered_per_s(load)


def _shares(rows: Sequence[_Row]) -> str:
    head = [
        "beside",
        "streams",
        "ours",
        "theirs",
        "tokens/s, ours over theirs",
        "TTFT p50 ms, ours",
        "theirs",
    ]
    return table(head, (_share_row(*row) for row in rows))


def _share_row(comparison: Comparison, load: Load, readings: Readings) -> list[str]:
    return [
        comparison.theirs,
        str(load.streams),
        *side_cells(readings, lambda each: _share(load, each), ".0%"),
        compared(readings, tokens_per_s, over),
        *side_cells(readings, ttft_ms, ",.0f"),
    ]


def _cpu(rows: Sequence[_Row]) -> str:
    head = [
        "beside",
        "streams",
        "whose",
        "µs per token: frontend",
        "HAProxy and engine host",
        "client",
        "rest of Ray",
        "cores: frontend",
        "client",
        "others on the machine",
        "streams that one frontend's core carries",
    ]
    return table(head, (line for row in rows for line in _cpu_rows(*row)))


def _cpu_rows(comparison: Comparison, load: Load, readings: Readings) -> Iterator[list[str]]:
    systems = (comparison.ours, comparison.theirs)
    for system, own in zip(systems, sides(readings), strict=True):
        frontend = median(_us_per_token(own, FRONTENDS))
        yield [
            comparison.theirs,
            str(load.streams),
            system,
            *(cell(_us_per_token(own, kinds)) for kinds in (FRONTENDS, _AROUND, _CLIENT, _REST)),
            *(cell([_cores(each, kinds) for each in own], ".2f") for kinds in (FRONTENDS, _CLIENT)),
            cell([each.other_cores for each in own], ".2f"),
            f"{_streams_of_a_core(frontend):,.0f}" if frontend else NONE,
        ]


def _us_per_token(readings: Sequence[Reading], kinds: Sequence[str]) -> list[float]:
    return figures(readings, lambda each: each.cpu_us_per_token(*kinds))


def _cores(reading: Reading, kinds: Sequence[str]) -> float:
    return reading.cpu_s_of(*kinds) / reading.window_s


def _streams_of_a_core(us_per_token: float) -> float:
    return 1e6 / us_per_token / (ANSWER_TOKENS / ANSWER_S)


def _bursts(rows: Sequence[_Row]) -> str:
    head = ["beside", "at once", "TTFT p50 added, ms, ours", "theirs", "ours less theirs"]
    return table(head, (_burst_row(*row) for row in rows))


def _burst_row(comparison: Comparison, load: Load, readings: Readings) -> list[str]:
    return [
        comparison.theirs,
        str(load.streams),
        *side_cells(readings, _added_ms),
        compared(readings, _added_ms, less, "+,.1f"),
    ]


def _added_ms(reading: Reading) -> float | None:
    seen_ms = ttft_ms(reading)
    return None if seen_ms is None else seen_ms - TTFT_MS


def _requests(rows: Sequence[_Row]) -> str:
    head = [
        "beside",
        "CPU ms of the frontend per request, ours",
        "theirs",
        "ours over theirs",
        "requests/s, ours",
        "theirs",
    ]
    return table(head, (_request_row(*row) for row in rows))


def _request_row(comparison: Comparison, _: Load, readings: Readings) -> list[str]:
    return [
        comparison.theirs,
        *side_cells(readings, _request_ms, ".2f"),
        compared(readings, _request_ms, over),
        *side_cells(readings, lambda each: each.num_answers / each.window_s, ",.0f"),
    ]


def _request_ms(reading: Reading) -> float | None:
    if not reading.num_answers:
        return None
    return reading.cpu_s_of(*FRONTENDS) / reading.num_answers * 1e3


def _chunks(rows: Sequence[_Row]) -> str:
    head = [
        "beside",
        "streams",
        "tokens per event, ours",
        "theirs",
        "gap p50 ms, ours",
        "theirs",
        "gap p99 ms, ours",
        "theirs",
    ]
    shown = [row for row in rows if row[1].streams in _CHUNKS_SHOWN]
    return table(head, (_chunk_row(*row) for row in shown))


def _chunk_row(comparison: Comparison, load: Load, readings: Readings) -> list[str]:
    return [
        comparison.theirs,
        str(load.streams),
        *side_cells(readings, lambda each: each.tokens_per_event, ".2f"),
        *side_cells(readings, lambda each: None if each.gap_ms is None else each.gap_ms[0]),
        *side_cells(readings, lambda each: None if each.gap_ms is None else each.gap_ms[1]),
    ]
