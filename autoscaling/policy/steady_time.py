"""Gives the policy a time that never runs back, whatever the caller's clock does. Deterministic.

The policy remembers instants: until when a class backs off, since when slices are surplus, when a
need was high. After the wall clock was set back by an hour each would be an hour too far ahead, and
what waits for it would wait for an hour longer. So the policy reckons in a time of its own, which
is ahead of the clock by all that this was set back so far: a look after a step back is no time
after the look before it. A clock that is set forward is a silence.

Slices are told with the clocks of their hosts. A slice is in its state since no later than when it
was first seen so; else an order of a host that is an hour ahead could not be late for that hour.
"""

import math
from dataclasses import dataclass, replace

from autoscaling.policy.memory import PolicyRecord
from autoscaling.records import Observation, Plan, SliceView
from serving.domain.capacity.batch_due import BatchDue
from serving.domain.slice_lifecycle import SliceState


@dataclass(frozen=True, slots=True)
class _FirstSeen:
    """When a slice was first seen at all, and in its `state`."""

    at_s: float
    state: SliceState
    state_at_s: float


class SteadyTime:
    """The time of one policy."""

    def __init__(self) -> None:
        self._ahead_s = 0.0
        self._now_s = -math.inf
        self._seen: dict[str, _FirstSeen] = {}

    def observed(self, observation: Observation) -> Observation:
        """Returns what was observed, in this time."""
        self._ahead_s = max(self._ahead_s, self._now_s - observation.now_s)
        self._now_s = observation.now_s + self._ahead_s
        load, fleet = observation.load, observation.fleet
        slices = tuple(self._view(each) for each in fleet.slices)
        self._seen = {each.slice_id: self._seen[each.slice_id] for each in slices}
        if any(new is not old for new, old in zip(slices, fleet.slices, strict=True)):
            fleet = replace(fleet, slices=slices)
        if load is not None and self._ahead_s:
            due = self._due(load.batch_due)
            load = replace(load, at_s=load.at_s + self._ahead_s, batch_due=due)
        return Observation(self._now_s, load, fleet)

    def told(self, plan: Plan) -> Plan:
        """Returns a plan by the caller's clock."""
        if not self._ahead_s:
            return plan
        next_s = plan.next_slice_at_s
        return replace(
            plan,
            at_s=plan.at_s - self._ahead_s,
            next_slice_at_s=None if next_s is None else next_s - self._ahead_s,
        )

    def recorded(self, record: PolicyRecord) -> PolicyRecord:
        """Returns a record with its instants by the caller's clock."""
        ahead_s = self._ahead_s
        if not ahead_s:
            return record

        def earlier(at_s: float | None) -> float | None:
            return None if at_s is None else at_s - ahead_s

        classes = {}
        for name, each in record.classes.items():
            until_s, failed_at_s = each.backoff.until_s, each.backoff.failed_at_s
            instants = {"until_s": earlier(until_s), "failed_at_s": earlier(failed_at_s)}
            backoff = each.backoff.model_copy(update=instants)
            classes[name] = each.model_copy(update={"backoff": backoff})
        since_s = record.forecast.since_s - ahead_s
        forecast = record.forecast.model_copy(update={"since_s": since_s})
        busy_at_s = earlier(record.busy_at_s)
        return record.model_copy(
            update={"classes": classes, "forecast": forecast, "busy_at_s": busy_at_s}
        )

    def _view(self, each: SliceView) -> SliceView:
        now_s, ahead_s = self._now_s, self._ahead_s
        seen = self._seen.get(each.slice_id) or _FirstSeen(now_s, each.state, now_s)
        if seen.state != each.state:
            seen = _FirstSeen(seen.at_s, each.state, now_s)
        self._seen[each.slice_id] = seen
        since_s = min(each.since_s + ahead_s, seen.state_at_s)
        requested_at_s = min(each.requested_at_s + ahead_s, seen.at_s)
        ends_at_s = None if each.expires_at_s is None else each.expires_at_s + ahead_s
        if (since_s, requested_at_s, ends_at_s) == (
            each.since_s,
            each.requested_at_s,
            each.expires_at_s,
        ):
            return each
        return replace(each, since_s=since_s, requested_at_s=requested_at_s, expires_at_s=ends_at_s)

    def _due(self, due: BatchDue) -> BatchDue:
        work = tuple(replace(each, due_at_s=each.due_at_s + self._ahead_s) for each in due.work)
        return replace(due, work=work)
