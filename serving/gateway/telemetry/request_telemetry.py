"""Reports each point of a request's life to its metrics, its trace and the log.

Each point of a request's life is one call here. Behind the call are the metrics and the load window
(`request_metrics`), the trace of a request that is sampled (`request_trace`), and the log line.
`RequestContext` follows one HTTP request, from its arrival to the end of its answer;
`RequestTelemetry` follows one of the sequences that it asks for, from its arrival at the fleet to
its end. Does not own when which point is reached: the edge, admission and the dispatcher do.

Callers pass the time, monotonic, in seconds. Prompts and answers are in no line and no span.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from serving.domain.capacity.objectives import DEFAULT_OBJECTIVES, Objectives
from serving.domain.errors import RequestError
from serving.domain.models.request_fields.service_class import ServiceClass, ServiceTier
from serving.gateway.quotas.book import QuotaTicket
from serving.gateway.streams.answer_head import AnswerHead
from serving.gateway.streams.connections import ClientConnection
from serving.gateway.telemetry.request_metrics import (
    DEFAULT_TENANT,
    NO_CLASS,
    ClassMetrics,
    EdgeMetrics,
    Exemplar,
    Histogram,
    LoadWindow,
    RequestMetrics,
    TokenCount,
)
from serving.gateway.telemetry.request_story import EngineChoice, Fact, RequestStory
from serving.gateway.telemetry.request_trace import RequestTrace, SequenceTrace, request_attributes
from serving.link.messages import TokenOutput
from serving.telemetry.log_lines import log_traced
from serving.telemetry.spans import SpanKind, Tracer

logger = logging.getLogger(__name__)

# An output's way through the gateway is timed when the sequence had a multiple of so many tokens.
TOKENS_PER_TIMED = 8
# Of requests for which there was no room.
_REFUSED = (429, 503)


@dataclass(slots=True)
class RequestContext:
    """The context of one HTTP request, shared by the edge and all sequences that it asks for.

    `trace` is `None` if it is not sampled. A time plus `wall_offset_s` is wall-clock time.
    `waited_s` is how long it waited for an engine in the admission queue. `output_at_s` is when an
    output came that is timed on its way to the client; `None` while none is timed. `numbers` are
    those of the class that last took one of its sequences, `None` before. `failure` is the error
    that one of its sequences ended with, until it is answered, and `refusal` what is wrong with it,
    as vLLM found it. `tenant` and `weight` are its key's. `batch_id` is the batch that it is a line
    of, empty for any other request. It is served as `service_tier`, and its
    client waits `patience_s` for the first token; `None` means as long as others of its class.
    `open_fields` are the fields that steer engines and that it may set. `is_short` says that it is
    rendered on the loop. `renders` are what a renderer would make of it, conversations and inputs
    of an engine, if that was made in a fork. `connection` is the client's, if parts of the answer
    may be written to it past the application. `has_begun` says that an output has come, and `head`
    is that of a stream. `story` says why it goes where it goes; `None` while its model is not
    known. `quota` is where its use is counted, if its tenant has quotas.
    """

    received_at_s: float
    request_id: str = ""
    path: str = ""
    tenant: str = DEFAULT_TENANT
    batch_id: str = ""
    weight: float = 1.0
    service_tier: ServiceTier = ServiceTier.DEFAULT
    patience_s: float | None = None
    open_fields: frozenset[str] = frozenset()
    is_short: bool = False
    renders: deque[tuple[Any, Any]] | None = None
    edge: EdgeMetrics = field(default_factory=EdgeMetrics)
    model: str | None = None
    waited_s: float = 0.0
    output_at_s: float | None = None
    numbers: ClassMetrics | None = None
    failure: RequestError | None = None
    refusal: RequestError | None = None
    trace: RequestTrace | None = None
    wall_offset_s: float = 0.0
    connection: ClientConnection | None = None
    has_begun: bool = False
    head: AnswerHead | None = None
    story: RequestStory | None = None
    quota: QuotaTicket | None = None

    @property
    def service_class(self) -> ServiceClass:
        """The class that it is of."""
        return self.service_tier.service_class

    def begin_trace(self, tracer: Tracer, method: str, traceparent: str, tracestate: str) -> None:
        """Begins the trace, or continues the client's, if the request is sampled."""
        span = tracer.begin(
            f"{method} {self.path}",
            SpanKind.SERVER,
            request_attributes(method, self.path, self.request_id),
            traceparent,
            tracestate,
        )
        if span is not None:
            self.trace = RequestTrace(span)
            self.wall_offset_s = time.time() - time.monotonic()

    @property
    def trace_id(self) -> str | None:
        """The trace that log lines name; `None` for a request that is not sampled."""
        return None if self.trace is None else self.trace.trace_id

    def body_read(self) -> None:
        """Notes that the body is read; the decision on admission begins here."""
        if self.trace is not None:
            self.trace.asks_admission()

    def selected(self, model: str) -> RequestStory:
        """Notes which model it is for; returns its story, which begins here."""
        self.model = model
        self.story = RequestStory(
            self.request_id,
            self.path,
            model,
            self.tenant,
            self.service_class.label,
            self.received_at_s,
        )
        if self.trace is not None:
            self.trace.of_model(model)
        return self.story

    def tell(self, event: str, now_s: float, **facts: Fact) -> None:
        """Adds to its story, if it has one."""
        if self.story is not None:
            self.story.tell(event, now_s, **facts)

    def queued(self) -> None:
        """Notes that no engine is ready, and that nothing has been promised yet."""
        self.tell("waits", time.monotonic(), reason="no engine is ready")
        if self.trace is not None:
            self.trace.queued()

    def dequeued(self, waited_s: float) -> None:
        """Notes that an engine came, or that none did in time."""
        self.waited_s += waited_s
        if self.trace is not None:
            self.trace.dequeued()

    def admitted(self) -> None:
        """Notes that it goes on to its model."""
        self.edge.record_admission(self.model or "", "admitted", self.tenant)
        self.tell("admitted", time.monotonic())
        if self.trace is not None:
            self.trace.record_admission("admitted", is_refused=False)

    def refused(self, error: RequestError) -> None:
        """Notes why it does not go on."""
        code = error.code or "malformed"
        self.edge.record_admission(self.model or "", code, self.tenant)
        self.tell("refused", time.monotonic(), code=code, reason=error.log_reason)
        if self.trace is not None:
            self.trace.record_admission(code, is_refused=True)
        log_traced(
            logger, logging.INFO, self.trace_id,
            "request_refused request_id=%s path=%s model=%s code=%s status=%d reason=%.200r",
            self.request_id, _shown(self.path), self.model, code, error.status, error.log_reason,
        )  # fmt: skip

    def answers(self) -> None:
        """Notes that a part of the answer is handed to the server that writes it."""
        if self.output_at_s is not None:
            self.written(time.monotonic())
        if self.trace is not None:
            self.trace.answers()

    def written(self, now_s: float) -> None:
        """Times the way of an engine's output through the gateway, if it is being timed."""
        if self.output_at_s is not None and self.numbers is not None:
            self.numbers.gateway_output.observe(now_s - self.output_at_s)
            self.output_at_s = None

    def ended(
        self,
        now_s: float,
        route: str,
        status: int | None,
        *,
        is_whole: bool,
        is_cancelled: bool,
        told_status: int | None = None,
    ) -> None:
        """Notes the end. `status` is `None` when no answer was begun; `route` is a label.

        `told_status` is that of the error that a stream without an output ended with; `None` if it
        is no such.
        """
        model = self.model or ""
        if status is not None:
            self.edge.answered(model, route, status)
        if is_cancelled:
            self.edge.cancelled(model, self.tenant)
            if self.connection is not None and self.connection.was_ended:
                self.edge.left_unread(model, self.tenant)
                self.tell("unread", now_s)
        elif is_whole and status is not None and (told_status or status) < 400:
            self.answered(now_s)
        self.tell("answered", now_s, status=status, client_left=is_cancelled)
        if self.quota is not None:
            self.quota.end(was_refused=(told_status or status) in _REFUSED)
        if self.trace is not None:
            self.trace.ended(status, has_client_left=is_cancelled)
        log_traced(
            logger, logging.INFO, self.trace_id,
            "request request_id=%s path=%s model=%s status=%s duration_ms=%d cancelled=%s",
            self.request_id, _shown(self.path), self.model, status,
            int((now_s - self.received_at_s) * 1000), is_cancelled,
        )  # fmt: skip

    def answered(self, now_s: float) -> None:
        """Times a whole answer that is handed over and is no error."""
        if self.numbers is not None:
            self.numbers.duration.observe(now_s - self.received_at_s)
            self.exemplify(self.numbers.duration, now_s - self.received_at_s, now_s)

    def exemplify(self, histogram: Histogram, value: float, now_s: float) -> None:
        """Makes a sample that has just been counted an example, if the request is sampled."""
        if self.trace is not None:
            at_s = now_s + self.wall_offset_s
            histogram.exemplify(Exemplar(self.trace.trace_id, value, at_s))


def _shown(path: str) -> str:
    """Returns a path in the form for log lines: limited in length, and without line ends."""
    return path[:200] if path[:200].isprintable() else repr(path[:200])


# The request that the present task works for: what lies between the edge and the fleet client is
# vLLM's, and passes nothing of ours along. `None` outside of a request.
REQUEST_CONTEXT: ContextVar[RequestContext | None] = ContextVar("request_context", default=None)


def present_context(now_s: float) -> RequestContext:
    """Returns the request that the present task works for, or a new one outside of a request."""
    return REQUEST_CONTEXT.get() or RequestContext(now_s)


class DispatchedEngine(Protocol):
    """The engine that takes a request."""

    @property
    def engine_id(self) -> str:
        """The engine's name."""
        ...

    @property
    def compute_class(self) -> str:
        """The compute class that its slice came from."""
        ...

    @property
    def slice_name(self) -> str | None:
        """The slice that it owns; `None` if it owns none."""
        ...

    @property
    def trace_attributes(self) -> Mapping[str, str]:
        """The attributes that a span on it gets."""
        ...


@dataclass(slots=True)
class RequestTelemetry:
    """Follows one request in flight.

    `numbers` and `tokens` are those of the compute class that has it, or last had it. `moved_at_s`
    is when it left its engine, `None` while it has one; it `has_yielded` if it did so for others.
    `num_tokens` counts those of all its engines. `choice` is how the last of them was chosen. It is
    the request's sequence of this `number`.
    """

    owner: "ModelTelemetry"
    context: RequestContext
    request_id: str
    taken_at_s: float
    num_prompt_tokens: int
    numbers: ClassMetrics
    tokens: TokenCount
    trace: SequenceTrace | None = None  # `None` for a request that is not sampled
    dispatched_at_s: float | None = None
    first_at_s: float | None = None
    last_at_s: float = 0.0
    num_tokens: int = 0
    moved_at_s: float | None = None
    num_moves: int = 0
    has_yielded: bool = False
    choice: EngineChoice | None = None
    number: int = 0
    reserved: tuple[int, float] | None = None  # tokens under quotas, and when (wall clock)

    @property
    def traceparent(self) -> str | None:
        """The parent of the engine's span; `None` if the request is not sampled."""
        return None if self.trace is None else self.trace.traceparent

    @property
    def trace_id(self) -> str | None:
        """The trace that log lines name; `None` for a request that is not sampled."""
        return None if self.trace is None else self.trace.trace_id

    def reserve(self, max_tokens: int | None) -> RequestError | None:
        """Counts the tokens that it will take as others have; returns the refusal if too many."""
        if self.context.quota is None:
            return None
        expected = self.owner.output_mean(self.context.service_class) or 0.0
        if max_tokens is not None:
            expected = min(expected, max_tokens)
        now_s = time.time()
        tokens = self.num_prompt_tokens + round(expected)
        refusal = self.context.quota.reserve(tokens, now_s)
        if refusal is None:
            self.reserved = tokens, now_s
        return refusal

    def queued(self, reason: str) -> None:
        """Notes that there is no engine for it now."""
        self._tell("waits", time.monotonic(), reason=reason)
        if self.trace is not None:
            self.trace.waits(reason)

    def dispatched(
        self, engine: DispatchedEngine, choice: EngineChoice, num_named: int, now_s: float
    ) -> None:
        """Notes which engine has it, its first one or a later one, and why.

        To know what of it is cached, `num_named` blocks had to be named.
        """
        self.choice = choice
        context = self.context
        numbers = self.owner.metrics.of_class(engine.compute_class)
        self.numbers = context.numbers = numbers
        self.tokens = numbers.of_tenant(context.tenant)
        numbers.dispatches[choice.because] += 1
        numbers.named_blocks += num_named
        if self.dispatched_at_s is None:
            self.dispatched_at_s = now_s
            waited_s = context.waited_s + now_s - self.taken_at_s
            numbers.queue_times[context.service_class].observe(waited_s)
            self._load.taken(now_s, context.service_class, waited_s)
            prepared_s = self.taken_at_s - context.received_at_s - context.waited_s
            numbers.gateway_input.observe(max(0.0, prepared_s))
            self.tokens.input_tokens += self.num_prompt_tokens
        if self.context.story is not None:
            self._tell(
                "dispatched",
                now_s,
                engine_id=engine.engine_id,
                compute_class=engine.compute_class,
                slice=engine.slice_name,
                **choice.facts(),
                blocks_named=num_named,
            )
        if self.trace is not None:
            self.trace.dispatched(engine.trace_attributes, choice.reason, choice.num_engines)
        if logger.isEnabledFor(logging.DEBUG):
            log_traced(
                logger, logging.DEBUG, self.trace_id,
                "routed model=%s request_id=%s engine_id=%s engines=%d reason=%r",
                self.owner.model, self.request_id, engine.engine_id, choice.num_engines,
                choice.reason,
            )  # fmt: skip

    def found_cached(self, num_tokens: int, now_s: float) -> None:
        """Counts tokens of the prompt that were in the engine's prefix cache.

        Told before the tokens that came with it. Where others came before those they are not
        counted: an engine counts as prompt what another one has emitted, and may find it.
        """
        self._tell("found_cached", now_s, tokens=num_tokens)
        if not self.num_tokens:
            self._load.found_cached(now_s, num_tokens)
            self.tokens.cached_tokens += num_tokens
            if self.choice is not None and self.choice.expected_cached is not None:
                self.numbers.cache_forecast.compare(self.choice.expected_cached, num_tokens)

    def first_token(self, now_s: float) -> None:
        """Times the first token."""
        self._tell("first_token", now_s)
        self.first_at_s = now_s
        self.context.has_begun = True
        waited_s = now_s - self.context.received_at_s
        self.numbers.to_first_token.observe(waited_s)
        if self._has_objectives:
            allowed_s = self.owner.objectives.ttft_of(self.num_prompt_tokens)
            self.numbers.ttft_objective.judge(is_met=waited_s <= allowed_s)
            if self.owner.has_own_objectives:
                self._load.began(now_s, is_met=waited_s <= allowed_s)
        self.context.exemplify(self.numbers.to_first_token, waited_s, now_s)

    def resumed(self, now_s: float) -> None:
        """Times the first token from another engine after a move."""
        assert self.moved_at_s is not None
        self._tell("goes_on", now_s, paused_s=round(now_s - self.moved_at_s, 6))
        if not self.has_yielded:
            self.numbers.resume_stall.observe(now_s - self.moved_at_s)
        self.moved_at_s, self.has_yielded = None, False
        if self.context.head is not None:
            self.context.head.goes_on()

    def released(self, now_s: float) -> None:
        """Times how long tokens were held; the time of an output on its way begins here."""
        context = self.context
        if context.output_at_s is not None:
            self.numbers.gateway_hold.observe(now_s - context.output_at_s)
            context.output_at_s = now_s

    def moved(self, cause: str, reason: str, now_s: float) -> None:
        """Notes that it has to go on elsewhere.

        Its engine was `lost` or is `draining`, or it `yielded` to others, which is no fault.
        """
        self._tell("left", now_s, cause=cause, reason=reason, emitted_tokens=self.num_tokens)
        self.num_moves += 1
        self.has_yielded = cause == "yielded"
        self.numbers.resumes[cause] += 1
        if self.moved_at_s is None:  # else the next engine went before it had a token
            self.moved_at_s = now_s
        if self.context.head is not None:
            self.context.head.stands_still()
        if self.trace is not None:
            self.trace.migrated(cause, reason, self.num_tokens)

    def redispatched(
        self, cause: str, from_engine: str, to_engine: str | None, num_losses: int
    ) -> None:
        """Logs the move. `to_engine` is `None` if the request waits for one."""
        log_traced(
            logger, logging.INFO, self.trace_id,
            "request_resumed model=%s request_id=%s cause=%s from_engine=%s to_engine=%s"
            " attempt=%d emitted=%d losses=%d",
            self.owner.model, self.request_id, cause, from_engine, to_engine,
            self.num_moves + 1, self.num_tokens, num_losses,
        )  # fmt: skip

    def ended(self, outcome: str, now_s: float) -> None:
        """Notes that its engine has finished it."""
        self._load.finished(now_s, self.num_tokens)
        self._count_end(outcome, now_s)
        if self.trace is not None:
            self.trace.ended(outcome, self.num_tokens)

    def aborted(self, now_s: float, *, has_engine: bool) -> None:
        """Notes that its client, or the failure of a sibling, has ended it."""
        if has_engine:
            self._load.aborted(now_s, self.num_tokens)
        self._count_end("aborted", now_s)
        if self.trace is not None:
            self.trace.ended("aborted", self.num_tokens)

    def dropped(self) -> None:
        """Ends the trace of a request whose version is shut down. It is no longer counted."""
        self._settle()
        if self.trace is not None:
            self.trace.ended("aborted", self.num_tokens)

    def failed(self, error: RequestError, num_losses: int) -> None:
        """Notes that it has ended with an error that its client reads."""
        code = error.code or "malformed"
        self.context.failure = error
        self._count_end(code, time.monotonic())
        if self.trace is not None:
            self.trace.failed(code, self.num_tokens)
        log_traced(
            logger, logging.WARNING, self.trace_id,
            "request_failed model=%s request_id=%s emitted=%d losses=%d error=%s code=%s",
            self.owner.model, self.request_id, self.num_tokens, num_losses,
            type(error).__name__, code,
        )  # fmt: skip

    @property
    def _has_objectives(self) -> bool:
        """False for batch work, which is done when there is room."""
        return self.context.service_class is not ServiceClass.BATCH

    @property
    def _load(self) -> LoadWindow:
        return self.owner.load_of(self.context.service_class)

    def _tell(self, event: str, now_s: float, **facts: Fact) -> None:
        if self.context.story is not None:
            self.context.story.tell(event, now_s, sequence=self.number, **facts)

    def _settle(self) -> None:
        if self.reserved is None or self.context.quota is None:
            return
        reserved, reserved_at_s = self.reserved
        self.reserved = None
        # Nothing is charged for what no engine has had.
        taken = 0 if self.dispatched_at_s is None else self.num_prompt_tokens + self.num_tokens
        self.context.quota.settle(taken - reserved, reserved_at_s, time.time())

    def _count_end(self, outcome: str, now_s: float) -> None:
        self._tell("ended", now_s, outcome=outcome, output_tokens=self.num_tokens)
        self._settle()
        numbers = self.numbers
        numbers.sequences[outcome] += 1
        if self.first_at_s is None or self.dispatched_at_s is None:
            return
        numbers.engine_time.observe(self.last_at_s - self.dispatched_at_s)
        if self.num_tokens > 1:
            spent_s = (self.last_at_s - self.first_at_s) / (self.num_tokens - 1)
            numbers.per_output_token.observe(spent_s)
            if self._has_objectives:
                is_met = spent_s <= self.owner.objectives.tpot_s
                numbers.tpot_objective.judge(is_met=is_met)
                if self.owner.has_own_objectives:
                    self._load.paced(now_s, is_met=is_met)
            self.context.exemplify(numbers.per_output_token, spent_s, self.last_at_s)


class ModelTelemetry:
    """Follows the requests of all versions of one model.

    `load` is that of interactive and standard work, `batch_load` that of batch work. `objectives`
    are the present ones; where the model has none of its own, a scaling policy may plan for others,
    and is not told who met them.
    """

    def __init__(
        self, model: str, started_at_s: float, objectives: Objectives | None = None
    ) -> None:
        self.model = model
        self.set_objectives(objectives)
        self.metrics = RequestMetrics()
        self.load = LoadWindow(started_at_s)
        self.batch_load = LoadWindow(started_at_s)

    def set_objectives(self, own: Objectives | None, *, are_held: bool = True) -> None:
        """Takes the objectives of the model; `None`: it has none of its own.

        If they `are_held`, as many requests as can be are to be within them when engines lack.
        """
        self.objectives = DEFAULT_OBJECTIVES if own is None else own
        self.has_own_objectives = own is not None
        self.held_objectives = own if are_held else None

    def load_of(self, service_class: ServiceClass) -> LoadWindow:
        """Returns where the requests of a class are counted as load."""
        return self.batch_load if service_class is ServiceClass.BATCH else self.load

    def mean_waits_s(self, now_s: float) -> dict[ServiceClass, float]:
        """Returns how long sequences lately waited for an engine, of each class that one took."""
        return self.load.mean_waits_s(now_s) | self.batch_load.mean_waits_s(now_s)

    def output_mean(self, service_class: ServiceClass) -> float | None:
        """Returns the tokens of an answer of the class lately, or of others before its first.

        `None` before the first of all.
        """
        own = self.load_of(service_class).output_mean
        others = self.load if service_class is ServiceClass.BATCH else self.batch_load
        return others.output_mean if own is None else own

    def arrived(self, request_id: str, num_prompt_tokens: int, now_s: float) -> RequestTelemetry:
        """Notes a request that was handed to the fleet; returns its telemetry."""
        context = present_context(now_s)
        self.load_of(context.service_class).arrived(now_s, num_prompt_tokens)
        numbers = self.metrics.of_class(NO_CLASS)
        tokens = numbers.of_tenant(context.tenant)
        trace = None
        if context.trace is not None:
            trace = context.trace.sequence(request_id, num_prompt_tokens)
        number = 0 if context.story is None else context.story.begin_sequence()
        return RequestTelemetry(
            self,
            context,
            request_id,
            now_s,
            num_prompt_tokens,
            numbers,
            tokens,
            trace,
            number=number,
        )

    def emitted(
        self, outputs: Iterable[tuple[RequestTelemetry, TokenOutput]], now_s: float
    ) -> None:
        """Counts and times one step of an engine.

        Runs for every token of every stream. The requests of a step have, as a rule, had their last
        tokens together too; so the time between is counted for all of them at once.
        """
        from_s, numbers, num_alike = 0.0, None, 0
        for request, output in outputs:
            num_tokens = len(output.token_ids)
            before = request.num_tokens
            if before % TOKENS_PER_TIMED == 0 or not num_tokens:
                request.context.output_at_s = now_s
            if not num_tokens:
                continue
            request.num_tokens = before + num_tokens
            request.tokens.output_tokens += num_tokens
            if before and request.last_at_s == from_s and request.numbers is numbers:
                num_alike += 1
            elif before:
                if numbers is not None:
                    numbers.inter_token.observe(now_s - from_s, num_alike)
                from_s, numbers, num_alike = request.last_at_s, request.numbers, 1
            else:
                request.first_token(now_s)
            request.last_at_s = now_s
            if request.moved_at_s is not None:
                request.resumed(now_s)
            if request.trace is not None:
                request.trace.emitted()
        if numbers is not None:
            numbers.inter_token.observe(now_s - from_s, num_alike)
