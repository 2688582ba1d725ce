"""One served model at one gateway: its fleet, its frontend, and admission in front of both."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp
from vllm.config import VllmConfig

from serving.config import GatewayConfig, ModelConfig
from serving.errors import GatewayBehindError, OverloadedError
from serving.gateway.fleet_core import FleetCore, FleetLimits
from serving.gateway.frontend import FleetLLM, build_frontend, frontend_config
from serving.gateway.refused_fields import ON_TPU
from serving.gateway.request_meter import ARRIVAL
from serving.model_source import resolve_source

logger = logging.getLogger(__name__)

# vLLM's engine argument that belongs to both sides; the rest of `frontend_args` is the frontend's
# own.
_GENERATE_TASKS = ("generate",)
# How an engine is laid over the chips of its slice. vLLM holds it against the machine it is on, and
# refuses most of it where there are no chips.
_OF_THE_SLICE = frozenset(
    {
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "enable_expert_parallel",
        "additional_config",
        "gpu_memory_utilization",
    }
)


class ServedModel:
    """Implements the edge's `ModelFrontend` and membership's `FleetModel` for one model."""

    def __init__(
        self, config: ModelConfig, gateway: GatewayConfig, vllm_config: VllmConfig
    ) -> None:
        self._config = config
        self._gateway = gateway
        self.metrics = CollectorRegistry() if gateway.vllm_request_metrics else None
        limits = FleetLimits(
            request_deadline_s=gateway.request_deadline_s,
            max_engine_losses=gateway.max_engine_losses,
        )
        self.core = FleetCore(config.name, limits, _GENERATE_TASKS)
        self.llm = FleetLLM(vllm_config, self.core, self.metrics)
        # A pooling model's tasks depend on its pooler, which only an engine has loaded.
        self._are_tasks_known = vllm_config.model_config.runner_type == "generate"
        self._app: ASGIApp | None = None
        self._building = asyncio.Lock()

    @classmethod
    async def build(cls, config: ModelConfig, gateway: GatewayConfig) -> "ServedModel":
        """Reads the model's configuration and tokenizer; needs no engine.

        Raises:
            ValueError: vLLM refuses the model, an engine argument or a frontend argument.
        """
        vllm_config = await asyncio.to_thread(
            frontend_config, resolve_source(config.source), config.name, _args_here(config)
        )
        model = cls(config, gateway, vllm_config)
        if model._are_tasks_known:
            await model.app()
        return model

    @property
    def name(self) -> str:
        """See `ModelFrontend`."""
        return self._config.name

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """See `ModelFrontend`."""
        return tuple(adapter.name for adapter in self._config.lora_adapters)

    @property
    def refused_fields(self) -> Mapping[str, str]:
        """See `ModelFrontend`."""
        return ON_TPU if self._config.is_on_tpu else {}

    async def app(self) -> ASGIApp:
        """See `ModelFrontend`. Built once; for a pooling model with the first engine."""
        if self._app is None:
            async with self._building:
                if self._app is None:
                    self._app = await self._build_app()
        return self._app

    async def admit(self) -> None:
        """Waits for an engine before anything is promised to the client.

        Raises:
            GatewayBehindError: this gateway does not keep up with the tokens it has.
            OverloadedError: too many requests wait already.
            NoEngineInTimeError: none came within the request deadline.
        """
        behind_s = self.core.behind_s
        if behind_s > self._gateway.max_behind_s:
            self.core.turn_away()
            raise GatewayBehindError(self.name, behind_s)
        if self.core.has_engine:
            return
        waiting = self.core.num_waiting + self.core.num_at_the_door
        if waiting >= self._gateway.max_waiting_requests:
            self.core.turn_away()
            raise OverloadedError(self.name, waiting, self.core.retry_after_s)
        began_at_s = time.monotonic()
        arrival = ARRIVAL.get()
        trace = None if arrival is None else arrival.trace
        if trace is not None:
            trace.waits_at_the_door()
        try:
            if not await self.core.wait_for_engine(self._gateway.request_deadline_s):
                raise self.core.no_engine_in_time()
        finally:
            if trace is not None:
                trace.is_let_in()
        if arrival is not None:
            arrival.waited_s += time.monotonic() - began_at_s

    async def cards(self) -> list[dict[str, Any]]:
        """See `ModelFrontend`. As vLLM words them."""
        app = await self.app()
        registry = app.state.openai_serving_models  # type: ignore[attr-defined]
        models = await registry.show_available_models()
        return [card.model_dump() for card in models.data]

    def learn(self, engine_info: Mapping[str, Any]) -> None:
        """See `FleetModel`. An engine may have fitted a shorter context than was asked for."""
        config = self.llm.model_config
        max_model_len = engine_info.get("max_model_len")
        if isinstance(max_model_len, int):
            config.max_model_len = min(config.max_model_len, max_model_len)
        tasks = engine_info.get("supported_tasks")
        if not self._are_tasks_known and isinstance(tasks, list):
            self.core.supported_tasks = tuple(tasks)
            self._are_tasks_known = True

    def describe(self) -> dict[str, Any]:
        """The model's part of `/fleet` that only this gateway knows."""
        return {
            "name": self.name,
            "waiting": self.core.num_waiting + self.core.num_at_the_door,
            "in_flight": self.core.num_in_flight,
            "frontend_in_flight": self.llm.num_in_flight,
            "resumes": self.core.num_resumes,
        }

    async def _build_app(self) -> ASGIApp:
        if not self._are_tasks_known:
            await self.admit()
        return await build_frontend(
            self.llm,
            self.core.supported_tasks,
            name=self.name,
            adapters=[(a.name, resolve_source(a.path)) for a in self._config.lora_adapters],
            frontend_args=self._config.frontend_args,
        )


def _args_here(config: ModelConfig) -> dict[str, Any]:
    """The engine arguments that concern a frontend: of an engine on TPU all but its layout."""
    if not config.is_on_tpu:
        return config.engine_args
    return {name: value for name, value in config.engine_args.items() if name not in _OF_THE_SLICE}
