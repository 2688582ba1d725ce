"""One version of a model at one gateway: its fleet, its frontend, and admission in front of both.

Owns what belongs to the version: tokenizer, chat template, parsers and adapters, and every request
that was rendered with them. Does not own which version takes a request (`model_versions`).
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp
from vllm.config import VllmConfig

from serving.artifacts.model_source import resolve_source
from serving.config.application import GatewayConfig, ModelConfig
from serving.gateway.admission import Admission, Inside
from serving.gateway.door import Door, FleetLimits
from serving.gateway.fleet_core import FleetCore
from serving.gateway.frontend import FleetLLM, build_frontend, frontend_config
from serving.gateway.refused_fields import ON_TPU, ON_TPU_WITHOUT_PROMPT_LOGPROBS
from serving.gateway.telemetry.request_metrics import RequestMeter

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


def fleet_limits(gateway: GatewayConfig) -> FleetLimits:
    """The limits of every fleet at this gateway."""
    return FleetLimits(
        request_deadline_s=gateway.request_deadline_s, max_engine_losses=gateway.max_engine_losses
    )


@dataclass(frozen=True, slots=True)
class Shared:
    """What all versions of a model have in common: numbers that outlive each of them."""

    door: Door
    requests: RequestMeter

    @classmethod
    def of(cls, model: str, gateway: GatewayConfig) -> "Shared":
        """All of it new."""
        return cls(Door(model, fleet_limits(gateway)), RequestMeter())


class ServedModel:
    """One version of a model; `ModelVersions` holds it, and says what is asked of it."""

    def __init__(
        self, config: ModelConfig, gateway: GatewayConfig, vllm_config: VllmConfig, shared: Shared
    ) -> None:
        self._config = config
        self.version = config.version_id
        self.admission = Admission(config.name, gateway, shared.door)
        self.metrics = CollectorRegistry() if gateway.vllm_request_metrics else None
        self.core = FleetCore(
            config.name,
            fleet_limits(gateway),
            _GENERATE_TASKS,
            version=self.version,
            door=shared.door,
            request_meter=shared.requests,
        )
        self.llm = FleetLLM(vllm_config, self.core, self.metrics)
        # A pooling model's tasks depend on its pooler, which only an engine has loaded.
        self._are_tasks_known = vllm_config.model_config.runner_type == "generate"
        self._app: ASGIApp | None = None
        self._building = asyncio.Lock()

    @classmethod
    async def build(
        cls, config: ModelConfig, gateway: GatewayConfig, shared: Shared | None = None
    ) -> "ServedModel":
        """Reads the model's configuration and tokenizer; needs no engine.

        `shared` is what it has in common with other versions; `None`: there are none.

        Raises:
            ValueError: vLLM refuses the model, an engine argument or a frontend argument.
        """
        vllm_config = await asyncio.to_thread(
            frontend_config, resolve_source(config.source), config.answers_as, _args_here(config)
        )
        shared = shared or Shared.of(config.name, gateway)
        model = cls(config, gateway, vllm_config, shared)
        if model._are_tasks_known:
            await model.app()
        return model

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The LoRA adapters that it answers to."""
        return tuple(adapter.name for adapter in self._config.lora_adapters)

    @property
    def refused_fields(self) -> Mapping[str, str]:
        """Fields of a request that its engines cannot honour, with the reason."""
        if not self._config.is_on_tpu:
            return {}
        takes_more_than_text = self.llm.model_config.is_multimodal_model
        speculates = self._config.engine_args.get("speculative_config") is not None
        return ON_TPU_WITHOUT_PROMPT_LOGPROBS if takes_more_than_text or speculates else ON_TPU

    def answers_to(self, name: str) -> bool:
        """Whether a request for this model or adapter can be answered by it."""
        return name in self._config.answers_as or name in self.adapter_names

    def is_frontend_of(self, config: ModelConfig) -> bool:
        """Whether its frontend is what `config`, of the same version, says."""
        return self._config.frontend_args == config.frontend_args

    async def reframe(self, config: ModelConfig) -> None:
        """Builds the frontend anew, of the same version; requests keep the one that took them.

        Raises:
            ValueError: vLLM refuses a frontend argument. The frontend is as before.
        """
        before, self._config = self._config, config
        try:
            app = await self._build_app() if self._app is not None else None
        except BaseException:
            self._config = before
            raise
        self._app = app

    async def app(self) -> ASGIApp:
        """Its application. Built once; for a pooling model with the first engine."""
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
        await self.admission.admit(self.inside, lambda: self.core.has_engine)

    @property
    def is_over(self) -> bool:
        """Whether neither an engine nor a request is left."""
        return not (self.core.seats or self.core.num_in_flight or self.llm.num_in_flight)

    @property
    def inside(self) -> Inside:
        """What admission has to know of its requests."""
        return Inside(self.core.behind_s, self.core.num_waiting)

    async def cards(self) -> list[dict[str, Any]]:
        """Its entries of `/v1/models`, as vLLM words them."""
        app = await self.app()
        registry = app.state.openai_serving_models  # type: ignore[attr-defined]
        models = await registry.show_available_models()
        return [card.model_dump() for card in models.data]

    def learn(self, engine_info: Mapping[str, Any]) -> None:
        """Takes in what an engine says. It may have fitted a shorter context than was asked for."""
        config = self.llm.model_config
        max_model_len = engine_info.get("max_model_len")
        if isinstance(max_model_len, int):
            config.max_model_len = min(config.max_model_len, max_model_len)
        tasks = engine_info.get("supported_tasks")
        if not self._are_tasks_known and isinstance(tasks, list):
            self.core.supported_tasks = tuple(tasks)
            self._are_tasks_known = True

    async def _build_app(self) -> ASGIApp:
        if not self._are_tasks_known:
            await self.admit()
        return await build_frontend(
            self.llm,
            self.core.supported_tasks,
            names=self._config.answers_as,
            adapters=[(a.name, resolve_source(a.path)) for a in self._config.lora_adapters],
            frontend_args=self._config.frontend_args,
        )


def _args_here(config: ModelConfig) -> dict[str, Any]:
    """The engine arguments that concern a frontend: of an engine on TPU all but its layout."""
    if not config.is_on_tpu:
        return config.engine_args
    return {name: value for name, value in config.engine_args.items() if name not in _OF_THE_SLICE}
