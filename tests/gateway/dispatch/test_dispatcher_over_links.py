"""The dispatcher, real links and paced engines together, as a gateway wires them."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from serving.domain.errors import PoisonRequestError, RequestError
from serving.domain.slice_lifecycle import SliceLifecycle
from serving.domain.slice_records import SliceRecord, Snapshot
from serving.engine.paced.config import PacedConfig
from serving.engine.paced.engine import PacedEngine
from serving.gateway.dispatch.admission import FleetLimits
from serving.gateway.dispatch.dispatcher import Dispatcher, Outputs
from serving.gateway.membership import LinkSettings, Membership
from serving.link.heartbeat import HeartbeatConfig
from serving.link.server import LinkServer
from tests.gateway.engines import answer_to, in_flight

SECRET = b"the cluster secret of these tests"
DEADLINE_S = 30.0
FAST = PacedConfig()


class Gateway:
    """A served model's dispatcher, its engines, and the answers so far. An `OutputSink` too."""

    def __init__(self, name: str = "gw", config: PacedConfig = FAST) -> None:
        self.dispatcher = Dispatcher("demo", FleetLimits())
        self.dispatcher.attach(self)
        self.membership = Membership({"demo": self}, LinkSettings(name, SECRET, HeartbeatConfig()))
        self._config = config
        self.servers: list[LinkServer] = []
        self.records: list[SliceRecord] = []
        self.engines: dict[str, PacedEngine] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.failures: dict[str, RequestError] = {}
        self._changed = asyncio.Event()
        self._num_engines = 0

    async def register_engine(self, _: Any) -> Dispatcher:
        """See `FleetModel`."""
        return self.dispatcher

    def deliver(self, outputs: Outputs) -> None:
        for _, output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish is not None:
                self.finished.add(output.request_id)
        self._changed.set()

    def fail(self, request_id: str, error: RequestError) -> None:
        self.failures[request_id] = error
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until something holds, which an output or a failure may change."""
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    def submit(self, request_id: str, max_tokens: int, **changes: Any) -> None:
        request = in_flight(self.dispatcher, request_id, max_tokens, **changes)
        self.dispatcher.submit(request)

    async def start_engine(self, poison: int | None = None) -> None:
        """One more engine; it is listed at once."""
        self._num_engines += 1
        engine_id = f"e{self._num_engines}"
        engine = self.engines[engine_id] = PacedEngine(self._config)
        if poison is not None:
            engine.poison(poison)
        server = LinkServer(engine, engine_id=engine_id, secret=SECRET)
        await server.listen()
        self.servers.append(server)
        record = SliceRecord(
            engine_id,
            "demo",
            "local",
            SliceLifecycle.begin(0.0),
            engine_id=engine_id,
            address=server.address,
        )
        self.records.append(record)
        self.membership.apply(Snapshot(str(self._num_engines), tuple(self.records)))

    async def replace_the_dead(self, poison: int) -> None:
        """As Serve does with replicas: a new engine for each one that died."""
        while True:
            for engine_id, engine in list(self.engines.items()):
                try:
                    await engine.check(1.0)
                except Exception:  # noqa: BLE001 - dead, whatever it says
                    del self.engines[engine_id]
                    await self.start_engine(poison)
            await asyncio.sleep(0.005)


@asynccontextmanager
async def gateway(
    num_engines: int, poison: int | None = None, config: PacedConfig = FAST
) -> AsyncIterator[Gateway]:
    subject = Gateway(config=config)
    try:
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(num_engines):
                await subject.start_engine(poison)
            while len(subject.dispatcher.connections) < num_engines:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.001)
            yield subject
    finally:
        await subject.membership.close()
        for server in subject.servers:
            await server.close()
        for engine in subject.engines.values():
            await engine.close()


async def kill_two(subject: Gateway, chance: random.Random) -> None:
    """Kills two of its engines one after the other, each when some request has so many tokens."""
    for engine_id in ("e1", "e2"):
        position = chance.randint(0, 100)
        await subject.until(
            lambda position=position: max(map(len, subject.tokens.values()), default=0) >= position
        )
        subject.engines[engine_id].die("killed by the test")


@pytest.mark.parametrize("seed", range(5))
async def test_requests_finish_token_exactly_whenever_their_engines_die(seed: int) -> None:
    chance = random.Random(seed)
    wanted = {f"r{number}": chance.randint(50, 400) for number in range(32)}
    async with gateway(num_engines=3) as subject:
        for request_id, max_tokens in wanted.items():
            subject.submit(request_id, max_tokens)
        await kill_two(subject, chance)
        await subject.until(lambda: subject.finished == wanted.keys())
        assert subject.tokens == {key: answer_to(key, count) for key, count in wanted.items()}
        assert (subject.failures, subject.dispatcher.num_in_flight) == ({}, 0)
        assert [server.num_requests for server in subject.servers] == [0, 0, 0]


async def test_poison_request_takes_down_its_allowance_of_engines_and_nobody_else() -> None:
    poison = 255
    innocents = {f"r{number}": 300 for number in range(16)}
    async with gateway(num_engines=2, poison=poison) as subject:
        replacing = asyncio.create_task(subject.replace_the_dead(poison))
        for request_id, max_tokens in innocents.items():
            subject.submit(request_id, max_tokens)
        subject.submit("bad", 5, prompt=[poison])
        await subject.until(lambda: subject.finished == innocents.keys())
        await subject.until(lambda: not subject.dispatcher.num_in_flight)
        replacing.cancel()
        assert isinstance(subject.failures.pop("bad"), PoisonRequestError)
        assert subject.failures == {}
        assert subject.tokens == {key: answer_to(key, 300) for key in innocents}
