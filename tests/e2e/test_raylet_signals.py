"""The raylet of an engine's host gets a signal under 16 streams, on hosts of their own."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from serving.domain.tokens.paced import LETTERS, paced_tokens

from .application import (
    RunningApplication,
    application_args,
    linked_engines,
    paced_model,
    wait_until,
)
from .streams import Answer, Request, begin_all

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT)
MODEL = "paced"
NUM_STREAMS, NUM_TOKENS = 16, 150
WHOLE_S = 180.0
V6E_2X4 = {"generation": "v6e", "topology": "2x4", "chips_per_host": 4}
PLAN = {
    "slices": [
        {"name": "spot", "compute_class": "spot", "count": 2, "returns_after_s": 1, **V6E_2X4}
    ]
}


@pytest.fixture(scope="module")
def application() -> Iterator[RunningApplication]:
    deployments = [{"compute_class": "spot", "replicas": 2, "num_cpus": 0.01, "slice": V6E_2X4}]
    model = paced_model(pace={"ttft_ms": 50.0, "tpot_ms": 100.0}, deployments=deployments)
    args = application_args(model, gateway={"request_deadline_s": 120.0})
    with RunningApplication(args, through="sim", plan=PLAN) as running:
        yield running


def prompt_of(number: int) -> list[int]:
    return list(f"Stream {number}".encode())


STREAMS = [
    Request(
        "/v1/completions",
        {
            "model": MODEL,
            "prompt": prompt_of(number),
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    for number in range(NUM_STREAMS)
]


def raylet_of(application: RunningApplication, node_id: str) -> psutil.Process:
    """The raylet of a node."""
    (found,) = [
        process
        for process in application.processes()
        if process.name() == "raylet" and f"--node_id={node_id}" in process.cmdline()
    ]
    return found


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_streams_go_on_when_a_raylet_gets(
    application: RunningApplication, number: signal.Signals
) -> None:
    fleet = application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 2}, WHOLE_S)
    application.wait_idle()
    row = fleet["slices"][0]
    victim = raylet_of(application, row["hosts"][0]["node_id"])

    async def run() -> list[Answer]:
        answering = await begin_all(application.base_url, STREAMS, 60.0)
        os.kill(victim.pid, number)
        return await answering

    try:
        answers = asyncio.run(run())
    finally:
        # One that stands still is given up by Ray's head, and ended by who owns the machine.
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    assert [answer.error for answer in answers if answer.error] == []
    wanted = [paced_tokens(prompt_of(at), NUM_TOKENS, LETTERS) for at in range(NUM_STREAMS)]
    assert [answer.choices[0].token_ids for answer in answers] == wanted
    # The slice is lost with its host, and another one comes for the replica.
    gone = row["replica_id"]
    wait_until(
        lambda: gone not in {each["replica_id"] for each in application.fleet()["slices"]}, WHOLE_S
    )
