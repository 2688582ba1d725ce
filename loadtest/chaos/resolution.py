"""Resolves which events of a schedule are due, and which slice each hits. Pure."""

import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from loadtest.chaos.schedule import (
    AddEvent,
    ChaosEvent,
    ChaosSchedule,
    RunEvent,
    SliceTarget,
    StockEvent,
)


@dataclass(frozen=True, slots=True)
class RunLoad:
    """The load of a run at one moment: requests that are under way, and sent per second."""

    in_flight: int
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class SeenHost:
    """The host as the platform shows it: Ray's id of its node, and its address."""

    node: str
    address: str


@dataclass(frozen=True, slots=True)
class SeenSlice:
    """The slice as the platform shows it; `None` is not known. `hosts` are by worker id."""

    name: str
    compute_class: str | None
    state: str | None
    hosts: tuple[SeenHost, ...] = ()


@dataclass(frozen=True, slots=True)
class DueEvent:
    """The event that is due. `number` is its place in the schedule."""

    number: int
    event: ChaosEvent
    reason: str


@dataclass(frozen=True, slots=True)
class ChaosAction:
    """The event and its target: a slice's name, a compute class or a kind; "" for no target.

    `host` is the first one of the slice, `None` where none is known.
    """

    event: ChaosEvent
    target: str
    reason: str
    host: SeenHost | None = None


@dataclass(frozen=True, slots=True)
class Miss:
    """The event that hits nothing, and why."""

    event: ChaosEvent
    target: str
    reason: str


def due_events(
    schedule: ChaosSchedule, done: Collection[int], now_s: float, load: RunLoad
) -> Iterator[DueEvent]:
    """Yields the events that are due and not among the numbers `done`, in their order.

    An event at a load is due the first time that load is reached.
    """
    for number, event in enumerate(schedule.events):
        if number not in done and (reason := _due_reason(event, now_s, load)) is not None:
            yield DueEvent(number, event, reason)


def _due_reason(event: ChaosEvent, now_s: float, load: RunLoad) -> str | None:
    if event.at_s is not None:
        return f"at {event.at_s:g} s" if now_s >= event.at_s else None
    if event.at_in_flight is not None:
        is_due = load.in_flight >= event.at_in_flight
        return f"{load.in_flight} in flight, at {event.at_in_flight}" if is_due else None
    at_requests_per_s = event.at_requests_per_s or 0.0
    is_due = load.requests_per_s >= at_requests_per_s
    return f"{load.requests_per_s:.3g} requests/s, at {at_requests_per_s:g}" if is_due else None


def resolve(
    due: Iterable[DueEvent], slices: Sequence[SeenSlice], chance: random.Random
) -> list[ChaosAction | Miss]:
    """Returns what each of these events hits, in their order.

    Two events of one moment that describe their slice hit different ones.
    """
    taken: set[str] = set()
    resolved: list[ChaosAction | Miss] = []
    for event in due:
        found = _resolve_one(event, slices, taken, chance)
        taken.add(found.target)
        resolved.append(found)
    return resolved


def _resolve_one(
    due: DueEvent, slices: Sequence[SeenSlice], taken: Collection[str], chance: random.Random
) -> ChaosAction | Miss:
    event, reason = due.event, due.reason
    if isinstance(event, StockEvent):
        return ChaosAction(event, event.target.compute_class, reason)
    if isinstance(event, AddEvent):
        return ChaosAction(event, event.target.kind, reason)
    target = event.target
    if target is None:
        return ChaosAction(event, "", reason)
    matching = sorted(
        (candidate for candidate in slices if _matches(candidate, target)),
        key=lambda candidate: candidate.name,
    )
    if target.slice is None:
        matching = [candidate for candidate in matching if candidate.name not in taken]
    if not matching:
        return Miss(event, str(target), f"{reason}: no such slice; there are {_listed(slices)}")
    chosen = chance.choice(matching)
    host = chosen.hosts[0] if chosen.hosts else None
    needs_host = isinstance(event, RunEvent) and (event.holds("{node}") or event.holds("{address}"))
    if needs_host and host is None:
        return Miss(event, chosen.name, f"{reason}: the hosts of {chosen.name} are not known")
    if target.slice is None:
        reason += f", one of {len(matching)}"
    return ChaosAction(event, chosen.name, reason, host)


def _matches(candidate: SeenSlice, target: SliceTarget) -> bool:
    if target.slice is not None:
        return candidate.name == target.slice
    return target.compute_class in (None, candidate.compute_class) and target.state in (
        None,
        candidate.state,
    )


def _listed(slices: Sequence[SeenSlice]) -> str:
    if not slices:
        return "none"
    return ", ".join(f"{slice.name} ({slice.compute_class}, {slice.state})" for slice in slices)
