"""Clients that are not polite: half-sent requests, readers that do not read, bodies all at once.

Each runs in a process of its own, started by `disturbing`, so that it takes no turn from the polite
clients' loop. It talks to 127.0.0.1 only, says once that it stands, and ends when its standard
input does, or after `_MOST_S`. What became of its requests it says at its end, by status.
"""

import asyncio
import contextlib
import json
import resource
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from tests.e2e.application import PROJECT_ROOT

MODEL, SLOW_MODEL = "bench", "slow"
_MOST_S = 240.0
_END_S = 30.0
_HEAD = b"POST %s HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
# As little as Linux allows, and packets as small as on a network, for which the kernel keeps
# less on the sender's side: else it would take a stream of minutes before anybody waits.
_LITTLE_BYTES, _PACKET_BYTES = 2304, 536
# The ids of the prompt come back in the first event: more than such a client's buffer takes. The
# shipped model has room for 4,096 tokens; at 4 s each what is left lasts longer than a run.
_LONG_PROMPT_TOKENS, _LONG_ANSWER_TOKENS = 3500, 500
_DRIP_BYTES = 8
_SLOW_BODY_S = 20.0
_PIECE_BYTES = 65_536


class Kind(StrEnum):
    """What is not polite about a client."""

    HALF_SENT = "half-sent requests"
    QUICK_READERS = "quick readers"
    SLOW_READERS = "slow readers"
    BODIES = "bodies at once"
    SLOW_BODIES = "bodies at once, half of them slow"


# How fast they come: readers as fast as a gateway takes in their prompts beside its other work.
_COME_PER_S = {Kind.HALF_SENT: 2000.0, Kind.QUICK_READERS: 120.0, Kind.SLOW_READERS: 120.0}
_BODIES_COME_PER_S = 100.0


@dataclass(frozen=True, slots=True)
class Order:
    """What one process of disturbing clients does: so many at a time, bodies of `body_bytes`."""

    kind: Kind
    port: int
    count: int
    body_bytes: int = 0


@dataclass(slots=True)
class Disturbers:
    """A process of disturbing clients; `became` is filled when it has ended."""

    process: asyncio.subprocess.Process
    became: dict[str, int]


@contextlib.asynccontextmanager
async def disturbing(order: Order) -> AsyncIterator[Disturbers]:
    """Runs the order in a process of its own, from when it stands to the end of the block.

    Raises:
        RuntimeError: it ended by itself.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.ingress_disturbances", json.dumps(asdict(order))),
        cwd=PROJECT_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # as the polite client: see `servers`
    )
    assert process.stdin is not None
    assert process.stdout is not None
    disturbers = Disturbers(process, {})
    try:
        await process.stdout.readline()
        yield disturbers
        process.stdin.close()
        async with asyncio.timeout(_END_S):
            said = await process.stdout.read()
            if await process.wait():
                raise RuntimeError(f"{order.kind}: ended with {process.returncode}")
            disturbers.became.update(json.loads(said))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


# -- in the process --


class _Crowd:
    """Clients that come one after the other and do what the order says until they are told."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.became: Counter[str] = Counter()
        self._num_standing = 0
        self._stands = asyncio.Event()

    def arrived(self) -> None:
        """One more has come as far as it is to come before the polite clients are measured."""
        self._num_standing += 1
        if self._num_standing >= self.order.count:
            self._stands.set()

    async def run(self, told: asyncio.Event) -> None:
        """Comes, says that it stands, and leaves when it is told."""
        client = _CLIENTS[self.order.kind]
        pause_s = 1 / _COME_PER_S.get(self.order.kind, _BODIES_COME_PER_S)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for number in range(self.order.count):
                await asyncio.sleep(max(0.0, began_s + number * pause_s - loop.time()))
                tasks.append(group.create_task(client(self, number)))
            await self._stands.wait()
            print("stands", flush=True)
            await told.wait()
            for task in tasks:
                task.cancel()


@contextlib.asynccontextmanager
async def _connected(
    port: int,
    number: int,
    options: Mapping[tuple[int, int], int] = MappingProxyType({}),
) -> AsyncIterator[socket.socket]:
    """A connection from one of eight addresses, so that there are ports enough."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as own:
        own.settimeout(0)
        for (level, name), value in options.items():
            own.setsockopt(level, name, value)
        own.bind((f"127.0.0.{2 + number % 8}", 0))
        await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", port))
        yield own


async def _half_sent(crowd: _Crowd, number: int) -> None:
    """Sends half of a head, and does so again whenever it is closed."""
    is_first = True
    while True:
        try:
            async with _connected(crowd.order.port, number) as own:
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(own, _HEAD % b"/v1/chat/completions")
                if is_first:
                    crowd.arrived()
                    is_first = False
                answer = b""
                while part := await loop.sock_recv(own, 4096):
                    answer += part
                crowd.became[_status(answer)] += 1
        except asyncio.CancelledError:
            crowd.became["open at the end"] += 1
            raise
        except OSError as error:
            crowd.became[type(error).__name__] += 1
            await asyncio.sleep(1.0)


async def _reader(crowd: _Crowd, number: int) -> None:
    """Asks for a long stream. Quick ones read all of it; the others nothing, or a few bytes."""
    is_slow = crowd.order.kind is Kind.SLOW_READERS
    body = json.dumps(
        {
            "model": SLOW_MODEL,
            "prompt": [(number * 31 + at * 7) % 1000 + 100 for at in range(_LONG_PROMPT_TOKENS)],
            "max_tokens": _LONG_ANSWER_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
    ).encode()
    small = {
        (socket.SOL_SOCKET, socket.SO_RCVBUF): _LITTLE_BYTES,
        (socket.IPPROTO_TCP, socket.TCP_MAXSEG): _PACKET_BYTES,
    }
    loop = asyncio.get_running_loop()
    status, num_read = "no answer", 0
    try:
        async with _connected(crowd.order.port, number, small if is_slow else {}) as own:
            await loop.sock_sendall(own, _with_length("/v1/completions", body))
            answer = await loop.sock_recv(own, 64)
            status, num_read = _status(answer), len(answer)
            crowd.arrived()
            while True:
                if not is_slow:
                    part = await loop.sock_recv(own, 65_536)
                elif number % 2:
                    await asyncio.Event().wait()
                else:
                    await asyncio.sleep(1.0)
                    part = await loop.sock_recv(own, _DRIP_BYTES)
                num_read += len(part)
                if not part:
                    status += ", closed"
                    return
    except OSError as error:
        if not num_read:
            crowd.arrived()
        status += f", {type(error).__name__}"
    finally:
        crowd.became[status] += 1
        crowd.became["bytes read"] += num_read


async def _body(crowd: _Crowd, number: int) -> None:
    """Sends a body as large as one may be, and again whenever it is answered."""
    body = large_body(crowd.order.body_bytes, of_many=bool(number & 1))
    is_slow = crowd.order.kind is Kind.SLOW_BODIES and number & 2
    pause_s = _SLOW_BODY_S * _PIECE_BYTES / len(body) if is_slow else 0.0
    speed = "slow" if is_slow else "quick"
    loop = asyncio.get_running_loop()
    crowd.arrived()
    while True:
        try:
            async with _connected(crowd.order.port, number) as own:
                request = _with_length("/v1/chat/completions", body)
                for at in range(0, len(request), _PIECE_BYTES):
                    await loop.sock_sendall(own, request[at : at + _PIECE_BYTES])
                    await asyncio.sleep(pause_s)
                crowd.became[f"{speed}: {_status(await loop.sock_recv(own, 4096))}"] += 1
        except asyncio.CancelledError:
            crowd.became[f"{speed}: under way at the end"] += 1
            raise
        except OSError as error:
            crowd.became[f"{speed}: {type(error).__name__}"] += 1
            await asyncio.sleep(1.0)


def large_body(num_bytes: int, *, of_many: bool) -> bytes:
    """A chat request of nearly so many bytes: of many short messages, or of one long one."""
    one = {"role": "user", "content": ""}
    message = json.dumps(one | {"content": "What is a slice?"})
    head, end = f'{{"model": "{MODEL}", "max_tokens": 1, "messages": [', "]}"
    room = num_bytes - len(head) - len(end)
    if of_many:
        messages = ", ".join([message] * (room // (len(message) + 2)))
    else:
        messages = json.dumps(one | {"content": "slice " * ((room - len(json.dumps(one))) // 6)})
    return f"{head}{messages}{end}".encode()


def _with_length(path: str, body: bytes) -> bytes:
    head = _HEAD % path.encode()
    return head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def _status(answer: bytes) -> str:
    """Returns the status of an answer; `closed` if there was none."""
    return answer[9:12].decode() if answer.startswith(b"HTTP/1.1 ") else "closed"


_CLIENTS: Mapping[Kind, Callable[[_Crowd, int], Coroutine[Any, Any, None]]] = {
    Kind.HALF_SENT: _half_sent,
    Kind.QUICK_READERS: _reader,
    Kind.SLOW_READERS: _reader,
    Kind.BODIES: _body,
    Kind.SLOW_BODIES: _body,
}


async def _run(order: Order) -> dict[str, int]:
    crowd, told = _Crowd(order), asyncio.Event()
    # Nothing is ever sent: it becomes readable when it is closed.
    asyncio.get_running_loop().add_reader(sys.stdin, told.set)
    async with asyncio.timeout(_MOST_S):
        await crowd.run(told)
    asyncio.get_running_loop().remove_reader(sys.stdin)
    return dict(crowd.became)


def main() -> None:
    """Does the order on the command line."""
    given = json.loads(sys.argv[1])
    order = Order(**given | {"kind": Kind(given["kind"])})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(json.dumps(asyncio.run(_run(order))), flush=True)


if __name__ == "__main__":
    main()
