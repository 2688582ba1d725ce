"""Engines die under 16 streams, and no client can tell. See `WORKLOAD` for what the streams ask."""

import asyncio
import json
import os
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
from .streams import Answer, Request, stream_all

pytestmark = [pytest.mark.e2e, pytest.mark.starts_engine]

# Of the tests of one application these are the last: nobody has to wait for the last new engine.
LEAVES_IT_DAMAGED = True

MODEL = "slicewise-demo"
NUM_TOKENS = 400
REPLACEMENT_TIMEOUT_S = 150.0
NUM_LONG_KILLS = 50
NUM_ATTEMPTS = 3

INVENTORY = {
    "type": "object",
    "properties": {
        "slices": {
            "type": "array",
            "minItems": 12,
            "maxItems": 16,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": "^[a-z]{3,6}$"},
                    "chips": {"type": "integer", "minimum": 0, "maximum": 999},
                },
                "required": ["name", "chips"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["slices"],
    "additionalProperties": False,
}


def completion(prompt: str, **options: Any) -> Request:
    defaults = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": NUM_TOKENS}
    defaults |= {"ignore_eos": True, "return_token_ids": True}
    return Request("/v1/completions", defaults | options)


def chat(question: str, **options: Any) -> Request:
    defaults = {"model": MODEL, "messages": [{"role": "user", "content": question}]}
    defaults |= {"temperature": 0, "max_tokens": 700, "return_token_ids": True}
    return Request("/v1/chat/completions", defaults | options)


def inventory(question: str) -> Request:
    schema = {"name": "inventory", "schema": INVENTORY, "strict": True}
    return chat(question, response_format={"type": "json_schema", "json_schema": schema})


PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
WORKLOAD = [
    *(completion(f"What is slice number {number}?") for number in range(4)),
    completion("A slice is", **PENALTIES),
    completion("A host is", **PENALTIES),
    completion("The gateway", logprobs=2),
    completion("The engine", logprobs=2, **PENALTIES),
    completion("Two samples:", n=2, temperature=0.8, seed=7),
    completion("A seeded sample:", temperature=0.9, seed=8),
    completion("Never again:", bad_words=["slice", "the chip"]),
    chat("What is Slicewise?", min_tokens=250),
    chat(
        "What is a compute class?",
        logprobs=True,
        top_logprobs=2,
        ignore_eos=True,
        max_tokens=NUM_TOKENS,
    ),
    *(inventory(f"List the slices of zone {zone}.") for zone in "abc"),
]
INVENTORIES = [at for at, request in enumerate(WORKLOAD) if "response_format" in request.body]


class Kill(StrEnum):
    """What happens to one engine."""

    ENGINE_CORE = "engine core is killed"
    WORKER = "worker is killed"
    ENGINE_HOST = "engine host is killed"
    SLICE_REPLICA = "slice replica is killed"
    HANG = "engine core is stopped"
    CORE_TERMINATED = "engine core gets SIGTERM"
    CORE_INTERRUPTED = "engine core gets SIGINT"
    WORKER_TERMINATED = "worker gets SIGTERM"
    WORKER_INTERRUPTED = "worker gets SIGINT"
    HOST_TERMINATED = "engine host gets SIGTERM"
    HOST_INTERRUPTED = "engine host gets SIGINT"


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
        drawn = chance.choice(list(Kill))
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
        match self.kill:
            case Kill.ENGINE_HOST | Kill.HOST_TERMINATED | Kill.HOST_INTERRUPTED:
                return host
            case Kill.SLICE_REPLICA:
                return application.processes(Role.SLICE_REPLICA)[self.engine]
            case Kill.WORKER | Kill.WORKER_TERMINATED | Kill.WORKER_INTERRUPTED:
                return workers[0]
            case _:
                return cores[0]

    @property
    def signal(self) -> signal.Signals:
        match self.kill:
            case Kill.HANG:
                return signal.SIGSTOP
            case Kill.CORE_TERMINATED | Kill.WORKER_TERMINATED | Kill.HOST_TERMINATED:
                return signal.SIGTERM
            case Kill.CORE_INTERRUPTED | Kill.WORKER_INTERRUPTED | Kill.HOST_INTERRUPTED:
                return signal.SIGINT
            case _:
                return signal.SIGKILL


class Disturbance:
    """Carries a plan out, once, when its stream has come as far as it says."""

    def __init__(self, plan: Plan, pid: int) -> None:
        self._plan = plan
        self._pid = pid
        self.at_s: float | None = None

    def __call__(self, number: int, answer: Answer) -> None:
        is_due = number == self._plan.stream and answer.num_tokens >= self._plan.position
        if self.at_s is None and is_due:
            os.kill(self._pid, self._plan.signal)
            self.at_s = time.monotonic()


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
    """Waits until two engines are linked."""
    application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 2}, REPLACEMENT_TIMEOUT_S)


def wait_ended(victim: psutil.Process) -> None:
    """Waits until the process is no more, or only its name is left."""
    deadline_s = time.monotonic() + REPLACEMENT_TIMEOUT_S
    while victim.is_running() and victim.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, f"{victim} is still there"
        time.sleep(0.1)


def survive(application: RunningApplication, undisturbed: list[Answer], plan: Plan) -> str:
    """Runs the streams through the kill and compares; a line with what was measured.

    The streams may be read long after they were written, and the kill then finds nothing in flight:
    it is tried again, earlier in the stream. A kill that never moved anything shows nothing.
    """
    for attempt in range(NUM_ATTEMPTS):
        wait_whole(application)
        plan = replace(plan, position=max(1, plan.position // 4**attempt))
        num_resumes_before = num_resumes(application.fleet())
        line = kill_and_compare(application, undisturbed, plan)
        moved = num_resumes(application.fleet()) - num_resumes_before
        if plan.kill == Kill.SLICE_REPLICA:
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


def kill_and_compare(application: RunningApplication, undisturbed: list[Answer], plan: Plan) -> str:
    victim = plan.victim(application)
    disturbance = Disturbance(plan, victim.pid)
    answers = asyncio.run(stream_all(application.base_url, WORKLOAD, disturbance))
    try:
        assert disturbance.at_s is not None, f"stream {plan.stream} never came to {plan.position}"
        errors = {at: answer.error for at, answer in enumerate(answers) if answer.error}
        assert errors == {}
        pairs = enumerate(zip(answers, undisturbed, strict=True))
        differing = [at for at, (one, other) in pairs if not one.same_as(other)]
        assert [WORKLOAD[at].body for at in differing] == []
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
    line = survive(demo_application, undisturbed, Plan.from_seed(5, Kill.SLICE_REPLICA))
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


# Each but a killed replica costs the start of a new engine. `make test` has a SIGKILL and a
# SIGSTOP, and a SIGTERM to an engine core by itself (`tests/engine`); the other processes and
# signals are long tests.
ALWAYS_TRIED = {Kill.ENGINE_HOST, Kill.HANG}


@pytest.mark.parametrize(
    "kill",
    [pytest.param(kill, marks=() if kill in ALWAYS_TRIED else pytest.mark.long) for kill in Kill],
)
def test_streams_survive_exactly_when(
    demo_application: RunningApplication,
    undisturbed: list[Answer],
    capsys: pytest.CaptureFixture[str],
    kill: Kill,
) -> None:
    plan = Plan.from_seed(list(Kill).index(kill), kill)
    report(capsys, survive(demo_application, undisturbed, plan))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1000 + NUM_LONG_KILLS))
def test_streams_survive_exactly_whatever_the_seed_says(
    demo_application: RunningApplication,
    undisturbed: list[Answer],
    capsys: pytest.CaptureFixture[str],
    seed: int,
) -> None:
    report(capsys, f"seed {seed}: {survive(demo_application, undisturbed, Plan.from_seed(seed))}")
