"""What happens to requests at one gateway, counted and timed by compute class.

Owns the numbers of each model and the stopwatch of each sequence in flight. Does not own their
names and text form (`serving_metrics`), nor the load of the last half minute (`load_meter`). Pure:
callers pass the time, monotonic, in seconds.

The parts that run for every token are plain integers and lists: everything here belongs to one
event loop, and a scrape runs on that loop too.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field

from serving.gateway.telemetry.request_trace import RequestTrace, SequenceTrace

# An output's way through the gateway is timed when the sequence had a multiple of so many tokens.
TOKENS_PER_TIMED = 8
# The class of a sequence that no engine has taken.
NO_CLASS = ""
# Who asks without a key, or with one that has no name.
DEFAULT_TENANT = "default"

# OpenTelemetry's bounds of its GenAI server metrics are all among these; ours go on to the longest
# waits that we allow, and are finer where a TPU's tokens lie. Source: GenAI metrics of
# opentelemetry.io's semantic conventions, read 2026-11-21.
_TO_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    30.0, 60.0, 120.0,
)  # fmt: skip
_PER_TOKEN_S = (
    0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 10.0,
)  # fmt: skip
_WHOLE_S = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84,
    327.68, 655.36, 1310.72,
)  # fmt: skip
# Ours alone: from a fraction of the cost of one token to a gateway that cannot keep up.
_GATEWAY_S = (
    0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Exemplar:
    """A sample whose trace can be looked up. `at_s` is wall-clock time."""

    trace_id: str
    value: float
    at_s: float


class Histogram:
    """Samples in buckets. `counts[i]` are those up to `bounds[i]`; the last are beyond all.

    `exemplars` has the last traced sample of a bucket, by its place in `counts`.
    """

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a sample, or so many that are the same."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def exemplify(self, exemplar: Exemplar) -> None:
        """Keeps a sample that has been counted as the example of its bucket."""
        self.exemplars[bisect_left(self.bounds, exemplar.value)] = exemplar


@dataclass(slots=True)
class TokenCount:
    """Tokens of one tenant on one class."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class ClassMeter:
    """What one compute class did for one model. Histograms are of seconds."""

    to_first_token: Histogram = field(default_factory=lambda: Histogram(_TO_FIRST_TOKEN_S))
    per_output_token: Histogram = field(default_factory=lambda: Histogram(_PER_TOKEN_S))
    inter_token: Histogram = field(default_factory=lambda: Histogram(_PER_TOKEN_S))
    duration: Histogram = field(default_factory=lambda: Histogram(_WHOLE_S))
    queue_time: Histogram = field(default_factory=lambda: Histogram(_TO_FIRST_TOKEN_S))
    engine_time: Histogram = field(default_factory=lambda: Histogram(_WHOLE_S))
    gateway_input: Histogram = field(default_factory=lambda: Histogram(_GATEWAY_S))
    gateway_output: Histogram = field(default_factory=lambda: Histogram(_GATEWAY_S))
    resume_stall: Histogram = field(default_factory=lambda: Histogram(_TO_FIRST_TOKEN_S))
    tenants: dict[str, TokenCount] = field(default_factory=dict)
    sequences: Counter[str] = field(default_factory=Counter)  # by outcome
    resumes: Counter[str] = field(default_factory=Counter)  # by cause
    link_losses: Counter[str] = field(default_factory=Counter)  # by cause

    def of_tenant(self, tenant: str) -> TokenCount:
        """The tokens of a tenant, from zero when it is new."""
        count = self.tenants.get(tenant)
        if count is None:
            count = self.tenants[tenant] = TokenCount()
        return count

    @property
    def input_tokens(self) -> int:
        """Of all tenants."""
        return sum(each.input_tokens for each in self.tenants.values())

    @property
    def cached_tokens(self) -> int:
        """Of all tenants."""
        return sum(each.cached_tokens for each in self.tenants.values())

    @property
    def output_tokens(self) -> int:
        """Of all tenants."""
        return sum(each.output_tokens for each in self.tenants.values())


@dataclass(slots=True)
class Arrival:
    """One HTTP request, shared by the edge and by all sequences that it asks for.

    `trace` is `None` where it is not sampled. `wall_offset_s` makes its times wall-clock times.
    `waited_s` is how long it waited for an engine at the door. `output_at_s` is when an engine's
    output came whose way to the client is timed, `None` while none is. `meter` is of
    the class that last took one of its sequences, `None` before. `tenant` is the name of its key.
    """

    received_at_s: float
    waited_s: float = 0.0
    output_at_s: float | None = None
    meter: ClassMeter | None = None
    trace: RequestTrace | None = None
    wall_offset_s: float = 0.0
    tenant: str = DEFAULT_TENANT

    def exemplify(self, histogram: Histogram, value: float, now_s: float) -> None:
        """Makes a sample that has just been counted an example, if the request is sampled."""
        if self.trace is not None:
            at_s = now_s + self.wall_offset_s
            histogram.exemplify(Exemplar(self.trace.trace_id, value, at_s))

    def written(self, now_s: float) -> None:
        """Something of the answer is handed to the server that writes it."""
        if self.output_at_s is not None and self.meter is not None:
            self.meter.gateway_output.observe(now_s - self.output_at_s)
            self.output_at_s = None

    def answered(self, now_s: float) -> None:
        """The whole answer is handed over, and it is no error."""
        if self.meter is not None:
            self.meter.duration.observe(now_s - self.received_at_s)
            self.exemplify(self.meter.duration, now_s - self.received_at_s, now_s)


# The request that the present task works for: what lies between the edge and the fleet client is
# vLLM's, and passes nothing of ours along. `None` outside of a request.
ARRIVAL: ContextVar[Arrival | None] = ContextVar("arrival", default=None)


def asked_by() -> str:
    """The tenant whom the present task works for."""
    arrival = ARRIVAL.get()
    return DEFAULT_TENANT if arrival is None else arrival.tenant


@dataclass(slots=True)
class Stopwatch:
    """One sequence in flight. `left_at_s` is when it lost its engine, `None` while it has one."""

    arrival: Arrival
    taken_at_s: float
    num_prompt_tokens: int
    meter: ClassMeter
    tokens: TokenCount
    dispatched_at_s: float | None = None
    first_at_s: float | None = None
    last_at_s: float = 0.0
    num_tokens: int = 0
    left_at_s: float | None = None

    def trace(self, request_id: str) -> SequenceTrace | None:
        """The trace of the sequence, which was taken just now; `None` where it is not sampled."""
        trace = self.arrival.trace
        return None if trace is None else trace.sequence(request_id, self.num_prompt_tokens)

    def emitted_first(self, now_s: float) -> None:
        """Its first token came."""
        self.first_at_s = now_s
        waited_s = now_s - self.arrival.received_at_s
        self.meter.to_first_token.observe(waited_s)
        self.arrival.exemplify(self.meter.to_first_token, waited_s, now_s)

    def goes_on(self, now_s: float) -> None:
        """A token came from elsewhere than the engine that it lost or left."""
        assert self.left_at_s is not None
        self.meter.resume_stall.observe(now_s - self.left_at_s)
        self.left_at_s = None


class RequestMeter:
    """The numbers of one model. `taken` gives a sequence the stopwatch that stands for it."""

    def __init__(self) -> None:
        self.classes = {NO_CLASS: ClassMeter()}

    def of_class(self, compute_class: str) -> ClassMeter:
        """The numbers of a class, from zero when it is new."""
        meter = self.classes.get(compute_class)
        if meter is None:
            meter = self.classes[compute_class] = ClassMeter()
        return meter

    def taken(self, num_prompt_tokens: int, now_s: float) -> Stopwatch:
        """A sequence was handed to the fleet."""
        arrival = ARRIVAL.get() or Arrival(now_s)
        meter = self.of_class(NO_CLASS)
        tokens = meter.of_tenant(arrival.tenant)
        return Stopwatch(arrival, now_s, num_prompt_tokens, meter, tokens)

    def dispatched(self, watch: Stopwatch, compute_class: str, now_s: float) -> None:
        """An engine of this class has the sequence, its first one or a later one."""
        arrival = watch.arrival
        meter = watch.meter = arrival.meter = self.of_class(compute_class)
        watch.tokens = meter.of_tenant(arrival.tenant)
        if watch.dispatched_at_s is not None:
            return
        watch.dispatched_at_s = now_s
        meter.queue_time.observe(arrival.waited_s + now_s - watch.taken_at_s)
        prepared_s = watch.taken_at_s - arrival.received_at_s - arrival.waited_s
        meter.gateway_input.observe(max(0.0, prepared_s))
        watch.tokens.input_tokens += watch.num_prompt_tokens

    def emitted(self, outputs: Iterable[tuple[Stopwatch, int]], now_s: float) -> None:
        """One step of an engine came: its sequences, each with the number of its new tokens.

        Runs for every token of every stream. The sequences of a step have, as a rule, had their
        last tokens together too; so the time between is looked up for all of them at once.
        """
        from_s, meter, num_alike = 0.0, None, 0
        for watch, num_tokens in outputs:
            before = watch.num_tokens
            if before % TOKENS_PER_TIMED == 0 or not num_tokens:
                watch.arrival.output_at_s = now_s
            if not num_tokens:
                continue
            watch.num_tokens = before + num_tokens
            watch.tokens.output_tokens += num_tokens
            if before and watch.last_at_s == from_s and watch.meter is meter:
                num_alike += 1
            elif before:
                if meter is not None:
                    meter.inter_token.observe(now_s - from_s, num_alike)
                from_s, meter, num_alike = watch.last_at_s, watch.meter, 1
            else:
                watch.emitted_first(now_s)
            watch.last_at_s = now_s
            if watch.left_at_s is not None:
                watch.goes_on(now_s)
        if meter is not None:
            meter.inter_token.observe(now_s - from_s, num_alike)

    def found_cached(self, watch: Stopwatch, num_tokens: int) -> None:
        """So many of the prompt's tokens were in the engine's prefix cache."""
        watch.tokens.cached_tokens += num_tokens

    def left(self, watch: Stopwatch, cause: str, now_s: float) -> None:
        """The sequence has to go on elsewhere, because its engine was `lost` or is `draining`."""
        watch.meter.resumes[cause] += 1
        if watch.left_at_s is None:  # else the next engine went before it had a token
            watch.left_at_s = now_s

    def ended(self, watch: Stopwatch, outcome: str) -> None:
        """The sequence is over, once."""
        meter = watch.meter
        meter.sequences[outcome] += 1
        if watch.first_at_s is None or watch.dispatched_at_s is None:
            return
        meter.engine_time.observe(watch.last_at_s - watch.dispatched_at_s)
        if watch.num_tokens > 1:
            spent_s = (watch.last_at_s - watch.first_at_s) / (watch.num_tokens - 1)
            meter.per_output_token.observe(spent_s)
            watch.arrival.exemplify(meter.per_output_token, spent_s, watch.last_at_s)

    def link_lost(self, compute_class: str, cause: str) -> None:
        """A link to an engine of this class ended, `unexpected` or while the engine drained."""
        self.of_class(compute_class).link_losses[cause] += 1


class EdgeMeter:
    """What the HTTP edge let in and answered. A model is one that is served, or "" for none."""

    def __init__(self) -> None:
        self.admissions: Counter[tuple[str, str, str]] = Counter()  # model, result, tenant
        self.responses: Counter[tuple[str, str, str]] = Counter()  # model, route, status
        self.cancellations: Counter[tuple[str, str]] = Counter()  # model, tenant

    def judged(self, model: str, result: str, tenant: str) -> None:
        """A request was `admitted`, or refused with the code of an error."""
        self.admissions[model, result, tenant] += 1

    def answered(self, model: str, route: str, status: int) -> None:
        """An answer was begun with this status."""
        self.responses[model, route, str(status)] += 1

    def cancelled(self, model: str, tenant: str) -> None:
        """The client left before it had the whole answer."""
        self.cancellations[model, tenant] += 1
