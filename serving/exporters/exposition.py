"""Arranges series as metric families: our own page, and one like the GKE device plugin's for Ray.

Owns the two shapes. Does not own the text format, which is prometheus-client's. Pure.
"""

from collections.abc import Iterable, Sequence
from statistics import fmean

from prometheus_client import Metric as Family
from prometheus_client.utils import floatToGoString

from serving.exporters.identity import Identity
from serving.exporters.libtpu_service.metric_table import RULES
from serving.exporters.series import HistogramValue, Series
from serving.telemetry.metric_names import ALL, Kind, Unit

_SOURCES = {rule.metric: name for name, rule in RULES.items()}

# Ray's names of what we have, and the factor from our unit to Ray's. Source: ray 2.60.0
# `dashboard/modules/reporter/reporter_agent.py`, read 2026-11-21.
_RAYS_NAMES = {
    "tpu_duty_cycle_ratio": ("duty_cycle", 100),
    "tpu_hbm_used_bytes": ("memory_used", 1),
    "tpu_hbm_capacity_bytes": ("memory_total", 1),
    "tpu_tensorcore_utilization_ratio": ("tensorcore_utilization", 100),
    "tpu_hbm_bandwidth_utilization_ratio": ("memory_bandwidth_utilization", 100),
}
# Ray takes an id apart at its first dash, so the instance has to be without one.
_RAYS_INSTANCE = "0"


def families(series: Iterable[Series]) -> list[Family]:
    """Returns our page, in the registry's order. A family without series is left out."""
    by_metric: dict[str, list[Series]] = {}
    for one_series in series:
        by_metric.setdefault(one_series.metric, []).append(one_series)
    return [_family(name, by_metric[name]) for name in ALL if name in by_metric]


def _family(name: str, series: Sequence[Series]) -> Family:
    metric = ALL[name]
    stem = name.removesuffix("_total") if metric.kind == Kind.COUNTER else name
    source = f" (libtpu's {_SOURCES[name]})" if name in _SOURCES else ""
    family = Family(stem, metric.help + source, metric.kind)
    for one_series in series:
        labels = dict(one_series.labels)
        if isinstance(one_series.value, HistogramValue):
            _add_histogram(family, labels, one_series.value)
        else:
            family.add_sample(name, labels, one_series.value)
    return family


def _add_histogram(family: Family, labels: dict[str, str], value: HistogramValue) -> None:
    for bound, count in value.buckets:
        le = floatToGoString(bound)  # type: ignore[no-untyped-call]
        family.add_sample(f"{family.name}_bucket", {**labels, "le": le}, float(count))
    family.add_sample(f"{family.name}_bucket", {**labels, "le": "+Inf"}, float(value.count))
    family.add_sample(f"{family.name}_count", labels, float(value.count))
    family.add_sample(f"{family.name}_sum", labels, value.total)


def device_plugin_families(series: Iterable[Series], identity: Identity) -> list[Family]:
    """Returns the page that Ray's dashboard reads TPUs from, by chip of the host.

    Ray shows nothing unless each chip has a value of TensorCore or bandwidth. It shows an absent
    value as 0 and refuses more devices than chips. So a chip's devices are averaged or summed.
    """
    by_chip: dict[tuple[str, str], list[float]] = {}
    for one_series in series:
        chip = dict(one_series.labels).get("chip")
        if one_series.metric in _RAYS_NAMES and chip is not None:
            assert not isinstance(one_series.value, HistogramValue)
            by_chip.setdefault((one_series.metric, chip), []).append(one_series.value)
    pages: dict[str, Family] = {}
    for (metric, chip), values in by_chip.items():
        name, scale = _RAYS_NAMES[metric]
        is_share = ALL[metric].unit == Unit.RATIO
        family = pages.setdefault(name, Family(name, ALL[metric].help, "gauge"))
        family.add_sample(
            name,
            {
                "accelerator_id": f"{_RAYS_INSTANCE}-{chip}",
                "make": "cloud-tpu",
                "model": identity["accelerator"],
                "tpu_topology": identity["topology"],
            },
            (fmean(values) if is_share else sum(values)) * scale,
        )
    return list(pages.values())
