"""After thousands of requests, many of them abandoned, nothing of them is left anywhere."""

import asyncio
import itertools
import random
import sys
from typing import Any

import httpx
import pytest

from .application import RunningApplication
from .memory import MIB, own_bytes, serving_processes
from .streams import Request, client_of

# How many clients ask at once; the rest wait for their turn.
CONCURRENCY = 32

# What a process may grow by in the second half. Allocators keep what a burst needed: steps of a few
# MiB come and go (1 MiB was measured). In 1,000 requests a leak of 4 KiB in each would show; what
# vLLM's frontend holds of one request (prompt, tokens, detokenizer, stream) is more than that.
ALLOWED_GROWTH_BYTES = 4 * MIB

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def mixed_request(model: str, chance: random.Random) -> Request:
    """Some request: chat or completion, streamed or not, short or long, one or two samples."""
    body: dict[str, Any] = {"model": model, "max_tokens": chance.choice([1, 8, 30, 80])}
    body["stream"] = chance.random() < 0.7
    if chance.random() < 0.3:
        body |= {"n": 2, "temperature": 0.8, "seed": 1}
    if chance.random() < 0.2:
        body["stop"] = ["e"]
    words = " ".join(chance.choices(["slice", "host", "chip", "token"], k=chance.randint(1, 40)))
    if chance.random() < 0.5:
        return Request("/v1/completions", body | {"prompt": words})
    return Request(
        "/v1/chat/completions", body | {"messages": [{"role": "user", "content": words}]}
    )


async def ask_and_perhaps_leave(
    client: httpx.AsyncClient, request: Request, leave_after_s: float | None
) -> bool:
    """One request; whether it was answered whole. A client that leaves closes its connection."""
    try:
        async with asyncio.timeout(leave_after_s):
            async with client.stream("POST", request.path, json=request.body) as response:
                assert response.status_code == 200, await response.aread()
                async for _ in response.aiter_bytes():
                    pass
    except TimeoutError:
        return False
    return True


async def ask_many(base_url: str, model: str, num_requests: int, chance: random.Random) -> int:
    """Asks, `CONCURRENCY` at a time; how many were answered to their end."""
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(request: Request, leave_after_s: float | None) -> bool:
        async with places:
            return await ask_and_perhaps_leave(client, request, leave_after_s)

    async with client_of(base_url) as client:
        ends = await asyncio.gather(
            *(
                one(
                    mixed_request(model, chance),
                    chance.uniform(0.0, 0.3) if chance.random() < 0.5 else None,
                )
                for _ in range(num_requests)
            )
        )
    return sum(ends)


def assert_nothing_is_left(
    application: RunningApplication,
    model: str,
    num_requests: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chance = random.Random(1)
    processes = serving_processes(application)
    halves = [own_bytes(processes)]
    num_answered = 0
    for _ in range(2):
        num_answered += asyncio.run(
            ask_many(application.base_url, model, num_requests // 2, chance)
        )
        # In the gateway's frontends and fleet clients, and on the engines.
        fleet = application.wait_idle(30.0)
        engines = [engine for served in fleet["models"] for engine in served["engines"]]
        assert [(each["in_flight"], each["num_waiting"]) for each in engines] == [(0, 0)] * 2
        halves.append(own_bytes(processes))
    assert 0 < num_answered < num_requests, "some are answered, some abandoned"
    growth = {
        process.pid: [
            (after[process.pid] - before[process.pid]) / MIB
            for before, after in itertools.pairwise(halves)
        ]
        for process in processes
    }
    with capsys.disabled():
        for process in processes:
            first, second = growth[process.pid]
            sys.stdout.write(
                f"\n    {process.name()}: {halves[-1][process.pid] / MIB:.0f} MiB, "
                f"grew {first:+.1f} MiB in the first half, {second:+.1f} MiB in the second"
            )
        sys.stdout.write("\n")
    assert serving_processes(application) == processes, "a process was replaced"
    assert {
        pid: late for pid, (_, late) in growth.items() if late > ALLOWED_GROWTH_BYTES / MIB
    } == {}


def test_2000_requests_leave_nothing_behind(
    paced_application: RunningApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    # Before the count: caches, pools and code paths that fill with the first requests.
    asyncio.run(ask_many(paced_application.base_url, "paced", 300, random.Random(0)))
    assert_nothing_is_left(paced_application, "paced", 2000, capsys)


@pytest.mark.starts_engine
def test_200_requests_leave_nothing_behind_on_vllm(
    demo_application: RunningApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(ask_many(demo_application.base_url, "slicewise-demo", 100, random.Random(0)))
    assert_nothing_is_left(demo_application, "slicewise-demo", 200, capsys)
