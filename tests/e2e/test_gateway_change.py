"""Gateways are replaced and one is added under streams of three minutes: all of them end whole.

Each change of the set of gateways starts a new HAProxy, and the streams of all gateways stay with
the one before, which ends them after its hard stop. Ray's own is shorter than these streams.
"""

import asyncio
import re
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import yaml

from serving.domain.tokens.paced import LETTERS, paced_tokens

from .application import Role, RunningApplication, application_args, paced_model, serve_config
from .rollout_load import patiently
from .streams import READ_TIMEOUT_S, Answer, Request

pytestmark = [pytest.mark.e2e, pytest.mark.long]

# One token in a second: what takes time here computes next to nothing.
TPOT_MS, NUM_TOKENS = 1000, 181
STREAM_S = (NUM_TOKENS - 1) * TPOT_MS / 1000
# Ray's own value. A stream says nothing about ours unless it goes on for longer after the change.
DEFAULT_HARD_STOP_S = 120.0
STREAMS_AT_ONCE = 4
CHANGE_S = 150.0
MIB = 1 << 20


def args_with(**gateway: Any) -> dict[str, Any]:
    model = paced_model(1, {"ttft_ms": 10, "tpot_ms": TPOT_MS})
    return application_args(model, gateway={"num_cpus": 0.01, **gateway})


@dataclass(frozen=True)
class Haproxy:
    """The HAProxy that takes new connections, and the gateways it sends requests to."""

    pid: int
    gateways: frozenset[str]


def haproxy_of(application: RunningApplication) -> Haproxy:
    """Asks its admin socket, which a new HAProxy takes over when it is ready."""
    (path,) = application.folder.glob("h/*/a")
    with socket.socket(socket.AF_UNIX) as admin:
        admin.connect(str(path))
        admin.sendall(b"show info; show stat\n")
        text = b"".join(iter(lambda: admin.recv(65536), b"")).decode()
    pid = re.search(r"^Pid: (\d+)$", text, re.MULTILINE)
    assert pid, text
    gateways = re.findall(r"^[^,\n]+,(SERVE_REPLICA[^,]*gateway[^,]*),", text, re.MULTILINE)
    return Haproxy(int(pid[1]), frozenset(gateways))


async def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float = CHANGE_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.1)


class Streams:
    """Streams that are opened at one instant. Each has a prompt and an answer of its own."""

    def __init__(self, client: httpx.AsyncClient, first: int) -> None:
        self.answers = {number: Answer() for number in range(first, first + STREAMS_AT_ONCE)}
        self._begun: set[int] = set()
        self._tasks = [asyncio.create_task(self._read(client, number)) for number in self.answers]

    async def begin(self) -> None:
        """Waits until each has a token."""
        await wait_until(lambda: len(self._begun) == STREAMS_AT_ONCE, "all streams have begun", 30)

    async def end(self) -> None:
        await asyncio.gather(*self._tasks)

    async def _read(self, client: httpx.AsyncClient, number: int) -> None:
        request = Request(
            "/v1/completions",
            {
                "model": "paced",
                "prompt": prompt_of(number),
                "max_tokens": NUM_TOKENS,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        self.answers[number] = await request.stream(client, lambda _: self._begun.add(number))


def prompt_of(number: int) -> list[int]:
    return list(f"Long stream {number}".encode())


def breaks(streams: Streams, changed_s: float) -> list[str]:
    """What is wrong with the answers of these streams, and how long after the change they ended."""
    found = []
    for number, answer in streams.answers.items():
        choice = answer.choices[0]
        is_whole = (
            answer.error is None
            and answer.is_done
            and choice.finish_reason == "length"
            and choice.token_ids == paced_tokens(prompt_of(number), NUM_TOKENS, LETTERS)
        )
        after_s = answer.chunk_times_s[-1] - changed_s
        if not is_whole:
            found.append(
                f"{number}: {answer.num_tokens} tokens, {answer.error or 'no error'}, "
                f"{after_s:.1f} s after the change"
            )
        elif after_s < DEFAULT_HARD_STOP_S + 5:
            found.append(f"{number}: over {after_s:.1f} s after the change, which shows nothing")
    return found


async def apply(application: RunningApplication, args: dict[str, Any]) -> None:
    path = application.folder / "changed.yaml"
    path.write_text(yaml.safe_dump(serve_config(args, application.port)))
    done = await asyncio.to_thread(application.serve, "deploy", str(path))
    assert done.returncode == 0, done.stderr


async def change(
    application: RunningApplication,
    args: dict[str, Any],
    is_done: Callable[[frozenset[str]], bool],
) -> float:
    """Applies `args` and waits for the gateways to be so; the instant of the first new HAProxy."""
    before = haproxy_of(application)
    await apply(application, args)
    await wait_until(lambda: haproxy_of(application).pid != before.pid, "there is a new HAProxy")
    changed_s = time.monotonic()
    await wait_until(lambda: is_done(haproxy_of(application).gateways), "the gateways are changed")
    return changed_s


async def open_streams(
    application: RunningApplication, client: httpx.AsyncClient, first: int
) -> Streams:
    """Streams on both of two gateways."""
    await asyncio.to_thread(application.loads, 2)
    streams = Streams(client, first)
    await streams.begin()
    loads = await asyncio.to_thread(application.loads, 2)
    assert sum(loads.values()) == STREAMS_AT_ONCE
    assert min(loads.values()) > 0
    return streams


async def run(application: RunningApplication) -> dict[str, float]:
    limits = httpx.Limits(max_connections=None, keepalive_expiry=60.0)
    async with httpx.AsyncClient(
        base_url=application.base_url, timeout=READ_TIMEOUT_S, limits=limits
    ) as client:
        await wait_until(lambda: len(haproxy_of(application).gateways) == 2, "two gateways are up")
        old, old_gateways = haproxy_of(application), application.processes(Role.GATEWAY)
        began_s = time.monotonic()
        leaving = await open_streams(application, client, 0)
        old_haproxies = set(application.processes(Role.HAPROXY))
        replaced_s = await change(
            application,
            args_with(replicas=2, max_body_bytes=MIB),
            lambda listed: len(listed) == 2 and not listed & old.gateways,
        )

        kept = haproxy_of(application)
        staying = await open_streams(application, client, STREAMS_AT_ONCE)
        assert haproxy_of(application).gateways == kept.gateways
        added_s = await change(
            application,
            args_with(replicas=3, max_body_bytes=MIB),
            lambda listed: len(listed) == 3 and listed > kept.gateways,
        )

        await leaving.end()
        assert (broken := breaks(leaving, replaced_s)) == [], "\n".join(broken)
        await wait_until(
            lambda: not any(gateway.is_running() for gateway in old_gateways),
            "the replaced gateways have ended",
        )
        # The client still has its connections to a HAProxy all of whose gateways are gone.
        assert old_haproxies & set(application.processes(Role.HAPROXY))
        models = [client.get("/v1/models") for _ in leaving.answers]
        statuses = [answer.status_code for answer in await asyncio.gather(*models)]
        assert statuses == [200] * STREAMS_AT_ONCE
        await staying.end()
        assert (broken := breaks(staying, added_s)) == [], "\n".join(broken)
        return {"replaced": replaced_s - began_s, "added": added_s - began_s}


def test_streams_of_three_minutes_outlive_a_change_of_gateways(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with patiently(RunningApplication(args_with(replicas=2))) as application:
        after_s = asyncio.run(run(application))
    with capsys.disabled():
        sys.stdout.write(
            f"\n    {2 * STREAMS_AT_ONCE} streams of {STREAM_S:.0f} s, all whole: gateways "
            f"replaced after {after_s['replaced']:.0f} s, added after {after_s['added']:.0f} s\n"
        )
