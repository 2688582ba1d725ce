"""Counts the events of requests at one gateway: since its start, and in the last half minute.

`RequestMetrics` are the numbers of one model by compute class, `EdgeMetrics` those of the HTTP
edge; both are read by a scrape. `LoadWindow` is what a scaling policy reads. Owns the numbers. Does
not own when they change (`request_telemetry`), nor their names and text form (`metrics.requests`).
Pure: callers pass the time, monotonic, in seconds.

The parts that run for every token are plain integers and lists: everything here belongs to one
event loop, and a scrape runs on that loop too.
"""

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field

from serving.domain.load_report import LoadSample
from serving.domain.models.request_fields.service_class import ServiceClass

# The class of a sequence that no engine has taken.
NO_CLASS = ""
# The tenant of a request without a key, or with a key that has no name.
DEFAULT_TENANT = "default"
# The window is long enough that a rate of one request in some seconds is observed, and short
# enough to follow a step.
WINDOW_S = 30.0
# A gateway that has just started divides by no less: one early request is no surge.
_MIN_ELAPSED_S = 5.0

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
    """The last sample of a bucket whose trace can be found. `at_s` is wall-clock time."""

    trace_id: str
    value: float
    at_s: float


class Histogram:
    """Counts samples in buckets. `counts[i]` are those up to `bounds[i]`; the last are beyond all.

    `exemplars` has the last traced sample of a bucket, by its place in `counts`.
    """

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a sample, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def exemplify(self, exemplar: Exemplar) -> None:
        """Keeps a sample that has been counted as the example of its bucket."""
        self.exemplars[bisect_left(self.bounds, exemplar.value)] = exemplar


@dataclass(slots=True)
class TokenCount:
    """The tokens of one tenant on one class."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class ObjectiveCount:
    """The sequences that kept to an objective and those that did not, batch work left out."""

    met: int = 0
    missed: int = 0

    def judge(self, *, is_met: bool) -> None:
        """Counts one sequence."""
        if is_met:
            self.met += 1
        else:
            self.missed += 1


OBJECTIVE_RESULTS = ("met", "missed")
FORECAST_OUTCOMES = ("found", "missing", "unforeseen")


@dataclass(slots=True)
class CacheForecast:
    """Tokens of prompts that a gateway expected in engines' prefix caches, and what was there.

    `found` were expected and there, `missing` were expected, `unforeseen` were there.
    """

    found: int = 0
    missing: int = 0
    unforeseen: int = 0

    def compare(self, expected: int, found: int) -> None:
        """Counts the tokens of one prompt."""
        self.found += min(expected, found)
        self.missing += max(0, expected - found)
        self.unforeseen += max(0, found - expected)


@dataclass(slots=True)
class ClassMetrics:
    """The numbers of one compute class for one model. Histograms are in seconds."""

    to_first_token: Histogram = field(default_factory=lambda: Histogram(_TO_FIRST_TOKEN_S))
    per_output_token: Histogram = field(default_factory=lambda: Histogram(_PER_TOKEN_S))
    inter_token: Histogram = field(default_factory=lambda: Histogram(_PER_TOKEN_S))
    duration: Histogram = field(default_factory=lambda: Histogram(_WHOLE_S))
    queue_times: dict[ServiceClass, Histogram] = field(
        default_factory=lambda: {each: Histogram(_TO_FIRST_TOKEN_S) for each in ServiceClass}
    )
    engine_time: Histogram = field(default_factory=lambda: Histogram(_WHOLE_S))
    gateway_input: Histogram = field(default_factory=lambda: Histogram(_GATEWAY_S))
    gateway_output: Histogram = field(default_factory=lambda: Histogram(_GATEWAY_S))
    gateway_hold: Histogram = field(default_factory=lambda: Histogram(_GATEWAY_S))
    output_chunks: int = 0
    resume_stall: Histogram = field(default_factory=lambda: Histogram(_TO_FIRST_TOKEN_S))
    ttft_objective: ObjectiveCount = field(default_factory=ObjectiveCount)
    tpot_objective: ObjectiveCount = field(default_factory=ObjectiveCount)
    cache_forecast: CacheForecast = field(default_factory=CacheForecast)
    named_blocks: int = 0
    tenants: dict[str, TokenCount] = field(default_factory=dict)
    sequences: Counter[str] = field(default_factory=Counter)  # by outcome
    dispatches: Counter[str] = field(default_factory=Counter)  # by what decided, see `Because`
    resumes: Counter[str] = field(default_factory=Counter)  # by cause
    link_losses: Counter[str] = field(default_factory=Counter)  # by cause

    def of_tenant(self, tenant: str) -> TokenCount:
        """Returns the tokens of a tenant, from zero when it is new."""
        count = self.tenants.get(tenant)
        if count is None:
            count = self.tenants[tenant] = TokenCount()
        return count

    @property
    def input_tokens(self) -> int:
        """The sum over all tenants."""
        return sum(count.input_tokens for count in self.tenants.values())

    @property
    def cached_tokens(self) -> int:
        """The sum over all tenants."""
        return sum(count.cached_tokens for count in self.tenants.values())

    @property
    def output_tokens(self) -> int:
        """The sum over all tenants."""
        return sum(count.output_tokens for count in self.tenants.values())


class RequestMetrics:
    """The numbers of one model, by compute class."""

    def __init__(self) -> None:
        self.classes = {NO_CLASS: ClassMetrics()}

    def of_class(self, compute_class: str) -> ClassMetrics:
        """Returns the numbers of a class, from zero when it is new."""
        numbers = self.classes.get(compute_class)
        if numbers is None:
            numbers = self.classes[compute_class] = ClassMetrics()
        return numbers

    def link_lost(self, compute_class: str, cause: str) -> None:
        """Counts a link to an engine of this class that was `lost`, or ended while `draining`."""
        self.of_class(compute_class).link_losses[cause] += 1


class EdgeMetrics:
    """The admissions and answers of the HTTP edge.

    A model is one that is served, or "" for none.
    """

    def __init__(self) -> None:
        self.admissions: Counter[tuple[str, str, str]] = Counter()  # model, result, tenant
        self.responses: Counter[tuple[str, str, str]] = Counter()  # model, route, status
        self.cancellations: Counter[tuple[str, str]] = Counter()  # model, tenant
        self.unread: Counter[tuple[str, str]] = Counter()  # model, tenant

    def record_admission(self, model: str, result: str, tenant: str) -> None:
        """Counts a request that was `admitted`, or refused with the code of an error."""
        self.admissions[model, result, tenant] += 1

    def answered(self, model: str, route: str, status: int) -> None:
        """Counts an answer that was begun with this status."""
        self.responses[model, route, str(status)] += 1

    def cancelled(self, model: str, tenant: str) -> None:
        """Counts a client that left before it had the whole answer."""
        self.cancellations[model, tenant] += 1

    def left_unread(self, model: str, tenant: str) -> None:
        """Counts a client that was ended since it left too much of its answer unread."""
        self.unread[model, tenant] += 1


# The errors with which requests and sequences are refused for want of engines or of time, before
# they have had anything. Quotas are counted by themselves.
REFUSALS = (
    "gateway_behind",
    "overloaded",
    "no_room_in_time",
    "no_engine_in_time",
    "deadline_too_short",
    "version_retired",
)


def refusal_counts(model: str, edge: EdgeMetrics, metrics: RequestMetrics) -> dict[str, int]:
    """Returns how many requests for a model were refused, and sequences that had been let in.

    By the code of the error, those of which there are some; since the gateway's start.
    """
    counts: Counter[str] = Counter()
    for (of_model, result, _), count in edge.admissions.items():
        if of_model == model:
            counts[result] += count
    for numbers in metrics.classes.values():
        counts.update(numbers.sequences)
    return {code: counts[code] for code in REFUSALS if counts[code]}


@dataclass(slots=True)
class WaitSum:
    """The sequences that an engine took, and how long all of them had waited for it, in seconds."""

    count: int = 0
    total_s: float = 0.0

    def add(self, count: int, total_s: float) -> None:
        """Adds some."""
        self.count += count
        self.total_s += total_s


@dataclass(slots=True)
class _Second:
    """The events of one second, from `at_s` on."""

    at_s: float
    num_arrived: int = 0
    num_prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_finished: int = 0
    output_tokens: int = 0
    ttft: ObjectiveCount = field(default_factory=ObjectiveCount)
    tpot: ObjectiveCount = field(default_factory=ObjectiveCount)
    waits: dict[ServiceClass, WaitSum] = field(default_factory=dict)


class LoadWindow:
    """The load of one model in the last half minute, second by second, of some classes of service.

    An arrival is counted once: in the queue where it has to wait there, else when it is dispatched.
    """

    def __init__(self, started_at_s: float) -> None:
        self._started_at_s = started_at_s
        self._seconds: deque[_Second] = deque()
        self._input_mean: float | None = None
        self._output_mean: float | None = None
        # Counted in the queue and admitted, but not arrived yet.
        self._num_counted = 0
        self._admitted_at_s = started_at_s

    @property
    def output_mean(self) -> float | None:
        """The tokens of a sequence that lately ended, on average; `None` before the first."""
        return self._output_mean

    def enqueued(self, now_s: float) -> None:
        """Counts a request that found no engine, and waits in the queue or is rejected."""
        self._second(now_s).num_arrived += 1

    def admitted(self, now_s: float) -> None:
        """Notes that one of those is admitted: it will arrive, and must not be counted again."""
        self._num_counted += 1
        self._admitted_at_s = now_s

    def arrived(self, now_s: float, prompt_tokens: int) -> None:
        """Counts a sequence to generate."""
        second = self._second(now_s)
        second.num_prompts += 1
        second.prompt_tokens += prompt_tokens
        if now_s - self._admitted_at_s > WINDOW_S:
            self._num_counted = 0  # those were refused later, or their clients left
        if self._num_counted:
            self._num_counted -= 1
        else:
            second.num_arrived += 1

    def found_cached(self, now_s: float, tokens: int) -> None:
        """Counts tokens of a prompt that an engine did not have to compute."""
        self._second(now_s).cached_tokens += tokens

    def taken(self, now_s: float, service_class: ServiceClass, waited_s: float) -> None:
        """Counts a sequence that its first engine took after so long a wait."""
        waits = self._second(now_s).waits
        waits.setdefault(service_class, WaitSum()).add(1, waited_s)

    def mean_waits_s(self, now_s: float) -> dict[ServiceClass, float]:
        """Returns how long sequences waited for an engine, of each class that one took."""
        self._drop_old(now_s)
        sums: dict[ServiceClass, WaitSum] = {}
        for second in self._seconds:
            for service_class, wait in second.waits.items():
                sums.setdefault(service_class, WaitSum()).add(wait.count, wait.total_s)
        return {each: wait.total_s / wait.count for each, wait in sums.items()}

    def began(self, now_s: float, *, is_met: bool) -> None:
        """Counts a first token that met its objective, or did not."""
        self._second(now_s).ttft.judge(is_met=is_met)

    def paced(self, now_s: float, *, is_met: bool) -> None:
        """Counts a sequence that ended, and whose tokens after the first met their objective."""
        self._second(now_s).tpot.judge(is_met=is_met)

    def finished(self, now_s: float, output_tokens: int) -> None:
        """Counts a sequence that its engine ended after so many tokens."""
        second = self._second(now_s)
        second.num_finished += 1
        second.output_tokens += output_tokens

    def aborted(self, now_s: float, output_tokens: int) -> None:
        """Counts a sequence that its client ended, if it was longer than others are already.

        How long the others would have become is not known. Where clients lose patience, answers
        that were cut short would make the load look lighter.
        """
        if self._output_mean is not None and output_tokens > self._output_mean:
            self.finished(now_s, output_tokens)

    def sample(
        self, now_s: float, *, num_waiting: int, oldest_wait_s: float, num_in_flight: int
    ) -> LoadSample:
        """Returns the load as it is now; the caller counts what the arguments say."""
        self._drop_old(now_s)
        elapsed_s = min(WINDOW_S, max(_MIN_ELAPSED_S, now_s - self._started_at_s))
        num_prompts = sum(second.num_prompts for second in self._seconds)
        num_finished = sum(second.num_finished for second in self._seconds)
        if num_prompts:
            tokens = sum(second.prompt_tokens - second.cached_tokens for second in self._seconds)
            # Cached tokens are known later than their prompt, which may have left the window.
            self._input_mean = max(0, tokens) / num_prompts
        if num_finished:
            self._output_mean = sum(second.output_tokens for second in self._seconds) / num_finished
        return LoadSample(
            requests_per_s=sum(second.num_arrived for second in self._seconds) / elapsed_s,
            num_waiting=num_waiting,
            oldest_wait_s=oldest_wait_s,
            num_in_flight=num_in_flight,
            input_tokens_mean=self._input_mean,
            output_tokens_mean=self._output_mean,
            num_ttft_met=sum(second.ttft.met for second in self._seconds),
            num_ttft_missed=sum(second.ttft.missed for second in self._seconds),
            num_tpot_met=sum(second.tpot.met for second in self._seconds),
            num_tpot_missed=sum(second.tpot.missed for second in self._seconds),
        )

    def _second(self, now_s: float) -> _Second:
        if not self._seconds or now_s - self._seconds[-1].at_s >= 1.0:
            self._seconds.append(_Second(now_s))
            self._drop_old(now_s)
        return self._seconds[-1]

    def _drop_old(self, now_s: float) -> None:
        while self._seconds and self._seconds[0].at_s <= now_s - WINDOW_S:
            self._seconds.popleft()
