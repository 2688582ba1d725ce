"""Counts the ends of slices that nobody took away: the model's own failures, no class's.

An engine that crashes does so on every class. So these are counted for the model and shown with its
plan, and no class gets a worse name for them. Deterministic: time comes in.
"""

from collections import Counter, deque
from collections.abc import Iterable

from autoscaling.records import SliceLoss
from serving.domain.slice_lifecycle import EndCause

# How long a failure is shown.
_SHOWN_FOR_S = 3600.0
_KEPT = 1000
_OWN_CAUSES = frozenset({EndCause.BOOT_FAILED, EndCause.UNHEALTHY, EndCause.REPLICA_LOST})


class EngineFailures:
    """The failures of one model within the last hour."""

    def __init__(self) -> None:
        self._failures: deque[tuple[float, str]] = deque(maxlen=_KEPT)

    def observe(self, now_s: float, losses: Iterable[SliceLoss]) -> None:
        """Takes the failures among `losses`, and forgets what is older than an hour."""
        for each in losses:
            if each.cause in _OWN_CAUSES:
                self._failures.append((now_s, each.cause))
        while self._failures and now_s - self._failures[0][0] > _SHOWN_FOR_S:
            self._failures.popleft()

    @property
    def words(self) -> str:
        """What failed, for the arithmetic of a plan; empty where nothing did."""
        if not self._failures:
            return ""
        counts = Counter(cause for _, cause in self._failures)
        causes = ", ".join(f"{count} {cause}" for cause, count in sorted(counts.items()))
        return f"; failed within an hour: {causes}, which no class is blamed for"
