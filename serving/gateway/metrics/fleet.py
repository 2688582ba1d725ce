"""Presents slice states and scaling plans as Prometheus families, as a gateway knows them.

Both cover the whole fleet and are the same at every gateway, to be read with `max by`, never added.
Owns which number has which name. Keeps no state.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from serving.domain.plan_report import ModelPlan, PlanReport
from serving.domain.slice_lifecycle import SliceState
from serving.domain.slice_records import SliceRecord, Snapshot
from serving.domain.supply.records import SupplyRecord, SupplyState
from serving.gateway.metrics.requests import Families
from serving.ledger.endings import Endings


class SliceCollector(Collector):
    """Collects how long slices have been in their states, and how many ended.

    `patience_s` is by model and compute class, for those that have one. `now_s` gives wall-clock
    time.
    """

    def __init__(
        self,
        read: Callable[[], Snapshot],
        endings: Endings,
        patience_s: Mapping[tuple[str, str], float],
        now_s: Callable[[], float],
    ) -> None:
        self._read = read
        self._endings = endings
        self._patience_s = patience_s
        self._now_s = now_s

    def collect(self) -> Iterator[Family]:
        """Yields the present families."""
        families = Families()
        snapshot = self._read()
        for labels, seconds in _longest(snapshot.records, self._now_s()).items():
            families.add("slicewise_slice_state_seconds", dict(labels), seconds)
        for labels, count in _supply(snapshot.supply).items():
            families.add("slicewise_supply_slices", dict(labels), count)
        for (model, compute_class, cause), count in self._endings.counts().items():
            labels_of_end = {"model": model, "compute_class": compute_class, "cause": str(cause)}
            families.add("slicewise_slices_ended_total", labels_of_end, count)
        for (model, compute_class), patience_s in self._patience_s.items():
            of_class = {"model": model, "compute_class": compute_class}
            families.add("slicewise_slice_patience_seconds", of_class, patience_s)
        yield from families


class PlanCollector(Collector):
    """Collects the last plans. `read` gives `None` until there is one."""

    def __init__(self, read: Callable[[], PlanReport | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        """Yields the present families; none without a plan."""
        board, families = self._read(), Families()
        if board is not None:
            families.add("slicewise_plan_written_time_seconds", {}, board.written_at_s)
            families.add("slicewise_plan_alerts", {}, len(board.alerts))
            for plan in board.models:
                _add_plan(families, plan)
        yield from families


def _add_plan(families: Families, plan: ModelPlan) -> None:
    of_model = {"model": plan.model}
    present = {
        "slicewise_plan_demand_slices": plan.demand_slices,
        "slicewise_plan_changed_time_seconds": plan.changed_at_s,
        "slicewise_plan_next_slice_time_seconds": plan.next_slice_at_s,
        "slicewise_plan_alerts": len(plan.alerts),
        "slicewise_plan_failures_total": plan.num_failures,
    }
    for name, value in present.items():
        if value is not None:
            families.add(name, of_model, value)
    # A class of which nothing is refused now is known to be at 0.
    refused = dict.fromkeys(plan.targets, 0)
    for refusal in plan.refusals:
        refused[refusal.compute_class] = refused.get(refusal.compute_class, 0) + abs(refusal.delta)
    for name, by_class in (
        ("slicewise_plan_target_slices", plan.targets),
        ("slicewise_plan_refused_slices", refused),
    ):
        for compute_class, count in by_class.items():
            families.add(name, of_model | {"compute_class": compute_class}, count)


_Labels = tuple[tuple[str, str], ...]


def _longest(records: Iterable[SliceRecord], now_s: float) -> dict[_Labels, float]:
    """Returns the seconds that slices have been in their present state, by labels.

    Replicas without a slice share their labels, and the longest time counts.
    """
    longest: dict[_Labels, float] = {}
    for record in records:
        if record.state is SliceState.GONE:
            continue
        labels = (
            ("slice", record.life.slice_name or ""),
            ("model", record.model),
            ("compute_class", record.compute_class),
            ("state", str(record.state)),
        )
        # Hosts' clocks differ by a little.
        seconds = max(0.0, now_s - record.life.entered_at_s)
        longest[labels] = max(longest.get(labels, 0.0), seconds)
    return longest


def _supply(records: Iterable[SupplyRecord]) -> dict[_Labels, int]:
    """Returns the number of slices by compute class and state; every state of a known class."""
    counts: dict[_Labels, int] = {}
    for record in records:
        compute_class = record.compute_class or ""
        for state in SupplyState:
            counts.setdefault((("compute_class", compute_class), ("state", str(state))), 0)
        counts[("compute_class", compute_class), ("state", str(record.state))] += 1
    return counts
