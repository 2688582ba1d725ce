"""Presents the provisioner's rounds, and what it sees, as a page for Prometheus.

Owns which number has which name, and the page's address. Keeps no state. The state belongs to the
event loop: a scrape asks the loop for it, so a loop that stands still answers none.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from autoscaling.provisioning.groups import WorkerGroup
from autoscaling.provisioning.sidecar.readings import REDIS, PlatformConditions
from autoscaling.provisioning.sidecar.rounds import (
    ADDED,
    DROPPED,
    RoundsSoFar,
    is_unheld,
    paid_chips,
)
from serving.domain.supply.pods import PodPhase
from serving.domain.supply.records import SupplyReport, SupplyState
from serving.telemetry.metric_names import ALL, MAX_CLASSES, MAX_QUOTAS, Kind

# Prometheus waits 10 s for a page; a loop that is so late is an outage of its own.
_LOOP_S = 5.0
# The kubelet's words that an operator meets; others count as the last. Source: kubernetes 1.34,
# pkg/kubelet/images/types.go and kuberuntime/kuberuntime_container.go, read 2026-11-20.
_KUBELET_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)
_OTHER_REASON = "other"
_READY, _UNREADY = "ready", "unready"
_T = TypeVar("_T")
_Of = TypeVar("_Of", bound=tuple[str, ...])
# No replica gets a slice in these states.
_HELD_BACK = (SupplyState.QUARANTINED, SupplyState.CONDEMNED)


@dataclass(frozen=True, slots=True)
class ProvisionerState:
    """All that a page shows. `conditions` is `None` where nothing around the slices is watched.

    `report_age_s` is how long the directory had been silent at the last look; `None` if it was
    never heard of.
    """

    rounds: RoundsSoFar
    report_age_s: float | None
    conditions: PlatformConditions | None


class ProvisionerCollector(Collector):
    """Collects what `read` gives. `now_s` is wall-clock time."""

    def __init__(self, read: Callable[[], ProvisionerState], now_s: Callable[[], float]) -> None:
        self._read = read
        self._now_s = now_s

    def collect(self) -> Iterator[Family]:
        """Yields the present families; what is not known has none."""
        state, families = self._read(), _Families()
        _add_rounds(families, state.rounds, state.report_age_s)
        observation, report = state.rounds.observation, state.rounds.report
        if observation is not None:
            families.add("slicewise_provisioning_notes", len(observation.notes))
            _add_groups(families, observation.groups, state.rounds.pending_since_s, self._now_s())
            if report is not None:
                since_s, now_s = state.rounds.unheld_since_s, self._now_s()
                _add_supply(families, observation.groups, report, since_s, now_s)
        if state.conditions is not None:
            _add_conditions(families, state.conditions)
        return iter(families)


@contextmanager
def served_page(collector: Collector, port: int) -> Iterator[int]:
    """Serves the page on all addresses meanwhile; port 0 takes a free one. Yields the port.

    Raises:
        OSError: the port is taken.
    """
    registry = CollectorRegistry()
    registry.register(_Undescribed(collector))
    ProcessCollector(registry=registry)
    server, thread = start_http_server(port, registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def asked_of(loop: asyncio.AbstractEventLoop, read: Callable[[], _T]) -> Callable[[], _T]:
    """Returns `read` for other threads: it runs on the loop.

    What it returns raises TimeoutError if the loop does not come to it.
    """

    async def on_loop() -> _T:
        return read()

    def ask() -> _T:
        return asyncio.run_coroutine_threadsafe(on_loop(), loop).result(_LOOP_S)

    return ask


class _Undescribed(Collector):
    """Keeps a registry from collecting at its making, when the loop is busy with just that."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterable[Family]:
        return self._collector.collect()

    def describe(self) -> Iterable[Family]:
        return ()


class _Families:
    """The families of one scrape, in the order of their first samples."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def add(self, name: str, value: float, **labels: str) -> None:
        """Adds a series; a label without a value is left out."""
        family = self._families.get(name)
        if family is None:
            metric = ALL[name]
            stem = name.removesuffix("_total") if metric.kind == Kind.COUNTER else name
            family = self._families[name] = Family(stem, metric.help, metric.kind)
        family.add_sample(name, {label: text for label, text in labels.items() if text}, value)

    def __iter__(self) -> Iterator[Family]:
        return iter(self._families.values())


def _add_rounds(families: _Families, rounds: RoundsSoFar, report_age_s: float | None) -> None:
    families.add("slicewise_provisioning_rounds_total", rounds.num_rounds)
    for kind, count in rounds.num_failures.items():
        families.add("slicewise_provisioning_failures_total", count, kind=kind)
    families.add("slicewise_provisioning_start_time_seconds", rounds.started_at_s)
    if rounds.succeeded_at_s is not None:
        families.add("slicewise_provisioning_success_time_seconds", rounds.succeeded_at_s)
    if report_age_s is not None:
        families.add("slicewise_provisioning_report_age_seconds", report_age_s)
    groups = [] if rounds.observation is None else [each.name for each in rounds.observation.groups]
    # From zero on: a counter that appears with its first event hides it from every rate.
    changed = {(group, way): 0 for group in groups for way in (ADDED, DROPPED)}
    for (group, way), count in (changed | dict(rounds.num_slices)).items():
        families.add(
            "slicewise_provisioning_changed_slices_total", count, group=group, direction=way
        )
    if rounds.plan is not None:
        refused = Counter(refusal.about for refusal in rounds.plan.refusals)
        for about in {*groups, *refused}:
            families.add("slicewise_provisioning_refusals", refused[about], group=about)


def _add_groups(
    families: _Families,
    groups: Iterable[WorkerGroup],
    pending_since_s: Mapping[str, float],
    now_s: float,
) -> None:
    for group in groups:
        pods = [pod for each in group.slices for pod in each.pods]
        missing = max(0, group.asked_for - len(group.lasting))
        families.add("slicewise_provisioning_missing_slices", missing, group=group.name)
        machineless = sum(pod.machine is None and pod.phase == PodPhase.PENDING for pod in pods)
        families.add("slicewise_provisioning_machineless_pods", machineless, group=group.name)
        since_s = pending_since_s.get(group.name, now_s)
        families.add(
            "slicewise_provisioning_oldest_machineless_seconds",
            max(0.0, now_s - since_s),
            group=group.name,
        )
        hindered = Counter(_reason(pod.waiting) for pod in pods if pod.waiting is not None)
        for reason, count in hindered.items():
            families.add(
                "slicewise_provisioning_hindered_pods", count, group=group.name, reason=reason
            )


def _reason(waiting: str) -> str:
    word, _, _ = waiting.partition(":")
    return word if word in _KUBELET_REASONS else _OTHER_REASON


def _add_supply(
    families: _Families,
    groups: Iterable[WorkerGroup],
    report: SupplyReport,
    unheld_since_s: Mapping[str, float],
    now_s: float,
) -> None:
    families.add("slicewise_provisioning_frozen", float(report.frozen is not None))
    of_groups = {(each.kind.compute_class, each.name) for each in groups}
    slices = Counter({(*of, state): 0 for of in of_groups for state in SupplyState})
    chips = Counter(dict.fromkeys(of_groups, 0))
    # Without any there is none that is older than now.
    held_back_s = {(*of, state): now_s for of in of_groups for state in _HELD_BACK}
    unheld_s = dict.fromkeys(of_groups, now_s)
    for record in report.slices:
        of = record.compute_class or "", record.group or ""
        slices[*of, record.state] += 1
        if record.state in _HELD_BACK:
            _note_older(held_back_s, (*of, record.state), record.since_s)
        if is_unheld(record):
            chips[of] += paid_chips(record)
            _note_older(unheld_s, of, unheld_since_s.get(record.incarnation, now_s))
    _add_by(families, "slices", slices)
    _add_by(families, "unheld_chips", chips)
    _add_by(families, "oldest_held_back_seconds", _ages(held_back_s, now_s))
    _add_by(families, "oldest_unheld_seconds", _ages(unheld_s, now_s))


def _note_older(since_s: dict[_Of, float], of: _Of, at_s: float) -> None:
    since_s[of] = min(at_s, since_s.get(of, at_s))


def _ages(since_s: Mapping[_Of, float], now_s: float) -> dict[_Of, float]:
    return {of: max(0.0, now_s - at_s) for of, at_s in since_s.items()}


def _add_by(families: _Families, name: str, values: Mapping[_Of, float]) -> None:
    """Adds what is by compute class and group, and by state where there is one."""
    for of, value in values.items():
        labels = dict(zip(("compute_class", "group", "state"), map(str, of), strict=False))
        families.add(f"slicewise_provisioning_{name}", value, **labels)


def _add_conditions(families: _Families, known: PlatformConditions) -> None:
    for part in known.parts:
        kind = known.problems.get(part, "")
        families.add("slicewise_condition_readable", float(not kind), resource=part, kind=kind)
    wanted = dict(known.wanted or {})
    for pods, components in ((known.pods, wanted), (known.redis, _seen_redis(known))):
        if pods is None:
            continue
        ready = Counter(pod.component for pod in pods if pod.is_ready)
        every = Counter(pod.component for pod in pods)
        for component in {*components, *every}:
            for state, count in (
                (_READY, ready[component]),
                (_UNREADY, every[component] - ready[component]),
            ):
                families.add("slicewise_control_pods", count, component=component, state=state)
    for component, count in wanted.items():
        families.add("slicewise_control_pods_wanted", count, component=component)
    for use in (known.quotas or ())[:MAX_QUOTAS]:
        of = {"quota": use.quota, "resource": use.resource}
        families.add("slicewise_quota_hard", use.hard, **of)
        if use.used is not None:
            families.add("slicewise_quota_used", use.used, **of)
    for found in (known.classes or ())[:MAX_CLASSES]:
        families.add("slicewise_class_priorities", found.num_priorities, class_name=found.name)
        families.add(
            "slicewise_class_suspended_priorities", found.num_suspended, class_name=found.name
        )


def _seen_redis(known: PlatformConditions) -> Iterable[str]:
    """The component, where there is one of ours: another's Redis has no pods here."""
    return (REDIS,) if known.redis else ()
