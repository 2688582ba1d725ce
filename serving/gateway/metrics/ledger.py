"""The slice ledger as Prometheus families, and the gateway's own report to it.

Each gateway keeps the ledger of the whole fleet. The lives are the directory's, the same for all.
An engine reports to every gateway over its link how busy it is. So the sums of several gateways
are the same sum, to be read with `max by`, never added.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from serving.gateway.metrics.requests import Families
from serving.gateway.telemetry.request_metrics import DEFAULT_TENANT
from serving.ledger.ledger import BatchUse, EngineUse, Ledger, LedgerSum, TenantEntry
from serving.link.messages import EngineLoad, EngineStats

_MS_PER_S = 1000
_S_PER_HOUR = 3600


def is_busy(num_in_flight: int, load: EngineLoad | None) -> bool:
    """Returns whether an engine has requests: this gateway's `num_in_flight`, or another's.

    `load` is the engine's over all gateways, `None` until it was reported.
    """
    return bool(num_in_flight) or (load is not None and load.num_running + load.num_waiting > 0)


class UsingRequest(Protocol):
    """One of this gateway's sequences on an engine; see `InFlightRequest`."""

    tenant: str
    batch_id: str


def engine_use(requests: Iterable[UsingRequest], stats: EngineStats | None) -> EngineUse:
    """Returns who uses an engine: this gateway's sequences on it, and its own report.

    `stats` is `None` until it has reported any.
    """
    tenants: Counter[str] = Counter()
    batches: dict[str, Counter[str]] = {}
    for request in requests:
        tenants[request.tenant] += 1
        if request.batch_id:
            batches.setdefault(request.tenant, Counter())[request.batch_id] += 1
    if stats is None:
        return EngineUse(in_flight=tenants, batches=BatchUse(in_flight=batches))
    return EngineUse(
        _named(stats.tenant_tokens),
        _named(stats.tenant_sequences),
        tenants,
        BatchUse(stats.batch_tokens, stats.batch_sequences, batches),
    )


def _named(counts: Mapping[str, int]) -> dict[str, int]:
    """Names the tenant of sequences of gateways of an earlier build, which report none."""
    named = {tenant: count for tenant, count in counts.items() if tenant}
    if unnamed := counts.get(""):
        named[DEFAULT_TENANT] = named.get(DEFAULT_TENANT, 0) + unnamed
    return named


class LedgerCollector(Collector):
    """Collects the ledger's sums.

    `usd_per_chip_hour` is by compute class, for those with a price.
    """

    def __init__(self, ledger: Ledger, usd_per_chip_hour: Mapping[str, float]) -> None:
        self._ledger = ledger
        self._usd_per_chip_hour = usd_per_chip_hour

    def collect(self) -> Iterator[Family]:
        """Yields the present families."""
        families, ledger = Families(), self._ledger
        began_s = ledger.started_at_ms / _MS_PER_S
        families.add("slicewise_ledger_start_time_seconds", {}, began_s)
        totals = ledger.totals()
        _add_chip_seconds(families, "slicewise_ledger_chip_seconds_total", totals)
        by_slice = "slicewise_ledger_slice_chip_seconds_total"
        _add_chip_seconds(families, by_slice, ledger.slices())
        for entry in ledger.chips():
            families.add("slicewise_ledger_chips", _labels(entry), entry.amount)
        for entry in totals:
            price = self._usd_per_chip_hour.get(entry.compute_class)
            if price is not None:
                usd = chip_hours(entry) * price if entry.state.is_paid else 0.0
                families.add("slicewise_ledger_cost_usd_total", _labels(entry), usd)
        for part in ledger.tenants():
            self._add_tenant(families, part)
        yield from families

    def _add_tenant(self, families: Families, part: TenantEntry) -> None:
        labels = {"model": part.model, "compute_class": part.compute_class, "tenant": part.tenant}
        seconds = part.chip_ms / _MS_PER_S
        families.add("slicewise_ledger_tenant_chip_seconds_total", labels, seconds)
        families.add("slicewise_ledger_output_tokens_total", labels, part.tokens)
        price = self._usd_per_chip_hour.get(part.compute_class)
        if price is not None:
            usd = seconds / _S_PER_HOUR * price
            families.add("slicewise_ledger_tenant_cost_usd_total", labels, usd)


def chip_hours(entry: LedgerSum) -> float:
    """Returns a sum in chip hours, the unit of prices."""
    return entry.amount / _MS_PER_S / _S_PER_HOUR


def _add_chip_seconds(families: Families, name: str, entries: Iterable[LedgerSum]) -> None:
    for entry in entries:
        families.add(name, _labels(entry), entry.amount / _MS_PER_S)


def _labels(entry: LedgerSum) -> dict[str, str]:
    return {
        "slice": entry.slice_name or "",
        "model": entry.model,
        "compute_class": entry.compute_class,
        "state": str(entry.state),
    }
