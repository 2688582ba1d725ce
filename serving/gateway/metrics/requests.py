"""Presents a gateway's requests and links as Prometheus families, read at scrape time.

Owns which number has which name; `serving.telemetry.metric_names` has the meaning of the names.
Keeps no state and does not own the numbers (`request_metrics`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Protocol

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from serving.domain.models.request_fields.service_class import ServiceClass
from serving.gateway.dispatch.requests import Account
from serving.gateway.telemetry.request_metrics import (
    DEFAULT_TENANT,
    FORECAST_OUTCOMES,
    NO_CLASS,
    OBJECTIVE_RESULTS,
    EdgeMetrics,
    Histogram,
    RequestMetrics,
    TokenCount,
)
from serving.link.messages import EngineLoad
from serving.telemetry.metric_names import ALL, Kind

_HISTOGRAMS = {
    "slicewise_time_to_first_token_seconds": attrgetter("to_first_token"),
    "slicewise_time_per_output_token_seconds": attrgetter("per_output_token"),
    "slicewise_inter_token_seconds": attrgetter("inter_token"),
    "slicewise_request_duration_seconds": attrgetter("duration"),
    "slicewise_engine_time_seconds": attrgetter("engine_time"),
    "slicewise_gateway_input_seconds": attrgetter("gateway_input"),
    "slicewise_gateway_output_seconds": attrgetter("gateway_output"),
    "slicewise_gateway_hold_seconds": attrgetter("gateway_hold"),
    "slicewise_resume_stall_seconds": attrgetter("resume_stall"),
}
_TOKENS = {
    "slicewise_input_tokens_total": attrgetter("input_tokens"),
    "slicewise_cached_input_tokens_total": attrgetter("cached_tokens"),
    "slicewise_output_tokens_total": attrgetter("output_tokens"),
}
# With the label that each counts by.
_COUNTS_BY = {
    "slicewise_sequences_total": ("outcome", attrgetter("sequences")),
    "slicewise_dispatches_total": ("reason", attrgetter("dispatches")),
    "slicewise_resumes_total": ("cause", attrgetter("resumes")),
    "slicewise_link_losses_total": ("cause", attrgetter("link_losses")),
}
_OBJECTIVES = {"ttft": attrgetter("ttft_objective"), "tpot": attrgetter("tpot_objective")}
_JUDGED = "slicewise_objective_sequences_total"
_FORECAST = "slicewise_cache_forecast_tokens_total"
# Shown from zero on, because alerts wait for them: a counter that appears with its first event
# hides that event from every rate.
_MOVES = ("lost", "draining")
_FROM_ZERO = {
    "slicewise_sequences_total": (
        "cannot_resume", "engine_refused", "no_engine_in_time", "poison_request",
        "version_retired",
    ),
    "slicewise_resumes_total": (*_MOVES, "slow", "yielded"),
    "slicewise_link_losses_total": _MOVES,
}  # fmt: skip
_FROM_ZERO_WITHOUT_ENGINE = {
    "slicewise_sequences_total": ("no_engine_in_time", "no_room_in_time", "overloaded")
}
_REFUSALS_FROM_ZERO = ("gateway_behind", "no_engine_in_time", "overloaded")


class LinkedEngine(Protocol):
    """The interface of one linked engine; see `EngineConnection`."""

    @property
    def compute_class(self) -> str:
        """The compute class that its slice came from."""
        ...

    @property
    def is_draining(self) -> bool:
        """True if it takes no more requests."""
        ...

    @property
    def requests(self) -> Sized:
        """The sequences on it."""
        ...


class MeteredModel(Protocol):
    """The interface of one model's engines and requests; see `ServedModel`."""

    @property
    def request_metrics(self) -> RequestMetrics:
        """The numbers of the model."""
        ...

    @property
    def connections(self) -> Iterable[LinkedEngine]:
        """The linked engines of the model."""
        ...

    @property
    def num_waiting(self) -> int:
        """The number of sequences without an engine."""
        ...

    @property
    def num_queued(self) -> int:
        """The number of requests that are not admitted yet."""
        ...

    @property
    def num_in_line(self) -> Mapping[ServiceClass, int]:
        """The number of sequences that wait for room in an engine, by class."""
        ...

    @property
    def num_in_line_of_account(self) -> Mapping[Account, int]:
        """Of these, those that wait for their tenants' turns, by class and tenant."""
        ...

    @property
    def num_promised(self) -> int:
        """The number of refused sequences that are to come back."""
        ...


@dataclass(frozen=True, slots=True)
class EngineReading:
    """The load of one linked engine.

    `slice_name` is `None` if it has none, or none is known yet.
    """

    model: str
    compute_class: str
    engine_id: str
    slice_name: str | None
    load: EngineLoad


class Families:
    """The families of one scrape, in the order of their first samples."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def add(self, name: str, labels: Mapping[str, str], value: float | Histogram) -> None:
        """Adds a series; a label without a value is left out.

        Raises:
            KeyError: the registry of names does not have it.
        """
        metric = ALL[name]
        family = self._families.get(name)
        if family is None:
            stem = name.removesuffix("_total") if metric.kind == Kind.COUNTER else name
            family = self._families[name] = Family(stem, metric.help, metric.kind)
        named = {label: text for label, text in labels.items() if text}
        if isinstance(value, Histogram):
            _add_histogram(family, named, value)
        else:
            family.add_sample(name, named, value)

    def __iter__(self) -> Iterator[Family]:
        """Returns an iterator over the families."""
        return iter(self._families.values())


class ServingCollector(Collector):
    """Collects the numbers of a gateway's models and of its edge. `fleets` is by model."""

    def __init__(self, fleets: Mapping[str, MeteredModel], edge: EdgeMetrics) -> None:
        self._fleets = fleets
        self._edge = edge

    def collect(self) -> Iterator[Family]:
        """Returns the present families."""
        families = Families()
        for model, fleet in self._fleets.items():
            _add_classes(families, model, fleet.request_metrics)
            _add_present(families, model, fleet)
        # Of a tenant as soon as any of its requests came.
        seen = {(model, tenant) for model, _, tenant in self._edge.admissions}
        awaited = {
            (model, result, tenant): 0
            for model in self._fleets
            for tenant in sorted({DEFAULT_TENANT} | {by for of, by in seen if of == model})
            for result in _REFUSALS_FROM_ZERO
        }
        for (model, result, tenant), count in (awaited | self._edge.admissions).items():
            labels = {"model": model, "result": result, "tenant": tenant}
            families.add("slicewise_admissions_total", labels, count)
        for (model, route, status), count in self._edge.responses.items():
            labels = {"model": model, "route": route, "status": status}
            families.add("slicewise_http_responses_total", labels, count)
        quiet = {(model, DEFAULT_TENANT): 0 for model in self._fleets}
        for name, counts in (
            ("slicewise_cancellations_total", self._edge.cancellations),
            ("slicewise_unread_answers_total", self._edge.unread),
        ):
            for (model, tenant), count in (quiet | counts).items():
                families.add(name, {"model": model, "tenant": tenant}, count)
        yield from families


class EngineCollector(Collector):
    """Collects the engines' last reports of themselves; engines without a report are left out."""

    def __init__(self, read: Callable[[], Iterable[EngineReading]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        """Returns the present families."""
        families = Families()
        for reading in self._read():
            labels = {
                "engine": reading.engine_id,
                "slice": reading.slice_name or "",
                "model": reading.model,
                "compute_class": reading.compute_class,
            }
            families.add("slicewise_engine_running", labels, reading.load.num_running)
            families.add("slicewise_engine_waiting", labels, reading.load.num_waiting)
            families.add("slicewise_engine_kv_usage_ratio", labels, reading.load.kv_usage_ratio)
        yield from families


def _add_classes(families: Families, model: str, metrics: RequestMetrics) -> None:
    for compute_class, numbers in metrics.classes.items():
        labels = {"model": model, "compute_class": compute_class}
        if compute_class != NO_CLASS:
            for name, histogram in _HISTOGRAMS.items():
                families.add(name, labels, histogram(numbers))
            for service_class, waits in numbers.queue_times.items():
                of_class = labels | {"service_class": service_class.label}
                families.add("slicewise_queue_time_seconds", of_class, waits)
            families.add("slicewise_output_chunks_total", labels, numbers.output_chunks)
            families.add("slicewise_named_blocks_total", labels, numbers.named_blocks)
            for objective, of_objective in _OBJECTIVES.items():
                for result in OBJECTIVE_RESULTS:
                    judged = labels | {"objective": objective, "result": result}
                    families.add(_JUDGED, judged, getattr(of_objective(numbers), result))
            for outcome in FORECAST_OUTCOMES:
                count = getattr(numbers.cache_forecast, outcome)
                families.add(_FORECAST, labels | {"outcome": outcome}, count)
            tenants = numbers.tenants or {DEFAULT_TENANT: TokenCount()}
            for tenant, tokens in tenants.items():
                for name, tokens_of in _TOKENS.items():
                    families.add(name, labels | {"tenant": tenant}, tokens_of(tokens))
        for name, (label, counts) in _COUNTS_BY.items():
            zeros = _FROM_ZERO if compute_class != NO_CLASS else _FROM_ZERO_WITHOUT_ENGINE
            awaited = dict.fromkeys(zeros.get(name, ()), 0)
            for value, count in (awaited | counts(numbers)).items():
                families.add(name, labels | {label: value}, count)


def _add_present(families: Families, model: str, fleet: MeteredModel) -> None:
    links: Counter[tuple[str, str]] = Counter()
    in_flight: Counter[str] = Counter()
    for compute_class in fleet.request_metrics.classes.keys() - {NO_CLASS}:
        # A class that had engines and has none left has no links, which is known and not missing.
        links[compute_class, "ready"] = in_flight[compute_class] = 0
    for engine in fleet.connections:
        links[engine.compute_class, "draining" if engine.is_draining else "ready"] += 1
        in_flight[engine.compute_class] += len(engine.requests)
    for (compute_class, state), count in links.items():
        labels = {"model": model, "compute_class": compute_class, "state": state}
        families.add("slicewise_links", labels, count)
    for compute_class, count in in_flight.items():
        labels = {"model": model, "compute_class": compute_class}
        families.add("slicewise_sequences_in_flight", labels, count)
    waiting = fleet.num_waiting + fleet.num_queued
    families.add("slicewise_requests_waiting", {"model": model}, waiting)
    for service_class, count in fleet.num_in_line.items():
        labels = {"model": model, "service_class": service_class.label}
        families.add("slicewise_line_sequences", labels, count)
    for (service_class, tenant), count in fleet.num_in_line_of_account.items():
        labels = {"model": model, "service_class": service_class.label, "tenant": tenant}
        families.add("slicewise_line_tenant_sequences", labels, count)
    families.add("slicewise_promised_sequences", {"model": model}, fleet.num_promised)


def _add_histogram(family: Family, labels: dict[str, str], value: Histogram) -> None:
    bounds = [floatToGoString(bound) for bound in value.bounds]  # type: ignore[no-untyped-call]
    counts = list(accumulate(value.counts))
    for place, (bound, count) in enumerate(zip([*bounds, "+Inf"], counts, strict=True)):
        exemplar = None
        if (example := value.exemplars.get(place)) is not None:
            exemplar = Exemplar({"trace_id": example.trace_id}, example.value, example.at_s)
        family.add_sample(f"{family.name}_bucket", labels | {"le": bound}, count, exemplar=exemplar)
    family.add_sample(f"{family.name}_count", labels, counts[-1])
    family.add_sample(f"{family.name}_sum", labels, value.total)
