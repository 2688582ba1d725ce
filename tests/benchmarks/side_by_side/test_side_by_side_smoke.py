"""One pair of real servers at little work, from the start of the first to the page."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.side_by_side import report
from benchmarks.side_by_side.loads import COMPARISONS, RAY_DIRECT, SLICEWISE, Load
from benchmarks.side_by_side.records import Pair, Records
from benchmarks.side_by_side.run import lacking, measure_pairs
from benchmarks.side_by_side.systems import start_of
from tests.benchmarks.side_by_side.builders import HEAD

pytestmark = [pytest.mark.e2e, pytest.mark.long]

LOADS = (Load("at once", 2, 8), Load("requests", 2, 1, window_s=0.5), Load("steady", 2, 8, 0.1, 1))
PAGE = "<!-- begin: measured --><!-- end: measured -->\n"


def test_pair_beside_ray_serve_llm_is_measured(tmp_path: Path) -> None:
    (shipped,) = (each for each in COMPARISONS if each.key == "ray-direct")
    tiny = replace(shipped, loads=LOADS, warm_up=Load("warm-up", 2, 4))
    settings = tuple(tiny if each is shipped else each for each in COMPARISONS)
    records = Records.open(tmp_path / "records.jsonl", replace(HEAD, settings=settings))
    measure_pairs(records, 1, [tiny], start_of, print, patience_s=0)
    assert list(lacking(records, 1, [tiny])) == []
    (pair,) = records.pairs(tiny.key)
    assert isinstance(pair, Pair)
    assert (pair.ours.system, pair.theirs.system) == (SLICEWISE, RAY_DIRECT)
    for visit, kinds in (
        (pair.ours, {"gateway", "engine host", "HAProxy", "client"}),
        (pair.theirs, {"model replica", "HAProxy", "client"}),
    ):
        at_once, requests, steady = visit.readings
        assert at_once.errors == requests.errors == steady.errors == {}
        assert at_once.num_tokens == 16
        # What the engine takes before a first token is in it.
        assert at_once.ttft_ms is not None
        assert at_once.ttft_ms[0] >= 45
        assert requests.num_answers > 0
        assert steady.num_tokens > 0
        assert kinds <= set(steady.cpu_s)
    text = report.updated(PAGE, records)
    assert f"| {RAY_DIRECT} | 2 | Slicewise |" in text
