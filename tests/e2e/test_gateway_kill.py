"""One of two gateways dies: what the other one carries is untouched."""

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import pytest

from serving.domain.tokens.paced import LETTERS, paced_tokens

from .application import Role, RunningApplication, linked_engines
from .streams import Answer, Request, stream_all

# 10 s at the application's pace: long enough to be asked about while they run.
NUM_TOKENS = 1000
MODEL = "paced"

pytestmark = [pytest.mark.e2e]

STREAMS = [
    Request(
        "/v1/completions",
        {
            "model": MODEL,
            "prompt": list(f"stream {number}".encode()),
            "max_tokens": NUM_TOKENS,
            "return_token_ids": True,
        },
    )
    for number in range(12)
]


# A gateway is a process that imports vLLM: with other tests beside it, more than 30 s were seen.
GATEWAY_START_S = 150.0


def own_ports(application: RunningApplication) -> range:
    """The ports that gateways may take: each takes the first that is free."""
    first = application.args["gateway"]["metrics_port"]
    return range(first, first + 4)


def gateways_by_port(application: RunningApplication) -> dict[int, str]:
    """Which gateway answers at which of the ports that gateways may take."""
    found = {}
    for port in own_ports(application):
        with contextlib.suppress(httpx.TransportError):
            page = httpx.get(
                f"http://127.0.0.1:{port}/metrics",
                headers={"Authorization": f"Bearer {application.api_key}"},
                trust_env=False,
            )
            (found[port],) = set(re.findall(r'gateway="(\w+)"', page.text))
    return found


def wait_for_gateways(
    application: RunningApplication, is_so: Callable[[dict[int, str]], bool]
) -> dict[int, str]:
    deadline_s = time.monotonic() + GATEWAY_START_S
    while not is_so(found := gateways_by_port(application)):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.2)
    return found


@dataclass(frozen=True)
class Killed:
    """One gateway's end under streams: `ports` say which gateway answers at which of them."""

    answers: list[Answer]
    loads: dict[str, int]
    ports_before: dict[int, str]
    ports_after: dict[int, str]  # once the dead one answers no more


@pytest.fixture(scope="module")
def killed(operated_application: RunningApplication) -> Killed:
    """Kills a gateway once for both tests: a successor imports vLLM."""
    application = operated_application
    # The proxy knows both before it is given anything.
    application.loads(2)
    before = wait_for_gateways(application, lambda found: len(set(found.values())) == 2)
    victim = application.processes(Role.GATEWAY)[0]

    async def run() -> Killed:
        started: set[int] = set()
        all_started = asyncio.Event()

        def on_chunk(number: int, _: Answer) -> None:
            started.add(number)
            if len(started) == len(STREAMS):
                all_started.set()

        streaming = asyncio.create_task(
            stream_all(application.base_url, STREAMS, on_chunk, application.api_key)
        )
        async with asyncio.timeout(60):
            await all_started.wait()
            loads = await asyncio.to_thread(application.loads, 2)
        os.kill(victim.pid, signal.SIGKILL)
        after = await asyncio.to_thread(
            wait_for_gateways, application, lambda found: len(found) == 1
        )
        return Killed(await streaming, loads, before, after)

    return asyncio.run(run())


def test_requests_of_the_other_gateway_are_untouched(
    operated_application: RunningApplication, killed: Killed
) -> None:
    answers, loads = killed.answers, killed.loads
    assert sum(loads.values()) == len(STREAMS)
    survivors = [at for at, answer in enumerate(answers) if answer.is_done]
    broken = [at for at, answer in enumerate(answers) if answer.error is not None]
    assert sorted(survivors + broken) == list(range(len(STREAMS)))
    assert sorted([len(survivors), len(broken)]) == sorted(loads.values())
    assert all(loads.values()), "a gateway carried nothing"
    for at in survivors:
        (choice,) = answers[at].choices.values()
        prompt = STREAMS[at].body["prompt"]
        assert choice.token_ids == paced_tokens(prompt, NUM_TOKENS, LETTERS)
    # The dead gateway's requests leave the engines, and a new one takes its place.
    application = operated_application
    application.loads(2, GATEWAY_START_S)
    application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 2}, 120.0)
    application.wait_idle()
    assert len(application.processes(Role.GATEWAY)) == 2


def test_each_gateway_answers_for_itself_and_a_dead_one_does_not(
    operated_application: RunningApplication, killed: Killed
) -> None:
    application, before, one = operated_application, killed.ports_before, killed.ports_after
    assert set(one.items()) < set(before.items())
    # Its successor takes the first port that is free, and says that it is another.
    after = wait_for_gateways(application, lambda found: len(found) == 2)
    free = min(set(own_ports(application)) - one.keys())
    assert after.keys() == one.keys() | {free}
    assert set(one.items()) < set(after.items())
    assert set(after.values()) != set(before.values())
    application.loads(2, GATEWAY_START_S)
    application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 2}, 120.0)
