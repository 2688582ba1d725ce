"""Decides how long tokens may wait to be sent together, by how busy the gateway's loop is.

Pure: the caller passes the time, and what the loop's thread has used and wanted of its core.
"""

from dataclasses import dataclass

# How often the load is looked at: longer than a turn, shorter than anybody notices.
WINDOW_S = 0.2
# Of what it gets of a core, the shares that the loop's thread uses: below the first one nothing
# waits, from the second on tokens wait for as long as they may. Near all of it there would be
# nothing left to react with.
_IDLE_RATIO, _FULL_RATIO = 0.5, 0.9
# How much of what it was before the time keeps in each window as it falls. A longer wait makes the
# loop less busy, which asks for a shorter one: without this the two would chase each other.
_KEPT = 0.3
# Shorter waits join nothing.
_SHORTEST_S = 0.002


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """For how long a thread has computed, and waited for a core that others had, in seconds."""

    computed_s: float
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HoldBounds:
    """The shortest and the longest time that tokens wait, in seconds."""

    least_s: float = 0.0
    most_s: float = 0.0


class HoldPace:
    """Tells how long tokens wait at present."""

    def __init__(self, bounds: HoldBounds, now_s: float, times: ThreadTimes) -> None:
        """Begins with the shortest time; `times` are those of the loop's thread so far."""
        self._bounds = bounds
        self._at_s, self._times = now_s, times
        self._wanted_s = 0.0
        self.hold_s = bounds.least_s

    def is_due(self, now_s: float) -> bool:
        """Returns whether the load should be looked at again."""
        return now_s - self._at_s >= WINDOW_S

    def look(self, now_s: float, times: ThreadTimes) -> None:
        """Takes in the load since the last look.

        While it waits for a core the thread is neither busy nor idle: with half a core and work for
        a whole one it is full, and with little to do it is idle beside whatever neighbours.
        """
        computed_s = times.computed_s - self._times.computed_s
        given_s = now_s - self._at_s - (times.waited_s - self._times.waited_s)
        self._at_s, self._times = now_s, times
        busy_ratio = computed_s / max(given_s, computed_s, 1e-9)
        share = (busy_ratio - _IDLE_RATIO) / (_FULL_RATIO - _IDLE_RATIO)
        wanted_s = self._bounds.most_s * min(1.0, max(0.0, share))
        # Longer at once, shorter by and by.
        falling_s = wanted_s + _KEPT * (self._wanted_s - wanted_s)
        self._wanted_s = max(wanted_s, falling_s)
        if self._wanted_s < _SHORTEST_S:
            self._wanted_s = 0.0
        self.hold_s = min(self._bounds.most_s, max(self._bounds.least_s, self._wanted_s))
