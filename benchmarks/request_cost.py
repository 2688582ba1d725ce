"""What a request costs at the gateway besides its tokens: CPU before the engine has it, and after.

Streams and whole answers of one token, of which all is a request's own. Each gateway is a process
of its own (`request_gateway`); the paced engine and the client are in this one. Times are the
kernel scheduler's, of all threads of the process, in nanoseconds. There are two measurements:

- *Rounds*, of requests that come at once. The engine stands still until it has all of them and the
  gateway has nothing left to do: the CPU time until then is what comes before the first token. The
  rest is the first token, the end and what follows.
- *A closed loop*: each client sends its next request when it has its answer.

With `base`, the root of another checkout, the gateway of that one is measured in the same run, the
rounds in turns, so that a ratio does not depend on what else the machine does.
"""

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.request_gateway import MODEL
from serving.engine.paced.config import PacedConfig
from serving.engine.paced.engine import PacedEngine
from serving.link.heartbeat import HeartbeatConfig
from serving.link.server import LinkServer

# The engine's pace, once it turns.
_STEP_S = 0.001
WARM_UP_ROUNDS, NUM_ROUNDS = 8, 30
NUM_LOOPS, LOOP_REQUESTS = 7, 240
_STILL_S = 0.004
_SECRET = b"s" * 32
_ROOT = Path(__file__).resolve().parents[1]
_PROGRAM = _ROOT / "benchmarks/request_gateway.py"
_PROMPT = (
    "A slice is a set of chips that are joined by their own network, and it is obtained, lost and "
    "released as a whole. Tell me in one sentence what a gateway does with a request when the "
    "slice that has it is taken away in the middle of an answer."
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of request, and how many of them come at once over as many kept connections."""

    name: str
    path: str
    body: dict[str, Any]
    at_once: int

    def request(self, number: int) -> bytes:
        """The request as it is sent."""
        body = json.dumps(self.body).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
            f"accept: */*\r\nuser-agent: benchmarks\r\nauthorization: Bearer sk-of-nobody\r\n"
            f"x-request-id: bench-{number}-{os.urandom(6).hex()}\r\n"
        )
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _chat(**changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": _PROMPT}]
    return {"model": MODEL, "messages": messages, "max_tokens": 1, "temperature": 0.7} | changes


_COMPLETION = {"model": MODEL, "prompt": _PROMPT, "max_tokens": 1, "stream": True}
_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
SHAPES = (
    Shape("chat, stream", _CHAT, _chat(stream=True), 8),
    Shape("chat, stream, one at a time", _CHAT, _chat(stream=True), 1),
    Shape("chat, stream, 64 at once", _CHAT, _chat(stream=True), 64),
    Shape("chat, whole", _CHAT, _chat(), 8),
    Shape("completion, stream", _TEXT, _COMPLETION, 8),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU microseconds of one request: until the engine has it, and from then on."""

    before_us: float
    after_us: float


class Gateway:
    """One gateway's process with its engine here, and kept connections to it."""

    def __init__(self, tree: Path, folder: str) -> None:
        self._tree = tree
        self._folder = folder
        pace = PacedConfig(
            ttft_s=_STEP_S, time_per_token_s=_STEP_S, max_num_seqs=512, vocab_size=2**31
        )
        self._engine = PacedEngine(pace)
        name = os.urandom(3).hex()
        # Patient: a gateway that has to wait for a core is not dead.
        patience = HeartbeatConfig(1.0, 120.0)
        self._server = LinkServer(
            self._engine, engine_id=f"e-{name}", secret=_SECRET, heartbeat=patience
        )
        self._process: asyncio.subprocess.Process | None = None
        self._connections: list[_Connection] = []
        self._port = 0
        self._num_sent = 0

    async def start(self) -> None:
        """Starts the process, and waits until it serves."""
        await self._server.listen()
        given = {
            "engine_id": self._server.engine_id,
            "engine_address": list(self._server.address),
            "secret": _SECRET.hex(),
            "gateway_id": f"g-{self._server.engine_id}",
            "log_folder": self._folder,
        }
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", str(_PROGRAM), json.dumps(given),
            cwd=self._tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(self._tree), "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert self._process.stdout is not None
        while not (line := await self._process.stdout.readline()).strip().isdigit():
            if not line:
                raise RuntimeError(f"the gateway of {self._tree} ended before it served")
        self._port = int(line)

    async def close(self) -> None:
        """Ends the process."""
        for _, writer in self._connections:
            writer.close()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()
        await self._server.close()
        await self._engine.close()

    def cpu_ns(self) -> int:
        """What all threads of its process have computed so far."""
        assert self._process is not None
        return cpu_ns(self._process.pid)

    async def _stand_still(self) -> int:
        """Waits until the process computes nothing; returns its time then."""
        before = self.cpu_ns()
        while True:
            await asyncio.sleep(_STILL_S)
            now = self.cpu_ns()
            if now == before:
                return now
            before = now

    async def closed_loop(self, shape: Shape, num_requests: int) -> float:
        """Lets each connection send its next request after an answer; returns µs of a request."""
        used = await self._connected(shape)
        begun = await self._stand_still()

        async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for _ in range(num_requests // shape.at_once):
                self._num_sent += 1
                writer.write(shape.request(self._num_sent))
                await read_answer(reader)

        await asyncio.gather(*(client(*connection) for connection in used))
        return (await self._stand_still() - begun) / (1000 * num_requests)

    async def _connected(self, shape: Shape) -> list[_Connection]:
        while len(self._connections) < shape.at_once:
            self._connections.append(await asyncio.open_connection("127.0.0.1", self._port))
        return self._connections[: shape.at_once]

    async def round(self, shape: Shape) -> Cost:
        """Sends one round of requests, and reads their answers."""
        used = await self._connected(shape)
        begun = await self._stand_still()
        self._engine.hang()
        for _, writer in used:
            self._num_sent += 1
            writer.write(shape.request(self._num_sent))
        dispatched = await self._stand_still()
        while self._server.num_requests < shape.at_once:
            dispatched = await self._stand_still()
        self._engine.unhang()
        await asyncio.gather(*(read_answer(reader) for reader, _ in used))
        ended = await self._stand_still()
        per_request_ns = 1000 * shape.at_once
        return Cost((dispatched - begun) / per_request_ns, (ended - dispatched) / per_request_ns)


def cpu_ns(pid: int) -> int:
    """Returns what all threads of a process have computed so far, in nanoseconds."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += int((thread / "schedstat").read_bytes().split()[0])
    return total


async def read_answer(reader: asyncio.StreamReader) -> None:
    """Reads one answer to its end.

    Raises:
        RuntimeError: it is an error.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"a request failed: {head!r}")
    if b"transfer-encoding: chunked" not in head.lower():
        length = head.lower().split(b"content-length:")[1].split()[0]
        await reader.readexactly(int(length))
        return
    while size := int(await reader.readline(), 16):
        await reader.readexactly(size + 2)
    await reader.readline()


@contextlib.asynccontextmanager
async def gateways(trees: dict[str, Path]) -> AsyncIterator[dict[str, Gateway]]:
    """Runs a gateway of each tree."""
    with tempfile.TemporaryDirectory() as folder:
        started = {name: Gateway(tree, folder) for name, tree in trees.items()}
        try:
            for gateway in started.values():
                await gateway.start()
            yield started
        finally:
            for gateway in started.values():
                await gateway.close()


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of request at one gateway, in CPU microseconds; medians."""

    shape: str
    gateway: str
    before_us: float
    after_us: float
    loop_us: float


async def run(base: Path | None) -> list[Row]:
    """Measures all kinds of requests, the gateways in turns."""
    trees = {"now": _ROOT} if base is None else {"base": base, "now": _ROOT}
    rows = []
    async with gateways(trees) as running:
        for shape in SHAPES:
            rows += await _measured(running, shape)
    return rows


async def _measured(running: dict[str, Gateway], shape: Shape) -> list[Row]:
    rounds: dict[str, list[Cost]] = {name: [] for name in running}
    loops: dict[str, list[float]] = {name: [] for name in running}
    for number in range(WARM_UP_ROUNDS + NUM_ROUNDS):
        for name in _in_turns(running, number):
            rounds[name].append(await running[name].round(shape))
    for number in range(1 + NUM_LOOPS):
        for name in _in_turns(running, number):
            loops[name].append(await running[name].closed_loop(shape, LOOP_REQUESTS))
    rows = []
    for name in running:
        counted = rounds[name][WARM_UP_ROUNDS:]
        before_us = statistics.median(cost.before_us for cost in counted)
        after_us = statistics.median(cost.after_us for cost in counted)
        loop_us = statistics.median(loops[name][1:])
        rows.append(Row(shape.name, name, before_us, after_us, loop_us))
    return rows


def _in_turns(running: dict[str, Gateway], number: int) -> list[str]:
    return [*running] if number % 2 else [*running][::-1]


def report(rows: list[Row]) -> str:
    """A markdown table: microseconds of CPU, and ratios to the base where there is one."""
    base = {row.shape: row for row in rows if row.gateway == "base"}
    lines = [
        "| request | gateway | at once: until the engine has it | at once: from the first token on "
        "| at once: together | in a closed loop |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        before = base.get(row.shape)
        cells = [_figures(row)] if before is None else [_figures(row), _figures(before)]
        texts = [f"{figure:.0f}" for figure in cells[0]]
        if before is not None and row.gateway != "base":
            texts = [f"{now:.0f} ({now / then:.2f})" for now, then in zip(*cells, strict=True)]
        lines.append(f"| {row.shape} | {row.gateway} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _figures(row: Row) -> tuple[float, float, float, float]:
    return row.before_us, row.after_us, row.before_us + row.after_us, row.loop_us
