"""The slices that Serve was asked for and that no replica tells of. Deterministic: time comes in.

A replica tells of the slice that it waits for, and how late it is. One that Serve does not start
tells nothing: Serve 2.60 gives a deployment up after three failed starts for each replica wanted,
or twenty while it is rolled, and Ray may find no room for its actor. Its slice would be awaited for
ever, and no other class asked.
"""

from collections.abc import Iterable, Mapping

from autoscaling.records import SliceView
from serving.domain.slice_lifecycle import SliceState

# A replica that starts tells of itself within so many seconds.
_GRACE_S = 20.0


class UnseenOrders:
    """What is missing of each class's target, and since when."""

    def __init__(self) -> None:
        self._since_s: dict[str, list[float]] = {}  # by class, the oldest first
        self._seen: frozenset[str] = frozenset()

    def look(
        self, now_s: float, targets: Mapping[str, int], slices: Iterable[SliceView]
    ) -> tuple[SliceView, ...]:
        """Takes in the targets and slices of now; returns what is missing, as slices that wait.

        A replica that is new is taken for the one that was missing for longest. What drains is no
        part of a target.
        """
        known = tuple(slices)
        before, self._seen = self._seen, frozenset(each.slice_id for each in known)
        missing: list[SliceView] = []
        for name, target in targets.items():
            of_class = [each for each in known if each.compute_class == name]
            num_new = sum(each.slice_id not in before for each in of_class)
            num_there = sum(each.state != SliceState.DRAINING for each in of_class)
            since_s = [min(at_s, now_s) for at_s in self._since_s.get(name, [])[num_new:]]
            num_missing = max(0, target - num_there)
            since_s = [*since_s, *[now_s] * num_missing][:num_missing]
            self._since_s[name] = since_s
            missing += [
                # An order is itself by its name: the next one that is missing is another.
                SliceView(
                    f"{name}, not started {number} since {at_s:.0f}",
                    name,
                    SliceState.REQUESTED,
                    at_s,
                    at_s,
                )
                for number, at_s in enumerate(since_s)
                if now_s - at_s >= _GRACE_S
            ]
        return tuple(missing)


def unseen_words(now_s: float, unseen: Iterable[SliceView]) -> tuple[str, ...]:
    """Returns an alert for each class of which Serve does not start what it was asked for."""
    by_class: dict[str, list[float]] = {}
    for each in unseen:
        by_class.setdefault(each.compute_class, []).append(now_s - each.requested_at_s)
    return tuple(
        f"Serve starts too few replicas of {name}: the first one that is missing is "
        f"{max(ages_s):.0f} s late, of {len(ages_s)} (`serve status` says why)"
        for name, ages_s in sorted(by_class.items())
    )
