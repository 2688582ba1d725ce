"""Runs chaos in step with a run: what is due is done, once, and written down.

Owns which events are done. Does not own the clock, nor how the load and the slices are known: its
caller passes them, twice a second.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from loadtest.chaos.actors import ActionFailedError, Actor
from loadtest.chaos.resolution import (
    ChaosAction,
    Miss,
    RunLoad,
    SeenHost,
    SeenSlice,
    due_events,
    resolve,
)
from loadtest.chaos.schedule import (
    AddEvent,
    ChaosEvent,
    ChaosSchedule,
    KillEvent,
    NoticeEvent,
    PartitionEvent,
    RunEvent,
    SlowEvent,
    StockEvent,
)
from loadtest.records import EventRecord

logger = logging.getLogger(__name__)


class ChaosRunner:
    """Carries out one schedule by one actor. Synchronous; not for several threads at once."""

    def __init__(self, schedule: ChaosSchedule, actor: Actor, seed: int) -> None:
        self._schedule = schedule
        self._actor = actor
        self._chance = random.Random(seed)
        self._done: set[int] = set()

    def tick(self, now_s: float, load: RunLoad, slices: Sequence[SeenSlice]) -> list[EventRecord]:
        """Does what is due at `now_s`, in seconds after the run's start; returns its records.

        Returns when the last action is done or has failed, which each action bounds in time. One
        that hits nothing or fails is a record with its `error`.
        """
        due = list(due_events(self._schedule, self._done, now_s, load))
        self._done.update(event.number for event in due)
        return [self._carry_out(resolved, now_s) for resolved in resolve(due, slices, self._chance)]

    def _carry_out(self, resolved: ChaosAction | Miss, now_s: float) -> EventRecord:
        event, target = resolved.event, resolved.target
        if isinstance(resolved, Miss):
            logger.warning("chaos_missed action=%s reason=%s", event.action, resolved.reason)
            return EventRecord(now_s, event.action, target, error=resolved.reason)
        try:
            said = self._actor.act(resolved)
        except ActionFailedError as error:
            logger.warning("chaos_failed action=%s target=%s: %s", event.action, target, error)
            return EventRecord(now_s, event.action, target, resolved.reason, error=str(error))
        detail = f"{resolved.reason}: {said}" if said else resolved.reason
        logger.info("chaos_done action=%s target=%s reason=%s", event.action, target, detail)
        return EventRecord(now_s, event.action, target, detail, _until_s(event, now_s))


def _until_s(event: ChaosEvent, now_s: float) -> float | None:
    """Returns when the effect of an event ends; `None` for an instant, or where it is unknown."""
    match event:
        case NoticeEvent():
            return now_s + event.notice_s
        case SlowEvent() | PartitionEvent() | RunEvent():
            return None if event.for_s is None else now_s + event.for_s
        case KillEvent() | StockEvent() | AddEvent():
            return None
        case _:
            assert_never(event)


# Any: JSON of another program, of which only what is needed is read.
def slices_in_fleet(fleet: Mapping[str, Any]) -> list[SeenSlice]:
    """The slices in an answer of the platform's `/fleet`; those without a name yet are left out."""
    return [
        SeenSlice(
            row["name"],
            row.get("compute_class"),
            row.get("state"),
            tuple(SeenHost(host["node_id"], host["address"]) for host in row.get("hosts", ())),
        )
        for row in fleet.get("slices") or ()
        if row.get("name")
    ]
