"""Who is offered which free slice: one slice to one replica at a time.

Owns the offers that are out. They only keep replicas from racing for one slice; the lock is the
placement group, and a directory that restarts and forgets its offers does no harm. Pure: callers
pass `now_s`, on one monotonic clock.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from serving.slices.inventory import Survey, WholeSlice

# How long an offer keeps others away. The placement group stands in less (0.2 to 1.4 s, Ray 2.60),
# and from then on the slice is not free.
OFFER_S = 15.0


@dataclass(frozen=True, slots=True)
class Offer:
    """The slice a replica may reserve now (`None`: it has to wait), and why."""

    slice: WholeSlice | None
    reason: str


class Claims:
    """The offers that are out, by replica."""

    def __init__(self) -> None:
        self._out: dict[str, tuple[frozenset[str], float]] = {}

    def offer(
        self,
        replica_id: str,
        survey: Survey,
        now_s: float,
        barred_until_s: Callable[[WholeSlice], float | None],
        *,
        tried: Iterable[frozenset[str]] = (),
    ) -> Offer:
        """A free slice nobody else has been offered; the replica's earlier offer is withdrawn.

        `barred_until_s` says until when a slice is in quarantine (`None`: it is not). `tried` are
        the slices the replica could not reserve a moment ago: they come last.
        """
        self.withdraw(replica_id)
        self._out = {who: offer for who, offer in self._out.items() if offer[1] > now_s}
        promised = frozenset[str]().union(*(node_ids for node_ids, _ in self._out.values()))
        failed = set(tried)
        refused = dict(survey.refused)
        candidates = []
        for free in survey.free:
            barred = barred_until_s(free)
            if barred is not None:
                refused[free.name] = f"in quarantine for another {barred - now_s:.0f} s"
            elif free.node_ids & promised:
                refused[free.name] = "offered to another replica"
            else:
                candidates.append(free)
        if not candidates:
            return Offer(None, _words(refused))
        chosen = min(candidates, key=lambda each: (each.node_ids in failed, each.name))
        self._out[replica_id] = (chosen.node_ids, now_s + OFFER_S)
        return Offer(chosen, f"{chosen.name} is free")

    def withdraw(self, replica_id: str) -> None:
        """The replica has its slice, or no longer wants one."""
        self._out.pop(replica_id, None)


def _words(refused: dict[str, str]) -> str:
    if not refused:
        return "there is no such slice"
    shown = [f"{name}: {reason}" for name, reason in list(refused.items())[:4]]
    more = len(refused) - len(shown)
    return "no slice is free (" + "; ".join(shown) + (f"; {more} more)" if more else ")")
