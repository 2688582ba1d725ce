"""Engines for a fleet client: a scripted one at the end of no link, and requests for either."""

import time
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from serving.domain.paced_tokens import paced_token
from serving.engine.paced.engine import PacedConfig
from serving.gateway.fleet_core import FleetCore
from serving.link.errors import FrameError, LinkClosedError
from serving.link.messages import Finish, Step, TokenOutput, TokenRequest

TOKEN_RANGE = PacedConfig().token_range


def core_request(
    request_id: str = "r", max_tokens: int = 5, prompt: list[int] | None = None, **params: Any
) -> EngineCoreRequest:
    """A request as vLLM's frontend hands it over."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(request_id.encode()) if prompt is None else prompt,
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def answer_to(request_id: str, num_tokens: int = 5) -> list[int]:
    """What every engine here makes of `core_request(request_id, num_tokens)`."""
    prompt = list(request_id.encode())
    return [paced_token(prompt, position, TOKEN_RANGE) for position in range(num_tokens)]


class ScriptedLink:
    """A link to an engine that takes a step when told to. Implements `EngineLink`."""

    def __init__(self, core: FleetCore, engine_id: str = "e1") -> None:
        self.engine_id = engine_id
        self.submitted: list[TokenRequest] = []
        self.aborted: list[str] = []
        self.calls: list[tuple[str, Any]] = []
        self.is_broken = False
        self.has_told_end = False
        self.max_prompt_tokens = 1000
        self._core = core
        self._running: dict[str, TokenRequest] = {}
        self._num_out: dict[str, int] = {}  # wire id -> tokens out, those of earlier engines too
        core.add_engine(engine_id, "local", self)

    @property
    def running(self) -> list[str]:
        """The wire ids of the requests on the engine."""
        return list(self._running)

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
            self._core.take_step(self.engine_id, self.make_step())

    def end(self, *, is_told: bool = True) -> None:
        """The engine dies, and the gateway is told; or its host falls silent with it."""
        self.is_broken = True
        self.has_told_end = is_told
        self._core.lose_engine(self.engine_id, "killed by the test")
