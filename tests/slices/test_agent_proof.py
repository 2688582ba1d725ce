"""The stream of a host beyond loopback: who is let in, who is believed, and what is said of others.

Hosts that are apart, with addresses of their own:
`tests/deployments/simulation/test_separate_hosts.py`.
"""

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from serving.domain.limits import LinkEncryption
from serving.link.heartbeat import HeartbeatConfig
from serving.link.tls import SKEW_S, Authority, ClientTls, TlsIdentity, TlsRole, accepting_end
from serving.slices.host_heartbeat.lines import LEFT_LINE
from serving.slices.host_heartbeat.server import MAX_WATCHERS, HostStreamServer
from serving.slices.host_heartbeat.watcher import HostWatcher
from serving.slices.notices import Notice, NoticeKind
from tests.link.wire import Wire
from tests.slices.sinks import RecordingSink

SECRET = b"a cluster secret that these tests share"
OTHER_SECRET = b"another cluster secret of these tests"
PREEMPTION = Notice(NoticeKind.PREEMPTION, 1, 1234.5, "it is preempted", "metadata preempted")
PREEMPTION_LINE = (
    b'{"notices":[{"kind":"preemption","worker_id":1,"deadline_s":1234.5,'
    b'"reason":"it is preempted","source":"metadata preempted"}]}\n'
)
BRISK = HeartbeatConfig(0.25, 1.0)
SOON_S = 20.0

Address = tuple[str, int]


@asynccontextmanager
async def agent(
    secret: bytes = SECRET, encryption: LinkEncryption = LinkEncryption.TLS
) -> AsyncIterator[tuple[HostStreamServer, Address]]:
    """A host's end with a notice to tell, on loopback, encrypted as it is on other addresses."""
    tls = accepting_end(secret, encryption, TlsRole.HOST_AGENT, "127.0.0.1")
    server = HostStreamServer(1, tls)
    server.announce(PREEMPTION)
    address = await server.listen("127.0.0.1")
    try:
        yield server, address
    finally:
        await server.close()


def replica(secret: bytes = SECRET, encryption: LinkEncryption = LinkEncryption.TLS) -> ClientTls:
    return ClientTls(secret, encryption, TlsRole.HOST_WATCHER)


@asynccontextmanager
async def watched(
    address: Address,
    tls: ClientTls,
    revive: Callable[[], Awaitable[Address | None]] | None = None,
) -> AsyncIterator[RecordingSink]:
    """What a replica hears from that address."""
    sink = RecordingSink()
    watching = asyncio.create_task(HostWatcher(1, address, sink, tls, BRISK, revive).run())
    try:
        yield sink
    finally:
        watching.cancel()
        (result,) = await asyncio.gather(watching, return_exceptions=True)
        assert result is None or isinstance(result, asyncio.CancelledError)


async def loss(sink: RecordingSink) -> str:
    """Waits until the host is lost, of which nothing else was believed; the reason."""
    await sink.wait_for(lambda sink: (1, "host stream") in sink.now)
    (lost,) = sink.announced
    assert lost.kind == NoticeKind.HOST_LOST
    return lost.reason


def identity(role: TlsRole, secret: bytes = SECRET) -> TlsIdentity:
    return Authority(secret).issue(role, time.time())


def trusting(opening: TlsIdentity | None) -> ssl.SSLContext:
    """The context of a stranger who takes the agent for who it says, and shows this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if opening is None else opening.context
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


# -- the agent's end --


async def answer_to(address: Address, context: ssl.SSLContext | None, said: bytes) -> bytes:
    """Says something to an agent; all that it answers until it hangs up."""
    heard = b""
    async with asyncio.timeout(SOON_S):
        try:
            reader, writer = await asyncio.open_connection(*address, ssl=context)
        except OSError:
            return heard
        try:
            writer.write(said)
            while data := await reader.read(4096):
                heard += data
        except OSError:
            pass
        finally:
            writer.transport.abort()
    return heard


@pytest.mark.parametrize(
    ("stranger", "reason"),
    [
        (lambda: None, "both ends need the same link.encryption"),
        (lambda: trusting(None), "peer did not return a certificate"),
        (
            lambda: trusting(identity(TlsRole.HOST_WATCHER, OTHER_SECRET)),
            "not of this cluster's secret, role and time",
        ),
        (
            lambda: trusting(identity(TlsRole.GATEWAY)),
            "the peer is gateway.slicewise, and not host-watcher.slicewise",
        ),
    ],
    ids=["plain", "no certificate", "other secret", "gateway"],
)
async def test_stranger_is_not_answered_and_not_heard(
    stranger: Callable[[], ssl.SSLContext | None],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with agent() as (server, address):
        server.on_left = lambda: pytest.fail("a stranger was heard")
        assert await answer_to(address, stranger(), LEFT_LINE) == b""
        refused = [line for line in caplog.messages if line.startswith("host stream not opened")]
        assert len(refused) == 1
        assert reason in refused[0].replace("_", " ").lower() or reason in refused[0]
        # Its own replica still is.
        async with watched(address, replica()) as sink:
            await sink.wait_for(lambda sink: sink.announced == [PREEMPTION])


async def test_strangers_that_say_nothing_keep_no_replica_out() -> None:
    async with agent() as (_, address):
        strangers = [await asyncio.open_connection(*address) for _ in range(4 * MAX_WATCHERS)]
        async with watched(address, replica()) as sink:
            await sink.wait_for(lambda sink: sink.announced == [PREEMPTION])
        # Nor for ever.
        async with asyncio.timeout(SOON_S):
            assert [await reader.read() for reader, _ in strangers] == [b""] * len(strangers)
        for _, writer in strangers:
            writer.transport.abort()


async def test_replica_with_two_secrets_hears_agents_of_either() -> None:
    both = replica(OTHER_SECRET + b"\n" + SECRET)
    for secret in (SECRET, OTHER_SECRET):
        async with agent(secret) as (_, address), watched(address, both) as sink:
            await sink.wait_for(lambda sink: sink.announced == [PREEMPTION])


async def test_replica_that_is_not_admitted_learns_where_the_reason_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    behind = ClientTls(
        SECRET,
        LinkEncryption.TLS,
        TlsRole.HOST_WATCHER,
        lambda: time.time() - 4 * SKEW_S,
    )
    async with agent() as (_, address), watched(address, behind) as sink:
        reason = await loss(sink)
    assert reason.endswith("it was closed, and its agent's log says why if it is alive")
    assert any("certificate has expired" in line for line in caplog.messages)


# -- the replica's end --


@contextmanager
def speaking(lines: bytes) -> Iterator[Callable[..., None]]:
    """Answers each connection as an agent with something to tell would."""
    writers: list[asyncio.StreamWriter] = []

    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(lines)

    yield answer
    for writer in writers:
        writer.transport.abort()


@asynccontextmanager
async def impostor(context: ssl.SSLContext | None) -> AsyncIterator[Address]:
    """Somebody at an agent's address who announces what would end the slice."""
    with speaking(PREEMPTION_LINE) as answer:
        server = await asyncio.start_server(answer, "127.0.0.1", ssl=context)
        host, port = server.sockets[0].getsockname()
        yield host, port
        server.close()


IMPOSTORS = {
    "plain": (lambda: None, "the peer speaks plainly on a link that is encrypted here"),
    "other secret": (
        lambda: identity(TlsRole.HOST_AGENT, OTHER_SECRET).context,
        "not of this cluster's secret, role and time: self-signed certificate",
    ),
    "engine host": (
        lambda: identity(TlsRole.ENGINE).context,
        "not of this cluster's secret, role and time: Hostname mismatch",
    ),
}


@pytest.mark.parametrize(("context", "reason"), IMPOSTORS.values(), ids=IMPOSTORS.keys())
async def test_impostor_is_not_believed_and_the_host_is_lost_with_the_reason(
    context: Callable[[], ssl.SSLContext | None], reason: str
) -> None:
    async with impostor(context()) as address, watched(address, replica()) as sink:
        found = await loss(sink)
    assert found.startswith("the host is lost: its agent cannot prove itself: ")
    assert reason in found


async def test_impostor_that_says_nothing_is_a_host_that_is_silent() -> None:
    with speaking(b"") as answer:
        server = await asyncio.start_server(answer, "127.0.0.1")
        async with watched(server.sockets[0].getsockname(), replica()) as sink:
            assert await loss(sink) == "the host is lost: nothing heard for 1 s"
        server.close()


async def test_host_whose_agent_cannot_prove_itself_is_lost_though_ray_has_it_alive() -> None:
    asked = 0

    async with impostor(identity(TlsRole.HOST_AGENT, OTHER_SECRET).context) as address:

        async def revive() -> Address:
            nonlocal asked
            asked += 1
            return address

        async with watched(address, replica(), revive) as sink:
            reason = await loss(sink)
    assert "its agent cannot prove itself" in reason
    assert reason.endswith("nothing heard for 1 s")
    # Not as fast as it can.
    assert 0 < asked < 10


async def test_every_reason_for_which_an_address_was_left_is_told_with_the_loss() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        nobody: Address = closed.getsockname()

        async def revive() -> Address:
            return nobody

        stranger = identity(TlsRole.HOST_AGENT, OTHER_SECRET).context
        async with impostor(stranger) as address, watched(address, replica(), revive) as sink:
            reason = await loss(sink)
    unproven, unreachable, silence = reason.removeprefix("the host is lost: ").split("; ")
    assert unproven.startswith("its agent cannot prove itself")
    assert unreachable.startswith("its stream cannot be connected")
    assert silence == "nothing heard for 1 s"


async def test_stranger_at_the_address_of_a_dead_agent_costs_no_slice() -> None:
    """Ray has started the agent again, and another program got the port of the one before."""
    async with agent() as (_, anew), impostor(None) as before:

        async def revive() -> Address:
            return anew

        async with watched(before, replica(), revive) as sink:
            await sink.wait_for(lambda sink: sink.announced == [PREEMPTION])


# -- the wire --


async def wire_of(encryption: LinkEncryption) -> bytes:
    async with (
        agent(encryption=encryption) as (_, address),
        Wire(address).tapped() as wire,
        watched(wire.address, replica(encryption=encryption)) as sink,
    ):
        await sink.wait_for(lambda sink: sink.announced == [PREEMPTION])
    return bytes(wire.seen)


async def test_wire_shows_no_notice_in_tls() -> None:
    assert b"it is preempted" in await wire_of(LinkEncryption.NONE)
    assert b"preempted" not in await wire_of(LinkEncryption.TLS)
