"""Buys slices on a GKE ComputeClass's list of priorities: spot, then flex-start, then on demand.

Sources: cloud.google.com/kubernetes-engine, "About custom ComputeClasses" and its troubleshooting
page (read 2026-11-26), and the flags of kubernetes/autoscaler's cluster autoscaler:

- A pod without a node gets one by the first rule that is not backing off. Within a rule the zone
  that has fewest is taken, then the cheapest.
- A rule (here: a zone of it) that does not deliver backs off for 5 minutes, twice as long each
  time, 30 minutes at most, and at once no more when it has delivered or after 3 hours. The pod
  falls through to the next rule.
- What runs on a worse rule stays there. Only `activeMigration.optimizeRulePriority` moves it back.
- A smaller number of replicas takes pods without a node first, then the one that is ready last,
  whatever its node costs: that is how a ReplicaSet chooses.

The delay of falling through is what a class's `patience_s` says, else twice its usual time of
provisioning and at least a minute; GKE waits longer for TPU slices and flex-start than for other
machines, and does not say how long. Active migration is the generous version: up to a tenth of the
slices at once, the new slice ready before the old one goes. Prepaid slices are the first rule and
are kept whole. A node goes with its pod; GKE keeps an empty one for minutes.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoscaling.records import Decision, Fleet, Observation, Plan, SliceView
from autoscaling.simulator.baselines.layout import num_ready
from autoscaling.simulator.baselines.single_class import SingleClassLayout
from serving.domain.compute_class import ComputeClass
from serving.domain.slice_lifecycle import WAITING, SliceState

FIRST_BACKOFF_S = 300.0
MAX_BACKOFF_S = 1800.0
BACKOFF_RESET_S = 10_800.0
MIGRATED_SHARE = 0.1
FALLS_THROUGH_AFTER = 2.0  # times the class's usual time of provisioning
_SHORTEST_WAIT_S = 60.0


@dataclass(slots=True)
class _Failure:
    """The last failure of a class to deliver, and how long it backs off after it."""

    at_s: float
    backoff_s: float


class ClassLadder:
    """Remembers how many slices it has on each class, and which classes back off."""

    def __init__(self, terms: Sequence[ComputeClass], *, migrates: bool) -> None:
        self._bounds = SingleClassLayout.of(terms)
        self._migrates = migrates
        self._rank = {each.name: _rank(each) for each in terms if not each.is_prepaid}
        self._terms = {each.name: each for each in terms if not each.is_prepaid}
        self._last_rank = self._rank[self._bounds.on_demand.name]
        self._placed: Counter[str] | None = None
        self._failures: dict[str, _Failure] = {}
        self._surge = 0

    @property
    def min_slices(self) -> int:
        """The fewest slices, as on demand only."""
        return self._bounds.min_slices

    @property
    def max_slices(self) -> int:
        """The most slices, as on demand only."""
        return self._bounds.max_slices

    def held(self, fleet: Fleet) -> int:
        """Returns the prepaid slices and those of every class, within the bounds."""
        bought = sum(fleet.targets.get(name, 0) for name in self._terms)
        return min(max(self._bounds.num_prepaid + bought, self.min_slices), self.max_slices)

    def plan(self, observation: Observation, wanted: int, reason: str) -> Plan:
        """The plan for `wanted` slices in all, each where it is or on the best class."""
        fleet, now_s = observation.fleet, observation.now_s
        if self._placed is None:
            self._placed = Counter({name: fleet.targets.get(name, 0) for name in self._terms})
        goes = list(self._fall_through(fleet, now_s, self._placed))
        bought = max(0, wanted - self._bounds.num_prepaid)
        self._surge = min(self._surge, max(0, self._placed.total() - bought))
        self._grow(bought, now_s, self._placed)
        goes += self._shrink(fleet, bought, set(goes), self._placed)
        if self._migrates:
            goes += self._migrate(fleet, bought, now_s, self._placed)
        targets = {each.name: each.max_slices for each in self._bounds.prepaid} | self._placed
        return self._told(observation, targets, goes, reason)

    def _told(
        self, observation: Observation, targets: dict[str, int], goes: list[str], reason: str
    ) -> Plan:
        backing_off = [name for name in self._terms if not self._is_open(name, observation.now_s)]
        told = f"{reason}; backing off: {', '.join(backing_off) or 'none'}"
        decisions = tuple(
            Decision(name, target - observation.fleet.targets.get(name, 0), told)
            for name, target in targets.items()
            if target != observation.fleet.targets.get(name, 0)
        )
        return Plan(observation.now_s, targets, decisions, drain_order=tuple(goes), arithmetic=told)

    def _fall_through(self, fleet: Fleet, now_s: float, placed: Counter[str]) -> Iterator[str]:
        """Takes back requests that their class has not answered; yields them."""
        for name, terms in self._terms.items():
            if self._rank[name] == self._last_rank:
                continue
            slices, failure = fleet.of_class(name), self._failures.get(name)
            wait_s = terms.patience_s or max(
                _SHORTEST_WAIT_S, FALLS_THROUGH_AFTER * terms.provisioning_s
            )
            late = [
                each.slice_id
                for each in slices
                if each.state in WAITING and now_s - each.requested_at_s > wait_s
            ]
            if late:
                placed[name] -= min(placed[name], len(late))
                self._back_off(name, now_s)
                yield from late
            elif failure is not None and any(
                each.state == SliceState.READY and each.since_s > failure.at_s for each in slices
            ):
                del self._failures[name]

    def _back_off(self, name: str, now_s: float) -> None:
        before = self._failures.get(name)
        is_again = before is not None and now_s - before.at_s < BACKOFF_RESET_S
        backoff_s = FIRST_BACKOFF_S
        if before is not None and is_again:
            # Requests that were made before it backed off are of the same failure.
            still = now_s < before.at_s + before.backoff_s
            backoff_s = before.backoff_s if still else min(MAX_BACKOFF_S, 2 * before.backoff_s)
        self._failures[name] = _Failure(now_s, backoff_s)

    def _is_open(self, name: str, now_s: float) -> bool:
        failure = self._failures.get(name)
        return failure is None or now_s >= failure.at_s + failure.backoff_s

    def _best(self, now_s: float, placed: Counter[str], below: float = math.inf) -> str | None:
        """Returns the class that the next slice is asked of, of a better rank than `below`."""
        free = [
            name
            for name, terms in self._terms.items()
            if placed[name] < terms.max_slices
            and self._rank[name] < below
            and self._is_open(name, now_s)
        ]
        return min(
            free,
            key=lambda name: (self._rank[name], placed[name], self._terms[name].price, name),
            default=None,
        )

    def _grow(self, bought: int, now_s: float, placed: Counter[str]) -> None:
        while placed.total() < bought and (name := self._best(now_s, placed)) is not None:
            placed[name] += 1

    def _shrink(self, fleet: Fleet, bought: int, gone: set[str], placed: Counter[str]) -> list[str]:
        """Gives up what a ReplicaSet would, beyond what moves; returns it."""
        surplus = placed.total() - bought - self._surge
        if surplus <= 0:
            return []
        lives = [each for each in self._lives(fleet) if each.slice_id not in gone]
        lives.sort(key=lambda each: (each.state == SliceState.READY, -each.since_s))
        for each in lives[:surplus]:
            placed[each.compute_class] -= 1
        return [each.slice_id for each in lives[:surplus]]

    def _migrate(self, fleet: Fleet, bought: int, now_s: float, placed: Counter[str]) -> list[str]:
        """Asks better classes for slices; gives up worse ones once those are ready."""
        ready = [each for each in self._lives(fleet) if each.state == SliceState.READY]
        ready.sort(key=lambda each: (-self._rank[each.compute_class], -each.since_s))
        spare = min(self._surge, max(0, num_ready(fleet) - self._bounds.num_prepaid - bought))
        for each in ready[:spare]:
            placed[each.compute_class] -= 1
        self._surge -= spare
        is_settled = self._surge == 0 and all(
            each.state == SliceState.READY for each in self._lives(fleet)
        )
        if is_settled and ready and not spare:
            for each in ready[: max(1, int(MIGRATED_SHARE * bought))]:
                better = self._best(now_s, placed, self._rank[each.compute_class])
                if better is not None:
                    placed[better] += 1
                    self._surge += 1
        return [each.slice_id for each in ready[:spare]]

    def _lives(self, fleet: Fleet) -> Iterator[SliceView]:
        """Yields the slices that are bought here and do not go already."""
        for each in fleet.slices:
            if each.compute_class in self._terms and each.state != SliceState.DRAINING:
                yield each


def _rank(terms: ComputeClass) -> float:
    """Returns the place of a class: spot, what ends, what lasts."""
    if terms.is_revocable:
        return 0.0
    return 1.0 if terms.max_run_s is not None else 2.0
