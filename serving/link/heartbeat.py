"""Decides when to send a ping, and when a peer has been silent for too long.

Owns the judgement, including the case that our own event loop stood still. Does not own timers
or sockets. Pure: time is an argument (seconds of one monotonic clock), no I/O, no chance.
"""

from dataclasses import dataclass

from serving.domain.limits import HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S

# uvloop rounds timers to whole milliseconds, so a tick may come half of one too early.
EARLY_S = 0.001


@dataclass(frozen=True, slots=True)
class HeartbeatConfig:
    """The interval of an end's pings and the timeout for its peer's silence. Both in seconds.

    The peer's `interval_s` has to fit several times into `timeout_s`.
    """

    interval_s: float = HEARTBEAT_INTERVAL_S
    timeout_s: float = HEARTBEAT_TIMEOUT_S

    def __post_init__(self) -> None:
        if not 0 < self.interval_s < self.timeout_s:
            msg = f"interval_s={self.interval_s} must lie between 0 and timeout_s={self.timeout_s}"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Beat:
    """The decision of one tick."""

    is_peer_dead: bool
    is_ping_due: bool
    is_late: bool  # our own loop stood still, so nothing was judged by waiting


class Pulse:
    """Judges the liveness of one peer.

    Only time in which our own loop turned counts as the peer's silence. A tick that comes late may
    run before the socket has been read, so it judges nothing; the next one, late or not, does.
    """

    __slots__ = ("_config", "_ping_at_s", "_was_late", "due_at_s", "heard_at_s")

    def __init__(self, config: HeartbeatConfig, now_s: float) -> None:
        self._config = config
        self.heard_at_s = now_s
        self._ping_at_s = now_s + config.interval_s
        self.due_at_s = self._ping_at_s  # the instant at which `tick` has to be called
        self._was_late = False

    def tick(self, now_s: float) -> Beat:
        """Judges the peer and schedules the next tick."""
        interval_s, timeout_s = self._config.interval_s, self._config.timeout_s
        late_s = now_s - self.due_at_s
        is_late = late_s > interval_s / 2
        if is_late:
            self.heard_at_s = min(now_s, self.heard_at_s + late_s)
        is_judged = not is_late or self._was_late
        self._was_late = is_late and not self._was_late
        is_peer_dead = is_judged and now_s - self.heard_at_s >= timeout_s - EARLY_S
        is_ping_due = now_s >= self._ping_at_s - EARLY_S
        if is_ping_due:
            self._ping_at_s = now_s + interval_s
        # A peer already past the timeout is judged again soon, once the socket has been read.
        silent_at_s = max(self.heard_at_s + timeout_s, now_s + interval_s / 4)
        self.due_at_s = min(self._ping_at_s, silent_at_s)
        return Beat(is_peer_dead, is_ping_due, is_late)
