"""Slices that failed, and for how long nobody is offered them.

Owns the growing time. Does not own what counts as a failure. Pure: callers pass `now_s`, on one
monotonic clock.

A slice is known by its name, because that is what a reader sees, but it is its hosts that failed: a
slice of the same name on other nodes is another slice.
"""

from dataclasses import dataclass

FIRST_S = 30.0
LONGEST_S = 3600.0
# A slice that has not failed for so long starts anew. It also bounds how many are remembered.
FORGET_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class _Failure:
    """The last failure of a name. `suspects` is empty where nobody knows which host it was."""

    node_ids: frozenset[str]
    suspects: frozenset[str]
    count: int
    failed_at_s: float

    @property
    def until_s(self) -> float:
        # The exponent is bounded: a float cannot hold 2 ** 1024.
        return self.failed_at_s + min(LONGEST_S, FIRST_S * 2.0 ** min(self.count - 1, 16))

    def concerns(self, node_ids: frozenset[str]) -> bool:
        """Whether these nodes are the slice that failed, or still have a host that did."""
        return node_ids == self.node_ids or not self.suspects.isdisjoint(node_ids)


class Quarantine:
    """Which slices are kept off, and until when."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}

    def note_failure(
        self,
        name: str,
        node_ids: frozenset[str],
        now_s: float,
        *,
        suspects: frozenset[str] = frozenset(),
    ) -> float:
        """Until when the slice is kept off: 30 s the first time, then doubling up to an hour.

        `suspects` are the node ids of the hosts that a probe named. A slice that still has one of
        them stays in quarantine even when its other hosts were replaced.
        """
        self._forget(now_s)
        last = self._failures.get(name)
        count = last.count + 1 if last is not None and last.concerns(node_ids) else 1
        failure = _Failure(node_ids, suspects & node_ids, count, now_s)
        self._failures[name] = failure
        return failure.until_s

    def note_success(self, name: str) -> None:
        """The slice serves: its failures are forgotten."""
        self._failures.pop(name, None)

    def barred_until_s(self, name: str, node_ids: frozenset[str], now_s: float) -> float | None:
        """Until when nobody may have the slice; `None`: it may be had."""
        failure = self._failures.get(name)
        if failure is None or now_s >= failure.until_s or not failure.concerns(node_ids):
            return None
        return failure.until_s

    def _forget(self, now_s: float) -> None:
        self._failures = {
            name: failure
            for name, failure in self._failures.items()
            if now_s - failure.failed_at_s < FORGET_S
        }
