"""Slices that eight engines share: chips of their own, one owner, one end.

Two simulated hosts of eight chips, paced engines: processes of their own, whose environment says
which chips libtpu would give them. Nothing here shows that libtpu keeps to them.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from serving.domain.tokens.paced import LETTERS, paced_tokens
from serving.tpu.chips import VISIBLE_CHIPS

from .application import Role, RunningApplication, application_args, linked_engines, paced_model
from .streams import Answer, begin_all, token_stream

# The gate has slices of one engine (`test_slices.py`), and owners of several engines without Ray
# (`tests/slices/test_engine_hosts.py`).
pytestmark = [pytest.mark.e2e, pytest.mark.long]

MODEL = "paced"
READY_S = 300.0
NUM_STREAMS, NUM_TOKENS = 64, 120
ENGINES = 8
V6E_2X4 = {"generation": "v6e", "topology": "2x4"}
PLAN = {
    "slices": [
        {"name": "spot", "compute_class": "spot", "count": 2, "returns_after_s": 1, **V6E_2X4}
    ]
}
DEPLOYMENT = {
    "compute_class": "spot",
    "replicas": 2,
    "num_cpus": 0.01,
    "slice": V6E_2X4 | {"num_engines": ENGINES},
}


@pytest.fixture(scope="module")
def application() -> Iterator[RunningApplication]:
    pace = {"ttft_ms": 50.0, "tpot_ms": 100.0, "max_num_seqs": 512}
    model = paced_model(pace=pace, deployments=[DEPLOYMENT])
    with RunningApplication(application_args(model), through="sim", plan=PLAN) as running:
        yield running


def is_whole(fleet: dict[str, Any]) -> bool:
    return linked_engines(fleet) == {MODEL: 2 * ENGINES} and len(rows(fleet)) == 2


def rows(fleet: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The slices that serve, by name."""
    return {row["name"]: row for row in fleet["slices"] if row["state"] == "ready"}


def engine_ids(fleet: dict[str, Any], replica_id: str) -> set[str]:
    return {
        engine["engine_id"]
        for model in fleet["models"]
        for engine in model["engines"]
        if engine["replica_id"] == replica_id
    }


def hosts_by_slice(application: RunningApplication) -> dict[str, list[psutil.Process]]:
    """The engine hosts, by the name that their host has of its slice."""
    found: dict[str, list[psutil.Process]] = {}
    for process in application.processes(Role.ENGINE_HOST):
        found.setdefault(process.environ()["TPU_NAME"], []).append(process)
    return found


async def answered(
    application: RunningApplication, disturb: Callable[[], None]
) -> tuple[list[Answer], list[list[int]]]:
    """All streams, with `disturb` once each has begun; and what undisturbed ones would have."""
    prompts = [list(f"Stream {number}".encode()) for number in range(NUM_STREAMS)]
    requests = [token_stream(MODEL, prompt, NUM_TOKENS) for prompt in prompts]
    answering = await begin_all(application.base_url, requests, READY_S)
    await asyncio.to_thread(disturb)
    return await answering, [paced_tokens(prompt, NUM_TOKENS, LETTERS) for prompt in prompts]


def token_ids(answers: list[Answer]) -> list[list[int]]:
    return [answer.choices[0].token_ids for answer in answers]


def test_every_chip_of_a_slice_is_of_one_engine(application: RunningApplication) -> None:
    fleet = application.wait_fleet(is_whole, READY_S)
    assert [row["num_engines"] for row in rows(fleet).values()] == [ENGINES, ENGINES]
    assert [row["num_chips"] for row in rows(fleet).values()] == [8, 8]
    by_slice = hosts_by_slice(application)
    assert len(by_slice) == 2
    for processes in by_slice.values():
        told = [process.environ() for process in processes]
        chips = Counter(each[VISIBLE_CHIPS] for each in told)
        assert chips == Counter(str(chip) for chip in range(8))
        assert len({each["TPU_PROCESS_PORT"] for each in told}) == ENGINES


async def test_streams_survive_the_loss_of_a_slice_with_all_its_engines(
    application: RunningApplication,
) -> None:
    was = application.wait_fleet(is_whole, READY_S)
    lost = rows(was)["spot-0"]
    in_flight: list[int] = []

    def lose() -> None:
        in_flight.append(rows(application.fleet())["spot-0"]["in_flight"])
        application.simulation("kill", name="spot-0")

    answers, wanted = await answered(application, lose)
    assert in_flight[0] > 0, "nothing was on the slice: its end has shown nothing"
    assert token_ids(answers) == wanted
    fleet = application.wait_fleet(is_whole, READY_S)
    gone = engine_ids(was, lost["replica_id"])
    assert len(gone) == ENGINES
    now = [engine_ids(fleet, row["replica_id"]) for row in rows(fleet).values()]
    assert not gone & set().union(*now)
    (ended,) = [row for row in fleet["ended"] if row["replica_id"] == lost["replica_id"]]
    assert ended["cause"] == "preempted"


async def test_killed_replicas_are_succeeded_by_ones_that_take_all_engines_over(
    application: RunningApplication,
) -> None:
    was = application.wait_fleet(is_whole, READY_S)
    before = {each.pid for each in application.processes(Role.ENGINE_HOST)}

    def is_adopted(fleet: dict[str, Any]) -> bool:
        now = rows(fleet)
        return is_whole(fleet) and all(
            now[name]["replica_id"] != row["replica_id"] for name, row in rows(was).items()
        )

    def kill() -> None:
        for process in application.processes(Role.SLICE_REPLICA):
            process.send_signal(signal.SIGKILL)
        application.wait_fleet(is_adopted, READY_S)

    answers, wanted = await answered(application, kill)
    assert token_ids(answers) == wanted
    assert {each.pid for each in application.processes(Role.ENGINE_HOST)} == before
    now = application.fleet()
    for name, row in rows(was).items():
        adopted = engine_ids(now, rows(now)[name]["replica_id"])
        assert adopted == engine_ids(was, row["replica_id"])


@pytest.mark.long
async def test_engine_that_dies_takes_its_slice_along_and_no_stream(
    application: RunningApplication,
) -> None:
    was = application.wait_fleet(is_whole, READY_S)
    (victims, others) = hosts_by_slice(application).values()

    def kill() -> None:
        victims[3].send_signal(signal.SIGKILL)

    answers, wanted = await answered(application, kill)
    assert token_ids(answers) == wanted
    fleet = application.wait_fleet(
        lambda fleet: is_whole(fleet) and rows(fleet) != rows(was) and bool(fleet["ended"]),
        READY_S,
    )
    running = {each.pid for each in application.processes(Role.ENGINE_HOST)}
    assert {each.pid for each in others} < running
    assert not {each.pid for each in victims} & running
    (ended,) = [row for row in fleet["ended"] if row["cause"] == "unhealthy"]
    assert f"of {ENGINES} on the slice" in ended["reason"]
