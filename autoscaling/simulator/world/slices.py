"""The simulated slices: orders, stock, provisioning, loading, loss, expiry, release; and the books.

Owns what the cloud does to slices and what a replica does about it, with the states of
`serving.domain.slice_lifecycle`. Does not own how many are wanted (a `records.Policy`), what the
engines do (`engines`), or how much capacity there is over time (`spot_capacity`). Chance comes in
as a generator, time as instants.

A class gets a target number of slices. Each is a life: an order waits until the class has
capacity, is then provisioned, probed, loaded, and ready. A life that is announced to end drains at
once, and in the same moment its replica begins the next one (ADR 7). A lower number ends orders
first, then lives in the plan's order, then the youngest.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import numpy as np

from autoscaling.records import SliceLoss, SliceView
from autoscaling.simulator.world.engines import Engines
from autoscaling.simulator.world.spot_capacity import CapacitySeries
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.compute_class import ComputeClass
from serving.domain.limits import migrate_by_s
from serving.domain.slice_lifecycle import HELD_STATES, EndCause, SliceState


@dataclass(frozen=True, slots=True)
class Conditions:
    """The real behaviour of a compute class, as opposed to what its `ComputeClass` expects.

    `capacity` is how many slices may exist, `None`: always as many as the quota. Times to provision
    and to load are lognormal around their median, with these spreads (standard deviations of the
    logarithm). `probe_s` comes between. A slice is lost after `1 / losses_per_hour` hours on
    average, and when capacity falls below what there is; either is announced `notice_s` before.
    """

    capacity: CapacitySeries | None
    provisioning_s: float
    load_s: float
    losses_per_hour: float
    provisioning_spread: float = 0.3
    load_spread: float = 0.1
    probe_s: float = 5.0
    notice_s: float = 30.0

    @classmethod
    def as_expected(
        cls, terms: ComputeClass, capacity: CapacitySeries | None = None
    ) -> "Conditions":
        """Returns the conditions that the terms name."""
        return cls(capacity, terms.provisioning_s, terms.load_s, terms.losses_per_hour)


@dataclass(frozen=True, slots=True)
class ClassSetup:
    """The setup of a compute class: the terms that are known of it, and how it really behaves.

    `profile` is what its slices carry; `None`: as those of most classes.
    """

    terms: ComputeClass
    conditions: Conditions
    profile: CapacityProfile | None = None


@dataclass(frozen=True, slots=True)
class SliceRun:
    """The record of one life that is over, or that goes on at the end (`cause` is `None`).

    A life that drains when the simulation ends has its cause already. `held_at_s` is when its slice
    came, `None` if none came; `ready_at_s` likewise.
    """

    slice_id: str
    compute_class: str
    requested_at_s: float
    held_at_s: float | None
    ready_at_s: float | None
    ended_at_s: float
    cause: EndCause | None


@dataclass(slots=True, eq=False)
class _Life:
    """The life of one slice.

    `epoch` changes whenever its course does: events of an older epoch are void.
    """

    slice_id: str
    compute_class: str
    state: SliceState
    since_s: float
    requested_at_s: float
    number: int
    is_granted: bool = False
    held_at_s: float | None = None
    ready_at_s: float | None = None
    expires_at_s: float | None = None
    slot: int | None = None
    migrate_by_s: float = 0.0
    cause: EndCause | None = None
    epoch: int = 0


class ChipPool:
    """The chips that the slices of several models have together: the cloud's side of a quota."""

    def __init__(self, max_chips: int) -> None:
        self._left = max_chips

    def take(self, num_chips: int) -> bool:
        """Takes so many, all or none; returns whether they were there."""
        if num_chips > self._left:
            return False
        self._left -= num_chips
        return True

    def give_back(self, num_chips: int) -> None:
        """Returns so many, for whoever asks next."""
        self._left += num_chips


# By class: the pool that its slices are taken from, and how many chips one of them has.
Pools = Mapping[str, tuple[ChipPool, int]]


@dataclass(slots=True)
class _Class:
    setup: ClassSetup
    pool: tuple[ChipPool, int] | None = None
    target: int = 0
    capacity: float = math.inf
    occupied: int = 0
    orders: deque[_Life] = field(default_factory=deque)
    active: dict[str, _Life] = field(default_factory=dict)
    draining: dict[str, _Life] = field(default_factory=dict)

    def occupy(self) -> bool:
        """Takes the place of one slice; returns whether there is one."""
        if self.pool is not None and not self.pool[0].take(self.pool[1]):
            return False
        self.occupied += 1
        return True

    def vacate(self) -> None:
        self.occupied -= 1
        if self.pool is not None:
            self.pool[0].give_back(self.pool[1])


class SliceFleet:
    """Models all slices of one simulation.

    `drain_s` is how long a slice that goes is still held. `pools` are chips that it shares.
    """

    def __init__(
        self,
        setups: Sequence[ClassSetup],
        engines: Engines,
        rng: np.random.Generator,
        drain_s: float,
        pools: Pools = MappingProxyType({}),
    ) -> None:
        self._engines = engines
        self._rng = rng
        self._drain_s = drain_s
        self._classes = {
            each.terms.name: _Class(each, pools.get(each.terms.name)) for each in setups
        }
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0
        self._num_lives = 0
        self._losses: list[SliceLoss] = []
        self.records: list[SliceRun] = []
        self.seconds: dict[tuple[str, SliceState], float] = {}
        for each in self._classes.values():
            self._schedule_capacity(each)

    def begin_ready(self, compute_class: str, count: int) -> None:
        """Adds `count` slices that exist and are ready at 0, before anything else.

        Raises:
            ValueError: a pool has fewer.
        """
        known = self._classes[compute_class]
        known.target = count
        for _ in range(count):
            life = self._begin(known, 0.0)
            if not known.occupy():
                raise ValueError(f"{compute_class}: {count} slices at the start exceed the quota")
            life.is_granted = True
            self._come(known, life, 0.0)
            self._load(known, life, 0.0)
            self._make_ready(life, 0.0)

    def advance(self, until_s: float) -> None:
        """Lets everything happen to slices that is due by then."""
        while self._events and self._events[0][0] <= until_s:
            at_s, _, act = heapq.heappop(self._events)
            act(at_s)

    def take_losses(self) -> tuple[SliceLoss, ...]:
        """Returns the losses since the last call."""
        losses = tuple(self._losses)
        self._losses.clear()
        return losses

    def engines(self) -> list[tuple[int, str, str, float]]:
        """Returns the slot of each ready slice, its id, its class, and since when it is ready."""
        return [
            (life.slot, life.slice_id, life.compute_class, life.ready_at_s)
            for known in self._classes.values()
            for life in known.active.values()
            if life.slot is not None and life.ready_at_s is not None
        ]

    def views(self) -> tuple[SliceView, ...]:
        """Returns every life that is not over."""
        in_flight = self._engines.in_flight
        return tuple(
            SliceView(
                life.slice_id,
                life.compute_class,
                life.state,
                life.since_s,
                life.requested_at_s,
                0 if life.slot is None else in_flight[life.slot],
                life.expires_at_s,
            )
            for known in self._classes.values()
            for lives in (known.active, known.draining)
            for life in lives.values()
        )

    @property
    def targets(self) -> dict[str, int]:
        """The latest target of each class."""
        return {name: known.target for name, known in self._classes.items()}

    def apply(self, targets: Mapping[str, int], drain_order: Iterable[str], now_s: float) -> None:
        """Sets each class's target, between 0 and its quota.

        Raises:
            ValueError: a target is for no class of the setup.
        """
        unknown = sorted(targets.keys() - self._classes.keys())
        if unknown:
            allowed = ", ".join(self._classes)
            raise ValueError(f"the plan has targets for {', '.join(unknown)}; allowed: {allowed}")
        order = {slice_id: place for place, slice_id in enumerate(drain_order)}
        for name, target in targets.items():
            known = self._classes[name]
            known.target = min(max(0, target), known.setup.terms.max_slices)
            surplus = len(known.active) - known.target
            if surplus > 0:
                for life in _to_give_up(known.active.values(), order)[:surplus]:
                    self._give_up(known, life, now_s)
            self._replenish(known, now_s)

    def close_books(self, end_s: float) -> None:
        """Cuts off at `end_s` everything that is not over. No call may follow."""
        for known in self._classes.values():
            for life in (*known.active.values(), *known.draining.values()):
                self._spend(life, end_s)
                self._note(life, end_s, life.cause)

    # Orders

    def _replenish(self, known: _Class, now_s: float) -> None:
        """Begins lives until there are as many as asked for, and gives capacity to orders."""
        for _ in range(known.target - len(known.active)):
            life = self._begin(known, now_s)
            # No slice stands ready: one always has to come into being.
            self._enter(life, SliceState.PROVISIONING, now_s)
            known.orders.append(life)
        self._serve_waiting(known, now_s)

    def _begin(self, known: _Class, now_s: float) -> _Life:
        self._num_lives += 1
        name = known.setup.terms.name
        slice_id = f"{name}-{self._num_lives}"
        life = _Life(slice_id, name, SliceState.REQUESTED, now_s, now_s, self._num_lives)
        known.active[slice_id] = life
        return life

    def _serve_waiting(self, known: _Class, now_s: float) -> None:
        limit = min(known.capacity, known.setup.terms.max_slices)
        while known.orders and known.occupied < limit and known.occupy():
            life = known.orders.popleft()
            how = known.setup.conditions
            spread = how.provisioning_spread * self._rng.standard_normal()
            come_at_s = now_s + how.provisioning_s * math.exp(spread)
            life.is_granted = True
            self._later(life, come_at_s, partial(self._come, known, life))

    # From a slice that came to an engine that is ready

    def _come(self, known: _Class, life: _Life, now_s: float) -> None:
        life.held_at_s = now_s
        how, terms = known.setup.conditions, known.setup.terms
        self._enter(life, SliceState.RESERVED, now_s)
        self._enter(life, SliceState.PROBING, now_s)
        self._later(life, now_s + how.probe_s, partial(self._load, known, life))
        if how.losses_per_hour > 0:
            loss_at_s = now_s + float(self._rng.exponential(3600 / how.losses_per_hour))
            self._when_held(known, life, loss_at_s, EndCause.PREEMPTED)
        if terms.max_run_s is not None:
            life.expires_at_s = now_s + terms.max_run_s
            drain_at_s = max(now_s, life.expires_at_s - self._drain_s)
            self._when_held(known, life, drain_at_s, EndCause.EXPIRED)

    def _when_held(self, known: _Class, life: _Life, at_s: float, cause: EndCause) -> None:
        def act(now_s: float) -> None:
            if life.slice_id in known.active:
                self._lose(known, life, now_s, cause)

        self._at(at_s, act)

    def _load(self, known: _Class, life: _Life, now_s: float) -> None:
        self._enter(life, SliceState.LOADING, now_s)
        how = known.setup.conditions
        load_s = how.load_s * math.exp(how.load_spread * self._rng.standard_normal())
        self._later(life, now_s + load_s, partial(self._make_ready, life))

    def _make_ready(self, life: _Life, now_s: float) -> None:
        life.epoch += 1
        life.ready_at_s = now_s
        self._enter(life, SliceState.READY, now_s)
        profile = self._classes[life.compute_class].setup.profile
        life.slot = self._engines.open(now_s, profile)
        # Draining engines that had nowhere to move their requests have it now.
        for known in self._classes.values():
            for other in known.draining.values():
                self._leave(other, now_s)

    # Ends

    def _lose(self, known: _Class, life: _Life, now_s: float, cause: EndCause) -> None:
        """Announces the end of a slice: it drains, and its replica begins another life."""
        loss = SliceLoss(life.slice_id, life.compute_class, now_s, cause.value)
        self._losses.append(loss)
        end_s = now_s + self._drain_s
        if cause == EndCause.PREEMPTED:
            end_s = now_s + min(known.setup.conditions.notice_s, self._drain_s)
        self._drain(known, life, now_s, end_s, cause)
        self._replenish(known, now_s)

    def _give_up(self, known: _Class, life: _Life, now_s: float) -> None:
        """Gives up a life that is no longer wanted."""
        if life.state in HELD_STATES:
            self._drain(known, life, now_s, now_s + self._drain_s, EndCause.RELEASED)
            return
        if life.is_granted:
            known.vacate()
        else:
            known.orders.remove(life)
        life.epoch += 1
        del known.active[life.slice_id]
        self._end(life, now_s, EndCause.RELEASED)

    def _drain(
        self, known: _Class, life: _Life, now_s: float, end_s: float, cause: EndCause
    ) -> None:
        life.epoch += 1
        life.cause = cause
        del known.active[life.slice_id]
        known.draining[life.slice_id] = life
        self._enter(life, SliceState.DRAINING, now_s)
        if life.slot is None or end_s <= now_s:
            self._go(known, life, now_s)
            return
        life.migrate_by_s = migrate_by_s(now_s, end_s - now_s)
        self._engines.drain(life.slot, now_s)
        self._leave(life, now_s)
        self._later(life, life.migrate_by_s, partial(self._leave, life))
        self._later(life, end_s, partial(self._go, known, life))

    def _leave(self, life: _Life, now_s: float) -> None:
        if life.slot is not None:
            self._engines.leave(life.slot, now_s, life.migrate_by_s)

    def _go(self, known: _Class, life: _Life, now_s: float) -> None:
        if life.slot is not None:
            self._engines.close(life.slot, now_s)
            life.slot = None
        del known.draining[life.slice_id]
        known.vacate()
        self._end(life, now_s, life.cause)
        self._serve_waiting(known, now_s)

    # Capacity

    def _schedule_capacity(self, known: _Class) -> None:
        series = known.setup.conditions.capacity
        if series is None:
            return
        known.capacity = series.slices[0]
        for at_s, slices in zip(series.times_s[1:], series.slices[1:], strict=True):
            self._at(at_s, partial(self._set_capacity, known, slices))

    def _set_capacity(self, known: _Class, slices: int, now_s: float) -> None:
        """Takes away at once what exceeds it: first what has not come yet, then by chance."""
        known.capacity = slices
        # Those that drain already go anyway.
        lasting = [life for life in known.active.values() if life.is_granted]
        surplus = len(lasting) - slices
        if surplus > 0:
            order = self._rng.permutation(len(lasting)).tolist()
            order.sort(key=lambda place: lasting[place].state in HELD_STATES)
            for place in order[:surplus]:
                life = lasting[place]
                if life.state in HELD_STATES:
                    self._lose(known, life, now_s, EndCause.PREEMPTED)
                else:
                    life.epoch += 1
                    life.is_granted = False
                    known.vacate()
                    known.orders.appendleft(life)
        self._serve_waiting(known, now_s)

    # Events and books

    def _at(self, at_s: float, act: Callable[[float], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, act))

    def _later(self, life: _Life, at_s: float, act: Callable[[float], None]) -> None:
        """Schedules `act`, which is void if the life takes another course before."""
        epoch = life.epoch

        def act_if_still_due(now_s: float) -> None:
            if life.epoch == epoch:
                act(now_s)

        self._at(at_s, act_if_still_due)

    def _enter(self, life: _Life, state: SliceState, now_s: float) -> None:
        self._spend(life, now_s)
        life.state = state

    def _spend(self, life: _Life, now_s: float) -> None:
        key = (life.compute_class, life.state)
        self.seconds[key] = self.seconds.get(key, 0.0) + now_s - life.since_s
        life.since_s = now_s

    def _end(self, life: _Life, now_s: float, cause: EndCause | None) -> None:
        self._spend(life, now_s)
        self._note(life, now_s, cause)

    def _note(self, life: _Life, now_s: float, cause: EndCause | None) -> None:
        self.records.append(
            SliceRun(
                life.slice_id,
                life.compute_class,
                life.requested_at_s,
                life.held_at_s,
                life.ready_at_s,
                now_s,
                cause,
            )
        )


def _to_give_up(lives: Iterable[_Life], order: Mapping[str, int]) -> list[_Life]:
    """Returns orders without a slice first, then as the plan orders, then the youngest."""

    def rank(life: _Life) -> tuple[bool, float, int]:
        return life.state in HELD_STATES, order.get(life.slice_id, math.inf), -life.number

    return sorted(lives, key=rank)
