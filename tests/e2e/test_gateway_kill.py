"""One of two gateways dies: what the other one carries is untouched."""

import asyncio
import os
import signal
from typing import Any

import pytest

from .application import Role, RunningApplication, application_args, linked_engines, paced_model
from .streams import Answer, Request, stream_all

NUM_TOKENS = 600
ARGS = application_args(
    paced_model(2, {"ttft_ms": 10, "tpot_ms": 10}), gateway={"replicas": 2, "num_cpus": 0.01}
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(420),
    pytest.mark.parametrize("paced_application", [ARGS], indirect=True),
]

STREAMS = [
    Request(
        "/v1/completions",
        {
            "model": "paced",
            "prompt": f"stream {number}",
            "max_tokens": NUM_TOKENS,
            "return_token_ids": True,
        },
    )
    for number in range(12)
]


def loads_by_gateway(application: RunningApplication, num_gateways: int) -> dict[str, int]:
    """Requests in flight at each gateway; asks until each has answered."""
    loads: dict[str, int] = {}

    def has_seen_all(fleet: dict[str, Any]) -> bool:
        loads[fleet["gateway"]["id"]] = fleet["models"][0]["in_flight"]
        return len(loads) == num_gateways

    application.wait_fleet(has_seen_all, 30.0)
    return loads


def test_requests_of_the_other_gateway_are_untouched(
    paced_application: RunningApplication,
) -> None:
    application = paced_application
    undisturbed = asyncio.run(stream_all(application.base_url, STREAMS))
    assert all(answer.is_done for answer in undisturbed)
    victim = application.processes(Role.GATEWAY)[0]

    async def run() -> tuple[list[Answer], dict[str, int]]:
        started: set[int] = set()
        all_started = asyncio.Event()

        def on_chunk(number: int, _: Answer) -> None:
            started.add(number)
            if len(started) == len(STREAMS):
                all_started.set()

        streaming = asyncio.create_task(stream_all(application.base_url, STREAMS, on_chunk))
        async with asyncio.timeout(60):
            await all_started.wait()
            loads = await asyncio.to_thread(loads_by_gateway, application, 2)
            os.kill(victim.pid, signal.SIGKILL)
            return await streaming, loads

    answers, loads = asyncio.run(run())
    assert sum(loads.values()) == len(STREAMS)
    survivors = [at for at, answer in enumerate(answers) if answer.is_done]
    broken = [at for at, answer in enumerate(answers) if answer.error is not None]
    assert sorted(survivors + broken) == list(range(len(STREAMS)))
    assert sorted([len(survivors), len(broken)]) == sorted(loads.values())
    assert all(answers[at].same_as(undisturbed[at]) for at in survivors)
    # The dead gateway's requests leave the engines, and a new one takes its place.
    loads_by_gateway(application, 2)
    application.wait_fleet(lambda fleet: linked_engines(fleet) == {"paced": 2}, 30.0)
    application.wait_idle()
    assert len(application.processes(Role.GATEWAY)) == 2
