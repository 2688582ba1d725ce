"""What is around a dispatcher: scripted engines at the end of no link, requests, a sink."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from serving.domain.errors import RequestError
from serving.domain.tokens.paced import paced_token
from serving.engine.paced.config import PacedConfig
from serving.gateway.dispatcher import Dispatcher, Outputs
from serving.gateway.requests import InFlightRequest
from serving.link.client import LinkStats
from serving.link.connection import Traffic
from serving.link.errors import FrameError, LinkClosedError
from serving.link.messages import EngineEnd, Finish, Step, TokenOutput, TokenRequest

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
    """A link to an engine that takes a step on command. Implements `EngineLink`."""

    def __init__(self, dispatcher: Dispatcher, engine_id: str = "e1") -> None:
        self.engine_id = engine_id
        self.submitted: list[TokenRequest] = []
        self.aborted: list[str] = []
        self.calls: list[tuple[str, Any]] = []
        self.is_broken = False
        self.reported_end: EngineEnd | None = None
        self.stats = LinkStats(Traffic())
        self.late_s = 0.0
        self.max_prompt_tokens = 1000
        self._running: dict[str, TokenRequest] = {}
        self._num_out: dict[str, int] = {}  # wire id -> tokens out, those of earlier engines too
        self._dispatcher = dispatcher
        self._on_step: Callable[[Step], None]
        dispatcher.add_engine(engine_id, "local", self)

    @property
    def running(self) -> list[str]:
        """The wire ids of the requests on the engine."""
        return list(self._running)

    def deliver_to(self, on_step: Callable[[Step], None]) -> None:
        self._on_step = on_step

    def submit(self, request: TokenRequest) -> None:
        if self.is_broken:
            raise LinkClosedError("broken")
        if len(request.prompt_token_ids) > self.max_prompt_tokens:
            raise FrameError("the request does not fit into a frame")
        assert request.request_id not in self._num_out, "a wire id was used twice"
        self.submitted.append(request)
        self._running[request.request_id] = request
        self._num_out[request.request_id] = len(request.emitted_token_ids)

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
        return Step(outputs)

    def step(self, num_steps: int = 1) -> None:
        """Makes steps and delivers each."""
        for _ in range(num_steps):
            self._on_step(self.make_step())

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
