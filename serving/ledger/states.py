"""The state of a chip, derived from the life of its slice. Pure; time is integer milliseconds."""

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from serving.domain.slice_lifecycle import LoadStage, SliceLifecycle, SliceState, Transition
from serving.domain.supply.records import SupplyRecord, SupplyState

_S_MS = 1000


class LedgerState(StrEnum):
    """The states of a chip-second. Each chip-second is in exactly one."""

    PROVISIONING = "provisioning"  # requested, and not held: nothing is paid
    PROBING = "probing"  # held, and tried out
    LOADING = "loading"  # the engine starts and gets its weights
    COMPILING = "compiling"  # it has them, compiles its programs and warms up
    IDLE = "idle"  # the engine takes requests and has none
    SERVING = "serving"  # the engine has requests
    DRAINING = "draining"  # it takes no more
    LOST = "lost"  # listed as ready, and its engine cannot be reached
    # Of slices that no replica has: somebody pays for them all the same.
    BOOTING = "booting"  # its machines are there, and not every host is in Ray
    FREE = "free"  # a replica could take it
    LEASED = "leased"  # its chips are taken, and no replica reports that it has them
    QUARANTINED = "quarantined"  # kept from replicas for a while
    CONDEMNED = "condemned"  # it goes

    @property
    def is_held(self) -> bool:
        """True if a replica has the chips, or waits for them."""
        return self not in _OF_SUPPLY.values()

    @property
    def is_paid(self) -> bool:
        """True if the machines are there meanwhile."""
        return self is not LedgerState.PROVISIONING


# READY stands for three, which the life does not distinguish; LOADING for two, by its stage; GONE
# takes no time.
_OF_LIFE = {
    SliceState.REQUESTED: LedgerState.PROVISIONING,
    SliceState.PROVISIONING: LedgerState.PROVISIONING,
    SliceState.RESERVED: LedgerState.PROBING,
    SliceState.PROBING: LedgerState.PROBING,
    SliceState.LOADING: LedgerState.LOADING,
    SliceState.DRAINING: LedgerState.DRAINING,
}

# A slice that nobody has; a held one counts by its life, and one without machines costs nothing.
_OF_SUPPLY = {
    SupplyState.BOOTING: LedgerState.BOOTING,
    SupplyState.FREE: LedgerState.FREE,
    SupplyState.LEASED: LedgerState.LEASED,
    SupplyState.QUARANTINED: LedgerState.QUARANTINED,
    SupplyState.CONDEMNED: LedgerState.CONDEMNED,
}


class StateSpan(NamedTuple):
    """The time in one state."""

    state: LedgerState
    length_ms: int


def to_ms(at_s: float) -> int:
    """Rounds a wall-clock time to whole milliseconds, so that spans add up without a remainder."""
    return round(at_s * _S_MS)


def state_of(life: SliceLifecycle, ready_as: LedgerState) -> LedgerState | None:
    """Returns the present state; `None` when the life is over."""
    if life.state is SliceState.GONE:
        return None
    return _of_phase(life.transitions[-1], ready_as)


def state_of_supply(record: SupplyRecord) -> LedgerState | None:
    """Returns the state of a slice that nobody has; `None` if it counts otherwise, or not at all.

    A condemned slice that never had a machine costs nothing either.
    """
    if record.holder is not None or not any(host.node_id or host.machine for host in record.hosts):
        return None
    return _OF_SUPPLY.get(record.state)


def _of_phase(transition: Transition, ready_as: LedgerState) -> LedgerState:
    if transition.state is SliceState.READY:
        return ready_as
    if transition.stage is LoadStage.COMPILING:
        return LedgerState.COMPILING
    return _OF_LIFE[transition.state]


def spans(
    life: SliceLifecycle, from_ms: int, until_ms: int, ready_as: LedgerState
) -> Iterator[StateSpan]:
    """Yields the life's time from `from_ms` to `until_ms`, or to its end.

    READY counts as `ready_as`. The lengths sum to that time exactly, for any order of transitions,
    if the life began by `from_ms`.
    """
    # Hosts' clocks differ: a transition may lie in our future.
    ends_ms = [min(to_ms(transition.at_s), until_ms) for transition in life.transitions[1:]] + [
        until_ms
    ]
    at_ms = from_ms
    for transition, end_ms in zip(life.transitions, ends_ms, strict=True):
        if end_ms <= at_ms or transition.state is SliceState.GONE:
            continue
        yield StateSpan(_of_phase(transition, ready_as), end_ms - at_ms)
        at_ms = end_ms
