"""A short trace by several ways to choose: none gives first tokens sooner than the bound."""

from typing import Any

import pytest

from benchmarks.dispatch_trace import ALL_KNOWN, least_ttft_s, run

# Conversations that grow by a block of 512 tokens at a time, two of them with one beginning.
ROWS: list[dict[str, Any]] = [
    {
        "timestamp": 3000 * turn,
        "hash_ids": [first, *range(100 * talk, 100 * talk + turn + 1)],
        "input_length": 512 * (turn + 2),
        "output_length": 5,
    }
    for turn in range(4)
    for talk, first in enumerate([1, 1, 2, 3], start=1)
]


@pytest.mark.parametrize("kind", ["fewest requests", "room and cache", ALL_KNOWN])
def test_no_way_to_choose_is_faster_than_the_bound(kind: str) -> None:
    outcome = run(kind, 1, ROWS)

    assert outcome.num_requests == len(ROWS)
    found = (outcome.ttft_p50_s, outcome.ttft_p90_s, outcome.ttft_p99_s)
    for seconds, least_s in zip(found, least_ttft_s(ROWS), strict=True):
        assert seconds >= least_s > 0
