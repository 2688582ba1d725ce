"""What is around a dispatcher: scripted engines at the end of no link, requests, a sink."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from serving.domain.errors import RequestError
from serving.domain.tokens.cached_blocks import CacheLayout
from serving.domain.tokens.paced import paced_token
from serving.engine.paced.config import PacedConfig
from serving.gateway.dispatch.dispatcher import Dispatcher, Outputs
from serving.gateway.dispatch.requests import InFlightRequest
from serving.link.client import LinkStats
from serving.link.connection import Traffic
from serving.link.errors import FrameError, LinkClosedError
from serving.link.messages import (
    CacheDelta,
    CacheSnapshot,
    EngineEnd,
    Finish,
    Room,
    RoomWanted,
    Step,
    TokenOutput,
    TokenRequest,
)

TOKEN_RANGE = PacedConfig().token_range


def in_flight(
    dispatcher: Dispatcher,
    request_id: str = "r",
    max_tokens: int = 5,
    prompt: list[int] | None = None,
    **changes: Any,
) -> InFlightRequest:
    """A request as the engine client hands it over."""
    prompt = list(request_id.encode()) if prompt is None else prompt
    telemetry = dispatcher.telemetry.arrived(request_id, len(prompt), time.monotonic())
    given = {"prompt_token_ids": prompt, "max_tokens": max_tokens, "payload": []} | changes
    return InFlightRequest(request_id=request_id, telemetry=telemetry, **given)


class RecordingSink:
    """Writes down what a dispatcher delivers. Implements `OutputSink`."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.steps: list[list[TokenOutput]] = []
        self.failures: dict[str, RequestError] = {}
        self.failed = asyncio.Event()
        dispatcher.attach(self)

    @property
    def tokens(self) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {}
        for step in self.steps:
            for output in step:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        return tokens

    def deliver(self, outputs: Outputs) -> None:
        self.steps.append([output for _, output in outputs])

    def fail(self, request_id: str, error: RequestError) -> None:
        assert request_id not in self.failures, "reported twice"
        self.failures[request_id] = error
        self.failed.set()


def answer_to(request_id: str, num_tokens: int = 5) -> list[int]:
    """What every engine here makes of the request `request_id`, `num_tokens` long."""
    prompt = list(request_id.encode())
    return [paced_token(prompt, position, TOKEN_RANGE) for position in range(num_tokens)]


async def let_token_leave() -> None:
    """Gives the loop the turns from an engine's step to the client, about ten, and more.

    A token that comes before would be joined with the one that still lies ready.
    """
    for _ in range(50):
        await asyncio.sleep(0)


class ScriptedLink:
    """A link to an engine that takes a step on command. Implements `EngineLink`.

    With `places` it tells of room for so many requests, at the start and after each step.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        engine_id: str = "e1",
        *,
        places: int | None = None,
        cache_layout: CacheLayout | None = None,
    ) -> None:
        self.engine_id = engine_id
        self.submitted: list[TokenRequest] = []
        self.aborted: list[str] = []
        self.calls: list[tuple[str, Any]] = []
        self.is_broken = False
        self.reported_end: EngineEnd | None = None
        self.stats = LinkStats(Traffic())
        self.late_s = 0.0
        self.tells_room = places is not None
        self.places = places
        self.cache_layout = cache_layout
        self.on_cache: Callable[[CacheSnapshot | CacheDelta], None]
        self.demands: list[tuple[int, int]] = []
        self.wanted = RoomWanted()
        self.kept = 0  # places that are told as kept, and for whom they are not
        self.is_batch_leaving = False
        self.leaving: list[tuple[int, str]] = []
        self.max_prompt_tokens = 1000
        self.num_ways_asked = 0
        self._running: dict[str, TokenRequest] = {}
        self._num_out: dict[str, int] = {}  # wire id -> tokens out, those of earlier engines too
        self._dispatcher = dispatcher
        self._on_step: Callable[[Step], None]
        dispatcher.add_engine(engine_id, "local", self)
        if self.tells_room:
            self._on_step(Step([], room=self.room()))

    @property
    def running(self) -> list[str]:
        """The wire ids of the requests on the engine."""
        return list(self._running)

    def deliver_to(self, on_step: Callable[[Step], None]) -> None:
        self._on_step = on_step

    def watch_cache(self, on_change: Callable[[CacheSnapshot | CacheDelta], None]) -> None:
        self.on_cache = on_change

    def submit(self, request: TokenRequest) -> None:
        if self.is_broken:
            raise LinkClosedError("broken")
        if len(request.prompt_token_ids) > self.max_prompt_tokens:
            raise FrameError("the request does not fit into a frame")
        assert request.request_id not in self._num_out, "a wire id was used twice"
        self.submitted.append(request)
        self._running[request.request_id] = request
        self._num_out[request.request_id] = len(request.emitted_token_ids)

    def want_room(self, wanted: RoomWanted) -> None:
        self.wanted = wanted
        self.demands.append((wanted.num_requests, wanted.prefill_tokens))

    def make_way(self) -> None:
        self.num_ways_asked += 1

    def abort(self, request_ids: list[str]) -> None:
        if self.is_broken:
            return
        self.aborted += request_ids
        for request_id in request_ids:
            self._running.pop(request_id, None)

    async def call(self, method: str, args: bytes, timeout_s: float) -> bytes:
        self.calls.append((method, msgspec.msgpack.decode(args)))
        return b"\xc3"  # msgpack: true

    def make_step(self, only: list[str] | None = None) -> Step:
        """One token for every running request, or for `only` these."""
        outputs = []
        for wire_id in self.running if only is None else only:
            request = self._running[wire_id]
            position = self._num_out[wire_id]
            self._num_out[wire_id] += 1
            token_id = paced_token(request.prompt_token_ids, position, TOKEN_RANGE)
            is_last = position + 1 == request.max_tokens
            if is_last:
                del self._running[wire_id]
            finish = int(Finish.LENGTH) if is_last else None
            outputs.append(TokenOutput(wire_id, [token_id], finish))
        return Step(outputs, room=self.room() if self.tells_room else None)

    def room(self, **changes: Any) -> Room:
        """What it has room for now."""
        assert self.places is not None
        free = self.places - len(self._running)
        room = Room(
            len(self.submitted),
            free,
            1_000_000,
            num_sequences=len(self._running),
            num_places=free,
            num_dealt=free - self.kept,
            is_batch_leaving=self.is_batch_leaving,
            leaving=self.leaving,
        )
        return msgspec.structs.replace(room, **changes)

    def tell(self, **changes: Any) -> None:
        """Tells of room, with these numbers in place of the true ones."""
        self._on_step(Step([], room=self.room(**changes)))

    def step(self, num_steps: int = 1, only: list[str] | None = None) -> None:
        """Makes steps and delivers each, for `only` these requests if that is given."""
        for _ in range(num_steps):
            self.deliver(self.make_step(only))

    def deliver(self, step: Step) -> None:
        """Delivers a step that was made, or made up."""
        self._on_step(step)

    def fail_at(self, request_id: str, *token_ids: int) -> None:
        """Ends a request with an error for which there is no reason."""
        (wire_id,) = [each for each in self.running if each.partition("~")[0] == request_id]
        del self._running[wire_id]
        self._on_step(Step([TokenOutput(wire_id, list(token_ids), int(Finish.ERROR))]))

    def end(self, how: EngineEnd | None = EngineEnd.CRASHED) -> None:
        """The engine ends, and the host reports how; or (`None`) its host falls silent with it."""
        self.is_broken = True
        self.reported_end = how
        self._dispatcher.lose_engine(self.engine_id, "killed by the test")
