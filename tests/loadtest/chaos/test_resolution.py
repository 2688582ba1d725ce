"""Events are due once their moment has come, and hit what they describe, by a seed."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.chaos.resolution import (
    ChaosAction,
    DueEvent,
    Miss,
    RunLoad,
    SeenHost,
    SeenSlice,
    due_events,
    resolve,
)
from loadtest.chaos.schedule import parse_schedule

SLICES = [
    SeenSlice("spot-0", "spot", "ready"),
    SeenSlice("spot-1", "spot", "draining"),
    SeenSlice("spot-2", "spot", "ready"),
    SeenSlice("kept-0", "reserved", "ready"),
]
IDLE = RunLoad(0, 0.0)


def due(*events: dict[str, Any]) -> list[DueEvent]:
    schedule = parse_schedule({"events": [{"at_s": 0, **event} for event in events]})
    return list(due_events(schedule, frozenset(), 0.0, IDLE))


def targets(*events: dict[str, Any], seed: int = 0) -> list[str]:
    resolved = resolve(due(*events), SLICES, random.Random(seed))
    assert [each.reason for each in resolved if isinstance(each, Miss)] == []
    return [each.target for each in resolved]


@pytest.mark.parametrize(
    ("moment", "now_s", "load", "reason"),
    [
        ({"at_s": 60}, 59.9, IDLE, None),
        ({"at_s": 60}, 60.0, IDLE, "at 60 s"),
        ({"at_in_flight": 200}, 900.0, RunLoad(199, 50.0), None),
        ({"at_in_flight": 200}, 1.0, RunLoad(203, 0.0), "203 in flight, at 200"),
        ({"at_requests_per_s": 12}, 900.0, RunLoad(500, 11.9), None),
        ({"at_requests_per_s": 12}, 1.0, RunLoad(0, 12.34), "12.3 requests/s, at 12"),
    ],
)
def test_event_is_due_when_its_moment_has_come(
    moment: dict[str, Any], now_s: float, load: RunLoad, reason: str | None
) -> None:
    schedule = parse_schedule({"events": [{"action": "kill", **moment}]})
    found = [due_event.reason for due_event in due_events(schedule, frozenset(), now_s, load)]
    assert found == ([] if reason is None else [reason])


def test_event_that_is_done_is_not_due_again() -> None:
    schedule = parse_schedule({"events": [{"action": "kill", "at_s": at_s} for at_s in (0, 1, 9)]})
    assert [due_event.number for due_event in due_events(schedule, {0}, 5.0, IDLE)] == [1]


def test_target_is_what_it_is_described_as() -> None:
    assert targets({"action": "kill", "target": {"slice": "spot-1"}}) == ["spot-1"]
    assert targets({"action": "kill", "target": {"state": "draining"}}) == ["spot-1"]
    assert targets({"action": "kill", "target": {"compute_class": "reserved"}}) == ["kept-0"]
    assert targets({"action": "stockout", "target": {"compute_class": "spot"}}) == ["spot"]
    assert targets({"action": "add", "target": {"kind": "spot"}}) == ["spot"]
    assert targets({"action": "run", "command": ["true"]}) == [""]


def test_choice_is_by_seed_and_reaches_every_match() -> None:
    ready_spot = {"action": "kill", "target": {"compute_class": "spot", "state": "ready"}}
    chosen = [targets(ready_spot, seed=seed)[0] for seed in range(30)]
    assert set(chosen) == {"spot-0", "spot-2"}
    assert chosen == [targets(ready_spot, seed=seed)[0] for seed in range(30)]


@given(st.permutations(SLICES), st.integers(0, 100))
def test_choice_does_not_depend_on_the_order_of_the_slices(
    slices: list[SeenSlice], seed: int
) -> None:
    events = due({"action": "kill"})
    found, usual = (resolve(events, each, random.Random(seed)) for each in (slices, SLICES))
    assert found == usual


@given(st.integers(0, 1000))
def test_events_of_one_moment_hit_different_slices(seed: int) -> None:
    ready_spot = {"action": "kill", "target": {"compute_class": "spot", "state": "ready"}}
    assert sorted(targets(ready_spot, ready_spot, seed=seed)) == ["spot-0", "spot-2"]


def test_slice_that_is_not_there_is_missed_with_what_there_is() -> None:
    events = due({"action": "kill", "target": {"compute_class": "flex-start"}})
    (missed,) = resolve(events, SLICES[:1], random.Random(0))
    assert isinstance(missed, Miss)
    assert missed.target == "flex-start slice"
    assert missed.reason == "at 0 s: no such slice; there are spot-0 (spot, ready)"


def test_command_about_a_host_needs_one() -> None:
    command = {"action": "run", "command": ["ping", "{address}"], "target": {"slice": "spot-0"}}
    (missed,) = resolve(due(command), SLICES, random.Random(0))
    assert isinstance(missed, Miss)
    host = SeenHost("node-a", "10.0.0.1")
    known = [SeenSlice("spot-0", "spot", "ready", (host,))]
    (action,) = resolve(due(command), known, random.Random(0))
    assert isinstance(action, ChaosAction)
    assert (action.target, action.host) == ("spot-0", host)
