"""Both ends of a link for tests: one that records what it hears, and raw ones that misbehave."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Self

import msgspec

from serving.domain.tokens.paced import paced_token
from serving.engine.paced.config import PacedConfig
from serving.engine.paced.engine import PacedEngine
from serving.link.client import DEFAULT_HEARTBEAT, ClientLimits, LinkCallbacks, LinkClient
from serving.link.client import DEFAULT_LIMITS as DEFAULT_CLIENT_LIMITS
from serving.link.connection import FrameSplitter, encode_frame
from serving.link.handshake import NONCE_BYTES, EngineHandshake, GatewayHandshake
from serving.link.heartbeat import HeartbeatConfig
from serving.link.messages import (
    MAX_FRAME_BYTES,
    Challenge,
    Draining,
    EngineMessage,
    GatewayMessage,
    Hello,
    Proof,
    Step,
    TokenOutput,
    TokenRequest,
    Welcome,
)
from serving.link.server import DEFAULT_HEARTBEAT as DEFAULT_SERVER_HEARTBEAT
from serving.link.server import DEFAULT_LIMITS as DEFAULT_SERVER_LIMITS
from serving.link.server import LinkServer, ServerLimits

SECRET = b"the cluster secret of these tests"
DEADLINE_S = 15.0

# A pace at which a long request cannot end during a test.
SLOW = PacedConfig(time_per_token_s=0.01, max_model_len=1_000_000)
FAST_HEARTBEAT = HeartbeatConfig(interval_s=0.05, timeout_s=0.2)
PATIENT_HEARTBEAT = HeartbeatConfig(interval_s=1.0, timeout_s=60.0)


def request(request_id: str, max_tokens: int | None = 5) -> TokenRequest:
    return TokenRequest(request_id, list(request_id.encode()), max_tokens=max_tokens)


def answer_to(request_id: str, num_tokens: int = 5) -> list[int]:
    """What the paced engine makes of `request(request_id)`."""
    token_range = PacedConfig().token_range
    prompt = list(request_id.encode())
    return [paced_token(prompt, position, token_range) for position in range(num_tokens)]


def _explode(_args: bytes) -> bytes:
    msg = "a fault of the engine"
    raise RuntimeError(msg)


CALLS = {
    "reverse": lambda args: args[::-1],
    "explode": _explode,
    "overflow": lambda _args: bytes(MAX_FRAME_BYTES),
}


class WatchedEngine(PacedEngine):
    """A paced engine that tells what it was asked for."""

    def __init__(self, config: PacedConfig, adapters: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(config, CALLS, adapters)
        self.submitted: list[str] = []
        self.aborted: list[str] = []
        self.changed = asyncio.Event()

    async def submit(self, request: TokenRequest) -> None:
        await super().submit(request)
        self.submitted.append(request.request_id)
        self.changed.set()

    async def abort(self, request_ids: list[str]) -> None:
        await super().abort(request_ids)
        self.aborted += request_ids
        self.changed.set()

    async def until(self, is_reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not is_reached():
                self.changed.clear()
                await self.changed.wait()


class HeavyEngine(WatchedEngine):
    """Every output carries a payload of this size, as prompt logprobs and embeddings may."""

    def __init__(self, config: PacedConfig, payload_bytes: int) -> None:
        super().__init__(config)
        self._payload = [bytes(payload_bytes)]

    async def next_step(self) -> list[TokenOutput]:
        outputs = await super().next_step()
        for output in outputs:
            output.payload = self._payload
        return outputs


class Gateway:
    """A link client and everything it heard."""

    def __init__(self) -> None:
        self.client: LinkClient
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, TokenOutput] = {}
        self.num_steps = 0
        self.lost: list[str] = []
        self.drainings: list[Draining] = []
        self._changed = asyncio.Event()

    async def until(self, is_reached: Callable[[Self], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not is_reached(self):
                self._changed.clear()
                await self._changed.wait()

    async def until_lost(self) -> str:
        await self.until(lambda gateway: bool(gateway.lost))
        return self.lost[0]

    async def until_ended(self, *request_ids: str) -> None:
        await self.until(lambda gateway: gateway.ends.keys() >= set(request_ids))

    @property
    def callbacks(self) -> LinkCallbacks:
        return LinkCallbacks(self._on_lost, self._on_draining)

    def on_step(self, step: Step) -> None:
        self.num_steps += bool(step.outputs)  # others tell of room
        for output in step.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish is not None:
                self.ends[output.request_id] = output
        self._changed.set()

    def _on_lost(self, reason: str) -> None:
        self.lost.append(reason)
        self._changed.set()

    def _on_draining(self, draining: Draining) -> None:
        self.drainings.append(draining)
        self._changed.set()


@asynccontextmanager
async def serving(
    engine: PacedEngine,
    heartbeat: HeartbeatConfig = DEFAULT_SERVER_HEARTBEAT,
    limits: ServerLimits = DEFAULT_SERVER_LIMITS,
) -> AsyncIterator[LinkServer]:
    server = LinkServer(
        engine,
        engine_id="engine-0",
        secret=SECRET,
        heartbeat=heartbeat,
        limits=limits,
    )
    await server.listen()
    try:
        yield server
    finally:
        await server.close()
        await engine.close()


@asynccontextmanager
async def connected(
    address: tuple[str, int],
    gateway_id: str = "gateway-0",
    *,
    secret: bytes = SECRET,
    heartbeat: HeartbeatConfig = DEFAULT_HEARTBEAT,
    limits: ClientLimits = DEFAULT_CLIENT_LIMITS,
) -> AsyncIterator[Gateway]:
    gateway = Gateway()
    gateway.client = await LinkClient.connect(
        address,
        gateway_id=gateway_id,
        secret=secret,
        callbacks=gateway.callbacks,
        heartbeat=heartbeat,
        limits=limits,
    )
    gateway.client.deliver_to(gateway.on_step)
    try:
        yield gateway
    finally:
        await gateway.client.close()


class RawPeer:
    """A socket that speaks frames only as far as a test tells it to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(GatewayMessage | EngineMessage)
        self._splitter = FrameSplitter(MAX_FRAME_BYTES)
        self._received: list[GatewayMessage | EngineMessage] = []

    def send(self, *messages: msgspec.Struct) -> None:
        self.send_bytes(b"".join(map(encode_frame, messages)))

    def send_bytes(self, data: bytes) -> None:
        self._writer.write(data)

    async def receive(self) -> GatewayMessage | EngineMessage | None:
        """The next message that is not a ping; `None` once the other end has closed."""
        while not self._received:
            try:
                async with asyncio.timeout(DEADLINE_S):
                    data = await self._reader.read(65_536)
            except ConnectionError:
                data = b""
            if not data:
                return None
            self._received += map(self._decoder.decode, self._splitter.feed(data))
        return self._received.pop(0)

    async def until_closed(self) -> None:
        while await self.receive() is not None:
            pass

    def end_sending(self) -> None:
        """Says that nothing more will come, and goes on (not) reading."""
        self._writer.write_eof()

    async def close(self) -> None:
        self._writer.transport.abort()

    async def open_as_gateway(self, gateway_id: str, secret: bytes = SECRET) -> Proof:
        """Shakes hands by the rules, and hears of room. Returns the proof that was sent."""
        handshake = GatewayHandshake(gateway_id, secret, secrets.token_bytes(NONCE_BYTES))
        self.send(handshake.hello)
        challenge = await self.receive()
        assert isinstance(challenge, Challenge)
        proof = handshake.answer(challenge)
        self.send(proof)
        assert isinstance(await self.receive(), Welcome)
        told = await self.receive()
        assert isinstance(told, Step)
        assert (told.outputs, told.room is None) == ([], False)
        return proof

    async def open_as_engine_host(self, secret: bytes = SECRET) -> None:
        """Shakes hands by the rules."""
        handshake = EngineHandshake("raw-engine", secret, secrets.token_bytes(NONCE_BYTES))
        hello = await self.receive()
        assert isinstance(hello, Hello)
        self.send(handshake.challenge(hello))
        proof = await self.receive()
        assert isinstance(proof, Proof)
        handshake.verify(proof)
        self.send(Welcome())


@asynccontextmanager
async def raw_gateway(
    address: tuple[str, int], receive_buffer_bytes: int | None = None
) -> AsyncIterator[RawPeer]:
    client = socket.socket()
    client.settimeout(0)
    if receive_buffer_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    await asyncio.get_running_loop().sock_connect(client, address)
    # A small limit: what is not read stays in the kernel, then with the engine host.
    peer = RawPeer(*await asyncio.open_connection(sock=client, limit=1024))
    try:
        yield peer
    finally:
        await peer.close()


@asynccontextmanager
async def raw_engine_host(
    behave: Callable[[RawPeer], Awaitable[None]],
) -> AsyncIterator[tuple[str, int]]:
    """A port behind which every connection is handled by `behave`, then left open."""
    peers: list[RawPeer] = []
    tasks: list[asyncio.Task[None]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = RawPeer(reader, writer)
        peers.append(peer)
        await behave(peer)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.get_running_loop().create_task(handle(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[:2]
    finally:
        server.close()
        for peer in peers:
            await peer.close()
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError), result
