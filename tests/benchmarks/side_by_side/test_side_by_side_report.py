"""The page's tables: made of the raw records alone, and what has to be known to read them."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.side_by_side import report
from benchmarks.side_by_side.loads import (
    COMPARISONS,
    NUM_PAIRS,
    RAY_DIRECT,
    SLICEWISE_NOW,
    offered_per_s,
)
from benchmarks.side_by_side.records import Missing, Pair, Records, Visit
from tests.benchmarks.side_by_side.builders import pair, records_with

PAGE = "before\n<!-- begin: measured -->stale<!-- end: measured -->\nafter\n"
NOW, DIRECT = COMPARISONS[0], COMPARISONS[2]
NAPS, SPINS = COMPARISONS[-2], COMPARISONS[-1]


def section(page: str, heading: str) -> str:
    """What stands below a heading, up to the next one."""
    assert f"\n{heading}\n" in page, page
    return page.split(f"\n{heading}\n")[1].split("\n#")[0]


def row(text: str, *beginnings: str) -> list[str]:
    """The cells of the first row that begins so."""
    start = "| " + " | ".join(beginnings) + " |"
    found = [line for line in text.splitlines() if line.startswith(start)]
    assert found, f"no row {start} in\n{text}"
    return [cell.strip() for cell in found[0].strip("|").split("|")]


def at_share(share: float, turn: int = 0) -> Pair:
    """A pair beside now: ours has all that is offered, theirs that share of it."""
    made = pair(NOW, turn)
    return replace(made, ours=_at_share(made.ours, 1.0), theirs=_at_share(made.theirs, share))


def _at_share(visit: Visit, share: float) -> Visit:
    readings = [
        replace(reading, num_tokens=share * offered_per_s(load))
        for reading, load in zip(visit.readings, NOW.loads, strict=True)
    ]
    return replace(visit, readings=tuple(readings))


def carried(page: str) -> list[str]:
    """The streams carried beside now: ours and theirs."""
    return row(section(page, "### Streams carried"), SLICEWISE_NOW)[1:]


def updated(records: Records) -> str:
    return report.updated(PAGE, records)


def test_page_keeps_the_text_around_its_tables(tmp_path: Path) -> None:
    records = records_with(tmp_path, pair(NOW))
    text = updated(records)
    assert text.startswith("before\n<!-- begin: measured -->\nMeasured from 2026-11-25T00:00:00")
    assert text.endswith("<!-- end: measured -->\nafter\n")
    assert "stale" not in text
    assert report.updated(text, records) == text


def test_page_without_its_lines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the page has no lines"):
        report.updated("nothing here", records_with(tmp_path, pair(NOW)))


def test_conditions_say_what_it_was_measured_on(tmp_path: Path) -> None:
    text = updated(records_with(tmp_path, pair(NOW, 1), pair(NOW, 2)))
    assert "from 2026-11-25T01:00:00+00:00 to 2026-11-25T02:00:00+00:00" in text
    for words in ("0123abc", "python -m benchmarks", "2 CPU cores", "Python 3.11.7", "ray 2.60.0"):
        assert words in text


def test_page_names_each_commit_that_was_measured(tmp_path: Path) -> None:
    later = replace(pair(NOW, 1), commit="89abcde")
    assert "at commit 0123abc, 89abcde:" in updated(records_with(tmp_path, pair(NOW), later))


def test_page_that_lacks_pairs_says_so_and_names_the_reason(tmp_path: Path) -> None:
    missing = Missing("ray-direct", 0, "", RAY_DIRECT, "not installed:\n jsonref | x")
    text = updated(records_with(tmp_path, pair(NOW), missing))
    assert "**Pairs are missing. This is no result yet.**" in text
    assert f"- now: 1 of {NUM_PAIRS} pairs." in text
    assert f"- ray-direct: 0 of {NUM_PAIRS} pairs. {RAY_DIRECT}: not installed: jsonref" in text


def test_page_with_all_pairs_lacks_nothing(tmp_path: Path) -> None:
    pairs = [pair(each, turn) for each in COMPARISONS for turn in range(each.num_pairs)]
    assert "missing" not in updated(records_with(tmp_path, *pairs))


def test_disturbed_loads_and_failed_requests_are_counted(tmp_path: Path) -> None:
    theirs = {"other_cores": 0.3, "errors": {"connection lost": 2}}
    text = section(updated(records_with(tmp_path, pair(NOW, theirs=theirs))), "### Pairs")
    num = len(NOW.loads)
    cells = row(text, "now")
    assert cells[3:6] == ["1", f"{num} of {2 * num}", "0"]
    assert cells[6] == f"{2 * num} ({2 * num} connection lost)"


def test_streams_are_carried_by_the_median_of_the_shares(tmp_path: Path) -> None:
    text = updated(records_with(tmp_path, at_share(0.94), at_share(0.96, 1), at_share(0.97, 2)))
    assert carried(text) == ["512 of 512", "512 of 512"]


def test_share_is_of_what_the_streams_could_take(tmp_path: Path) -> None:
    text = updated(records_with(tmp_path, at_share(0.5), at_share(0.7, 1)))
    cells = row(section(text, "### What of the offered rate arrives"), SLICEWISE_NOW, "256")
    assert cells[2:5] == ["100%", "60% (50% to 70%)", "**1.71** (1.43 to 2.00)"]
    assert carried(text) == ["512 of 512", "0 of 512"]


def test_interval_stands_beside_the_median_of_enough_pairs(tmp_path: Path) -> None:
    pairs = [at_share(0.5 + turn / 100, turn) for turn in range(15)]
    text = updated(records_with(tmp_path, *pairs))
    cells = row(section(text, "### What of the offered rate arrives"), SLICEWISE_NOW, "64")
    assert cells[4] == "**1.75** [1.64, 1.89] (1.56 to 2.00)"


def test_cpu_is_per_token_and_by_process(tmp_path: Path) -> None:
    # 50 tokens a second of 64 streams: 0.1 s of the gateway are 31.25 µs a token.
    theirs = {"cpu_s": {"model replica": 0.3, "proxy": 0.02, "client": 0.1}}
    text = updated(records_with(tmp_path, pair(DIRECT, theirs=theirs)))
    table = section(text, "### CPU by process")
    ours = row(table, RAY_DIRECT, "64", "Slicewise")
    assert ours[3:7] == ["31.2", "9.4", "62.5", "0.0"]
    assert ours[7:10] == ["0.10", "0.20", "0.00"]
    assert ours[10] == "645"
    assert row(table, RAY_DIRECT, "64", RAY_DIRECT)[3:6] == ["100.0", "0.0", "31.2"]


def test_first_tokens_are_shown_without_the_engines_time(tmp_path: Path) -> None:
    text = updated(records_with(tmp_path, pair(NOW, theirs={"ttft_ms": (250.0, 300.0)})))
    heading = "### First tokens of streams that begin at once"
    cells = row(section(text, heading), SLICEWISE_NOW, "256")
    assert cells[2:] == ["10.0", "200.0", "**-190.0** (-190.0 to -190.0)"]


def test_request_is_shown_in_milliseconds_of_the_frontend(tmp_path: Path) -> None:
    text = updated(records_with(tmp_path, pair(NOW, ours={"num_answers": 50})))
    cells = row(section(text, "### A request besides its tokens"), SLICEWISE_NOW)
    assert cells[1:] == ["2.00", "12.50", "**0.16** (0.16 to 0.16)", "50", "8"]


def test_chunks_are_shown_with_their_gaps(tmp_path: Path) -> None:
    text = updated(records_with(tmp_path, pair(NOW, theirs={"gap_ms": None, "num_events": 0})))
    cells = row(section(text, "### Tokens per event, and the gaps between events"), SLICEWISE_NOW)
    assert cells[1:] == ["64", "2.00", "-", "40.0", "-", "41.0", "-"]


def test_engines_are_compared_like_for_like_and_as_shipped(tmp_path: Path) -> None:
    pairs = [
        pair(NAPS, 0, ours={"num_tokens": 900.0}, theirs={"num_tokens": 1000.0}),
        pair(SPINS, 0, ours={"num_tokens": 600.0}, theirs={"num_tokens": 750.0}),
    ]
    text = updated(records_with(tmp_path, *pairs))
    like = section(text, "### Like for like")
    assert row(like, "32", "naps")[2:5] == ["900", "1,000", "**0.90** (0.90 to 0.90)"]
    assert row(like, "32", "spins")[2:5] == ["600", "750", "**0.80** (0.80 to 0.80)"]
    waits = section(text, "### What the wait of the engine does")
    assert row(waits, "32")[1:] == ["1.20", "1.50", "1.33"]


def test_run_without_any_pair_has_a_page(tmp_path: Path) -> None:
    text = updated(records_with(tmp_path))
    assert "Measured not yet" in text
    assert carried(text) == ["-", "-"]
