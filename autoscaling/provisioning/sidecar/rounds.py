"""Remembers of the provisioner's rounds what its metrics page shows.

Owns what is counted, and what is no longer shown once it is not known to be so. Does not own how
it is named (`metrics`). Nothing is kept per pod beyond the last look, which the loop has anyway.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autoscaling.provisioning.errors import (
    ExpiredError,
    MissingError,
    OutdatedError,
    RecordsUnavailableError,
    RefusedError,
    ThrottledError,
    UnreachableError,
    UnusableError,
)
from autoscaling.provisioning.plan import Change, ProvisioningPlan
from autoscaling.provisioning.protocol import ClusterObservation
from serving.domain.supply.pods import PodPhase
from serving.domain.supply.records import SupplyRecord, SupplyReport

# How a failure is told, by its class; any other is a fault of ours.
FAILURE_KINDS: Mapping[type[Exception], str] = {
    RecordsUnavailableError: "records",
    RefusedError: "refused",
    MissingError: "missing",
    OutdatedError: "outdated",
    ExpiredError: "expired",
    ThrottledError: "throttled",
    UnreachableError: "unreachable",
    UnusableError: "unusable",
}
FAULT = "fault"
ADDED, DROPPED = "add", "drop"


def failure_kind(error: Exception) -> str:
    """Returns how a failure is told."""
    return next((kind for of, kind in FAILURE_KINDS.items() if isinstance(error, of)), FAULT)


@dataclass(frozen=True, slots=True)
class RoundsSoFar:
    """The rounds since the process began. Times are wall-clock seconds since the epoch.

    `num_failures` are by kind, every kind from zero; `num_slices` of changes by group and
    direction. `succeeded_at_s` is `None` before the first round that went well. `observation` and
    `report` are those of the last round, or newer; `None` where that one could not read them.
    `plan` is that of the last round that went well. `pending_since_s` has since when each group has
    a pod without a machine, and `unheld_since_s`, by incarnation, since when a slice has machines
    and no replica has it, as far as this process saw.
    """

    started_at_s: float
    num_rounds: int
    num_failures: Mapping[str, int]
    num_slices: Mapping[tuple[str, str], int]
    succeeded_at_s: float | None
    observation: ClusterObservation | None
    report: SupplyReport | None
    plan: ProvisioningPlan | None
    pending_since_s: Mapping[str, float]
    unheld_since_s: Mapping[str, float]


@dataclass(slots=True)
class _Round:
    """What a round has read so far."""

    observation: ClusterObservation | None = None
    report: SupplyReport | None = None


@dataclass(slots=True)
class _Counts:
    rounds: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    slices: Counter[tuple[str, str]] = field(default_factory=Counter)


class RoundLog:
    """A `RoundObserver` that remembers. Used from one event loop; `now_s` is wall-clock time."""

    def __init__(self, now_s: Callable[[], float] = time.time) -> None:
        self._now_s = now_s
        self._started_at_s = now_s()
        self._counts = _Counts()
        self._counts.failures.update(dict.fromkeys((*FAILURE_KINDS.values(), FAULT), 0))
        self._reading, self._read = _Round(), _Round()
        self._plan: ProvisioningPlan | None = None
        self._succeeded_at_s: float | None = None
        # By group and the first pod of a slice.
        self._pending_since_s: dict[tuple[str, str], float] = {}
        self._unheld_since_s: dict[str, float] = {}

    def so_far(self) -> RoundsSoFar:
        """Returns what is known now."""
        oldest: dict[str, float] = {}
        for (group, _), since_s in self._pending_since_s.items():
            oldest[group] = min(since_s, oldest.get(group, since_s))
        return RoundsSoFar(
            started_at_s=self._started_at_s,
            num_rounds=self._counts.rounds,
            num_failures=dict(self._counts.failures),
            num_slices=dict(self._counts.slices),
            succeeded_at_s=self._succeeded_at_s,
            observation=self._reading.observation or self._read.observation,
            report=self._reading.report or self._read.report,
            plan=self._plan,
            pending_since_s=oldest,
            unheld_since_s=dict(self._unheld_since_s),
        )

    def observed(self, observation: ClusterObservation) -> None:
        """See `RoundObserver`."""
        now_s = self._now_s()
        before = self._pending_since_s
        if observation is not self._reading.observation:
            self._pending_since_s = {
                key: before.get(key, now_s) for key in _slices_without_machines(observation)
            }
        self._reading = _Round(observation)

    def reported(self, report: SupplyReport) -> None:
        """See `RoundObserver`."""
        now_s, before = self._now_s(), self._unheld_since_s
        if report is not self._reading.report:
            self._unheld_since_s = {
                each.incarnation: before.get(each.incarnation, now_s)
                for each in report.slices
                if is_unheld(each)
            }
        self._reading.report = report

    def changed(self, change: Change) -> None:
        """See `RoundObserver`."""
        num_dropped = len(change.drops)
        num_added = change.replicas - change.group.replicas + num_dropped
        self._counts.slices[change.group.name, DROPPED] += num_dropped
        self._counts.slices[change.group.name, ADDED] += max(0, num_added)

    def done(self, plan: ProvisioningPlan) -> None:
        """See `RoundObserver`."""
        self._plan, self._succeeded_at_s = plan, self._now_s()
        self._end()

    def failed(self, error: Exception) -> None:
        """See `RoundObserver`."""
        self._counts.failures[failure_kind(error)] += 1
        self._end()

    def _end(self) -> None:
        # What the next round cannot read either is shown no longer.
        self._counts.rounds += 1
        self._read, self._reading = self._reading, _Round()


def is_unheld(record: SupplyRecord) -> bool:
    """Returns whether machines of a slice are there, and paid for, and no replica has it."""
    return not record.is_taken and paid_chips(record) > 0


def paid_chips(record: SupplyRecord) -> int:
    """Returns the chips of those of its hosts that have a machine."""
    hosts = record.hosts
    there = sum(host.machine is not None or host.node_id is not None for host in hosts)
    return record.num_chips * there // len(hosts) if hosts else 0


def _slices_without_machines(observation: ClusterObservation) -> set[tuple[str, str]]:
    return {
        (group.name, each.incarnation)
        for group in observation.groups
        for each in group.slices
        if any(pod.machine is None and pod.phase == PodPhase.PENDING for pod in each.pods)
    }
