"""Tenants' quotas as Prometheus families: uses, limits, and what was refused because of them.

Of uses and limits those that are nearest to their limits are shown, as on `/fleet`. Keeps no state
and does not own the numbers (`gateway.quotas`).
"""

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from serving.domain.usage.quotas import nearest_uses
from serving.gateway.metrics.requests import Families
from serving.gateway.quotas.book import QuotaBook
from serving.telemetry.metric_names import MAX_TENANT_QUOTAS


class QuotaCollector(Collector):
    """Collects what one gateway knows of quotas; nothing while no tenant has any."""

    def __init__(
        self,
        book: QuotaBook,
        answer_age_s: Callable[[], float | None],
        wall_clock: Callable[[], float],
    ) -> None:
        """`answer_age_s` is `UsageTeller.age_s` now."""
        self._book = book
        self._answer_age_s = answer_age_s
        self._wall_clock = wall_clock

    def collect(self) -> Iterator[Family]:
        """Yields the present families."""
        families = Families()
        uses = list(self._book.uses(self._wall_clock()))
        for use in nearest_uses(uses, MAX_TENANT_QUOTAS):
            labels = {
                "tenant": use.tenant,
                "kind": str(use.quota.kind),
                "period": str(use.quota.period or ""),
                "models": ",".join(sorted(use.quota.models or ())),
            }
            families.add("slicewise_tenant_quota_used", labels, use.used)
            families.add("slicewise_tenant_quota_limit", labels, use.quota.limit)
        if uses:
            left_out = max(0, len(uses) - MAX_TENANT_QUOTAS)
            families.add("slicewise_tenant_quotas_left_out", {}, left_out)
        for each in self._book.refusal_counts():
            labels = {"tenant": each.tenant, "kind": str(each.kind), "reason": each.reason}
            families.add("slicewise_tenant_quota_refusals_total", labels, each.count)
        if (age_s := self._answer_age_s()) is not None:
            families.add("slicewise_tenant_quota_answer_age_seconds", {}, age_s)
        yield from families
