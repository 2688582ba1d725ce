"""Knows which slices end on their own: their maximum run is over then.

A flex-start slice lives for seven days at most, and when that is over is known from its start.
Deterministic: time comes in.
"""

from collections.abc import Iterable

from autoscaling.records import SliceView
from serving.domain.slice_lifecycle import HELD_STATES, SliceState

# A slice whose end was announced long before takes no requests in the last two minutes
# (`serving.config.slice_settings.MAX_DRAIN_S`), and decisions are some seconds apart.
_LEAVES_BEFORE_S = 130.0
_STAYING = HELD_STATES - {SliceState.DRAINING}


def leaves_in(each: SliceView, now_s: float) -> float | None:
    """Returns in how long a slice leaves that is held and does not drain yet.

    `None` if that is not known, as of one that is not held.
    """
    if each.expires_at_s is None or each.state not in _STAYING:
        return None
    return each.expires_at_s - _LEAVES_BEFORE_S - now_s


def num_ending(slices: Iterable[SliceView], now_s: float, within_s: float) -> int:
    """Returns how many of `slices` end within that time."""
    ends_in_s = (leaves_in(each, now_s) for each in slices)
    return sum(1 for each in ends_in_s if each is not None and each < within_s)


class KnownEnds:
    """The ends of one class's slices: those that come, and those of a while ago."""

    def __init__(self) -> None:
        self._leaves_at_s: dict[str, float] = {}

    def observe(self, now_s: float, slices: Iterable[SliceView], kept_for_s: float) -> None:
        """Records when the slices leave; an end is kept for so long after it."""
        known = {
            each.slice_id: each.expires_at_s - _LEAVES_BEFORE_S
            for each in slices
            if each.state in HELD_STATES and each.expires_at_s is not None
        }
        gone = {
            name: at_s
            for name, at_s in self._leaves_at_s.items()
            if at_s <= now_s < at_s + kept_for_s
        }
        self._leaves_at_s = gone | known

    def count(self, now_s: float, within_s: float) -> int:
        """Returns how many have left lately or leave within `within_s`."""
        return sum(1 for at_s in self._leaves_at_s.values() if at_s - now_s < within_s)
