"""Links in TLS: who is let in, what is said of those who are not, and what a wire shows."""

import asyncio
import secrets
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from cryptography import x509

from serving.domain.limits import LinkEncryption, needs_tls
from serving.engine.paced.engine import PacedEngine
from serving.link.client import LinkClient
from serving.link.errors import HandshakeError
from serving.link.handshake import NONCE_BYTES, GatewayHandshake
from serving.link.messages import Refused, TokenRequest
from serving.link.server import LinkServer
from serving.link.tls import (
    RENEW_S,
    SKEW_S,
    Authority,
    ClientTls,
    TlsEnd,
    TlsIdentity,
    TlsRole,
    channel_of,
)
from tests.link.peers import SECRET, SLOW, Gateway, RawPeer, WatchedEngine, answer_to, request
from tests.link.wire import Wire

OTHER_SECRET = b"another cluster secret of these tests"
NOW_S = 1_800_000_000.0


# -- the decision, and certificates --


@pytest.mark.parametrize(
    ("encryption", "host", "expected"),
    [
        (LinkEncryption.AUTO, "127.0.0.1", False),
        (LinkEncryption.AUTO, "127.8.0.1", False),
        (LinkEncryption.AUTO, "::1", False),
        (LinkEncryption.AUTO, "localhost", False),
        (LinkEncryption.AUTO, "10.0.0.7", True),
        (LinkEncryption.AUTO, "0.0.0.0", True),
        (LinkEncryption.AUTO, "head.example", True),
        (LinkEncryption.TLS, "127.0.0.1", True),
        (LinkEncryption.NONE, "10.0.0.7", False),
    ],
)
def test_links_beyond_loopback_are_encrypted_unless_said_otherwise(
    encryption: LinkEncryption, host: str, expected: bool
) -> None:
    assert needs_tls(encryption, host) is expected


def shake(opening: TlsIdentity, accepting: TlsIdentity, name: TlsRole = TlsRole.ENGINE) -> None:
    """Shakes hands in memory; raises what either end raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = opening.context.wrap_bio(to_client, to_server, server_hostname=name)
    server = accepting.context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.version() == server.version() == "TLSv1.3"
    assert client.getpeercert(binary_form=True) == accepting.certificate
    assert server.getpeercert(binary_form=True) == opening.certificate


def gateway(secret: bytes = SECRET, now_s: float | None = None) -> TlsIdentity:
    return Authority(secret).issue(TlsRole.GATEWAY, time.time() if now_s is None else now_s)


def engine_host(secret: bytes = SECRET, now_s: float | None = None) -> TlsIdentity:
    return Authority(secret).issue(TlsRole.ENGINE, time.time() if now_s is None else now_s)


def test_two_processes_with_one_secret_trust_each_other() -> None:
    shake(gateway(), engine_host())


@pytest.mark.parametrize("skew_s", [-SKEW_S + 60, SKEW_S - 60])
def test_clocks_may_differ_by_a_day(skew_s: float) -> None:
    shake(gateway(now_s=time.time() + skew_s), engine_host())
    shake(gateway(), engine_host(now_s=time.time() + skew_s))


@pytest.mark.parametrize(
    ("opening", "accepting", "message"),
    [
        (lambda: gateway(OTHER_SECRET), engine_host, "certificate verify failed"),
        (gateway, lambda: engine_host(OTHER_SECRET), "certificate verify failed"),
        (lambda: gateway(now_s=time.time() - 3 * RENEW_S), engine_host, "has expired"),
        (gateway, lambda: engine_host(now_s=time.time() - 3 * RENEW_S), "has expired"),
        (lambda: gateway(now_s=time.time() + 2 * SKEW_S), engine_host, "not yet valid"),
    ],
)
def test_certificate_of_another_secret_or_time_is_refused(opening, accepting, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ssl.SSLCertVerificationError, match=message):
        shake(opening(), accepting())


def test_certificate_of_another_role_is_refused() -> None:
    agent = Authority(SECRET).issue(TlsRole.HOST_AGENT, time.time())
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake(gateway(), agent)
    accepting = Authority(SECRET).issue(TlsRole.ENGINE, time.time())
    as_client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    as_client.check_hostname = False
    as_client.verify_mode = ssl.CERT_NONE
    with pytest.raises(ssl.SSLError, match="peer did not return a certificate"):
        shake(TlsIdentity(as_client, b"", 0.0), accepting)


def test_authority_is_the_same_in_every_process_and_another_for_another_secret() -> None:
    def authority(secret: bytes) -> bytes:
        (root,) = (
            Authority(secret).issue(TlsRole.ENGINE, NOW_S).context.get_ca_certs(binary_form=True)
        )
        return root

    assert authority(SECRET) == authority(SECRET)
    assert authority(SECRET) != authority(OTHER_SECRET)
    assert SECRET not in authority(SECRET)


def test_certificate_is_renewed_for_connections_after_a_day_and_when_the_clock_was_set() -> None:
    now_s = NOW_S
    end = TlsEnd(SECRET, TlsRole.GATEWAY, lambda: now_s)
    (first,) = end.identities()
    assert end.identities() == (first,)
    now_s += RENEW_S
    (second,) = end.identities()
    assert second.certificate != first.certificate
    assert x509.load_der_x509_certificate(second.certificate).not_valid_after_utc.timestamp() == (
        now_s + RENEW_S + SKEW_S
    )
    now_s -= 60
    assert end.identities() != (second,)


def test_channel_names_both_certificates_in_their_order() -> None:
    assert channel_of(b"a", b"b") != channel_of(b"b", b"a")
    assert len({channel_of(b"a", b"b"), channel_of(b"a", b"c"), channel_of(b"c", b"b")}) == 3


# -- links --


@asynccontextmanager
async def serving_tls(
    engine: PacedEngine, secret: bytes = SECRET, encryption: LinkEncryption = LinkEncryption.TLS
) -> AsyncIterator[LinkServer]:
    server = LinkServer(engine, engine_id="engine-0", secret=secret, encryption=encryption)
    await server.listen()
    try:
        yield server
    finally:
        await server.close()
        await engine.close()


@asynccontextmanager
async def linked(
    address: tuple[str, int],
    secret: bytes = SECRET,
    encryption: LinkEncryption = LinkEncryption.TLS,
) -> AsyncIterator[Gateway]:
    gateway = Gateway()
    gateway.client = await LinkClient.connect(
        address,
        gateway_id="gateway-0",
        secret=secret,
        callbacks=gateway.callbacks,
        tls=ClientTls(secret, encryption),
    )
    gateway.client.deliver_to(gateway.on_step)
    try:
        yield gateway
    finally:
        await gateway.client.close()


async def test_requests_are_answered_in_tls() -> None:
    engine = WatchedEngine(SLOW)
    async with serving_tls(engine) as server, linked(server.address) as gateway:
        assert gateway.client.is_encrypted
        for number in range(5):
            gateway.client.submit(request(f"request-{number}"))
        await gateway.until_ended(*(f"request-{number}" for number in range(5)))
        for number in range(5):
            assert gateway.tokens[f"request-{number}"] == answer_to(f"request-{number}")


async def test_prompt_of_a_million_tokens_arrives_in_tls() -> None:
    engine = WatchedEngine(SLOW)
    async with serving_tls(engine) as server, linked(server.address) as gateway:
        prompt = [7] * 900_000
        gateway.client.submit(TokenRequest("long", prompt, max_tokens=1))
        await gateway.until_ended("long")


async def test_gateway_that_goes_takes_its_requests_with_it_in_tls() -> None:
    engine = WatchedEngine(SLOW)
    async with serving_tls(engine) as server:
        async with linked(server.address) as gateway:
            gateway.client.submit(request("endless", 100_000))
            await gateway.until(lambda each: bool(each.num_steps))
        await engine.until(lambda: engine.aborted == ["endless"])


async def test_end_of_the_engine_host_is_told_in_tls() -> None:
    engine = WatchedEngine(SLOW)
    async with serving_tls(engine) as server, linked(server.address) as gateway:
        await server.close("the engine host is replaced")
        assert await gateway.until_lost() == "engine lost: the engine host is replaced"


async def test_gateway_of_another_secret_is_refused_with_the_reason() -> None:
    engine = WatchedEngine(SLOW)
    async with serving_tls(engine) as server:
        with pytest.raises(HandshakeError, match="not of this cluster's secret"):
            async with linked(server.address, OTHER_SECRET):
                pass


async def test_gateway_with_two_secrets_links_to_engine_hosts_of_either() -> None:
    both = OTHER_SECRET + b"\n" + SECRET
    for secret in (SECRET, OTHER_SECRET):
        engine = WatchedEngine(SLOW)
        async with serving_tls(engine, secret) as server, linked(server.address, both) as gateway:
            gateway.client.submit(request("request"))
            await gateway.until_ended("request")


async def test_peer_without_a_certificate_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    engine = WatchedEngine(SLOW)
    async with serving_tls(engine) as server:
        stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        stranger.check_hostname = False
        stranger.verify_mode = ssl.CERT_NONE
        reader, writer = await asyncio.open_connection(*server.address, ssl=stranger)
        writer.write(b"\x00\x00\x00\x01\x90")
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 10)
        writer.transport.abort()
    assert "did not return a certificate" in caplog.text.replace("_", " ").lower()


@pytest.mark.parametrize("is_encrypted_here", [True, False])
async def test_ends_that_disagree_on_encryption_both_name_the_setting(
    caplog: pytest.LogCaptureFixture, is_encrypted_here: bool
) -> None:
    kinds = [LinkEncryption.TLS, LinkEncryption.NONE]
    own, others = kinds if is_encrypted_here else reversed(kinds)
    engine = WatchedEngine(SLOW)
    async with serving_tls(engine, encryption=own) as server:
        with pytest.raises(HandshakeError, match=r"link\.encryption"):
            async with linked(server.address, encryption=others):
                pass
    refused = [line for line in caplog.messages if line.startswith("link not opened")]
    assert len(refused) == 1
    assert "both ends need the same link.encryption" in refused[0]


async def test_plain_peer_is_told_why_it_is_refused() -> None:
    engine = WatchedEngine(SLOW)
    async with serving_tls(engine) as server:
        peer = RawPeer(*await asyncio.open_connection(*server.address))
        handshake = GatewayHandshake("gateway", SECRET, secrets.token_bytes(NONCE_BYTES))
        peer.send(handshake.hello)
        answer = await peer.receive()
        assert isinstance(answer, Refused)
        assert "link.encryption" in answer.reason
        assert await peer.receive() is None
        await peer.close()


# -- the wire --


async def wire_of(encryption: LinkEncryption) -> bytes:
    engine = WatchedEngine(SLOW)
    async with (
        serving_tls(engine, encryption=encryption) as server,
        Wire(server.address).tapped() as wire,
        linked(wire.address, encryption=encryption) as gateway,
    ):
        gateway.client.submit(request("a prompt that nobody else may read"))
        await gateway.until_ended("a prompt that nobody else may read")
    return bytes(wire.seen)


async def test_wire_shows_neither_prompt_nor_names_in_tls() -> None:
    prompt = b"a prompt that nobody else may read"
    plain, encrypted = await wire_of(LinkEncryption.NONE), await wire_of(LinkEncryption.TLS)
    for word in (prompt, b"gateway-0", b"engine-0"):
        # Token ids of the prompt are its letters, each below 128 and so one byte of msgpack.
        assert plain.count(word) > 0
        assert word not in encrypted
