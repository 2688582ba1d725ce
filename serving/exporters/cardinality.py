"""How many series an exporter can show at most, from the registry of names.

Owns the arithmetic. The bound holds because nothing gets on a page beyond the registry's limits
(`board`). Pure.
"""

from collections.abc import Iterable

from serving.metric_names import (
    MAX_BUCKETS,
    TPU_CHIPS,
    TPU_DCN,
    TPU_EXPORTER,
    TPU_HOST,
    Kind,
    Metric,
    Scope,
)
from serving.topology import SliceShape

# Finite buckets, the infinite one, `_count` and `_sum`.
_SERIES_OF_A_HISTOGRAM = MAX_BUCKETS + 3
# One runtime process, device plugin, SDK, PCI, kubelet, workload files.
NUM_COLLECTORS = 6
# prometheus-client's own of the process: memory (2), start, CPU time, files (2).
_PROCESS_SERIES = 6

ONE_SLICE = (*TPU_CHIPS, *TPU_HOST, *TPU_EXPORTER)
MANY_SLICES = (*ONE_SLICE, *TPU_DCN)
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
