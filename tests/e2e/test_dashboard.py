"""The dashboard has a process of its own: it shows both gateways, and its end harms nobody."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from .application import Role, RunningApplication
from .streams import Answer, Request, stream_all

NUM_TOKENS = 600
DEADLINE_S = 90.0

pytestmark = [pytest.mark.e2e]

STREAMS = [
    Request(
        "/v1/completions",
        {"model": "paced", "prompt": f"stream {number}", "max_tokens": NUM_TOKENS},
    )
    for number in range(8)
]


def get(application: RunningApplication, path: str, accept: str = "*/*") -> httpx.Response:
    headers = {"accept": accept, "authorization": f"Bearer {application.api_key}"}
    return httpx.get(f"{application.base_url}{path}", headers=headers, timeout=10)


def wait_history(
    application: RunningApplication, is_so: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """The history once it is as wanted."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        answer = get(application, "/fleet/history?model=paced")
        if answer.status_code == 200 and is_so(answer.json()):
            history: dict[str, Any] = answer.json()
            return history
        assert time.monotonic() < deadline_s, f"{answer.status_code} {answer.text[:500]}"
        time.sleep(0.1)


def has_tokens(history: dict[str, Any]) -> bool:
    rates = history["series"].get("output_tokens_per_s", {}).get("local", [])
    return sum(rate or 0 for rate in rates) > 0


def test_dashboard_shows_both_gateways_and_its_end_harms_no_request(
    operated_application: RunningApplication,
) -> None:
    application = operated_application
    undisturbed = asyncio.run(
        stream_all(application.base_url, STREAMS, api_key=application.api_key)
    )
    history = wait_history(
        application, lambda shown: len(shown["gateways"]) == 2 and has_tokens(shown)
    )
    page = get(application, "/fleet", "text/html")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    (dashboard,) = application.processes(Role.DASHBOARD)
    gateways = application.processes(Role.GATEWAY)
    refusals: list[httpx.Response] = []

    async def run() -> list[Answer]:
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
            # One that is killed may have a successor before the page is given up: an idle machine
            # starts it within seconds. One that stands still has none.
            os.kill(dashboard.pid, signal.SIGSTOP)
            refusals.append(await asyncio.to_thread(get, application, "/fleet", "text/html"))
            os.kill(dashboard.pid, signal.SIGKILL)
            assert (await asyncio.to_thread(get, application, "/fleet")).status_code == 200
            return await streaming

    answers = asyncio.run(run())
    assert all(
        answer.is_done and answer.same_as(before)
        for answer, before in zip(answers, undisturbed, strict=True)
    )
    assert refusals[0].status_code == 503
    assert "The dashboard does not answer" in refusals[0].json()["error"]["message"]
    # Serve starts another one, which begins anew.
    after = wait_history(application, lambda shown: len(shown["gateways"]) == 2)
    assert after["dashboard"]["id"] != history["dashboard"]["id"]
    assert application.processes(Role.GATEWAY) == gateways
