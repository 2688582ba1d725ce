"""Builds vLLM's own OpenAI frontend for one model, over a fleet instead of one engine.

Owns the join: it decides which vLLM objects are built and on what. Does not own the wire format
(vLLM's), nor requests in flight (`dispatcher`), nor the HTTP edge (`http`).
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.reasoning import ReasoningParserManager
from vllm.renderers import BaseRenderer, renderer_from_config
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tool_parsers import ToolParserManager
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager

from serving.config.application import OpenField
from serving.domain.errors import MalformedRequestError, RequestError
from serving.domain.models.engine_kind import EngineKind
from serving.domain.models.request_fields.records import POOLING, REQUEST
from serving.domain.models.request_fields.refusals import ValueRule, record_rules
from serving.domain.models.request_fields.rules import EngineFacts
from serving.domain.models.request_fields.sampling import SAMPLING
from serving.gateway.edge.answers.answered_tier import name_tiers
from serving.gateway.edge.anthropic_errors import AnthropicRefusals
from serving.gateway.edge.endpoints import ShortPath
from serving.gateway.edge.fields import check_record, steered
from serving.gateway.edge.media import fit_frontend, fit_renderer
from serving.gateway.edge.rendering import fit_rendering
from serving.gateway.edge.routes import ANTHROPIC_ROUTES
from serving.gateway.forks.bodies.first_fault import refuse_at_first_fault
from serving.gateway.forks.grammars.judge import GrammarJudge
from serving.gateway.streams.detokenizing import TailOutputProcessor
from serving.gateway.streams.engine_client import FleetEngineClient
from serving.gateway.streams.failures import FleetRequestError
from serving.gateway.streams.known.chats import KnownChats
from serving.gateway.streams.plain import write_plain_past
from serving.gateway.telemetry.frontend_faults import tell_faults
from serving.gateway.telemetry.request_telemetry import REQUEST_CONTEXT, RequestContext

_ON_CPU = EngineFacts(EngineKind.VLLM)


class _RefusalsWithinStreams:
    """Makes a `RequestError` of vLLM's refusal of a request whose answer has begun.

    `/v1/responses` begins its stream before it has looked at all of the request. Everywhere else
    vLLM answers such a request itself, which is written anew for Anthropic's clients.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        refusing = AnthropicRefusals(app)
        self._apps = {str(route): refusing for route in ANTHROPIC_ROUTES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._apps.get(scope["path"], self._app)(scope, receive, send)
        except Exception as fault:
            cause = fault.__cause__ or fault
            if _is_refusal(cause):
                raise MalformedRequestError(str(cause)) from fault
            raise


def _is_refusal(fault: BaseException | None) -> bool:
    """Returns whether vLLM's frontend found a request to be wrong."""
    return isinstance(fault, VLLMClientError | ValueError)


def _is_refusal_of_a_stream(fault: Exception) -> bool:
    """Returns whether that came once the answer had begun: Starlette makes an error of it then."""
    return type(fault) is RuntimeError and _is_refusal(fault.__cause__)


class FleetLLM(AsyncLLM):
    """Runs vLLM's `AsyncLLM` over a `FleetEngineClient`.

    The constructor is written anew because vLLM's starts an engine; it sets every attribute that
    vLLM's own sets (a test compares them).
    """

    def __init__(
        self,
        config: VllmConfig,
        client: FleetEngineClient,
        metrics: CollectorRegistry | None,
        open_fields: Collection[OpenField] = (),
        grammars: GrammarJudge | None = None,
        *,
        facts: EngineFacts = _ON_CPU,
    ) -> None:
        """Builds the LLM; `metrics` gets vLLM's own metrics of requests, `None` keeps none.

        Clients may set `open_fields`, and no other field that steers engines. Without `grammars`
        vLLM looks at structured outputs itself. Values that engines with `facts` do not honour are
        refused.
        """
        has_stats = metrics is not None
        self.vllm_config = config
        self._elastic_ep_lock = asyncio.Lock()
        self.model_config = config.model_config
        self.scheduler_config = config.scheduler_config
        self.observability_config = config.observability_config
        self.log_requests = False
        self.log_stats = has_stats
        self.renderer = renderer_from_config(config)
        fit_renderer(self.renderer)
        fit_rendering(self.renderer)
        self.input_processor = JudgedInputProcessor(config, self.renderer, open_fields, facts)
        self.admission_stats = None
        self.output_processor = TailOutputProcessor(
            self.renderer.tokenizer,
            log_stats=has_stats,
            stream_interval=config.scheduler_config.stream_interval,
            tracing_enabled=False,
            on_unreadable=self._fail_unreadable,
        )
        self.engine_core = client  # type: ignore[assignment]
        self.logger_manager = None
        if metrics is not None:
            self.logger_manager = StatLoggerManager(
                vllm_config=config,
                engine_idxs=list(client.engine_ranks_managed),
                custom_stat_loggers=[_prometheus_logger(metrics)],
                enable_default_loggers=False,
            )
        self._client_count = 1
        self.output_handler = None
        self.profiler = None
        self._frontend_profiler_injected = False
        self._profile_lock = asyncio.Lock()
        self._profile_session_guard_enabled = False
        self._profile_session_active = False
        client.set_failure_sink(self.fail_request)
        self.client = client
        self._grammars = grammars

    async def add_request(  # type: ignore[override] # its other arguments are vLLM's
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> RequestOutputCollector:
        """Does what vLLM's does, with a grammar that has been compiled elsewhere before.

        Raises:
            VLLMValidationError: vLLM refuses the request, or no engine would keep its grammar.
            FleetRequestError: its grammar cannot be looked at now.
        """
        context = REQUEST_CONTEXT.get()
        if context is not None and context.path == "/v1/completions":
            # An engine with a reasoning parser waits for the end of a thought before it minds a
            # grammar, and vLLM does not tell it that completions have none.
            kwargs["reasoning_ended"] = True
        try:
            params = await self._with_judged_grammar(params)
            return await super().add_request(request_id, prompt, params, *args, **kwargs)
        except VLLMValidationError as error:
            if context is not None:
                context.refusal = MalformedRequestError(str(error), error.parameter)
            raise

    async def _with_judged_grammar(self, params: Any) -> Any:
        asked = getattr(params, "structured_outputs", None)
        if self._grammars is None or asked is None:
            return params
        # None is compiled that no engine would keep.
        self.input_processor.judge(params)
        grammar = {field.name: getattr(asked, field.name) for field in fields(asked) if field.init}
        try:
            judged = await self._grammars.judged(grammar)
        except MalformedRequestError as error:
            raise VLLMValidationError(error.message, parameter=error.param) from error
        except RequestError as error:
            raise FleetRequestError(error) from error
        params = params.clone()
        params.structured_outputs = JudgedStructure.of(judged)
        return params

    async def _add_request(self, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        """Does what vLLM's does, and forgets the request if that comes to nothing.

        vLLM does so for a request with several answers. One with a single answer would stay, when
        its client leaves or its encoding fails at this point.
        """
        try:
            await super()._add_request(request, *args, **kwargs)
        except BaseException:
            await self.abort(request.request_id, internal=True)
            raise

    def fail_request(self, request_id: str, error: RequestError) -> None:
        """Ends a request, and its siblings if `n > 1`, with an error that its client reads.

        Tokens that came before the failure go to the client before the error.
        """
        if self.client.fail_known(request_id, error):
            return
        states = self.output_processor.request_states
        state = states.get(request_id)
        if state is None:
            return
        queue, parent = state.queue, state.parent_req
        whole = [request_id] if parent is None else list(parent.child_requests)
        rest = self.client.take_rest(whole)
        ended_early = self.output_processor.process_outputs(rest).reqs_to_abort
        self.client.abort(ended_early)
        if request_id not in states:
            return  # a stop string was in what was left: the answer is whole
        for each in whole:
            if each in states:
                states[each].queue = None  # else vLLM ends the stream as if it had been aborted
        root = request_id if parent is None else parent.request_id
        self.client.abort(self.output_processor.abort_requests([root], internal=True))
        if queue is not None:
            fail_after_rest(queue, FleetRequestError(error))

    def _fail_unreadable(self, request_id: str, error: Exception) -> None:
        self.client.fail_unreadable(request_id, error)

    @property
    def num_in_flight(self) -> int:
        """The number of requests the frontend holds; zero when nothing leaks."""
        return int(self.output_processor.get_num_unfinished_requests()) + self.client.num_known


class _FailingCollector(RequestOutputCollector):
    """A collector of a stream that has failed: what lies in it is read before the error."""

    error: Exception

    def get_nowait(self) -> RequestOutput | PoolingRequestOutput | None:
        """Returns what was left, then raises the error."""
        if self.output is None:
            raise self.error
        return super().get_nowait()


def fail_after_rest(queue: RequestOutputCollector, error: Exception) -> None:
    """Ends a stream with an error, behind what its reader has not taken yet.

    vLLM's collector would put the error in its place.
    """
    if queue.output is None or isinstance(queue.output, Exception):
        queue.put(error)
        return
    queue.__class__ = _FailingCollector
    queue.error = error  # type: ignore[attr-defined]


class JudgedStructure(StructuredOutputsParams):
    """A grammar that has been compiled, as engines are to get it. No client can make one."""

    @classmethod
    def of(cls, judged: Mapping[str, Any]) -> "JudgedStructure":
        """Returns it with all fields that vLLM would have set, the private ones too."""
        made = cls(**{name: value for name, value in judged.items() if not name.startswith("_")})
        made._backend = judged["_backend"]
        made._backend_was_auto = judged["_backend_was_auto"]
        return made


class JudgedInputProcessor(InputProcessor):
    """Runs vLLM's input processor, and refuses what steers engines or what they do not have.

    The edge has read the body before, but with another parser, and vLLM reads headers too: what
    counts is what vLLM made of them.
    """

    def __init__(
        self,
        config: VllmConfig,
        renderer: BaseRenderer,
        opened: Collection[OpenField],
        facts: EngineFacts,
    ) -> None:
        super().__init__(config, renderer)
        self._opened = opened
        defaults = config.model_config.get_diff_sampling_param()
        self._sampling = record_rules(SAMPLING, facts, SamplingParams, defaults)
        self._pooling = record_rules(POOLING, facts, PoolingParams)
        self._request = record_rules(REQUEST, facts, EngineCoreRequest)

    def _validate_params(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        # vLLM would compile it again, here where other requests wait.
        judged = getattr(params, "structured_outputs", None)
        if not isinstance(judged, JudgedStructure):
            return super()._validate_params(params, *args, **kwargs)
        params.structured_outputs = None
        try:
            return super()._validate_params(params, *args, **kwargs)
        finally:
            params.structured_outputs = judged

    def judge(self, params: SamplingParams | PoolingParams) -> None:
        """Refuses what vLLM made of a body if engines do not honour it.

        Raises:
            VLLMValidationError: they do not. The client gets a 400.
        """
        rules = self._sampling if isinstance(params, SamplingParams) else self._pooling
        _judge(rules, params, REQUEST_CONTEXT.get())

    def process_inputs(  # type: ignore[override] # its other arguments are vLLM's
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> EngineCoreRequest:
        """Returns vLLM's record of a request.

        Raises:
            VLLMValidationError: it steers an engine or asks for what it does not honour, or vLLM
                refuses it. The client gets a 400.
        """
        # Before vLLM's, which resolves some of what was asked.
        self.judge(params)
        request = super().process_inputs(request_id, prompt, params, *args, **kwargs)
        # In a thread there is no context, and what a key alone opens is closed.
        context = REQUEST_CONTEXT.get()
        _judge(self._request, request, context)
        opened = self._opened if context is None else context.open_fields | set(self._opened)
        field = steered(_steering_in(request), opened)
        if field is not None:
            raise VLLMValidationError(
                f"{field} steers engines and is closed here; leave it out.", parameter=field
            )
        return request


def _judge(rules: Iterable[ValueRule], record: object, context: RequestContext | None) -> None:
    try:
        check_record(record, rules)
    except MalformedRequestError as error:
        if context is not None:
            context.failure = error  # which the edge answers with, its code included
        raise VLLMValidationError(error.message, parameter=error.param) from error


def _steering_in(request: EngineCoreRequest) -> dict[OpenField, object]:
    """Returns the values that steer an engine, wherever vLLM put them."""
    params = request.sampling_params
    extra = dict(params.extra_args or {}) if params is not None else {}
    found: dict[OpenField, object] = {
        field: extra.pop(field, None)
        for field in (OpenField.KV_TRANSFER_PARAMS, OpenField.EC_TRANSFER_PARAMS)
    }
    found[OpenField.VLLM_XARGS] = extra
    found[OpenField.PRIORITY] = request.priority
    # The first rank is a choice too, and `None` is not.
    rank = request.data_parallel_rank
    found[OpenField.DATA_PARALLEL_RANK] = None if rank is None else [rank]
    return found


def _prometheus_logger(registry: CollectorRegistry) -> type[PrometheusStatLogger]:
    """Returns vLLM's logger on its own registry, because models in one process share names."""

    class ModelPrometheusStatLogger(PrometheusStatLogger):
        _gauge_cls = partial(Gauge, registry=registry)
        _counter_cls = partial(Counter, registry=registry)
        _histogram_cls = partial(Histogram, registry=registry)

    return ModelPrometheusStatLogger


def frontend_config(model: str, names: Sequence[str], engine_args: Mapping[str, Any]) -> VllmConfig:
    """Returns vLLM's configuration for the frontend; answers carry the first of `names`.

    Raises:
        ValueError: vLLM refuses the arguments, or the model may fetch whatever clients name; the
            message gives the reason.
    """
    args = AsyncEngineArgs(model=model, served_model_name=list(names), **engine_args)
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    fit_frontend(config, engine_args)
    return config


async def build_frontend(
    llm: FleetLLM,
    tasks: tuple[str, ...],
    *,
    names: Sequence[str],
    adapters: Sequence[tuple[str, str]],
    frontend_args: Mapping[str, Any],
    keeps_grammars: bool = True,
) -> FastAPI:
    """Builds vLLM's ASGI application for one model. `adapters` are LoRA names and paths.

    A request may give any of `names`, and the answer carries the first. `keeps_grammars` says
    whether engines of the model do.

    Raises:
        ValueError: a frontend argument or an adapter is refused by vLLM.
    """
    config = llm.vllm_config
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    if keeps_grammars:
        # A tool's arguments follow its schema, whether or not it says `strict`.
        args.tool_strict_level = "parameter"
    for key, value in frontend_args.items():
        setattr(args, key, value)
    args.model = config.model_config.model
    args.served_model_name = list(names)
    args.structured_outputs_config = config.structured_outputs_config
    args.lora_modules = [LoRAModulePath(adapter, path) for adapter, path in adapters] or None
    args.enable_request_id_headers = False  # the HTTP edge does it, for every route
    args.disable_fastapi_docs = True
    # No key, and none of `VLLM_API_KEY` either: the edge asks for keys, and vLLM would for another.
    args.api_key = [""]
    _load_parser_plugins(args.tool_parser_plugin, config)
    _check_parsers(args.tool_call_parser, config.structured_outputs_config.reasoning_parser)
    app = await asyncio.to_thread(_built, llm, args, tasks)
    # Around vLLM's own, anew: what vLLM has built has handlers that tell no faults.
    stack = app.build_middleware_stack()
    short = ShortPath(app, stack, KnownChats.of(app.state, llm))
    app.middleware_stack = _RefusalsWithinStreams(short)
    # vLLM's launcher puts its server here, and vLLM's handler of errors asks it to exit when the
    # frontend has died. Here the gateway reports that (`FleetLLM.errored`), and is replaced.
    app.state.server = SimpleNamespace(should_exit=False)
    return app


def _built(llm: FleetLLM, args: Any, tasks: tuple[str, ...]) -> FastAPI:
    """Returns vLLM's application with its state. Takes a third of a second and more: in a thread.

    vLLM's state is made by a coroutine that waits for adapters only, which are known here, and
    keeps nothing of the loop that it runs on.
    """
    app: FastAPI = build_app(args, tasks, llm.vllm_config.model_config)
    asyncio.run(init_app_state(llm, app.state, args, tasks))
    refuse_at_first_fault(app)
    tell_faults(app, _is_refusal_of_a_stream)
    name_tiers(app.state)
    # vLLM's keep-alive would take a stream that is written past it for one that stands still, and a
    # middleware may change what it would not see.
    if not args.sse_keep_alive_interval and not args.middleware:
        write_plain_past(app.state)
    return app


def _load_parser_plugins(tool_parser_plugin: str, config: VllmConfig) -> None:
    if tool_parser_plugin:
        ToolParserManager.import_tool_parser(tool_parser_plugin)
    reasoning_plugin = config.structured_outputs_config.reasoning_parser_plugin
    if reasoning_plugin:
        ReasoningParserManager.import_reasoning_parser(reasoning_plugin)


def _check_parsers(tool_parser: str | None, reasoning_parser: str | None) -> None:
    # Looked up here, so that a misspelt name stops the deployment and not the first request.
    try:
        if tool_parser:
            ToolParserManager.get_tool_parser(tool_parser)
        if reasoning_parser:
            ReasoningParserManager.get_reasoning_parser(reasoning_parser)
    except KeyError as error:
        raise ValueError(str(error)) from error
