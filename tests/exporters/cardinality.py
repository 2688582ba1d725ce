"""How many series exporters and gateways can show at most, from the registry of names.

Owns the arithmetic. The bound holds because nothing gets on a page beyond the registry's limits
(`series`). Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from serving.domain.topology import SliceShape
from serving.telemetry.metric_names import (
    BATCHES,
    ENGINE_STEPS,
    ENGINES,
    LEDGER,
    LINKS,
    MAX_BUCKETS,
    PLANS,
    PROGRAMS,
    QUOTAS,
    SERVING_COUNTS,
    SERVING_LATENCY,
    SLICES,
    TPU_CHIPS,
    TPU_DCN,
    TPU_EXPORTER,
    TPU_HOST,
    VLLM_ENGINES,
    Kind,
    Metric,
    Scope,
)

# Finite buckets, the infinite one, `_count` and `_sum`.
_SERIES_OF_A_HISTOGRAM = MAX_BUCKETS + 3
# One runtime process, device plugin, SDK, PCI, kubelet, workload files.
NUM_COLLECTORS = 6
# prometheus-client's own of the process: memory (2), start, CPU time, files (2).
_PROCESS_SERIES = 6

ONE_SLICE = (*TPU_CHIPS, *TPU_HOST, *TPU_EXPORTER)
MANY_SLICES = (*ONE_SLICE, *TPU_DCN)
# On every gateway's page; and of each engine on the page of one gateway.
OF_EVERY_GATEWAY = (
    *(*SERVING_LATENCY, *SERVING_COUNTS, *ENGINES, *LINKS, *LEDGER, *SLICES, *PLANS),
    *(*BATCHES, *QUOTAS),
)
OF_ONE_GATEWAY = (*VLLM_ENGINES, *ENGINE_STEPS, *PROGRAMS)
_OF_A_CHIP = (Scope.DEVICE, Scope.CHIP, Scope.LINK)


def series_of(metric: Metric) -> int:
    """Series of a metric per device, chip, host or collector, whichever it is of."""
    each = _SERIES_OF_A_HISTOGRAM if metric.kind == Kind.HISTOGRAM else 1
    return each * metric.max_sets


def series_per_chip(shape: SliceShape, metrics: Iterable[Metric] = MANY_SLICES) -> int:
    """At most so many series are of one chip."""
    return sum(
        series_of(metric) * (shape.devices_per_chip if metric.scope == Scope.DEVICE else 1)
        for metric in metrics
        if metric.scope in _OF_A_CHIP
    )


def series_per_host(metrics: Iterable[Metric] = MANY_SLICES) -> int:
    """At most so many series are of one host, without those of its chips."""
    return _PROCESS_SERIES + sum(
        series_of(metric) * (NUM_COLLECTORS if metric.scope == Scope.COLLECTOR else 1)
        for metric in metrics
        if metric.scope not in _OF_A_CHIP
    )


def series_per_slice(shape: SliceShape, metrics: tuple[Metric, ...] = MANY_SLICES) -> int:
    """At most so many series are of a slice, all of its hosts and chips."""
    of_chips = shape.num_chips * series_per_chip(shape, metrics)
    return of_chips + shape.num_hosts * series_per_host(metrics)


@dataclass(frozen=True, slots=True)
class FleetSize:
    """What the series of gateways grow with. Every slice has one engine."""

    num_gateways: int
    num_slices: int
    num_models: int
    classes_per_model: int


def series_of_fleet(size: FleetSize) -> int:
    """At most so many series of ours are of all gateways, vLLM's of its engines included."""
    each = sum(_series_on_a_page(metric, size) for metric in OF_EVERY_GATEWAY)
    once = sum(_series_on_a_page(metric, size) for metric in OF_ONE_GATEWAY)
    return size.num_gateways * each + once


def _series_on_a_page(metric: Metric, size: FleetSize) -> int:
    counts = {
        Scope.GATEWAY: 1,
        Scope.MODEL: size.num_models,
        Scope.CLASS: size.num_models * size.classes_per_model,
        # No more classes than if no two models shared one.
        Scope.SUPPLY: size.num_models * size.classes_per_model,
        Scope.SLICE: size.num_slices,
        Scope.ENGINE: size.num_slices,
    }
    return series_of(metric) * counts[metric.scope]
