"""A client that leaves ends its request, wherever it stands: through the real ingress and Serve.

Serve is told not to watch for that (`deployments.start.ingress`), so nothing but ours does.
"""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .application import (
    Role,
    RunningApplication,
    application_args,
    linked_engines,
    paced_model,
)
from .streams import client_of

pytestmark = pytest.mark.e2e

MODEL = "paced"
# A whole answer takes 100 s, so what ends within `LEFT_S` has been ended. As slow that 256 of them
# leave most of a shared machine to those who read them: a gateway that is behind refuses, and a
# client that is behind gets its next request off too late for the ingress.
PACE = {"ttft_ms": 50, "tpot_ms": 200}
NUM_TOKENS, LEFT_S = 500, 30.0
NUM_TOGETHER, NUM_OF_STAYING = 300, 20

MESSAGES = [{"role": "user", "content": "What is a slice?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": NUM_TOKENS},
    "/v1/completions": {"prompt": "a slice", "max_tokens": NUM_TOKENS},
    "/v1/responses": {"input": "What is a slice?", "max_output_tokens": NUM_TOKENS},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": NUM_TOKENS},
}


@pytest.fixture(scope="module")
def application() -> Iterator[RunningApplication]:
    args = application_args(paced_model(1, PACE), gateway={"request_deadline_s": 120})
    with RunningApplication(args, through="slicewise") as running:
        yield running


def body_of(route: str, *, stream: bool) -> dict[str, Any]:
    return BODIES[route] | {"model": MODEL, "stream": stream}


async def leaves_once(
    application: RunningApplication, route: str, count: str, *, stream: bool
) -> None:
    """Asks, waits until `/fleet` counts the request as `count`, and closes the connection."""

    async def ask(client: httpx.AsyncClient) -> None:
        await client.post(route, json=body_of(route, stream=stream))

    async with client_of(application.base_url) as client:
        asking = asyncio.create_task(ask(client))
        await asyncio.to_thread(
            application.wait_fleet, lambda fleet: fleet["models"][0][count] == 1, LEFT_S
        )
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("route", BODIES)
def test_request_on_an_engine_ends_with_its_client(
    application: RunningApplication, route: str, stream: bool
) -> None:
    asyncio.run(leaves_once(application, route, "in_flight", stream=stream))
    application.wait_idle(LEFT_S)
    wait_until_said(application, route)


def wait_until_said(application: RunningApplication, route: str) -> None:
    """Waits until the ingress has said of a request on a route that it was cut.

    Once in eighty times it takes the gateway, which ends its side as soon as it hears that the
    client has left, for the one that cut it.
    """
    deadline_s = time.monotonic() + LEFT_S
    cuts = (" - - C", " - - SD")
    while not any(
        f"POST {route} " in end and any(cut in end for cut in cuts)
        for end in application.bad_ends()
    ):
        assert time.monotonic() < deadline_s, application.bad_ends()
        time.sleep(0.05)


def test_request_that_waits_for_an_engine_ends_with_its_client(
    application: RunningApplication,
) -> None:
    (host,) = application.processes(Role.ENGINE_HOST)
    host.suspend()
    try:
        application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 0}, 30.0)
        route = "/v1/chat/completions"
        asyncio.run(leaves_once(application, route, "waiting", stream=True))
        application.wait_fleet(lambda fleet: fleet["models"][0]["waiting"] == 0, LEFT_S)
    finally:
        host.resume()
    application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 1}, 60.0)
    application.wait_idle(LEFT_S)


def test_many_that_leave_together_end_and_another_goes_on(
    application: RunningApplication,
) -> None:
    async def stays(client: httpx.AsyncClient) -> str:
        body = body_of("/v1/completions", stream=False) | {"max_tokens": NUM_OF_STAYING}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    async def leave_together() -> tuple[str, str]:
        async with client_of(application.base_url) as client:
            alone = await stays(client)
        async with client_of(application.base_url) as staying:
            async with client_of(application.base_url) as leaving:
                body = body_of("/v1/chat/completions", stream=True)
                asked = [
                    asyncio.create_task(leaving.post("/v1/chat/completions", json=body))
                    for _ in range(NUM_TOGETHER)
                ]
                await asyncio.to_thread(
                    application.wait_fleet,
                    lambda fleet: fleet["models"][0]["in_flight"] == NUM_TOGETHER,
                    60.0,
                )
                answer = asyncio.create_task(stays(staying))
                await asyncio.to_thread(
                    application.wait_fleet,
                    lambda fleet: (
                        answer.done() or fleet["models"][0]["in_flight"] == NUM_TOGETHER + 1
                    ),
                    60.0,
                )
                assert not answer.done(), await answer
                for each in asked:
                    each.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
            return alone, await answer

    alone, beside = asyncio.run(leave_together())
    assert alone == beside
    application.wait_idle(LEFT_S)
    logs = [file.read_text(errors="replace") for file in application.log_files()]
    assert not any("Exception in ASGI application" in log for log in logs)
