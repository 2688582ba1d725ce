from pathlib import Path

import pytest

from loadtest.errors import LoadTestError
from loadtest.recorder import RequestRecorder, merge_parts, run_part, worker_part
from loadtest.records import (
    ClientSample,
    FleetSample,
    Record,
    RequestRecord,
    RunEnd,
    RunStart,
    encode,
    read_records,
)


def start(num_scheduled: int = 3) -> RunStart:
    return RunStart(1.7e9, "http://h", 10.0, 0.0, 2, 1, num_scheduled, {})


def request(ended_s: float, worker: int = 0) -> RequestRecord:
    name = f"r{ended_s}"
    return RequestRecord(name, worker, "m", "chat", 0.0, 0.0, None, None, ended_s, 1, 1)


def sample(at_s: float) -> ClientSample:
    return ClientSample(at_s, 0, 0.1, 0.001, {-700: 2}, 0, 0, 0)


def write(path: Path, *records: Record) -> None:
    with RequestRecorder(path) as recorder:
        for record in records:
            recorder.write(record)


def test_parts_are_merged_in_order_of_time(tmp_path: Path) -> None:
    fleet, end = FleetSample(1.5, {}), RunEnd(4.0)
    write(run_part(tmp_path), start(), fleet, end)
    write(worker_part(tmp_path, 0), request(1.0), sample(2.0), request(3.0))
    write(worker_part(tmp_path, 1), request(2.5, 1))
    merged = merge_parts(tmp_path)
    expected = [start(), request(1.0), fleet, sample(2.0), request(2.5, 1), request(3.0), end]
    assert list(read_records(merged)) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["requests.jsonl"]
    assert merge_parts(tmp_path) == merged


def test_record_is_in_the_file_once_it_is_written(tmp_path: Path) -> None:
    with RequestRecorder(worker_part(tmp_path, 0)) as recorder:
        recorder.write(request(1.0))
        assert list(read_records(worker_part(tmp_path, 0))) == [request(1.0)]


def test_run_that_was_killed_can_be_merged(tmp_path: Path) -> None:
    write(run_part(tmp_path), start())
    write(worker_part(tmp_path, 0), request(1.0))
    with worker_part(tmp_path, 0).open("ab") as part:
        part.write(encode(request(2.0))[:-10])
    assert list(read_records(merge_parts(tmp_path))) == [start(), request(1.0)]


def test_schedule_of_a_run_cut_short_is_the_last_told(tmp_path: Path) -> None:
    write(run_part(tmp_path), start(3), start(1), RunEnd(1.0, "interrupted"))
    first, _ = read_records(merge_parts(tmp_path))
    assert first == start(1)


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match="holds no run"):
        merge_parts(tmp_path)
    write(worker_part(tmp_path, 0), request(1.0))
    with pytest.raises(LoadTestError, match="has no start of a run"):
        merge_parts(tmp_path)
