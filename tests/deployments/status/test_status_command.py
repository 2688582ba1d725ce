"""`slicewise status` against the real edge, which answers for an example fleet."""

import asyncio
import json
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from dashboard.fleet_stage import CHAT, CODE, NOW_S, V6E, Stage, example_board, held, ready, serving
from typer.testing import CliRunner

from deployments.cli import build_cli
from deployments.status.gateway import fetch_fleet
from deployments.status.reports import parse_fleet
from deployments.status.tables import fleet_report
from deployments.terminal import plain_lines
from serving.domain.supply.orders import OperatorOrder, OrderKind
from tests.interrupts import heed_interrupts

ROOT = Path(__file__).parents[3]
DEADLINE_S = 30.0


async def lines_of(stage: Stage) -> list[str]:
    async with serving(stage) as url:
        body = await asyncio.to_thread(fetch_fleet, url, None, DEADLINE_S)
    return [" ".join(line.split()) for line in plain_lines(fleet_report(parse_fleet(body)))]


@asynccontextmanager
async def watching(url: str, output: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """`slicewise status --watch` in a process of its own, writing to `output`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deployments.cli", "status", "--watch", "--url", url),
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "60", "LINES": "12"},
        stdout=output,
        stderr=asyncio.subprocess.PIPE,
        # A shell has what it runs in the background ignore Ctrl-C, these tests perhaps.
        preexec_fn=heed_interrupts,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_slices_are_shown_after_the_engines() -> None:
    lines = await lines_of(Stage.example())
    start = lines.index("slices: 1 draining, 1 loading, 1 probing, 1 provisioning, 6 ready, "
                        "1 requested, 1 reserved")  # fmt: skip
    assert lines[start + 1 :] == [
        "SLICE COMPUTE CLASS STATE SINCE SHAPE HOSTS MODEL IN FLIGHT REASON",
        f"v5e-flex-1 flex-start probing 9s v5e 4x8 8 x 4 chips {CHAT} - "
        "chips and interconnect are tried out",
        f"v5e-flex-2 flex-start reserved 1s v5e 4x8 8 x 4 chips {CHAT} - "
        "holds every host of v5e-flex-2",
        f"replica-here local ready 1h00m - - {CODE} 40 the engine takes requests",
        *(
            f"v5p-res-{n} reserved ready {since} v5p 2x2x4 4 x 4 chips {CHAT} {load} "
            "the engine takes requests"
            for n, since, load in ((1, "2d04h", 3), (2, "2d04h", 10), (3, "7h24m", 17))
        ),
        f"v6e-spot-1 spot draining 11s v6e 4x4 4 x 4 chips {CHAT} 24 "
        "host 2: the cloud takes it back (metadata preempted)",
        f"v6e-spot-2 spot ready 41m00s v6e 4x4 4 x 4 chips {CODE} 31 the engine takes requests",
        f"v6e-spot-3 spot ready 1h35m v6e 2x4 1 x 8 chips {CODE} 38 the engine takes requests",
        f"v6e-spot-4 spot loading 48s v6e 4x4 4 x 4 chips {CODE} - the engine starts",
        f"replica-w1 spot provisioning 3m58s v6e 4x4 - {CHAT} - "
        "no slice of v6e 4x4 is free: 3 of 3 are held",
        f"replica-w2 spot requested 0s v6e 4x4 - {CHAT} - a replica wants a slice",
    ]
    assert "ENGINE COMPUTE CLASS STATE SINCE RUNNING WAITING KV IN FLIGHT" in lines[:start]


def test_slices_that_nobody_has_are_shown_with_their_reason() -> None:
    supply = [
        {"name": "v6e-spot-0", "state": "held", "since_s": 9.0, "reason": "r1 has it"},
        {
            "name": "v6e-spot-1",
            "state": "quarantined",
            "since_s": 12.0,
            "reason": "it failed 2 times, last: no HBM",
            "compute_class": "spot",
            "generation": "v6e",
            "topology": "2x4",
            "ends_in_s": 48.0,
            "num_failures": 2,
        },
    ]
    fleet = {"models": [], "gateway": {"id": "g", "uptime_s": 1.0}, "supply": supply}
    report = "\n".join(plain_lines(fleet_report(parse_fleet(json.dumps(fleet)))))
    assert "not held: 1 quarantined" in report
    (row,) = [line.split() for line in report.splitlines() if "v6e-spot-1" in line]
    assert row[:7] == ["v6e-spot-1", "spot", "quarantined", "12s", "48s", "v6e", "2x4"]
    assert "v6e-spot-0" not in report


def quotas_of(*rows: tuple[str, float, int], left_out: int = 0) -> list[str]:
    """The lines about quotas of ten requests a day: of whom, used, refused."""
    quotas = [
        {
            "tenant": tenant,
            "quota": "10 requests per day",
            "limit": 10,
            "used": used,
            "refused": refused,
        }
        for tenant, used, refused in rows
    ]
    fleet = {
        "models": [],
        "gateway": {"id": "g", "uptime_s": 1.0},
        "quotas": quotas,
        "quotas_left_out": left_out,
    }
    lines = plain_lines(fleet_report(parse_fleet(json.dumps(fleet))))
    return [" ".join(line.split()) for line in lines if line]


IDLE = ("idle", 0.0, 0)
TABLE = ["quotas, nearest to their limits first:", "TENANT QUOTA USED SHARE REFUSED"]


def test_a_short_list_of_quotas_is_shown_whole() -> None:
    lines = quotas_of(("a", 9, 3), *[IDLE] * 9)
    assert lines[:3] == [*TABLE, "a 10 requests per day 9 90% 3"]
    assert lines[3:] == ["idle 10 requests per day 0 0% 0"] * 9


def test_of_a_long_list_of_quotas_those_are_shown_that_are_used_or_have_refused() -> None:
    lines = quotas_of(("a", 12, 3), ("b", 0, 1), *[IDLE] * 9)
    assert lines == [
        *TABLE,
        "a 10 requests per day 12 120% 3",
        "b 10 requests per day 0 0% 1",
        "9 more are further from their limits",
    ]


def test_twenty_quotas_are_shown_at_most_and_the_others_counted() -> None:
    lines = quotas_of(*[("busy", 5.0, 0)] * 30, left_out=7)
    assert lines[2:-1] == ["busy 10 requests per day 5 50% 0"] * 20
    assert lines[-1] == "17 more are further from their limits"


def test_a_long_list_of_quotas_that_nobody_uses_is_one_line() -> None:
    assert quotas_of(*[IDLE] * 11) == ["quotas: 11, nothing used and nothing refused"]


def test_a_fleet_without_quotas_says_nothing_of_them() -> None:
    assert quotas_of() == []


async def test_fleet_without_slices_says_so() -> None:
    assert (await lines_of(Stage()))[-1] == "slices: none"


async def test_names_from_elsewhere_cannot_command_the_terminal() -> None:
    stage = Stage()
    record = held("x", V6E, CHAT, "spot", ready("\x1b[2Jgone\r\n", 5.0))
    stage.put(replace(record, topology="4x4\x07"))
    assert "?[2Jgone?? spot ready 5s v6e 4x4?" in (await lines_of(stage))[-1]


@pytest.mark.slow
async def test_cluster_that_cannot_be_read_is_told_and_the_fleet_is_shown() -> None:
    async with serving(Stage.example()) as url:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "deployments.cli", "status", "--url", url),
            *("--rayservice", "llm"),
            cwd=ROOT,
            env={**os.environ, "PATH": ""},
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(DEADLINE_S):
            printed, _ = await process.communicate()
    words = " ".join(printed.decode().split())
    assert process.returncode == 0
    assert words.startswith("gateway ")
    assert (
        "WARNING kubectl: the cluster was not read, so only the fleet is looked at: RayService "
        "serving/llm: kubectl is not on the PATH"
    ) in words
    assert "not read" not in words.partition("SLICE COMPUTE CLASS")[2]


async def test_watch_prints_again_until_interrupted() -> None:
    stage = Stage.example()
    async with serving(stage) as url, watching(url, asyncio.subprocess.PIPE) as process:
        assert process.stdout is not None
        await process.stdout.readuntil(b"replica-w2")
        stage.directory.forget("replica-w2")
        await process.stdout.readuntil(b"slices: 1 draining")
        assert b"requested" not in await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        await process.communicate()
        assert process.returncode == 0


@pytest.mark.slow
async def test_watch_asks_a_gateway_that_stopped_to_answer_again() -> None:
    stage = Stage.example()
    async with serving(stage) as url, watching(url, asyncio.subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        await process.stdout.readuntil(b"replica-w2")
        stage.is_failing = True
        assert b"HTTP 500" in await process.stderr.readline()
        stage.is_failing = False
        await process.stdout.readuntil(b"replica-w2")


@pytest.mark.slow
async def test_watch_on_a_terminal_redraws_in_place_and_fits_it() -> None:
    reader, terminal = pty.openpty()
    drawn = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    with os.fdopen(reader, "rb") as file:
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(drawn), file
        )
        try:
            async with serving(Stage.example()) as url, watching(url, terminal):
                for _ in range(2):
                    await drawn.readuntil(b"\x1b[1A\x1b[2K" * 11)  # from the last line to the first
                    screen = await drawn.readuntil(b"\r\x1b[2K")
        finally:
            transport.close()
            os.close(terminal)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.decode()).rstrip("\r").split("\r\n")
    assert lines[0].startswith("gateway 5f0c2a9b41de")
    assert len(lines) == 12
    assert max(map(len, lines)) == 60
    assert lines[-1].strip() == "..."


@pytest.mark.slow
async def test_watch_of_a_wrong_address_ends_at_once() -> None:
    async with watching("http://127.0.0.1:1", asyncio.subprocess.PIPE) as process:
        _, problem = await process.communicate()
        assert process.returncode == 2
        assert b"Connection refused" in problem


async def test_plan_is_told_with_what_is_refused_and_alerts() -> None:
    stage = Stage.example()
    stage.board = example_board("the load is 70 s\x1b[2J old")
    lines = await lines_of(stage)
    start = lines.index("autoscaling, planned 4s ago")
    assert lines[start - 1] == ""
    assert lines[start + 1 :] == [
        f"{CHAT}: flex-start 2, reserved 3, spot 4; next slice in 1m20s",
        "ALERT the load is 70 s?[2J old",
        "41.20 requests/s, 44.00 in 240 s by trend: 8.61 slices; need 9, floor 5",
        "refused: spot +2: not relied on: a wish is 131 s late",
    ]


async def test_fleet_that_does_not_scale_has_no_line_on_it() -> None:
    assert not any("autoscaling" in line for line in await lines_of(Stage.example()))


async def test_standing_orders_are_shown_with_who_why_and_until_when() -> None:
    stage = Stage()
    freeze = OperatorOrder(OrderKind.FREEZE, "anna", "a demo", NOW_S - 60.0, until_s=NOW_S + 600.0)
    pin = OperatorOrder(OrderKind.PIN, "bo", "paid for", NOW_S - 5.0, "spot", num_replicas=2)
    stage.directory.set_orders((freeze, pin))
    lines = await lines_of(stage)
    start = lines.index("standing orders:")
    assert lines[start + 1 :] == [
        "ORDER ABOUT SINCE UNTIL BY REASON",
        "freeze - 1m00s 10m00s anna a demo",
        "pin spot of every model at 2 5s - bo paid for",
    ]


def test_service_and_cluster_at_once_are_refused() -> None:
    options = ["status", "--rayservice", "llm", "--raycluster", "llm-abcde"]
    said = CliRunner().invoke(build_cli([]), options)
    assert said.exit_code == 2
    assert "not both" in said.output
