"""The real HAProxy under our configuration: reloads, half-sent requests, slow readers, sockets."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from deployments.start.ingress.haproxy import HEADER_TIMEOUT, IDLE_TIMEOUT, MAX_CONNECTIONS
from deployments.start.ports import free_ports

from .rendered_by_ray import write_as_ray_does

DEADLINE_S = 60.0
PROGRAM = (sys.executable, "-m", "deployments.start.ingress.haproxy")
HEAD = b"POST /v1/x HTTP/1.1\r\nhost: x\r\n"
REQUEST = HEAD + b"content-length: 0\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Gateway:
    """A gateway that answers health checks, and everything else as the test says."""

    def __init__(self, port: int, handler: Handler) -> None:
        self.port, self._handler = port, handler
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.heads: list[bytes] = []

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with suppress(asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"POST"):
                    self.heads.append(head.lower())
                    await self._handler(reader, writer)
                else:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks)


class Ingress:
    """HAProxy as Ray Serve runs it: started by our program, and again at each change."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self.folder, self._variables = folder, variables
        self.port, *admin = free_ports(3)
        self.admin_ports = (admin[0], admin[1])
        self.processes: list[subprocess.Popen[bytes]] = []

    async def start(self, gateways: list[int]) -> None:
        """Starts it, or replaces the one that runs as Ray Serve does."""
        file = write_as_ray_does(self.folder, self.port, gateways, self.admin_ports)
        command = [
            sys.executable,
            "-m",
            "deployments.start.ingress.haproxy",
            "-db",
            "-f",
            str(file),
        ]
        if self.processes:
            command += ["-x", str(self.folder / "admin"), "-sf", str(self.processes[-1].pid)]
        process = self._run(command)
        self.processes.append(process)
        await self.until(lambda: self._is_serving(process))

    def _run(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{len(self.processes)}.log").open("wb") as log:
            return subprocess.Popen(
                command, env=os.environ | self._variables, stdout=log, stderr=log
            )

    def _is_serving(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, self.log()
        listening = psutil.Process(process.pid).net_connections()
        return any(each.laddr and each.laddr.port == self.port for each in listening)

    def log(self) -> str:
        return "".join(file.read_text() for file in sorted(self.folder.glob("*.log")))

    async def until(self, is_so: Callable[[], bool]) -> None:
        # Of another process: there is nothing to wait on.
        async with asyncio.timeout(DEADLINE_S):
            while not is_so():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, request: bytes = REQUEST) -> bytes:
        """Sends a request on a connection of its own; returns what comes until it closes."""
        reader, writer = await self.connect()
        writer.write(request.replace(b"host: x", b"host: x\r\nconnection: close"))
        async with asyncio.timeout(DEADLINE_S):
            answer = await reader.read()
        await _close(writer)
        return answer

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


@asynccontextmanager
async def ingress(
    folder: Path, handler: Handler, **variables: str
) -> AsyncIterator[tuple[Ingress, Gateway]]:
    gateway = Gateway(free_ports(1)[0], handler)
    subject = Ingress(folder, variables)
    await gateway.open()
    try:
        await subject.start([gateway.port])
        yield subject, gateway
    finally:
        subject.close()
        await gateway.close()


async def answer_at_once(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")


async def test_no_reload_ends_a_stream_however_long_it_lasts(tmp_path: Path) -> None:
    """Ray's own hard stop is two seconds here; the stream lasts over five changes and that time."""
    goes_on = asyncio.Event()

    async def stream(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + b"1\r\na\r\n")
        await goes_on.wait()
        writer.write(b"1\r\nb\r\n0\r\n\r\n")

    async with ingress(tmp_path, stream) as (subject, gateway):
        reader, writer = await subject.connect()
        writer.write(REQUEST)
        async with asyncio.timeout(DEADLINE_S):
            await reader.readuntil(b"1\r\na\r\n")
        others = []
        for _ in range(5):
            other = Gateway(free_ports(1)[0], answer_at_once)
            await other.open()
            others.append(other)
            await subject.start([gateway.port, other.port])
        first = subject.processes[0]
        # Twice Ray's hard stop: the time itself is what is tested.
        await asyncio.sleep(4.0)
        assert first.poll() is None, subject.log()
        goes_on.set()
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.readuntil(b"0\r\n\r\n") == b"1\r\nb\r\n0\r\n\r\n"
        await _close(writer)
        await subject.until(lambda: first.poll() is not None)
        for other in others:
            await other.close()


class Streams:
    """Streams that go on until they are told to end, and what each has sent so far."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()

    async def answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        number = 0
        while not self.goes_on.is_set():
            writer.write(b"9\r\n%08d,\r\n" % number)
            number += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self.goes_on.wait(), 0.05)
        writer.write(b"0\r\n\r\n")

    async def follow(self, subject: Ingress) -> bytes:
        """A whole stream as a client has it, or an error if it was cut."""
        reader, writer = await subject.connect()
        writer.write(REQUEST)
        answer = await reader.readuntil(b"\r\n0\r\n\r\n")
        await _close(writer)
        return answer


@pytest.mark.long
async def test_hundred_changes_of_gateways_cut_no_stream_of_those_that_stay(tmp_path: Path) -> None:
    """Gateways are added, replaced and killed; a stream begins before every tenth change."""
    streams = Streams()
    async with ingress(tmp_path, streams.answer) as (subject, stays):
        followed: list[asyncio.Task[bytes]] = []
        other: Gateway | None = None
        for change in range(100):
            if change % 10 == 0:
                followed.append(asyncio.create_task(streams.follow(subject)))
                await asyncio.sleep(0.1)  # to the gateway that stays: there is no other yet
            newer = Gateway(free_ports(1)[0], streams.answer)
            await newer.open()
            await subject.start([stays.port, newer.port])
            if other is not None:
                await other.close()  # killed with whatever it carries
            other = newer
            if change % 10 == 9:
                await subject.start([stays.port])
                await other.close()
                other = None
        streams.goes_on.set()
        async with asyncio.timeout(DEADLINE_S):
            answers = await asyncio.gather(*followed)
    for answer in answers:
        # HAProxy may send several of the gateway's parts as one.
        parts = [part for part in answer.split(b"\r\n") if part.endswith(b",")]
        numbers = [int(number) for part in parts for number in part.split(b",")[:-1]]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) > 10


async def test_half_sent_requests_are_closed_and_others_go_on(tmp_path: Path) -> None:
    limits = {MAX_CONNECTIONS: "48", HEADER_TIMEOUT: "1"}
    async with ingress(tmp_path, answer_at_once, **limits) as (subject, _):
        halves = [await subject.connect() for _ in range(40)]
        for _, writer in halves:
            writer.write(HEAD)
        async with asyncio.timeout(DEADLINE_S):
            ends = await asyncio.gather(*(reader.read() for reader, _ in halves))
        assert {end.split(b"\r\n")[0] for end in ends} == {b"HTTP/1.1 408 Request Time-out"}
        assert (await subject.ask()).endswith(b"ok")
        for _, writer in halves:
            await _close(writer)


async def test_more_half_sent_requests_than_connections_keep_nobody_out(tmp_path: Path) -> None:
    """More than are accepted, sent again as they are closed, are there all the time.

    All of them fit into what is accepted and the kernel's queue, which is as long again: whoever
    comes to a full queue is not heard at all, and asks again by chance.
    """
    limits = {MAX_CONNECTIONS: "48", HEADER_TIMEOUT: "1"}
    closed = asyncio.Semaphore(0)

    async def half(subject: Ingress) -> None:
        while True:
            reader, writer = await subject.connect()
            try:
                writer.write(HEAD)
                with suppress(ConnectionError):
                    await reader.read()
                closed.release()
            finally:
                await _close(writer)

    async with ingress(tmp_path, answer_at_once, **limits) as (subject, _):
        reader, writer = await subject.connect()
        writer.write(REQUEST)
        await reader.readuntil(b"ok")
        halves = [asyncio.create_task(half(subject)) for _ in range(80)]
        try:
            async with asyncio.timeout(DEADLINE_S):
                for _ in range(5):
                    for _ in range(48):
                        await closed.acquire()
                    # Who has a connection is answered on it, and who has none yet gets one.
                    writer.write(REQUEST)
                    assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
                    assert (await subject.ask()).startswith(b"HTTP/1.1 200 ")
        finally:
            for each in halves:
                each.cancel()
            await asyncio.gather(*halves, return_exceptions=True)
            await _close(writer)


async def test_more_requests_than_are_served_are_refused_politely(tmp_path: Path) -> None:
    streams = Streams()
    async with ingress(tmp_path, streams.answer, **{MAX_CONNECTIONS: "48"}) as (subject, _):
        held = [await subject.connect() for _ in range(40)]
        async with asyncio.timeout(DEADLINE_S):
            for reader, writer in held:
                writer.write(REQUEST)
                await reader.readuntil(b"00000000,")
            refused = await subject.ask()
        head, body = refused.split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 5" in head.lower()
        assert b'"code":"too_many_connections"' in body
        healthy = await subject.ask(b"GET /-/healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert healthy.startswith(b"HTTP/1.1 200 ")
        # One that ends makes room for another one.
        await _close(held.pop()[1])
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await subject.connect()
            while True:
                writer.write(REQUEST)
                if (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 "):
                    break
                await reader.readuntil(b"}}")
        streams.goes_on.set()
        for _, each in [*held, (reader, writer)]:
            await _close(each)
        assert "max_connections=48 served=40" in subject.log()


async def test_client_does_not_say_how_serve_treats_its_request(tmp_path: Path) -> None:
    steering = b"x-request-timeout-seconds: 0\r\nX-Request-Disconnect-Disabled: ?0\r\n"
    async with ingress(tmp_path, answer_at_once) as (subject, gateway):
        for own in (b"", steering):
            answer = await subject.ask(REQUEST.replace(b"host: x\r\n", b"host: x\r\n" + own))
            assert answer.startswith(b"HTTP/1.1 200 ")
    for head in gateway.heads:
        assert head.count(b"x-request-disconnect-disabled: ?1\r\n") == 1
        assert head.count(b"disconnect-disabled") == 1
        assert b"x-request-timeout-seconds" not in head
    assert len(gateway.heads) == 2


@pytest.mark.parametrize("is_split", [False, True], ids=["at-once", "body-behind-head"])
async def test_client_that_leaves_before_its_answer_is_seen_by_its_gateway(
    tmp_path: Path, is_split: bool
) -> None:
    begun, asked, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def see_the_end(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        begun.set()
        await reader.readexactly(2)
        asked.set()
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        left.set()

    async with ingress(tmp_path, see_the_end) as (subject, _), asyncio.timeout(DEADLINE_S):
        for _ in range(5):  # HAProxy saw it now and then
            _, writer = await subject.connect()
            writer.write(HEAD + b"content-length: 2\r\n\r\n")
            if is_split:
                await begun.wait()
            writer.write(b"{}")
            await asked.wait()
            await _close(writer)
            await left.wait()
            for each in (begun, asked, left):
                each.clear()


async def test_reader_that_reads_nothing_is_closed_and_a_late_answer_is_not(tmp_path: Path) -> None:
    closed, asked = asyncio.Event(), asyncio.Event()

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if asked.is_set():  # the second one: an answer later than a client may stand still
            await asyncio.sleep(3.0)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            return
        asked.set()
        writer.write(STREAM)
        try:
            while True:
                writer.write(b"10000\r\n" + b"x" * 65_536 + b"\r\n")
                await writer.drain()
        except ConnectionError:
            closed.set()
            raise

    async with ingress(tmp_path, flood, **{IDLE_TIMEOUT: "1"}) as (subject, _):
        _, idle = await subject.connect()
        idle.transport.pause_reading()  # type: ignore[attr-defined]
        idle.write(REQUEST)
        async with asyncio.timeout(DEADLINE_S):
            await asked.wait()
            patient = asyncio.create_task(subject.ask())
            await closed.wait()
            assert (await patient).endswith(b"ok")
        await _close(idle)


async def test_sockets_and_pages_are_not_for_others(tmp_path: Path) -> None:
    async with ingress(tmp_path, answer_at_once) as (subject, _):
        assert stat.S_IMODE((tmp_path / "admin").stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "haproxy.cfg.slicewise").stat().st_mode) == 0o600
        connections = psutil.Process(subject.processes[0].pid).net_connections()
        listening = {each.laddr for each in connections if each.status == psutil.CONN_LISTEN}
        assert {address.ip for address in listening} == {"127.0.0.1"}
        assert {address.port for address in listening} == {subject.port, *subject.admin_ports}


async def test_configuration_of_another_ray_starts_nothing_and_says_why(tmp_path: Path) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text("global\n    maxconn 1\n")
    command = [*PROGRAM, "-db", "-f", str(file)]
    result = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "section `global`" in result.stderr
