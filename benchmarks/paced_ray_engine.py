"""Ray Serve LLM's own vLLM engine class with a paced engine core in place of vLLM's.

Everything above the core is what Ray Serve LLM runs in production: vLLM's OpenAI frontend with its
tokenizer and detokenizer, in the replica's process. The core is the same paced engine that
Slicewise's engine hosts run, here in that process too: Ray Serve LLM is spared the messages that
vLLM's core would send from a process of its own.

Loaded by Ray Serve LLM through `RAYLLM_VLLM_ENGINE_CLS`, with the packages it needs.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine

from serving.engine.paced.config import PacedConfig
from serving.engine.paced.engine import PacedEngine
from serving.gateway.dispatch.admission import FleetLimits
from serving.gateway.dispatch.dispatcher import Dispatcher
from serving.gateway.frontend import FleetLLM
from serving.gateway.streams.engine_client import FleetEngineClient
from serving.link.client import LinkStats
from serving.link.connection import Traffic
from serving.link.messages import (
    CacheDelta,
    CacheSnapshot,
    RoomWanted,
    Step,
    TokenRequest,
)

# The key of `LLMConfig.experimental_configs` under which the options of `PacedConfig` come.
PACE_KEY = "paced"
_ENGINE_ID = "paced"


class PacedVLLMEngine(VLLMEngine):  # type: ignore[misc] # Ray has no types
    """Ray's `VLLMEngine`, whose core emits tokens on a timetable."""

    def _start_async_llm_engine(
        self, vllm_engine_args: Any, vllm_engine_config: Any, placement_group: Any
    ) -> FleetLLM:
        del vllm_engine_args, placement_group  # of a core that is not started
        dispatcher = Dispatcher(self.llm_config.model_id, FleetLimits())
        client = FleetEngineClient(dispatcher, ("generate",))
        pace = self.llm_config.experimental_configs[PACE_KEY]
        self._core_loop = _CoreLoop(dispatcher, PacedEngine(PacedConfig(**pace)))
        return FleetLLM(vllm_engine_config, client, CollectorRegistry())


class _CoreLoop:
    """An engine core in this event loop; stands where a dispatcher expects a link."""

    tells_room = False
    cache_layout = None
    late_s = 0.0

    def __init__(self, dispatcher: Dispatcher, engine: PacedEngine) -> None:
        self.reported_end = None
        self.stats = LinkStats(Traffic())
        self._engine = engine
        self._submits: set[asyncio.Task[None]] = set()
        dispatcher.add_engine(_ENGINE_ID, "local", self)
        self._turning = asyncio.create_task(self._turn())

    def deliver_to(self, on_step: Callable[[Step], None]) -> None:
        self._on_step = on_step

    def submit(self, request: TokenRequest) -> None:
        self._own(asyncio.create_task(self._engine.submit(request)))

    def want_room(self, wanted: RoomWanted) -> None:
        """Nothing: everything is given to it at once."""

    def make_way(self) -> None:
        """Nothing: it has no batch work."""

    def watch_cache(self, on_change: Callable[[CacheSnapshot | CacheDelta], None]) -> None:
        """Nothing: it tells of no cache."""

    def abort(self, request_ids: list[str]) -> None:
        self._own(asyncio.create_task(self._engine.abort(request_ids)))

    async def call(self, method: str, args: bytes, timeout_s: float) -> bytes:
        async with asyncio.timeout(timeout_s):
            return await self._engine.call(method, args)

    def _own(self, task: asyncio.Task[None]) -> None:
        self._submits.add(task)
        task.add_done_callback(self._submits.discard)

    async def _turn(self) -> None:
        while True:
            outputs = await self._engine.next_step()
            if outputs:
                self._on_step(Step(outputs, self._engine.load))
