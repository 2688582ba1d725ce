"""Events are carried out on a simulation's socket or by a command; what fails is written down."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from deployments.simulation.control import ControlServer
from deployments.simulation.plan import UnknownSliceError
from loadtest.chaos.actors import Actor, HookActor, SimulationActor
from loadtest.chaos.resolution import RunLoad, SeenHost, SeenSlice
from loadtest.chaos.runner import ChaosRunner, slices_in_fleet
from loadtest.chaos.schedule import parse_schedule
from loadtest.records import EventRecord

IDLE = RunLoad(0, 0.0)
SLICES = [SeenSlice("spot-0", "spot", "ready", (SeenHost("node-a", "10.0.0.1"),))]


class Slices:
    """What a simulated cluster does on command, without Ray."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []

    def preempt(self, name: str, notice_s: float, worker_id: int = 0) -> None:
        self.done.append(("preempt", name, notice_s, worker_id))

    def maintain(self, name: str, notice_s: float, worker_id: int = 0) -> None:
        self.done.append(("maintain", name, notice_s, worker_id))

    def drain(self, name: str, notice_s: float, worker_id: int = 0) -> None:
        raise RuntimeError("Ray is gone")

    def kill(self, name: str, worker_id: int | None = None) -> None:
        raise UnknownSliceError(f"no slice {name!r}; there are none")

    def slow(self, name: str, factor: float, for_s: float) -> None:
        self.done.append(("slow", name, factor, for_s))

    def partition(self, name: str, for_s: float) -> None:
        self.done.append(("partition", name, for_s))

    def stock_out(self, compute_class: str, *, is_dry: bool = True) -> None:
        self.done.append(("stock_out", compute_class, is_dry))

    def add(self, kind_name: str) -> str:
        self.done.append(("add", kind_name))
        return f"{kind_name}-7"


def runner(*events: dict[str, Any], actor: Actor | None = None) -> ChaosRunner:
    schedule = parse_schedule({"events": [{"at_s": 0, **event} for event in events]})
    return ChaosRunner(schedule, actor or HookActor(), seed=0)


def run(*command: str, **changes: Any) -> EventRecord:
    event = {"action": "run", "target": {"slice": "spot-0"}, "command": command, **changes}
    (record,) = runner(event).tick(3.0, IDLE, SLICES)
    return record


def test_every_action_reaches_the_simulation_and_is_recorded(tmp_path: Path) -> None:
    cluster, path = Slices(), tmp_path / "c" / "control.sock"
    events: list[dict[str, Any]] = [
        {"action": "preempt", "notice_s": 20, "host": 1},
        {"action": "maintain", "target": {"slice": "spot-0"}},
        {"action": "slow", "target": {"slice": "spot-0"}, "factor": 4, "for_s": 30},
        {"action": "partition", "target": {"slice": "spot-0"}, "for_s": 5},
        {"action": "stockout", "target": {"compute_class": "spot"}},
        {"action": "stockout_over", "target": {"compute_class": "spot"}},
        {"action": "add", "target": {"kind": "flex"}},
    ]
    with ControlServer(cluster, path):
        records = runner(*events, actor=HookActor(SimulationActor(path))).tick(2.0, IDLE, SLICES)
    assert cluster.done == [
        ("preempt", "spot-0", 20, 1),
        ("maintain", "spot-0", 15, 0),
        ("slow", "spot-0", 4, 30),
        ("partition", "spot-0", 5),
        ("stock_out", "spot", True),
        ("stock_out", "spot", False),
        ("add", "flex"),
    ]
    assert records[0] == EventRecord(2.0, "preempt", "spot-0", "at 0 s, one of 1", 22.0)
    assert records[3] == EventRecord(2.0, "partition", "spot-0", "at 0 s", 7.0)
    assert records[6] == EventRecord(2.0, "add", "flex", "at 0 s: flex-7")


def test_what_fails_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    cluster, path = Slices(), tmp_path / "c" / "control.sock"
    chaos = runner(
        {"action": "kill", "target": {"slice": "spot-0"}},
        {"action": "drain", "target": {"slice": "spot-0"}},
        {"action": "kill", "target": {"slice": "spot-9"}},
        {"action": "stockout", "target": {"compute_class": "spot"}},
        actor=SimulationActor(path),
    )
    with ControlServer(cluster, path):
        killed, drained, missed, dry = chaos.tick(1.0, IDLE, SLICES)
    assert killed.error == "no slice 'spot-0'; there are none"
    assert drained.error == "drain ended with HTTP 500 in the simulated cluster"
    assert missed.error is not None
    assert "no such slice; there are spot-0" in missed.error
    assert dry.error is None
    assert cluster.done == [("stock_out", "spot", True)]


def test_event_is_carried_out_once() -> None:
    chaos = runner({"action": "run", "command": ["true"]}, {"action": "kill", "at_s": 5})
    assert [record.action for record in chaos.tick(1.0, IDLE, SLICES)] == ["run"]
    assert chaos.tick(2.0, IDLE, SLICES) == []
    assert [record.action for record in chaos.tick(5.0, IDLE, SLICES)] == ["kill"]
    assert chaos.tick(6.0, IDLE, SLICES) == []


def test_without_a_simulation_the_user_is_told(tmp_path: Path) -> None:
    kill = {"action": "kill", "target": {"slice": "spot-0"}}
    (hookless,) = runner(kill).tick(0.0, IDLE, SLICES)
    assert hookless.error == "kill needs a simulated cluster; here only `run` is possible"
    absent = SimulationActor(tmp_path / "control.sock")
    (unanswered,) = runner(kill, actor=absent).tick(0.0, IDLE, SLICES)
    assert unanswered.error is not None
    assert f"the simulated cluster at {tmp_path / 'control.sock'} does not ans" in unanswered.error


def test_command_is_told_its_slice_and_host_and_what_it_says_is_recorded() -> None:
    said = "import json, sys; print('first'); print(json.dumps(sys.argv[1:]))"
    record = run(sys.executable, "-c", said, "{slice}/{node}", "{address}", '{"a": 1}', for_s=9)
    reason, _, words = record.detail.partition(": ")
    assert (reason, record.until_s, record.error) == ("at 0 s", 12.0, None)
    assert json.loads(words) == ["spot-0/node-a", "10.0.0.1", '{"a": 1}']


@pytest.mark.parametrize(
    ("program", "timeout_s", "words"),
    [
        ("import sys; sys.exit('no such node')", 60, "ended with 1: no such node"),
        ("while True: pass", 0.5, "was killed after 0.5 s"),
    ],
)
def test_command_that_fails_or_hangs_is_recorded(
    program: str, timeout_s: float, words: str
) -> None:
    assert words in str(run(sys.executable, "-c", program, timeout_s=timeout_s).error)


def test_command_that_is_not_there_is_recorded() -> None:
    assert "no-such-program cannot be run" in str(run("no-such-program").error)


def test_slices_are_read_from_the_fleet_page() -> None:
    hosts = [{"worker_id": 0, "node_id": "node-a", "address": "10.0.0.1", "num_chips": 4}]
    rows = [
        {"name": "spot-0", "compute_class": "spot", "state": "ready", "hosts": hosts, "new": 1},
        {"name": None, "compute_class": "spot", "state": "provisioning", "hosts": []},
    ]
    assert slices_in_fleet({"slices": rows, "models": []}) == SLICES
    assert slices_in_fleet({"models": []}) == []
