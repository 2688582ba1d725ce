"""What the metrics cost: the same streams with all of them, ours alone and none, in turns.

Three gateways in one process, each the whole way of a token: HTTP edge, vLLM's frontend, fleet
client, link over loopback, paced engine. Ours are every number, the engine's sums, the ledger and a
scrape, both every few rounds; without them nothing is counted or timed (the load
window, which a policy needs, is in all). vLLM's are those of its frontend
(`gateway.vllm_request_metrics`), which vLLM's own server has on. Client, gateway and engine share
one process, so what a metric costs anywhere shows. No Ray, no HTTP server: their cost would only
make ours look smaller.

Tokens are counted per second of the process's CPU time. That is what a gateway that is busy gives
per second; it does not depend on who else uses the machine, as far as that can be had. The pace of
the engine keeps the process busy without letting it fall behind, where vLLM's frontend would join
the tokens of several steps into one output.
"""

import asyncio
import contextlib
import gc
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from serving.config.application import GatewayConfig
from serving.config.models import DeploymentConfig, ModelConfig
from serving.domain.dashboard_messages import PageAnswer, PageRequest
from serving.domain.errors import DashboardUnavailableError
from serving.domain.slice_lifecycle import SliceLifecycle, SliceState
from serving.domain.slice_records import SliceRecord, Snapshot
from serving.engine.paced.config import PacedConfig
from serving.engine.paced.engine import PacedEngine
from serving.gateway.dispatch.admission import QueueState
from serving.gateway.dispatch.requests import EngineConnection
from serving.gateway.edge.auth import ApiKeys
from serving.gateway.edge.http import EdgeRules, HttpEdge
from serving.gateway.edge.readiness import Readiness
from serving.gateway.membership import LinkSettings, Membership
from serving.gateway.metrics.engines import LinkCollector, LinkReading
from serving.gateway.metrics.ledger import LedgerCollector, engine_use, is_busy
from serving.gateway.metrics.page import render_metrics
from serving.gateway.metrics.requests import ServingCollector
from serving.gateway.served_model import ServedModel
from serving.gateway.telemetry.request_metrics import EdgeMetrics
from serving.gateway.telemetry.request_story import EngineChoice
from serving.gateway.telemetry.request_telemetry import (
    DispatchedEngine,
    ModelTelemetry,
    RequestTelemetry,
    present_context,
)
from serving.ledger.ledger import Ledger
from serving.ledger.states import to_ms
from serving.link.heartbeat import HeartbeatConfig
from serving.link.messages import TokenOutput
from serving.link.server import LinkServer

NUM_STREAMS = 32
# As in `side_by_side`.
NUM_TOKENS = 200
# 32 tokens each: some 4,000 a second.
STEP_S = 0.008
NUM_ROUNDS = 96
# A round is about 0.3 s of CPU, so this is a scrape every 5 s of a busy gateway.
ROUNDS_PER_SCRAPE = 16
WARM_UP_ROUNDS = 3
ROUND_TOKENS = NUM_STREAMS * NUM_TOKENS
# Joined outputs are cheaper for each token, in whichever round they happen to be.
_MIN_CHUNKS_PER_TOKEN = 0.9
_SECRET = b"s" * 32
_MODEL = "slicewise-demo"
_VOCAB_SIZE = 2**31


class UncountedRequest(RequestTelemetry):
    """Behind the same methods, the load window alone."""

    def dispatched(
        self,
        engine: DispatchedEngine,  # noqa: ARG002
        choice: EngineChoice,
        num_named: int,  # noqa: ARG002
        now_s: float,  # noqa: ARG002
    ) -> None:
        """Nothing but which engine it was: others read that."""
        self.choice = choice
        self.context.numbers = self.numbers

    def found_cached(self, num_tokens: int, now_s: float) -> None:
        """Nothing but the load."""
        self.owner.load.found_cached(now_s, num_tokens)

    def ended(self, outcome: str, now_s: float) -> None:  # noqa: ARG002 - the signature
        """Nothing but the load."""
        self.owner.load.finished(now_s, self.num_tokens)


class UncountedTelemetry(ModelTelemetry):
    """Likewise."""

    def __init__(self) -> None:
        super().__init__(_MODEL, time.monotonic())
        self._numbers = self.metrics.of_class("")
        self._tokens = self._numbers.of_tenant("")

    def arrived(self, request_id: str, num_prompt_tokens: int, now_s: float) -> RequestTelemetry:
        """Nothing but the load."""
        self.load.arrived(now_s, num_prompt_tokens)
        given = (self, present_context(now_s), request_id, now_s, num_prompt_tokens)
        return UncountedRequest(*given, self._numbers, self._tokens)

    def emitted(
        self, outputs: Iterable[tuple[RequestTelemetry, TokenOutput]], now_s: float
    ) -> None:
        """Nothing."""


class UncountedEdge(EdgeMetrics):
    """Likewise."""

    def record_admission(self, model: str, result: str, tenant: str) -> None:
        """Nothing."""

    def answered(self, model: str, route: str, status: int) -> None:
        """Nothing."""


class SilentEngine(PacedEngine):
    """A paced engine that adds nothing up."""

    def _count(self, outputs: list[TokenOutput], now_s: float) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Way:
    """One gateway with one engine, whole. `scrape` belongs to each round, `None` for none."""

    edge: HttpEdge
    scrape: Callable[[], Awaitable[None]] | None


@asynccontextmanager
async def way(*, has_ours: bool, has_vllms: bool) -> AsyncIterator[Way]:
    """A gateway with our metrics, and with those of vLLM's frontend, or without."""
    config = ModelConfig(
        name=_MODEL,
        source=f"models/{_MODEL}",
        engine_args={"max_model_len": 2048, "dtype": "float32"},
        deployments=(DeploymentConfig(compute_class="local"),),
    )
    # Nothing is held back to be joined: what a token costs is what is asked.
    gateway = GatewayConfig(vllm_request_metrics=has_vllms, min_hold_s=0.0, max_hold_s=0.0)
    model = await ServedModel.build(config, gateway)
    if not has_ours:
        model.current.dispatcher.telemetry = UncountedTelemetry()
    edge = HttpEdge(
        {_MODEL: model}, EdgeRules(ApiKeys(()), 1 << 20), _empty_page, dict, _no_dashboard, _ready
    )
    if not has_ours:
        edge.metrics = UncountedEdge()
    pace = PacedConfig(
        ttft_s=STEP_S, time_per_token_s=STEP_S, max_num_seqs=NUM_STREAMS, vocab_size=_VOCAB_SIZE
    )
    engine = PacedEngine(pace) if has_ours else SilentEngine(pace)
    name = f"{has_ours}-{has_vllms}"
    server = LinkServer(engine, engine_id=f"e-{name}", secret=_SECRET)
    await server.listen()
    settings = LinkSettings(f"g-{name}", _SECRET, HeartbeatConfig(0.25, 30.0))
    membership = Membership({_MODEL: model}, settings)
    life = SliceLifecycle.begin(time.time()).enter(SliceState.RESERVED, time.time(), "")
    life = life.enter(SliceState.LOADING, time.time(), "").enter(SliceState.READY, time.time(), "")
    record = SliceRecord(
        *("r", _MODEL, "local", life, "v6e", "2x4"),
        engine_id=server.engine_id,
        address=server.address,
    )
    membership.apply(Snapshot("1", (record,)))
    dispatcher = model.current.dispatcher
    state = QueueState(behind_s=0.0, num_waiting=0)
    await dispatcher.queue.admit(state, lambda: dispatcher.has_engine, 10.0)
    scrape = _scraper(model, edge, membership) if has_ours else None
    try:
        yield Way(edge, scrape)
    finally:
        await membership.close()
        await server.close()
        await engine.close()


def _scraper(
    model: ServedModel, edge: HttpEdge, membership: Membership
) -> Callable[[], Awaitable[None]]:
    """What a gateway does once a second, and for one scrape."""
    ledger = Ledger(to_ms(time.time()))
    ours = CollectorRegistry(auto_describe=False)
    ours.register(ServingCollector({_MODEL: model}, edge.metrics))
    ours.register(LinkCollector(lambda: list(map(_reading, model.connections))))
    ours.register(LedgerCollector(ledger, {"local": 1.0}))

    async def scrape() -> None:
        busy = {
            engine.engine_id: is_busy(len(engine.requests), None) for engine in model.connections
        }
        uses = {}
        for engine in model.connections:
            requests = engine.requests.values()
            uses[engine.engine_id] = engine_use(requests, engine.link.stats.engine_stats)
        ledger.observe(membership.snapshot, busy, to_ms(time.time()), uses)
        vllms = [] if model.metrics is None else [model.metrics]
        await render_metrics(vllms, "g", ours=[ours])

    return scrape


async def _no_dashboard(_request: PageRequest) -> PageAnswer:
    raise DashboardUnavailableError("nobody asks for it here")


def _ready() -> Readiness:
    return Readiness(is_ready=True, reason="engines take requests")


async def _empty_page(_accept: str) -> tuple[bytes, str]:
    return b"", ""


def _reading(engine: EngineConnection) -> LinkReading:
    stats = engine.link.stats
    return LinkReading(
        *(_MODEL, engine.compute_class, engine.engine_id, None, stats.traffic, stats.silence_s),
        *(stats.round_trip_s, stats.load, stats.engine_stats),
    )


async def _stream(edge: HttpEdge, number: int) -> int:
    """One streamed completion, as a server would drive the application; its chunks."""
    body = {
        "model": _MODEL,
        "prompt": [10 + (number * 7 + at) % 1000 for at in range(32)],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    messages = [{"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}]
    ended = asyncio.Event()
    num_chunks, status = 0, 0

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal num_chunks, status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            num_chunks += message.get("body", b"").count(b"data: {")

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "root_path": "",
        "query_string": b"", "http_version": "1.1", "scheme": "http", "client": None,
        "server": ("127.0.0.1", 80), "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    await edge(scope, receive, send)
    ended.set()
    if status != 200:
        raise RuntimeError(f"stream {number} ended with status {status}")
    return num_chunks


class TokensJoinedError(RuntimeError):
    """The machine was away for so long that outputs were joined. Take the round again."""


async def cpu_s(subject: Way, salt: int) -> float:
    """CPU time of one round: as many streams as run at once, and a scrape if it is due."""
    gc.collect()  # what another way has left behind
    started_s = time.process_time()
    numbers = range(salt * NUM_STREAMS, (salt + 1) * NUM_STREAMS)
    num_chunks = sum(await asyncio.gather(*(_stream(subject.edge, number) for number in numbers)))
    if subject.scrape is not None and salt % ROUNDS_PER_SCRAPE == 0:
        await subject.scrape()
    ended_s = time.process_time()
    if num_chunks < _MIN_CHUNKS_PER_TOKEN * ROUND_TOKENS:
        raise TokensJoinedError(f"{ROUND_TOKENS} tokens came in {num_chunks} chunks")
    return ended_s - started_s


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of CPU for the same tokens, one right after the other."""

    all: float
    ours: float
    none: float


async def run() -> list[Round]:
    """Rounds of three in changing order, after some of each to warm up."""
    rounds: list[Round] = []
    async with (
        way(has_ours=True, has_vllms=True) as every,
        way(has_ours=True, has_vllms=False) as ours,
        way(has_ours=False, has_vllms=False) as none,
    ):
        ways = {"all": every, "ours": ours, "none": none}
        # As a gateway does. Else the collector walks all of vLLM in some rounds and not in others.
        gc.collect()
        gc.freeze()
        for number in range(WARM_UP_ROUNDS):
            for each in ways.values():
                with contextlib.suppress(TokensJoinedError):
                    await cpu_s(each, number)
        numbers = itertools.count(WARM_UP_ROUNDS)
        while len(rounds) < NUM_ROUNDS:
            number = next(numbers)
            # Each comes first, second and third as often as the others.
            names = [*ways][number % 3 :] + [*ways][: number % 3]
            try:
                found = {name: await cpu_s(ways[name], number) for name in names}
            except TokensJoinedError:
                if number > 2 * NUM_ROUNDS:
                    raise
                continue
            rounds.append(Round(**found))
    return rounds


def ratio_of_sums(rounds: list[Round], name: str) -> tuple[float, float, float]:
    """Tokens per CPU second with `name` over those with none; and its 90 % interval.

    The interval is what the ratio would be of rounds drawn anew from those that were measured:
    whatever else the machine does comes and goes over many rounds.
    """
    draw = random.Random(1)
    pairs = [(each.none, getattr(each, name)) for each in rounds]

    def ratio(of: list[tuple[float, float]]) -> float:
        return sum(none for none, _ in of) / sum(some for _, some in of)

    again = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(2000))
    return ratio(pairs), again[100], again[-101]


def report(rounds: list[Round]) -> str:
    """A markdown table."""
    lines = [
        "| metrics | tok per CPU second | ratio to none | 90 % interval |",
        "|---|---|---|---|",
    ]
    for name in ("none", "ours", "all"):
        rate = len(rounds) * ROUND_TOKENS / sum(getattr(each, name) for each in rounds)
        ratio, low, high = ratio_of_sums(rounds, name)
        lines.append(f"| {name} | {rate:.0f} | {ratio:.3f} | {low:.3f} to {high:.3f} |")
    return "\n".join(lines)
