"""Peers that are silent, slow, gone, or not what they say."""

import asyncio
import itertools
import logging
import secrets

import pytest

from serving.engine.paced.config import PacedConfig
from serving.link.client import ClientLimits
from serving.link.errors import HandshakeError, LinkClosedError
from serving.link.handshake import NONCE_BYTES, GatewayHandshake
from serving.link.heartbeat import HeartbeatConfig
from serving.link.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Abort,
    Call,
    Challenge,
    Hello,
    Proof,
    Refused,
    Step,
    TokenOutput,
    TokenRequest,
    Welcome,
)
from serving.link.server import ServerLimits

from .peers import (
    DEADLINE_S,
    FAST_HEARTBEAT,
    PATIENT_HEARTBEAT,
    SECRET,
    SLOW,
    RawPeer,
    WatchedEngine,
    answer_to,
    connected,
    raw_engine_host,
    raw_gateway,
    request,
    serving,
)

NONCE = bytes(NONCE_BYTES)


async def test_hello_of_another_version_is_refused_with_the_reason() -> None:
    async with (
        serving(WatchedEngine(PacedConfig())) as server,
        raw_gateway(server.address) as peer,
    ):
        peer.send(Hello(PROTOCOL_VERSION + 1, "g", NONCE))
        refused = await peer.receive()
        assert isinstance(refused, Refused)
        assert f"version {PROTOCOL_VERSION + 1}" in refused.reason
        await peer.until_closed()


async def test_wrong_proof_is_refused_with_the_reason() -> None:
    async with (
        serving(WatchedEngine(PacedConfig())) as server,
        raw_gateway(server.address) as peer,
    ):
        peer.send(Hello(PROTOCOL_VERSION, "g", NONCE))
        assert isinstance(await peer.receive(), Challenge)
        peer.send(Proof(bytes(32)))
        refused = await peer.receive()
        assert isinstance(refused, Refused)
        assert "proof" in refused.reason
        await peer.until_closed()
        assert server.gateway_ids == set()


async def test_recorded_handshake_played_again_is_refused() -> None:
    async with serving(WatchedEngine(PacedConfig())) as server:
        handshake = GatewayHandshake("g", SECRET, secrets.token_bytes(NONCE_BYTES))
        async with raw_gateway(server.address) as peer:
            peer.send(handshake.hello)
            challenge = await peer.receive()
            assert isinstance(challenge, Challenge)
            recorded = handshake.answer(challenge)
            peer.send(recorded)
            assert isinstance(await peer.receive(), Welcome)
        async with raw_gateway(server.address) as intruder:
            intruder.send(handshake.hello, recorded)
            assert isinstance(await intruder.receive(), Challenge)
            assert isinstance(await intruder.receive(), Refused)
            await intruder.until_closed()


@pytest.mark.parametrize(
    "message",
    [request("r"), Abort(["r"]), Call(1, "reverse"), Welcome(), Step([])],
    ids=["submit", "abort", "call", "welcome", "step"],
)
async def test_nothing_but_a_handshake_is_taken_from_a_stranger(
    message: TokenRequest | Abort | Call | Welcome | Step,
) -> None:
    engine = WatchedEngine(PacedConfig())
    async with serving(engine) as server, raw_gateway(server.address) as peer:
        peer.send(message)
        assert await peer.receive() is None
        assert engine.submitted == []


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        (4097).to_bytes(4, "big"),
        (MAX_FRAME_BYTES).to_bytes(4, "big") + b"x" * 1000,
        (0).to_bytes(4, "big"),
        (3).to_bytes(4, "big") + b"\xc1\xc1\xc1",
        (4000).to_bytes(4, "big") + b"\x95\xa5hello\x01\xa1g\xc4\x00" + b"\x91" * 3988,
        (8).to_bytes(4, "big") + b"\x92\xa6hello!" + b"\x00",
    ],
    ids=["http", "oversized", "huge", "empty", "no-msgpack", "deeply-nested", "unknown-tag"],
)
async def test_garbage_from_a_stranger_ends_its_connection_only(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    engine = WatchedEngine(PacedConfig())
    async with (
        serving(engine) as server,
        connected(server.address) as gateway,
        raw_gateway(server.address) as peer,
    ):
        peer.send_bytes(garbage)
        assert await peer.receive() is None
        gateway.client.submit(request("r"))
        await gateway.until_ended("r")
        assert gateway.tokens["r"] == answer_to("r")
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_garbage_on_an_open_link_ends_it_and_aborts() -> None:
    engine = WatchedEngine(SLOW)
    async with serving(engine) as server, raw_gateway(server.address) as peer:
        await peer.open_as_gateway("g")
        peer.send(request("r", max_tokens=100_000))
        await engine.until(lambda: engine.submitted == ["r"])
        peer.send_bytes((3).to_bytes(4, "big") + b"\xc1\xc1\xc1")
        await peer.until_closed()
        await engine.until(lambda: engine.aborted == ["r"])


async def test_stranger_that_says_nothing_is_disconnected() -> None:
    limits = ServerLimits(handshake_timeout_s=0.1)
    async with (
        serving(WatchedEngine(PacedConfig()), limits=limits) as server,
        raw_gateway(server.address) as silent,
        raw_gateway(server.address) as halfway,
    ):
        halfway.send(Hello(PROTOCOL_VERSION, "g", NONCE))
        await silent.until_closed()
        await halfway.until_closed()


async def test_of_too_many_strangers_the_oldest_is_disconnected() -> None:
    limits = ServerLimits(max_unproven=2)
    async with (
        serving(WatchedEngine(PacedConfig()), limits=limits) as server,
        raw_gateway(server.address) as oldest,
        raw_gateway(server.address),
        connected(server.address),
    ):
        await oldest.until_closed()


async def test_silent_gateway_is_dropped_and_its_requests_aborted() -> None:
    engine = WatchedEngine(SLOW)
    async with (
        serving(engine, FAST_HEARTBEAT) as server,
        raw_gateway(server.address) as peer,
    ):
        await peer.open_as_gateway("g")
        peer.send(request("r", max_tokens=100_000))
        await peer.until_closed()
        await engine.until(lambda: engine.aborted == ["r"])
        assert server.gateway_ids == set()


async def test_slow_gateway_is_dropped_and_never_holds_up_another() -> None:
    engine = WatchedEngine(PacedConfig(max_model_len=1_000_000))
    limits = ServerLimits(max_buffered_bytes=64 * 1024)
    async with (
        serving(engine, PATIENT_HEARTBEAT, limits) as server,
        raw_gateway(server.address, receive_buffer_bytes=4096) as slow,
        connected(server.address, "quick") as quick,
    ):
        await slow.open_as_gateway("slow")
        slow_ids = [f"slow-{i}" for i in range(100)]
        slow.send(*(request(request_id, max_tokens=900_000) for request_id in slow_ids))
        await engine.until(lambda: len(engine.submitted) == len(slow_ids))
        quick.client.submit(request("quick", max_tokens=900_000))
        await engine.until(lambda: sorted(engine.aborted) == sorted(slow_ids))
        num_tokens = len(quick.tokens["quick"])
        await quick.until(lambda heard: len(heard.tokens["quick"]) > num_tokens + 1000)
        assert quick.tokens["quick"] == answer_to("quick", len(quick.tokens["quick"]))
        assert server.gateway_ids == {"quick"}


async def shake_hands_then_nothing(peer: RawPeer) -> None:
    await peer.open_as_engine_host()


async def test_silent_engine_host_is_lost_once() -> None:
    async with (
        raw_engine_host(shake_hands_then_nothing) as address,
        connected(address, heartbeat=FAST_HEARTBEAT) as gateway,
    ):
        assert "heartbeat missed" in await gateway.until_lost()
        await gateway.client.closed
        assert len(gateway.lost) == 1


async def test_engine_host_that_is_gone_is_lost_without_waiting_for_a_heartbeat() -> None:
    async def shake_hands_then_go(peer: RawPeer) -> None:
        await peer.open_as_engine_host()
        await peer.receive()
        await peer.close()

    async with (
        raw_engine_host(shake_hands_then_go) as address,
        connected(address, heartbeat=PATIENT_HEARTBEAT) as gateway,
    ):
        gateway.client.submit(request("r"))
        await gateway.until_lost()
        await gateway.client.closed
        assert len(gateway.lost) == 1


async def test_engine_host_that_goes_without_having_read_is_lost_at_once() -> None:
    async def end_when_told(peer: RawPeer) -> None:
        await peer.open_as_engine_host()
        await is_full.wait()
        peer.end_sending()

    is_full = asyncio.Event()
    async with (
        raw_engine_host(end_when_told) as address,
        connected(address, heartbeat=PATIENT_HEARTBEAT) as gateway,
    ):
        for number in range(2000):
            gateway.client.submit(TokenRequest(f"r{number}", [70_000] * 2000, max_tokens=1))
        is_full.set()
        assert "closed the link" in await gateway.until_lost()


async def test_engine_host_that_does_not_read_is_lost() -> None:
    limits = ClientLimits(max_buffered_bytes=64 * 1024, write_stall_timeout_s=0.2)
    heartbeat = HeartbeatConfig(interval_s=0.05, timeout_s=60.0)
    async with (
        raw_engine_host(shake_hands_then_nothing) as address,
        connected(address, heartbeat=heartbeat, limits=limits) as gateway,
    ):
        for number in range(2000):
            gateway.client.submit(TokenRequest(f"r{number}", [70_000] * 2000, max_tokens=1))
        assert "does not read" in await gateway.until_lost()
        assert len(gateway.lost) == 1


async def test_messages_that_wait_for_an_engine_host_are_bounded() -> None:
    limits = ClientLimits(max_buffered_bytes=64 * 1024, max_waiting_messages=10)
    async with (
        raw_engine_host(shake_hands_then_nothing) as address,
        connected(address, heartbeat=PATIENT_HEARTBEAT, limits=limits) as gateway,
    ):

        def submit_for_ever() -> None:
            for number in itertools.count():
                gateway.client.submit(TokenRequest(f"r{number}", [70_000] * 2000, max_tokens=1))

        with pytest.raises(LinkClosedError, match="10 messages wait"):
            submit_for_ever()
        assert gateway.lost == []  # never from inside `submit`
        assert "10 messages wait" in await gateway.until_lost()


async def test_burst_of_long_prompts_waits_and_arrives_in_order() -> None:
    limits = ClientLimits(max_buffered_bytes=64 * 1024)
    engine = WatchedEngine(PacedConfig(max_model_len=100_000))
    async with (
        serving(engine) as server,
        connected(server.address, limits=limits) as gateway,
    ):
        ids = [f"r{i}" for i in range(300)]
        for request_id in ids:
            gateway.client.submit(TokenRequest(request_id, [200] * 20_000, max_tokens=1))
        gateway.client.abort([ids[-1]])
        await gateway.until_ended(*ids[:-1])
        assert engine.submitted[:-1] == ids[:-1] or engine.submitted == ids[:-1]


@pytest.mark.parametrize(
    "reply",
    [Step([TokenOutput("r", [1])]), Welcome(), Proof(bytes(32)), Hello(1, "g", NONCE)],
    ids=["step", "welcome", "proof", "hello"],
)
async def test_engine_host_that_skips_the_handshake_is_not_believed(
    reply: Step | Welcome | Proof | Hello,
) -> None:
    async def skip_the_handshake(peer: RawPeer) -> None:
        peer.send(reply)

    async with raw_engine_host(skip_the_handshake) as address:
        with pytest.raises(LinkClosedError, match="protocol error"):
            async with connected(address):
                pass


async def test_engine_host_without_the_secret_gets_no_proof() -> None:
    received: list[object] = []

    async def impersonate(peer: RawPeer) -> None:
        received.append(await peer.receive())
        peer.send(Challenge(PROTOCOL_VERSION, "engine-0", NONCE, bytes(32)))
        received.append(await peer.receive())

    async with raw_engine_host(impersonate) as address:
        with pytest.raises(HandshakeError, match="different cluster secrets"):
            async with connected(address):
                pass
    assert isinstance(received[0], Hello)
    assert received[1:] in ([], [None])


async def test_engine_host_that_never_answers_is_given_up() -> None:
    async def stay_silent(peer: RawPeer) -> None:
        await peer.until_closed()

    async with raw_engine_host(stay_silent) as address:
        with pytest.raises(LinkClosedError, match="no answer within"):
            async with connected(address, limits=ClientLimits(handshake_timeout_s=0.1)):
                pass


async def test_connecting_can_be_cancelled() -> None:
    closed = asyncio.Event()

    async def stay_silent(peer: RawPeer) -> None:
        await peer.receive()
        connecting.cancel()
        await peer.until_closed()
        closed.set()

    async def connect(address: tuple[str, int]) -> None:
        async with connected(address):
            pass

    async with raw_engine_host(stay_silent) as address:
        connecting = asyncio.create_task(connect(address))
        with pytest.raises(asyncio.CancelledError):
            await connecting
        async with asyncio.timeout(DEADLINE_S):
            await closed.wait()
