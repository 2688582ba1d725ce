"""Both ends over real sockets, plain and in TLS; the host's end here or in a process of its own.

Who is let in and believed: `test_agent_proof.py`.
"""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from serving.domain.limits import LinkEncryption
from serving.link.heartbeat import HeartbeatConfig
from serving.link.tls import ClientTls, TlsRole, accepting_end
from serving.slices.host_heartbeat.lines import MAX_LINE_BYTES
from serving.slices.host_heartbeat.server import MAX_WATCHERS, HostStreamServer
from serving.slices.host_heartbeat.watcher import HostWatcher
from serving.slices.notices import Notice, NoticeKind
from tests.slices.sinks import RecordingSink

PREEMPTION = Notice(NoticeKind.PREEMPTION, 1, 1234.5, "it is preempted", "metadata preempted")
MAINTENANCE = Notice(NoticeKind.MAINTENANCE, 1, None, "maintenance", "metadata maintenance")
# Found out sooner than in production, where a host that is only slow must not cost its slice.
BRISK = HeartbeatConfig(0.25, 1.0)

SECRET = b"a cluster secret that these tests share"

Address = tuple[str, int]


@pytest.fixture(params=[LinkEncryption.NONE, LinkEncryption.TLS])
def encryption(request: pytest.FixtureRequest) -> LinkEncryption:
    """Everything holds on either kind of stream."""
    chosen: LinkEncryption = request.param
    return chosen


@pytest.fixture
def tls(encryption: LinkEncryption) -> ClientTls:
    """What a watcher proves itself by."""
    return ClientTls(SECRET, encryption, TlsRole.HOST_WATCHER)


def stream_server(encryption: LinkEncryption) -> HostStreamServer:
    tls = accepting_end(SECRET, encryption, TlsRole.HOST_AGENT, "127.0.0.1")
    return HostStreamServer(1, tls)


@pytest.fixture
async def server(encryption: LinkEncryption) -> AsyncIterator[HostStreamServer]:
    server = stream_server(encryption)
    yield server
    await server.close()


@pytest.fixture
async def watch(tls: ClientTls) -> AsyncIterator[Callable[[Address], RecordingSink]]:
    """Watches an address, and gives what was heard."""
    tasks = []

    def start(address: Address) -> RecordingSink:
        sink = RecordingSink()
        tasks.append(asyncio.create_task(HostWatcher(1, address, sink, tls, BRISK).run()))
        return sink

    yield start
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(each is None or isinstance(each, asyncio.CancelledError) for each in results)


async def loss(sink: RecordingSink) -> str:
    """Waits until the host is lost, and gives the reason."""
    await sink.wait_for(lambda sink: (1, "host stream") in sink.now)
    lost = sink.now[1, "host stream"]
    assert (lost.kind, lost.worker_id, lost.deadline_s) == (NoticeKind.HOST_LOST, 1, None)
    return lost.reason


async def test_notice_reaches_every_watcher_at_once(
    server: HostStreamServer, watch: Callable[[Address], RecordingSink]
) -> None:
    address = await server.listen("127.0.0.1")
    server.announce(MAINTENANCE)
    sinks = [watch(address), watch(address)]
    for sink in sinks:
        await sink.wait_for(lambda sink: sink.announced == [MAINTENANCE])
    server.announce(PREEMPTION)
    server.announce(PREEMPTION)
    server.withdraw(1, MAINTENANCE.source)
    for sink in sinks:
        await sink.wait_for(lambda sink: list(sink.now.values()) == [PREEMPTION])
        assert sink.announced == [MAINTENANCE, PREEMPTION]


async def test_host_that_ends_is_lost_at_once(
    server: HostStreamServer, watch: Callable[[Address], RecordingSink]
) -> None:
    sink = watch(await server.listen("127.0.0.1"))
    server.announce(PREEMPTION)
    await sink.wait_for(lambda sink: sink.announced)
    await server.close()
    assert "cannot be connected" in await loss(sink)
    assert (1, PREEMPTION.source) in sink.now


async def test_host_that_was_never_there_is_lost_at_once(
    watch: Callable[[Address], RecordingSink],
) -> None:
    assert "cannot be connected" in await loss(watch(("127.0.0.1", 9)))


async def test_stream_that_ends_alone_is_connected_again(
    server: HostStreamServer, watch: Callable[[Address], RecordingSink]
) -> None:
    """A relay whose first connection is cut while the host lives."""
    host = await server.listen("127.0.0.1")
    writers: list[asyncio.StreamWriter] = []

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(4096):
            target.write(data)

    async def relay(from_watcher: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        from_host, to_host = await asyncio.open_connection(*host)
        try:
            await asyncio.gather(copy(from_watcher, to_host), copy(from_host, writer))
        except OSError:
            pass  # the cut
        finally:
            to_host.close()

    async with asyncio.TaskGroup() as tasks:
        handlers: list[asyncio.Task[None]] = []
        relaying = await asyncio.start_server(
            lambda reader, writer: handlers.append(tasks.create_task(relay(reader, writer))),
            "127.0.0.1",
        )
        sink = watch(relaying.sockets[0].getsockname())
        server.announce(MAINTENANCE)
        await sink.wait_for(lambda sink: sink.announced)
        writers[0].transport.abort()
        server.announce(PREEMPTION)
        await sink.wait_for(lambda sink: PREEMPTION in sink.announced)
        assert len(writers) == 2
        assert (1, "host stream") not in sink.now
        relaying.close()
        for handler in handlers:
            handler.cancel()
        writers[1].transport.abort()


async def test_agent_that_died_alone_is_followed_to_its_next_address(
    server: HostStreamServer, encryption: LinkEncryption, tls: ClientTls
) -> None:
    other, sink = stream_server(encryption), RecordingSink()
    asked = 0

    async def revive() -> Address | None:
        nonlocal asked
        asked += 1
        return await other.listen("127.0.0.1") if asked == 1 else None

    watcher = HostWatcher(1, await server.listen("127.0.0.1"), sink, tls, BRISK, revive)
    watching = asyncio.create_task(watcher.run())
    server.announce(MAINTENANCE)
    await sink.wait_for(lambda sink: sink.announced)
    await server.close()
    other.announce(PREEMPTION)
    await sink.wait_for(lambda sink: PREEMPTION in sink.announced)
    assert (1, "host stream") not in sink.now
    await other.close()
    assert "cannot be connected" in await loss(sink)
    assert asked == 2
    await watching


async def test_host_that_falls_silent_is_lost_whatever_its_node_says(
    host: tuple[asyncio.subprocess.Process, Address], tls: ClientTls
) -> None:
    process, address = host
    sink = RecordingSink()

    async def revive() -> Address | None:
        raise AssertionError("nobody has died")

    watching = asyncio.create_task(HostWatcher(1, address, sink, tls, BRISK, revive).run())
    await sink.wait_for(lambda sink: sink.announced)
    process.send_signal(signal.SIGSTOP)
    assert "nothing heard for 1 s" in await loss(sink)
    await watching


async def test_host_learns_that_its_slice_was_left(
    server: HostStreamServer, tls: ClientTls
) -> None:
    left = asyncio.Event()
    server.on_left = left.set
    sink = RecordingSink()
    watcher = HostWatcher(1, await server.listen("127.0.0.1"), sink, tls, BRISK)
    watching = asyncio.create_task(watcher.run())
    server.announce(MAINTENANCE)
    await sink.wait_for(lambda sink: sink.announced)
    # As when a slice is released: said and hung up in one go.
    watcher.tell_left()
    watching.cancel()
    async with asyncio.timeout(20):
        await left.wait()
    await asyncio.gather(watching, return_exceptions=True)


async def serve(
    encryption: LinkEncryption, answer: Callable[[asyncio.StreamWriter], Awaitable[None]]
) -> tuple[asyncio.Server, Address]:
    """A peer that has the secret and does not speak as a host agent does."""

    async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(writer)
        finally:
            writer.transport.abort()

    end = accepting_end(SECRET, encryption, TlsRole.HOST_AGENT, "127.0.0.1")
    context = None if end is None else end.identities()[0].context
    server = await asyncio.start_server(handle, "127.0.0.1", ssl=context)
    return server, server.sockets[0].getsockname()


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b'{"notices": 5}\n',
        b'{"unknown": true}\n',
        b'{"notices":[{"kind":"party","worker_id":1,"deadline_s":null,"reason":"","source":""}]}\n',
        b"\xff\xfe\n",
        b"{" * (2 * MAX_LINE_BYTES),
        b"[" * (MAX_LINE_BYTES - 1) + b"\n",
    ],
    ids=["http", "type", "unknown", "kind", "bytes", "endless", "nested"],
)
async def test_host_that_sends_garbage_is_lost(
    garbage: bytes, encryption: LinkEncryption, watch: Callable[[Address], RecordingSink]
) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(garbage)
        await writer.drain()
        await asyncio.Event().wait()

    server, address = await serve(encryption, answer)
    assert "sends what no host sends" in await loss(watch(address))
    server.close()


async def test_host_that_drips_bytes_without_a_line_is_lost(
    encryption: LinkEncryption, watch: Callable[[Address], RecordingSink]
) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.02)

    server, address = await serve(encryption, answer)
    assert "nothing heard for 1 s" in await loss(watch(address))
    server.close()


async def test_host_that_hangs_up_at_once_twice_is_lost(
    encryption: LinkEncryption, watch: Callable[[Address], RecordingSink]
) -> None:
    num_connections = 0

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        if num_connections == 1:
            writer.write(b"{}\n")
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    server, address = await serve(encryption, answer)
    assert "ends at once" in await loss(watch(address))
    assert num_connections == 2
    server.close()


async def test_one_watcher_too_many_knows_the_notices_and_that_the_host_lives(
    server: HostStreamServer, watch: Callable[[Address], RecordingSink]
) -> None:
    address = await server.listen("127.0.0.1")
    server.announce(MAINTENANCE)
    first = [watch(address) for _ in range(MAX_WATCHERS)]
    for sink in first:
        await sink.wait_for(lambda sink: sink.announced)
    late = watch(address)
    await late.wait_for(lambda sink: sink.announced)
    server.announce(PREEMPTION)
    await late.wait_for(lambda sink: PREEMPTION in sink.announced)
    assert (1, "host stream") not in late.now
    await server.close()
    await loss(late)


async def test_watcher_that_never_reads_is_cut_off(
    server: HostStreamServer, tls: ClientTls
) -> None:
    host, port = await server.listen("127.0.0.1")
    (identity,) = tls.identities_for(host)
    reader, writer = await asyncio.open_connection(host, port, limit=1024, **tls.options(identity))
    assert await reader.readline()
    for number in range(2000):
        server.announce(Notice(NoticeKind.EXPIRY, 1, float(number), "x" * 50_000, "test"))
        await asyncio.sleep(0)
    seen = bytearray()
    try:
        while data := await reader.read(64 * 1024):
            seen += data
    except ConnectionError:
        pass
    assert len(seen) < 2000 * 50_000
    assert b"1999.0" not in seen
    writer.close()


_HOST = """
import asyncio, sys
from serving.domain.limits import LinkEncryption
from serving.link.tls import TlsRole, accepting_end
from serving.slices.host_heartbeat.server import HostStreamServer
from serving.slices.notices import Notice, NoticeKind

async def main():
    secret = sys.stdin.buffer.readline().strip()
    encryption = LinkEncryption(sys.argv[1])
    tls = accepting_end(secret, encryption, TlsRole.HOST_AGENT, "127.0.0.1")
    server = HostStreamServer(1, tls)
    server.announce(Notice(NoticeKind.EXPIRY, 1, 1e12, "some day", "test"))
    _, port = await server.listen("127.0.0.1")
    print(port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
async def host(
    encryption: LinkEncryption,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Address]]:
    """A host's end in a process of its own."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _HOST, encryption, stdin=pipe, stdout=pipe
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(SECRET + b"\n")
    port = int(await process.stdout.readline())
    yield process, ("127.0.0.1", port)
    if process.returncode is None:
        process.kill()
    await process.wait()


async def test_host_that_stops_answering_is_lost_when_its_time_is_over(
    host: tuple[asyncio.subprocess.Process, Address],
    watch: Callable[[Address], RecordingSink],
    tls: ClientTls,
) -> None:
    process, address = host
    sink = watch(address)
    heard = HostWatcher(1, address, RecordingSink(), tls, HeartbeatConfig(0.25, 30.0))
    other = asyncio.create_task(heard.run())
    await sink.wait_for(lambda sink: sink.announced)
    process.send_signal(signal.SIGSTOP)
    assert "nothing heard for 1 s" in await loss(sink)
    assert not other.done()
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)


async def test_host_that_is_killed_is_lost_at_once(
    host: tuple[asyncio.subprocess.Process, Address],
    watch: Callable[[Address], RecordingSink],
) -> None:
    process, address = host
    sink = watch(address)
    await sink.wait_for(lambda sink: sink.announced)
    process.kill()
    await loss(sink)


async def test_pause_of_our_own_loop_does_not_lose_a_host_that_lives(
    host: tuple[asyncio.subprocess.Process, Address],
    watch: Callable[[Address], RecordingSink],
) -> None:
    process, address = host
    sink = watch(address)
    await sink.wait_for(lambda sink: sink.announced)
    for _ in range(2):
        time.sleep(1.3)  # noqa: ASYNC251  the pause is what is tested
        await asyncio.sleep(0.4)
    assert len(sink.announced) == 1
    process.kill()
    await loss(sink)
