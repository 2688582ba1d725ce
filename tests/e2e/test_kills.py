"""Engines die under 16 streams, and no client can tell. See `WORKLOAD` for what the streams ask."""

import asyncio
import itertools
import json
import random
import signal
import sys
import time
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import psutil
import pytest

from .application import (
    Role,
    RunningApplication,
    linked_engines,
)
from .conftest import Damage
from .logs import logs_with
from .mixed_streams import INVENTORIES, MODEL, WORKLOAD, Disturbance
from .streams import Answer, Request, stream_all

pytestmark = [pytest.mark.e2e, pytest.mark.starts_engine]

# Of the tests of one application these are the last: nobody has to wait for the last new engine.
LEAVES_IT_DAMAGED = Damage.ENGINES_TO_COME

REPLACEMENT_TIMEOUT_S = 150.0
# What the seeds of the long test kill: so many engines, and the replicas that come in between.
NUM_LONG_CRASHES = 50
FIRST_LONG_SEED = 1000
NUM_ATTEMPTS = 3


class Victim(StrEnum):
    """What of an engine gets a signal."""

    CORE = "engine core"
    WORKER = "worker"
    HOST = "engine host"
    REPLICA = "slice replica"


@dataclass(frozen=True)
class Kill:
    """Which process gets which signal."""

    victim: Victim
    signal: signal.Signals

    def __str__(self) -> str:
        """Returns what is said of it."""
        return f"{self.victim} gets {self.signal.name}"


# Python's handler of SIGINT never runs in an actor of Ray's: its main thread waits in C++. Nothing
# happens to a replica; an engine host has ears of its own (`serving/engine/end_signals.py`).
DEAF = Kill(Victim.REPLICA, signal.SIGINT)
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT)
KILLS = [Kill(victim, number) for victim in Victim for number in SIGNALS]


@dataclass(frozen=True)
class Plan:
    """One kill: what, of which engine, and when. All of it comes from the seed."""

    kill: Kill
    engine: int
    stream: int
    position: int

    @classmethod
    def from_seed(cls, seed: int, kill: Kill | None = None) -> "Plan":
        chance = random.Random(seed)
        drawn = chance.choice(KILLS)
        return cls(
            kill or drawn,
            engine=chance.randrange(2),
            stream=chance.randrange(len(WORKLOAD)),
            position=chance.randrange(1, 150),
        )

    def victim(self, application: RunningApplication) -> psutil.Process:
        """The process to send the signal to."""
        host = application.processes(Role.ENGINE_HOST)[self.engine]
        cores = application.below(host, Role.ENGINE_CORE)
        workers = [each for core in cores for each in application.below(core, Role.ENGINE_WORKER)]
        match self.kill.victim:
            case Victim.HOST:
                return host
            case Victim.REPLICA:
                return application.processes(Role.SLICE_REPLICA)[self.engine]
            case Victim.WORKER:
                return workers[0]
            case Victim.CORE:
                return cores[0]


@pytest.fixture(scope="module")
def undisturbed(demo_application: RunningApplication) -> list[Answer]:
    """What the streams answer when nothing happens."""
    answers = asyncio.run(stream_all(demo_application.base_url, WORKLOAD))
    assert [answer.error for answer in answers] == [None] * len(WORKLOAD)
    return answers


@pytest.fixture(autouse=True)
def whole_fleet(demo_application: RunningApplication) -> None:
    """Every kill begins with two engines: the last one has been replaced."""
    wait_whole(demo_application)


def wait_whole(application: RunningApplication) -> None:
    """Waits until two engines are linked, each with a replica: its engine outlives one."""

    def is_whole(fleet: dict[str, Any]) -> bool:
        num_replicas = len(application.processes(Role.SLICE_REPLICA))
        return linked_engines(fleet) == {MODEL: 2} and num_replicas == 2

    application.wait_fleet(is_whole, REPLACEMENT_TIMEOUT_S)


def wait_ended(victim: psutil.Process) -> None:
    """Waits until the process is no more, or only its name is left."""
    deadline_s = time.monotonic() + REPLACEMENT_TIMEOUT_S
    while victim.is_running() and victim.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, f"{victim} is still there"
        time.sleep(0.1)


def survive(
    application: RunningApplication,
    undisturbed: list[Answer],
    plan: Plan,
    workload: list[Request] = WORKLOAD,
) -> str:
    """Runs the streams through the kill and compares; a line with what was measured.

    The streams may be read long after they were written, and the kill then finds nothing in flight:
    it is tried again, earlier in the stream. A kill that never moved anything shows nothing.
    """
    for attempt in range(NUM_ATTEMPTS):
        wait_whole(application)
        plan = replace(plan, position=max(1, plan.position // 4**attempt))
        num_resumes_before = num_resumes(application.fleet())
        line = kill_and_compare(application, undisturbed, plan, workload)
        moved = num_resumes(application.fleet()) - num_resumes_before
        if plan.kill.victim == Victim.REPLICA:
            assert moved == 0
            return line
        if moved:
            return f"{line}, {moved} requests moved"
    pytest.fail(f"{plan.kill}: the streams had ended each time before the client saw them begin")


def replicas(fleet: dict[str, Any]) -> set[str]:
    return {row["replica_id"] for row in fleet["slices"] if row["state"] == "ready"}


def engines(application: RunningApplication) -> set[int]:
    """The processes of engines that would be new ones if an engine had been loaded again."""
    roles = (Role.ENGINE_HOST, Role.ENGINE_CORE, Role.ENGINE_WORKER)
    return {process.pid for role in roles for process in application.processes(role)}


def num_resumes(fleet: dict[str, Any]) -> int:
    return int(fleet["models"][0]["resumes"])


def kill_and_compare(
    application: RunningApplication, undisturbed: list[Answer], plan: Plan, workload: list[Request]
) -> str:
    victim = plan.victim(application)
    disturbance = Disturbance(victim.pid, plan.kill.signal, plan.stream, plan.position)
    answers = asyncio.run(stream_all(application.base_url, workload, disturbance))
    try:
        assert disturbance.at_s is not None, f"stream {plan.stream} never came to {plan.position}"
        errors = {at: answer.error for at, answer in enumerate(answers) if answer.error}
        assert errors == {}
        pairs = enumerate(zip(answers, undisturbed, strict=True))
        differing = [at for at, (one, other) in pairs if not one.same_as(other)]
        assert [workload[at].body for at in differing] == []
        for at in INVENTORIES:
            assert 12 <= len(json.loads(answers[at].choices[0].text)["slices"]) <= 16
        application.wait_idle()
        longest_s = max(answer.longest_gap_s(disturbance.at_s) for answer in answers)
        usual_s = max(answer.longest_gap_s() for answer in undisturbed)
        return (
            f"{plan.kill} at token {plan.position} of stream {plan.stream}: longest stall "
            f"{longest_s * 1000:.0f} ms (undisturbed {usual_s * 1000:.0f} ms)"
        )
    finally:
        if plan.kill == Kill(Victim.REPLICA, signal.SIGSTOP):
            # Serve waits for its drain, minutes, before it kills one that does not answer.
            victim.kill()
        if plan.kill == DEAF:
            assert victim.is_running(), "it ends now: say so in docs/reference/reliability.md"
        else:
            # Its replacement is waited for by the next kill, if there is one.
            wait_ended(victim)


def test_killed_replica_leaves_its_engine_to_the_next_one(
    demo_application: RunningApplication,
    undisturbed: list[Answer],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two real vLLM engines, of which none is loaded again and none loses a request."""
    had, before = replicas(demo_application.fleet()), engines(demo_application)
    assert len(before) >= 4
    line = survive(
        demo_application, undisturbed, Plan.from_seed(5, Kill(Victim.REPLICA, signal.SIGKILL))
    )
    fleet = demo_application.wait_fleet(
        lambda fleet: len(replicas(fleet) & had) == 1 and len(replicas(fleet)) == 2,
        REPLACEMENT_TIMEOUT_S,
    )
    (new,) = replicas(fleet) - had
    (old,) = had - replicas(fleet)
    history = next(row["history"] for row in fleet["slices"] if row["replica_id"] == new)
    assert f"took over the engine of {old}" in history[-1]["reason"]
    assert engines(demo_application) == before
    adopted_s = history[-1]["at_s"] - history[0]["at_s"]
    report(capsys, f"{line}; adopted {adopted_s:.1f} s after the next replica began")


def report(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n    {line}\n")


@pytest.mark.long
def test_undisturbed_streams_repeat_exactly(
    demo_application: RunningApplication, undisturbed: list[Answer]
) -> None:
    again = asyncio.run(stream_all(demo_application.base_url, WORKLOAD))
    assert [one.same_as(other) for one, other in zip(again, undisturbed, strict=True)] == (
        [True] * len(WORKLOAD)
    )


# Each but a killed replica costs the start of a new engine. `make test` has a SIGKILL here and a
# SIGSTOP under these and other streams (`test_held_kills.py`); the other processes and signals are
# long tests.
ALWAYS_TRIED = {Kill(Victim.HOST, signal.SIGKILL)}


@pytest.mark.parametrize(
    "kill",
    [pytest.param(kill, marks=() if kill in ALWAYS_TRIED else pytest.mark.long) for kill in KILLS],
    ids=str,
)
def test_streams_survive_exactly_when(
    demo_application: RunningApplication,
    undisturbed: list[Answer],
    capsys: pytest.CaptureFixture[str],
    kill: Kill,
) -> None:
    plan = Plan.from_seed(KILLS.index(kill), kill)
    report(capsys, survive(demo_application, undisturbed, plan))


def long_plans() -> dict[int, Plan]:
    """Returns plans by seed, as many as it takes to end so many engines: replicas leave theirs."""
    plans: dict[int, Plan] = {}
    num_crashes = 0
    for seed in itertools.count(FIRST_LONG_SEED):
        if num_crashes == NUM_LONG_CRASHES:
            break
        plans[seed] = Plan.from_seed(seed)
        num_crashes += plans[seed].kill.victim != Victim.REPLICA
    return plans


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "plan"),
    [pytest.param(seed, plan, id=f"{seed}: {plan.kill}") for seed, plan in long_plans().items()],
)
def test_streams_survive_exactly_whatever_the_seed_says(
    demo_application: RunningApplication,
    undisturbed: list[Answer],
    capsys: pytest.CaptureFixture[str],
    seed: int,
    plan: Plan,
) -> None:
    report(capsys, f"seed {seed}: {survive(demo_application, undisturbed, plan)}")


@pytest.mark.long
def test_no_log_has_the_words_of_clients_or_models(
    demo_application: RunningApplication, undisturbed: list[Answer]
) -> None:
    """The last of this file: after all its crashes."""
    asked = ["What is slice number", "Never again:", "What is a compute class?", "of zone a."]
    said = [choice.text[100:130] for answer in undisturbed for choice in answer.choices.values()]
    assert all(len(each) == 30 for each in said)
    assert logs_with(demo_application, [*asked, *said]) == {}
