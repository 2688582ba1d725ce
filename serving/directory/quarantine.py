"""The quarantine of slices that failed: replicas are kept off them for a growing time.

Owns the growing time. Does not own what counts as a failure. Pure: callers pass `now_s`, on one
monotonic clock.

A slice is called by its name, because a reader sees the name. Its hosts are what failed: a slice of
the same name on other nodes is another slice, also while both exist.
"""

from dataclasses import dataclass

FIRST_S = 30.0
LONGEST_S = 3600.0
# A slice that has not failed for so long starts anew. It also bounds how many are remembered.
FORGET_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class _Failure:
    """The last failure of a slice. `suspects` is empty where the host is unknown."""

    name: str
    node_ids: frozenset[str]
    suspects: frozenset[str]
    count: int
    failed_at_s: float

    @property
    def until_s(self) -> float:
        # The exponent is bounded: a float cannot hold 2 ** 1024.
        return self.failed_at_s + min(LONGEST_S, FIRST_S * 2.0 ** min(self.count - 1, 16))

    def concerns(self, node_ids: frozenset[str]) -> bool:
        """Returns whether these nodes are the slice that failed, or still have a host that did."""
        return node_ids == self.node_ids or not self.suspects.isdisjoint(node_ids)


class Quarantine:
    """The slices that replicas are kept off, and the end of each quarantine."""

    def __init__(self) -> None:
        self._failures: list[_Failure] = []

    def note_failure(
        self,
        name: str,
        node_ids: frozenset[str],
        now_s: float,
        *,
        suspects: frozenset[str] = frozenset(),
    ) -> float:
        """Quarantines a slice for 30 s, then twice as long each time, to an hour; returns the end.

        `suspects` are the node ids of the hosts that a probe named. A slice that still has one of
        them stays in quarantine even when its other hosts were replaced.
        """
        self._failures = [old for old in self._failures if now_s - old.failed_at_s < FORGET_S]
        before = [failure for failure in self._failures if failure.concerns(node_ids)]
        count = 1 + max((failure.count for failure in before), default=0)
        failure = _Failure(name, node_ids, suspects & node_ids, count, now_s)
        self._failures = [each for each in self._failures if each not in before]
        self._failures.append(failure)
        return failure.until_s

    def note_success(self, name: str) -> None:
        """Forgets the failures of a slice that serves, and of all that had its name."""
        self._failures = [failure for failure in self._failures if failure.name != name]

    def quarantined_until_s(self, node_ids: frozenset[str], now_s: float) -> float | None:
        """Returns the end of the quarantine of these nodes' slice; `None` if it is in none."""
        return max(
            (
                failure.until_s
                for failure in self._failures
                if now_s < failure.until_s and failure.concerns(node_ids)
            ),
            default=None,
        )
