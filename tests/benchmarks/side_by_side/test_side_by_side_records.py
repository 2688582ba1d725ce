"""Raw records: kept at once, gone on with, and never mixed."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.side_by_side.errors import RecordsDifferError
from benchmarks.side_by_side.loads import COMPARISONS
from benchmarks.side_by_side.records import Missing, Records
from tests.benchmarks.side_by_side.builders import HEAD, pair, records_with

NOW = COMPARISONS[0]


def test_pair_is_in_the_file_as_soon_as_it_is_added(tmp_path: Path) -> None:
    records = records_with(tmp_path, pair(NOW))
    again = Records.read(tmp_path / "records.jsonl")
    assert again.pairs("now") == records.pairs("now") == [pair(NOW)]
    assert again.head == HEAD


def test_run_goes_on_behind_its_last_pair(tmp_path: Path) -> None:
    records_with(tmp_path, pair(NOW, 0), pair(NOW, 1))
    records = Records.open(tmp_path / "records.jsonl", HEAD)
    assert [records.has("now", turn) for turn in range(3)] == [True, True, False]
    records.append(pair(NOW, 2))
    assert len(Records.read(tmp_path / "records.jsonl").pairs("now")) == 3


def test_run_goes_on_at_another_commit_of_the_same_code(tmp_path: Path) -> None:
    records_with(tmp_path, pair(NOW, 0))
    later = msgspec.structs.replace(HEAD, commit="fedcba9")
    records = Records.open(tmp_path / "records.jsonl", later)
    assert (records.commit, records.head.commit) == ("fedcba9", HEAD.commit)
    assert records.has("now", 0)


def test_line_that_was_broken_off_is_not_there(tmp_path: Path) -> None:
    records_with(tmp_path, pair(NOW, 0), pair(NOW, 1))
    path = tmp_path / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    records = Records.open(path, HEAD)
    assert not records.has("now", 1)
    records.append(pair(NOW, 1))
    assert len(Records.read(path).pairs("now")) == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"code": "fedcba9"}, "other code: 89abcdef0123 there, fedcba9 here"),
        ({"settings": COMPARISONS[:1]}, "other settings"),
        ({"machine": "64 CPU cores"}, "other machine"),
        ({"versions": {"ray": "2.61.0"}}, "other versions"),
    ],
)
def test_records_of_something_else_are_refused(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    records_with(tmp_path, pair(NOW))
    before = (tmp_path / "records.jsonl").read_bytes()
    with pytest.raises(RecordsDifferError, match=named):
        Records.open(tmp_path / "records.jsonl", msgspec.structs.replace(HEAD, **change))
    assert (tmp_path / "records.jsonl").read_bytes() == before


def test_two_runs_in_one_file_are_refused(tmp_path: Path) -> None:
    records_with(tmp_path, pair(NOW))
    path = tmp_path / "records.jsonl"
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(RecordsDifferError, match="the only line of a run"):
        Records.read(path)


def test_reason_of_a_missing_system_is_the_last_one_said(tmp_path: Path) -> None:
    reasons = [Missing("now", 0, "", NOW.theirs, reason) for reason in ("first", "second")]
    records = records_with(tmp_path, *reasons)
    missing = records.missing("now", 1)
    assert missing is not None
    assert missing.reason == "second"


def test_system_that_was_there_later_is_not_missing(tmp_path: Path) -> None:
    records = records_with(tmp_path, Missing("now", 0, "", NOW.theirs, "no network"), pair(NOW))
    assert records.missing("now", 1) is None
