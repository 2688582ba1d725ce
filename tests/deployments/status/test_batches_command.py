"""`slicewise batches`: the table, its bars, and the command against a gateway's edge."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from typer.testing import CliRunner

from deployments.cli import build_cli
from deployments.status.batches import batch_lines, parse_batches, progress_bar
from deployments.status.gateway import FleetUnavailableError
from serving.gateway.edge.http import HttpEdge
from tests.gateway.batches.lanes import Answering, begin, chats, ended, gateway_in
from tests.gateway.test_http_edge import EchoFrontend, edge_over

NOW_S = 10_000.0


@asynccontextmanager
async def served(edge: HttpEdge) -> AsyncIterator[str]:
    """Serves an edge on a free port of this machine; yields its address."""
    listening = asyncio.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            listening.set()

    server = Server(uvicorn.Config(edge, port=0, log_config=None, lifespan="off", ws="none"))
    task = asyncio.create_task(server.serve())
    await listening.wait()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await task


def batch(**changes: Any) -> dict[str, Any]:
    counts = {"total": 200, "completed": 90, "failed": 10}
    return {
        "id": "batch_1",
        "status": "in_progress",
        "created_at": 9_000,
        "expires_at": 13_600,
        "request_counts": counts,
        "usage": {"total_tokens": 1234},
    } | changes


def lines_of(*batches: dict[str, Any], has_more: bool = False) -> list[str]:
    body = json.dumps({"data": batches, "has_more": has_more})
    return [" ".join(line.split()) for line in batch_lines(parse_batches(body), NOW_S)]


@pytest.mark.parametrize(
    ("num_done", "num_all", "full", "share"),
    [
        (0, 0, 0, "0%"),
        (0, 9, 0, "0%"),
        (199, 200, 23, "99%"),
        (200, 200, 24, "100%"),
        (1, 2, 12, "50%"),
    ],
)
def test_bar_is_full_when_all_is_done_and_no_sooner(
    num_done: int, num_all: int, full: int, share: str
) -> None:
    bar = progress_bar(num_done, num_all)
    assert (bar.count("#"), bar.count("."), bar.split()[-1]) == (full, 24 - full, share)


def test_table_shows_progress_age_and_what_is_left() -> None:
    done = batch(
        id="batch_0",
        status="completed",
        completed_at=9_042,
        request_counts={"total": 3, "completed": 3, "failed": 0},
    )
    header, running, ended_one, hint = lines_of(batch(), done, has_more=True)
    assert header == "BATCH STATE PROGRESS LINES FAILED TOKENS CHIP-S USD AGE LEFT"
    assert (
        running == "batch_1 in_progress [############............] 50% 200 10 1234 - - 16m40s 1h00m"
    )
    assert ended_one == f"batch_0 completed [{'#' * 24}] 100% 3 0 1234 - - 42s -"
    assert hint == "older ones are left out: --limit"


@pytest.mark.parametrize(
    ("cost", "shown"),
    [
        ({"chip_seconds": 93.26, "usd": 0.03497}, "93.3 0.0350"),
        ({"chip_seconds": 93.26, "usd": None}, "93.3 -"),
        ({"chip_seconds": 0.0, "usd": 0.0}, "- -"),
        (None, "- -"),
    ],
)
def test_table_shows_what_a_batch_has_cost(cost: dict[str, Any] | None, shown: str) -> None:
    _, line = lines_of(batch(cost=cost))
    assert f" 1234 {shown} 16m40s " in line


def test_faults_of_a_file_are_shown_by_line() -> None:
    faults = [{"line": line, "code": "c", "message": f"wrong {line}\n\x1b"} for line in range(1, 8)]
    lines = lines_of(batch(status="failed", failed_at=9_001, errors={"data": faults}))
    assert lines[2:5] == ["", "batch_1: 7 faults", "line 1: wrong 1??"]
    assert lines[-1] == "and 2 more"


def test_no_batches_and_no_list() -> None:
    assert lines_of() == ["no batches"]
    with pytest.raises(FleetUnavailableError, match="no list of batches"):
        parse_batches('{"models": []}')


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_cli([]), ["batches", *arguments])
    return result.exit_code, result.output


async def test_command_shows_the_batches_of_a_gateway(tmp_path: Path) -> None:
    async with gateway_in(tmp_path, Answering()) as gateway, gateway.client() as client:
        batch_id = await begin(client, chats(4))
        await ended(client, batch_id)
        async with served(gateway.edge) as url:
            code, shown = await asyncio.to_thread(run, "--url", url)
            watched = await asyncio.to_thread(run, "--url", url, "--watch")
            _, as_json = await asyncio.to_thread(run, "--url", url, "--json")
    assert code == 0
    assert f"{batch_id}  completed  [{'#' * 24}] 100%" in shown
    assert watched == (0, shown)
    assert json.loads(as_json)["data"][0]["id"] == batch_id


async def test_gateway_without_batches_is_named(tmp_path: Path) -> None:
    async with served(edge_over(EchoFrontend("m"))) as url:
        code, shown = await asyncio.to_thread(run, "--url", url)
    assert code == 2
    assert "an operator sets batches.folder" in shown
