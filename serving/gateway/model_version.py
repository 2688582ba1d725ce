"""Holds one version of a model at one gateway: its requests, and its frontend over them.

Owns the version's own parts: tokenizer, chat template, parsers and adapters, and every request
that was rendered with them. Does not own which version takes a request, nor who is admitted
(`served_model`). `serving.domain.models.model_version` defines a version.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from starlette.routing import Route
from starlette.types import ASGIApp
from vllm.config import VllmConfig

from serving.artifacts.model_source import resolve_source
from serving.config.application import GatewayConfig
from serving.config.models import ModelConfig
from serving.domain.models.engine_kind import EngineKind
from serving.domain.models.request_fields.refusals import ignored_defaults
from serving.domain.models.request_fields.rules import EngineFacts, Trait
from serving.gateway.dispatch.admission import AdmissionQueue, FleetLimits, QueueState
from serving.gateway.dispatch.dispatcher import Dispatcher
from serving.gateway.edge.fields import BodyJudge
from serving.gateway.first_use import do_what_was_put_off
from serving.gateway.forks.bodies.prepared_app import PreparedApp
from serving.gateway.forks.grammars.judge import GrammarJudge
from serving.gateway.forks.server import ForkServer
from serving.gateway.forks.version_spec import TASKS, VersionSpec
from serving.gateway.frontend import FleetLLM, build_frontend, frontend_config
from serving.gateway.streams.engine_client import FleetEngineClient
from serving.gateway.streams.hold import TokenHold
from serving.gateway.streams.pace import HoldBounds
from serving.tpu.requirements import count, section

logger = logging.getLogger(__name__)

# The tasks of a model that generates. Those of a pooling model come from its first engine.
_GENERATE_TASKS = ("generate",)
# How an engine is laid over the chips of its slice. vLLM checks it against the machine it runs on,
# and refuses most of it where there are no chips.
_OF_THE_SLICE = frozenset(
    {
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "enable_expert_parallel",
        "additional_config",
        "gpu_memory_utilization",
        "kv_transfer_config",
    }
)


class ModelVersion:
    """Serves one version of a model; `ServedModel` holds all of them."""

    def __init__(
        self,
        config: ModelConfig,
        gateway: GatewayConfig,
        vllm_config: VllmConfig,
        queue: AdmissionQueue,
        hold: TokenHold,
    ) -> None:
        self._config = config
        self._names = _names(config)
        self._queue = queue
        self.version = config.version_id
        self.metrics = CollectorRegistry() if gateway.vllm_request_metrics else None
        self.dispatcher = Dispatcher(config.name, queue.limits, version=self.version, queue=queue)
        self.client = FleetEngineClient(
            self.dispatcher,
            _GENERATE_TASKS,
            separates_tenants=gateway.separate_tenants,
            adapters=[adapter.name for adapter in config.lora_adapters],
            hold=hold,
        )
        # Compiles grammars, which paced engines do not keep, and prepares large bodies.
        self._forks = ForkServer(config.name, TASKS, self.fork_spec)
        facts = _facts(config, vllm_config.model_config)
        self.llm = FleetLLM(
            vllm_config,
            self.client,
            self.metrics,
            gateway.open_fields,
            None if config.engine == EngineKind.PACED else GrammarJudge(self._forks),
            facts=facts,
        )
        # A pooling model's tasks depend on its pooler, which only an engine has loaded.
        self._are_tasks_known = vllm_config.model_config.runner_type == "generate"
        self.body_judge = BodyJudge(facts)
        for ignored in ignored_defaults(facts, vllm_config.model_config.get_diff_sampling_param()):
            logger.warning(
                "default_not_honoured model=%s field=%s value=%s reason=%r",
                config.name,
                ignored.field,
                ignored.value,
                ignored.reason,
            )
        self._app: ASGIApp | None = None
        self._building = asyncio.Lock()

    @classmethod
    async def build(
        cls,
        config: ModelConfig,
        gateway: GatewayConfig,
        queue: AdmissionQueue | None = None,
        hold: TokenHold | None = None,
    ) -> "ModelVersion":
        """Reads the model's configuration and tokenizer; needs no engine.

        `queue` and `hold` are shared with the other versions; `None`: there are no others.

        Raises:
            ValueError: vLLM refuses the model, an engine argument or a frontend argument.
        """
        vllm_config = await asyncio.to_thread(
            frontend_config, resolve_source(config.source), config.answers_as, _args_here(config)
        )
        queue = queue or AdmissionQueue(config.name, FleetLimits.of(gateway))
        # A large tokenizer takes seconds, in which the streams of other models go on.
        hold = hold or TokenHold(HoldBounds(gateway.min_hold_s, gateway.max_hold_s))
        version = await asyncio.to_thread(cls, config, gateway, vllm_config, queue, hold)
        if version._are_tasks_known:
            await version.app()
        return version

    def answers_to(self, name: str) -> bool:
        """Returns whether it can answer a request for this model or adapter."""
        return name in self._names

    def is_frontend_of(self, config: ModelConfig) -> bool:
        """Returns whether its frontend is that of `config`, of the same version."""
        return self._config.frontend_args == config.frontend_args

    async def rebuild_frontend(self, config: ModelConfig) -> None:
        """Builds the frontend again; requests keep the one that took them.

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
        self._names = _names(config)
        # What it does meanwhile is done again, by one with the new arguments.
        self._forks.close()

    async def app(self) -> ASGIApp:
        """Returns its application. Built once; for a pooling model with the first engine."""
        if self._app is None:
            async with self._building:
                if self._app is None:
                    self._app = await self._build_app()
        return self._app

    def close(self) -> None:
        """Ends the frontend, and the process that works for it."""
        self.llm.shutdown()
        self._forks.close()

    def preparing(self, app: ASGIApp) -> ASGIApp:
        """Returns its application for a request that is read and rendered in a fork."""
        return PreparedApp(app, self._forks, self.body_judge)

    async def wait_closed(self) -> None:
        """Closes it, and waits until its process has ended."""
        self.llm.shutdown()
        await self._forks.wait_closed()

    @property
    def fork_pid(self) -> int | None:
        """The process that works for it; `None` until there is work."""
        return self._forks.pid

    @property
    def is_broken(self) -> bool:
        """True if its frontend has died: it answers nothing any more, and does not recover."""
        return bool(self.llm.errored)

    @property
    def is_over(self) -> bool:
        """True if neither an engine nor a request is left."""
        return not (
            self.dispatcher.connections or self.dispatcher.num_in_flight or self.llm.num_in_flight
        )

    @property
    def queue_state(self) -> QueueState:
        """The state of its requests for admission."""
        return QueueState(self.client.behind_s, self.dispatcher.num_waiting)

    @property
    def served_routes(self) -> frozenset[str]:
        """The routes of its application; none as long as it is not built."""
        built = [] if self._app is None else self._app.routes  # type: ignore[attr-defined]
        return frozenset(route.path for route in built if isinstance(route, Route))

    async def cards(self) -> list[dict[str, Any]]:
        """Returns its entries of `/v1/models`, in vLLM's own form."""
        app = await self.app()
        registry = app.state.openai_serving_models  # type: ignore[attr-defined]
        models = await registry.show_available_models()
        return [card.model_dump() for card in models.data]

    def update_from_engine(self, engine_info: Mapping[str, Any]) -> None:
        """Takes over an engine's context, if it is shorter, and the tasks of a pooling model."""
        config = self.llm.model_config
        max_model_len = engine_info.get("max_model_len")
        if isinstance(max_model_len, int):
            config.max_model_len = min(config.max_model_len, max_model_len)
        tasks = engine_info.get("supported_tasks")
        if not self._are_tasks_known and isinstance(tasks, list):
            self.client.supported_tasks = tuple(tasks)
            self._are_tasks_known = True

    async def _build_app(self) -> ASGIApp:
        if not self._are_tasks_known:
            patience_s = self._queue.limits.request_deadline_s
            await self._queue.admit(
                self.queue_state, lambda: self.dispatcher.has_engine, patience_s
            )
        app = await build_frontend(
            self.llm,
            self.client.supported_tasks,
            names=self._config.answers_as,
            adapters=self._adapters(),
            frontend_args=self._config.frontend_args,
            keeps_grammars=self._keeps_grammars,
        )
        await do_what_was_put_off()
        return app

    def _adapters(self) -> list[tuple[str, str]]:
        return [(a.name, resolve_source(a.path)) for a in self._config.lora_adapters]

    @property
    def _keeps_grammars(self) -> bool:
        return not self.body_judge.refuses("structured_outputs")

    def fork_spec(self) -> bytes:
        """Returns what the version's fork server has to know."""
        config = self._config
        return msgspec.msgpack.encode(
            VersionSpec(
                resolve_source(config.source),
                config.answers_as,
                _args_here(config),
                config.frontend_args,
                self._adapters(),
                self.client.supported_tasks,
                self.llm.model_config.max_model_len,
                has_grammars=config.engine != EngineKind.PACED,
                keeps_grammars=self._keeps_grammars,
            )
        )


def _facts(config: ModelConfig, described: Any) -> EngineFacts:
    """Returns what the table of request fields has to know of a model's engines.

    `described` is vLLM's configuration of the model.
    """
    return EngineFacts(config.engine, frozenset(_traits(config, described)))


def _traits(config: ModelConfig, described: Any) -> Iterator[Trait]:
    if config.engine_args.get("speculative_config") is not None:
        yield Trait.SPECULATES
    if described.is_multimodal_model:
        yield Trait.TAKES_MEDIA
    if config.engine_args.get("enable_return_routed_experts") is not True:
        yield Trait.LISTS_NO_EXPERTS
    if config.is_on_tpu and _has_groups(config, described):
        yield Trait.DATA_PARALLEL


def _has_groups(config: ModelConfig, described: Any) -> bool:
    """Returns whether some engine computes in several groups, each with requests of its own.

    So do joined slices, copies of a model on one, and attention that is not divided over all
    devices. Models with latent attention run in no other way (`serving.tpu.settings`).
    """
    slices = (each.slice for each in config.deployments)
    if any(each is not None and each.num_slices > 1 for each in slices):
        return True
    if (count(config.engine_args, "data_parallel_size") or 1) > 1:
        return True
    sharding = section(section(config.engine_args, "additional_config"), "sharding")
    strategy = section(sharding, "sharding_strategy")
    is_attention_data = strategy.get("enable_dp_attention") is True or described.use_mla
    return is_attention_data and count(strategy, "attn_dp_size") != 1


def _names(config: ModelConfig) -> frozenset[str]:
    """Returns the names of the model, and of the LoRA adapters, that requests may give."""
    return frozenset((*config.answers_as, *(adapter.name for adapter in config.lora_adapters)))


def _args_here(config: ModelConfig) -> dict[str, Any]:
    """Returns the engine arguments that concern a frontend: on TPU all but the layout."""
    if not config.is_on_tpu:
        return config.engine_args
    return {name: value for name, value in config.engine_args.items() if name not in _OF_THE_SLICE}
