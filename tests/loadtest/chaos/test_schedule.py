"""What a chaos schedule may say, and that a wrong one is refused by field."""

from pathlib import Path
from typing import Any

import pytest

from loadtest.chaos import schedule
from loadtest.chaos.schedule import (
    NoticeEvent,
    SlowEvent,
    StockEvent,
    load_schedule,
    parse_schedule,
)
from loadtest.errors import LoadTestError

EXAMPLES = sorted((Path(schedule.__file__).parent / "examples").glob("*.yaml"))
PREEMPT = {"at_s": 60, "action": "preempt"}
RUN = {"at_s": 60, "action": "run"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_shipped_example_is_a_schedule(path: Path) -> None:
    assert load_schedule(path).events


def test_file_is_taken_as_written(tmp_path: Path) -> None:
    path = tmp_path / "chaos.yaml"
    path.write_text(
        """
events:
  - {at_s: 60, action: preempt, target: {compute_class: spot, state: ready}, notice_s: 20}
  - {at_in_flight: 200, action: slow, target: {slice: spot-0}, factor: 2, for_s: 5}
  - {at_requests_per_s: 12.5, action: stockout, target: {compute_class: spot}}
"""
    )
    preempt, slow, stockout = load_schedule(path).events
    assert isinstance(preempt, NoticeEvent)
    assert (preempt.at_s, preempt.notice_s, str(preempt.target)) == (60, 20, "ready spot slice")
    assert isinstance(slow, SlowEvent)
    assert (slow.at_in_flight, slow.factor, slow.for_s) == (200, 2, 5)
    assert str(slow.target) == "slice spot-0"
    assert isinstance(stockout, StockEvent)
    assert (stockout.at_requests_per_s, stockout.target.compute_class) == (12.5, "spot")


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (PREEMPT | {"factor": 3}, r"events\[0\]\.factor: no such field; allowed: at_s,.*notice_s"),
        (PREEMPT | {"at_in_flight": 3}, r"events\[0\]: allowed: exactly one of at_s, at_in_fl"),
        ({"action": "preempt"}, r"events\[0\]: allowed: exactly one of at_s"),
        ({"at_s": 1}, r"events\[0\]\.action: None; allowed: preempt, .*, run$"),
        (PREEMPT | {"action": "explode"}, r"events\[0\]\.action: 'explode'; allowed: preempt, "),
        (PREEMPT | {"at_s": -1}, r"events\[0\]\.at_s: .*greater than or equal to 0 \(value -1\)"),
        (PREEMPT | {"at_s": "60"}, r"events\[0\]\.at_s: .*valid number \(value '60'\)"),
        (PREEMPT | {"notice_s": float("nan")}, r"events\[0\]\.notice_s: "),
        (
            PREEMPT | {"target": {"slice": "spot-0", "state": "ready"}},
            r"events\[0\]\.target: allowed: `slice` alone",
        ),
        (
            PREEMPT | {"target": {"colour": "red"}},
            r"events\[0\]\.target\.colour: no such field; allowed: slice, compute_class, state",
        ),
        (PREEMPT | {"action": "slow", "factor": 1}, r"events\[0\]\.factor: .*1\.1 \(value 1\)"),
        (PREEMPT | {"action": "stockout"}, r"events\[0\]\.target: Field required"),
        (RUN | {"command": []}, r"events\[0\]\.command: .*at least 1 item"),
        (RUN | {"command": ["a", "{node}"]}, r"events\[0\]: \{node\} in the command; allowed: on"),
        (RUN | {"command": "rm -r"}, r"events\[0\]\.command: .*tuple \(value 'rm -r'\)"),
    ],
)
def test_event_that_makes_no_sense_is_refused_by_field(event: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadTestError, match=words):
        parse_schedule({"events": [event]})


def test_every_problem_is_told() -> None:
    with pytest.raises(LoadTestError) as refused:
        parse_schedule({"events": [PREEMPT | {"host": -1}, PREEMPT | {"notice_s": "x"}]})
    assert "events[0].host" in str(refused.value)
    assert "events[1].notice_s" in str(refused.value)


@pytest.mark.parametrize("text", ["events: [", "events: []", "- 1", ""])
def test_file_that_is_no_schedule_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "chaos.yaml"
    path.write_text(text)
    with pytest.raises(LoadTestError, match=r"chaos schedule .*chaos\.yaml"):
        load_schedule(path)


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match=r"chaos schedule .*none\.yaml cannot be read"):
        load_schedule(tmp_path / "none.yaml")
