"""Gateways' dispatchers and paced engines, with the links between them, on a simulated network."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from serving.domain.capacity.objectives import Objectives
from serving.domain.errors import RequestError
from serving.domain.models.request_fields.service_class import ServiceClass
from serving.domain.tokens.cached_blocks import CacheMirror
from serving.domain.tokens.named_blocks import NamedBlocks
from serving.engine.paced.config import PacedConfig
from serving.engine.paced.engine import PacedEngine
from serving.gateway.dispatch.admission import AdmissionQueue, FleetLimits
from serving.gateway.dispatch.dispatcher import Dispatcher, Outputs
from serving.gateway.dispatch.load import load_of
from serving.gateway.dispatch.requests import InFlightRequest
from serving.gateway.telemetry.request_telemetry import ModelTelemetry
from serving.link.client import LinkCallbacks, LinkClient
from serving.link.rooms.room import EngineCapacity
from serving.link.server import LinkServer
from tests.gateway.engines import in_flight

_SECRET = b"the cluster secret of a simulated fleet"


# About a chip's: steps of 12 to 25 ms, of which a prompt of 8,000 tokens takes 400.
CHIP = PacedConfig(
    time_per_token_s=0.012,
    tpot_per_seq_s=0.0002,
    prefill_tokens_per_s=20_000.0,
    max_num_seqs=64,
    max_num_batched_tokens=8192,
    max_model_len=40_000,
)
CHIP_WITH_CACHE = replace(CHIP, kv_cache_tokens=120_000, block_size=64)


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


class RoomOnlyEngine(PacedEngine):
    """It tells of room, and not what its cache has."""

    @property
    def cached(self) -> CacheMirror | None:
        return None


class BlindEngine(RoomOnlyEngine):
    """Of an earlier build: it tells neither, and gets everything at once."""

    @property
    def capacity(self) -> EngineCapacity | None:  # type: ignore[override]
        return None


class KnownLengths(ModelTelemetry):
    """It expects each answer to be as long as it will be: as long as its request allows."""

    def __init__(self) -> None:
        super().__init__("demo", 0.0)

    def output_mean(self, service_class: ServiceClass) -> float | None:
        """More than any answer has."""
        return 1e9


@dataclass(slots=True)
class Answer:
    """When a request came, had its first and its last token, in seconds of the simulation.

    It stood still for `pause_s` when it lost its engine; `None` if it never did. Of its tokens
    until then `moved_cached_ratio` were in the cache where it went on, as its gateway expected it;
    `None` if that knows nothing of caches. `engine_id` is the last engine that has sent something
    of it.
    """

    came_at_s: float
    prompt_tokens: int
    tenant: str = ""
    first_at_s: float | None = None
    ended_at_s: float | None = None
    tokens: list[int] = field(default_factory=list)
    num_cached: int = 0
    engine_id: str | None = None
    last_at_s: float = 0.0
    pause_s: float | None = None
    moved_cached_ratio: float | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens that have come."""
        return len(self.tokens)

    @property
    def ttft_s(self) -> float:
        assert self.first_at_s is not None
        return self.first_at_s - self.came_at_s


class SimulatedGateway:
    """One gateway's dispatcher and its links. Implements `OutputSink`."""

    def __init__(
        self, name: str, deadline_s: float = 86_400.0, telemetry: ModelTelemetry | None = None
    ) -> None:
        limits = FleetLimits(request_deadline_s=deadline_s)
        queue = AdmissionQueue("demo", limits, telemetry)
        self.dispatcher = Dispatcher("demo", limits, queue=queue)
        self.dispatcher.attach(self)
        self.answers: dict[str, Answer] = {}
        self.failures: dict[str, RequestError] = {}
        self._in_flight: dict[str, InFlightRequest] = {}
        self.ended = asyncio.Event()
        self._name = name
        self._clients: list[LinkClient] = []
        self._loop = asyncio.get_running_loop()

    async def link(self, engine_id: str, address: tuple[str, int]) -> None:
        def lost(reason: str) -> None:
            self.dispatcher.lose_engine(engine_id, reason)

        callbacks = LinkCallbacks(on_lost=lost, on_draining=lambda _: None)
        client = await LinkClient.connect(
            address, gateway_id=self._name, secret=_SECRET, callbacks=callbacks
        )
        self._clients.append(client)
        self.dispatcher.add_engine(engine_id, "local", client)

    def submit(self, request_id: str, prompt: list[int], max_tokens: int, **changes: Any) -> None:
        blocks = NamedBlocks(prompt)
        request = in_flight(
            self.dispatcher, request_id, max_tokens, prompt, blocks=blocks, **changes
        )
        tenant = changes.get("tenant", "")
        self.answers[request_id] = Answer(self._loop.time(), len(prompt), tenant)
        self._in_flight[request_id] = request
        self.dispatcher.submit(request)

    def deliver(self, outputs: Outputs) -> None:
        now_s = self._loop.time()
        for telemetry, output in outputs:
            answer = self.answers[output.request_id]
            if telemetry.num_moves and answer.pause_s is None and answer.num_tokens:
                answer.pause_s = now_s - answer.last_at_s
                choice = telemetry.choice
                if choice is not None and choice.expected_cached is not None:
                    answer.moved_cached_ratio = choice.expected_cached / choice.num_tokens
            answer.last_at_s = now_s
            answer.tokens += output.token_ids
            answer.engine_id = self._in_flight[output.request_id].engine_id
            answer.num_cached += output.num_cached or 0
            if answer.first_at_s is None:
                answer.first_at_s = now_s
            if output.finish is not None:
                answer.ended_at_s = now_s
                del self._in_flight[output.request_id]
                self.ended.set()

    def fail(self, request_id: str, error: RequestError) -> None:
        self.failures[request_id] = error
        self._in_flight.pop(request_id, None)
        self.ended.set()

    def abort(self, request_id: str) -> None:
        """Ends a request as its client does that leaves."""
        self.dispatcher.abort([request_id])
        self._in_flight.pop(request_id, None)
        self.ended.set()

    async def until_done(self) -> None:
        """Waits until nothing is in flight."""
        while self.dispatcher.num_in_flight:
            self.ended.clear()
            await self.ended.wait()

    async def close(self) -> None:
        self.dispatcher.shutdown()
        for client in self._clients:
            await client.close()


@dataclass(slots=True)
class SimulatedFleet:
    """Any number of gateways and engines, each gateway linked to each engine."""

    gateways: list[SimulatedGateway] = field(default_factory=list)
    engines: list[PacedEngine] = field(default_factory=list)
    servers: list[LinkServer] = field(default_factory=list)

    async def add_engine(self, engine: PacedEngine) -> None:
        name = f"e{len(self.engines)}"
        server = LinkServer(engine, engine_id=name, secret=_SECRET)
        await server.listen()
        self.engines.append(engine)
        self.servers.append(server)
        for gateway in self.gateways:
            await gateway.link(name, server.address)

    async def lose_engine(self, number: int) -> None:
        """Takes an engine's host away: its links break."""
        await self.servers[number].close()

    def drain_engine(self, number: int, grace_s: float | None) -> None:
        """Has every gateway hear that an engine goes, as its replica tells them."""
        for gateway in self.gateways:
            gateway.dispatcher.drain_engine(f"e{number}", "scaling down", grace_s)

    async def keep_looking(self) -> None:
        """Samples each gateway's load once a second, as reports do."""
        while True:
            for gateway in self.gateways:
                dispatcher = gateway.dispatcher
                load_of([dispatcher], dispatcher.queue, asyncio.get_running_loop().time())
            await asyncio.sleep(1.0)

    async def until_done(self) -> None:
        await asyncio.gather(*(gateway.until_done() for gateway in self.gateways))

    @property
    def answers(self) -> list[Answer]:
        return [answer for gateway in self.gateways for answer in gateway.answers.values()]

    @property
    def cached_ratio(self) -> float:
        """The share of the prompts' tokens that engines had in their caches."""
        cached = sum(answer.num_cached for answer in self.answers)
        return cached / sum(answer.prompt_tokens for answer in self.answers)

    def forecast(self) -> tuple[int, int, int]:
        """The tokens expected in caches that were there, those that were not, and unexpected ones.

        Of all gateways.
        """
        forecasts = [
            numbers.cache_forecast
            for gateway in self.gateways
            for numbers in gateway.dispatcher.telemetry.metrics.classes.values()
        ]
        return (
            sum(each.found for each in forecasts),
            sum(each.missing for each in forecasts),
            sum(each.unforeseen for each in forecasts),
        )


@asynccontextmanager
async def simulated_fleet(
    num_gateways: int,
    engines: Sequence[PacedEngine],
    deadline_s: float = 86_400.0,
    *,
    knows_lengths: bool = False,
    objectives: Objectives | None = None,
) -> AsyncIterator[SimulatedFleet]:
    """Requests wait for `deadline_s` if they do not say."""
    gateways = [
        SimulatedGateway(f"gw{number}", deadline_s, KnownLengths() if knows_lengths else None)
        for number in range(num_gateways)
    ]
    for gateway in gateways:
        gateway.dispatcher.telemetry.set_objectives(objectives)
    fleet = SimulatedFleet(gateways)
    looking = asyncio.create_task(fleet.keep_looking())
    try:
        for engine in engines:
            await fleet.add_engine(engine)
        yield fleet
    finally:
        looking.cancel()
        for gateway in fleet.gateways:
            await gateway.close()
        for server in fleet.servers:
            await server.close()


def prompt_of(length: int, seed: random.Random) -> list[int]:
    """So many tokens of a paced engine, by chance."""
    return seed.choices(range(256), k=length)


def engines_of(config: PacedConfig, count: int, *, told: bool = True) -> list[PacedEngine]:
    """So many alike; those that are not `told` of are of an earlier build."""
    kind = PacedEngine if told else BlindEngine
    return [kind(config) for _ in range(count)]
