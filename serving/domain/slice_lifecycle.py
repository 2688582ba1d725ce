"""The life of a slice under one replica: its states, their order, its end and its durations.

Owns the state machine and the sums over it. Does not own who causes a transition, nor where the
record is kept. Pure: callers pass the wall-clock time, in seconds since the epoch.
"""

from dataclasses import dataclass, replace
from enum import StrEnum


class SliceState(StrEnum):
    """The states of a slice's life."""

    REQUESTED = "requested"  # a replica requests a free one
    PROVISIONING = "provisioning"  # none is free: one has to come into being, or to be given back
    RESERVED = "reserved"  # the placement group holds every host of it
    PROBING = "probing"  # chips and interconnect are probed
    LOADING = "loading"  # the engine starts: weights, compilation, warm-up
    READY = "ready"  # the engine takes requests
    DRAINING = "draining"  # it takes no more; what is in flight finishes or moves
    GONE = "gone"  # the replica no longer has it


class LoadStage(StrEnum):
    """The stage of an engine that is LOADING, as far as it reports one."""

    WEIGHTS = "weights"  # starts, and gets its weights
    COMPILING = "compiling"  # has them, compiles its programs and warms up


class EndCause(StrEnum):
    """The cause of a slice's end."""

    RELEASED = "released"  # no longer needed: scale-down, update, shutdown
    PREEMPTED = "preempted"  # taken away: spot preemption, maintenance, a host that died
    EXPIRED = "expired"  # its maximum run duration is over
    BOOT_FAILED = "boot_failed"  # probe or engine start failed, or it came up partially
    UNHEALTHY = "unhealthy"  # the engine died or hung on it
    REPLICA_LOST = "replica_lost"  # its replica fell silent; nobody had announced an end
    ADOPTED = "adopted"  # another replica has taken over slice and engine


# A replica that loses its slice may request another, which starts a new life. Within one life this
# is the order, and every state may end in GONE.
_NEXT: dict[SliceState, frozenset[SliceState]] = {
    SliceState.REQUESTED: frozenset({SliceState.PROVISIONING, SliceState.RESERVED}),
    SliceState.PROVISIONING: frozenset({SliceState.RESERVED}),
    SliceState.RESERVED: frozenset({SliceState.PROBING, SliceState.LOADING, SliceState.DRAINING}),
    SliceState.PROBING: frozenset({SliceState.LOADING, SliceState.DRAINING}),
    SliceState.LOADING: frozenset({SliceState.READY, SliceState.DRAINING}),
    SliceState.READY: frozenset({SliceState.DRAINING}),
    SliceState.DRAINING: frozenset(),
    SliceState.GONE: frozenset(),
}

# The states in which the replica holds a slice: its placement group stands.
HELD_STATES = frozenset(
    {
        SliceState.RESERVED,
        SliceState.PROBING,
        SliceState.LOADING,
        SliceState.READY,
        SliceState.DRAINING,
    }
)
WAITING = frozenset({SliceState.REQUESTED, SliceState.PROVISIONING})


class TransitionError(RuntimeError):
    """The state machine does not have this transition. The caller is at fault."""


@dataclass(frozen=True, slots=True)
class Transition:
    """The entry into a state. `at_s` is wall-clock time; `reason` is a sentence for a reader.

    `stage` is reported in LOADING, where each stage is a transition of its own; `None`: not known.
    """

    state: SliceState
    at_s: float
    reason: str
    stage: LoadStage | None = None


@dataclass(frozen=True, slots=True)
class SliceLifecycle:
    """The history of one slice, from the request for it to its end.

    `transitions` is never empty and ordered in time. `slice_name` is `None` until a slice has been
    reserved, and for ever on the compute class `local`. `cause` is set with the state GONE and only
    then.
    """

    transitions: tuple[Transition, ...]
    slice_name: str | None = None
    cause: EndCause | None = None

    @classmethod
    def begin(cls, now_s: float, reason: str = "a replica wants a slice") -> "SliceLifecycle":
        """Returns a lifecycle that has just begun."""
        return cls((Transition(SliceState.REQUESTED, now_s, reason),))

    @property
    def state(self) -> SliceState:
        """The present state."""
        return self.transitions[-1].state

    @property
    def reason(self) -> str:
        """The reason for the present state."""
        return self.transitions[-1].reason

    @property
    def entered_at_s(self) -> float:
        """The time at which the present state began; its stages do not count."""
        at_s = self.transitions[-1].at_s
        for transition in reversed(self.transitions):
            if transition.state != self.state:
                break
            at_s = transition.at_s
        return at_s

    @property
    def stage(self) -> LoadStage | None:
        """The stage of the present state; `None` if it has none, or none was reported."""
        return self.transitions[-1].stage

    def enter(
        self,
        state: SliceState,
        now_s: float,
        reason: str,
        *,
        slice_name: str | None = None,
        stage: LoadStage | None = None,
    ) -> "SliceLifecycle":
        """Returns the lifecycle with one more transition; a clock that goes back counts as no time.

        Entering the present state and stage again only changes the reason.

        Raises:
            TransitionError: the state does not follow the present one, or is GONE (see `end`); or
                a stage is given to another state than LOADING.
        """
        name = slice_name if slice_name is not None else self.slice_name
        if stage is not None and state != SliceState.LOADING:
            raise TransitionError(f"{state} has no stage {stage}")
        if state == self.state and stage not in (None, self.transitions[-1].stage):
            return replace(
                self, transitions=self._with(state, now_s, reason, stage), slice_name=name
            )
        if state == self.state:
            last = replace(self.transitions[-1], reason=reason)
            return replace(self, transitions=(*self.transitions[:-1], last), slice_name=name)
        if state not in _NEXT[self.state]:
            raise TransitionError(f"no way from {self.state} to {state}")
        return replace(self, transitions=self._with(state, now_s, reason, stage), slice_name=name)

    def end(self, cause: EndCause, now_s: float, reason: str) -> "SliceLifecycle":
        """Returns the ended lifecycle; a second end changes nothing, so the first cause stays."""
        if self.state == SliceState.GONE:
            return self
        return replace(self, transitions=self._with(SliceState.GONE, now_s, reason), cause=cause)

    def seconds_by_state(self, now_s: float) -> dict[SliceState, float]:
        """Returns the time in each state up to now. Their sum is the lifetime; GONE takes none."""
        ends_s = [transition.at_s for transition in self.transitions[1:]] + [
            max(now_s, self.transitions[-1].at_s)
        ]
        seconds: dict[SliceState, float] = {}
        for transition, end_s in zip(self.transitions, ends_s, strict=True):
            if transition.state != SliceState.GONE:
                seconds[transition.state] = (
                    seconds.get(transition.state, 0.0) + end_s - transition.at_s
                )
        return seconds

    def _with(
        self, state: SliceState, now_s: float, reason: str, stage: LoadStage | None = None
    ) -> tuple[Transition, ...]:
        return (
            *self.transitions,
            Transition(state, max(now_s, self.transitions[-1].at_s), reason, stage),
        )
