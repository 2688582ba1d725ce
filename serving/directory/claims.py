"""Who is offered which free slices: one slice to one replica at a time, and all that it needs.

Owns the offers that are out. They only keep replicas from racing for one slice; the lock is the
placement group, and a directory that restarts and forgets its offers does no harm. A replica that
needs several is offered all of them or none, so that no two replicas wait for each other's. Pure:
callers pass `now_s`, on one monotonic clock.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from serving.domain.inventory import Survey, WholeSlice

# How long an offer keeps others away. The placement group stands in less (0.2 to 1.4 s, Ray 2.60),
# and from then on the slice is not free.
OFFER_S = 15.0


@dataclass(frozen=True, slots=True)
class Offer:
    """The slices a replica may reserve now, all of them (empty: it has to wait), and why."""

    slices: tuple[WholeSlice, ...]
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
        num_slices: int = 1,
        tried: Iterable[frozenset[str]] = (),
    ) -> Offer:
        """So many free slices nobody else has been offered; the earlier offer is withdrawn.

        `barred_until_s` says until when a slice is in quarantine (`None`: it is not). `tried` are
        the slices the replica could not reserve a moment ago: they come last. Several slices are of
        one zone, for they work as one.
        """
        self.withdraw(replica_id)
        self._out = {who: offer for who, offer in self._out.items() if offer[1] > now_s}
        promised = frozenset[str]().union(*(node_ids for node_ids, _ in self._out.values()))
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
        chosen = _choose(candidates, num_slices, frozenset(tried))
        if not chosen:
            return Offer((), _words(refused, candidates, num_slices))
        node_ids = frozenset[str]().union(*(each.node_ids for each in chosen))
        self._out[replica_id] = (node_ids, now_s + OFFER_S)
        names = " and ".join(each.name for each in chosen)
        return Offer(chosen, f"{names} {'is' if len(chosen) == 1 else 'are'} free")

    def withdraw(self, replica_id: str) -> None:
        """The replica has its slices, or no longer wants any."""
        self._out.pop(replica_id, None)


def _choose(
    candidates: Iterable[WholeSlice], num_slices: int, tried: frozenset[frozenset[str]]
) -> tuple[WholeSlice, ...]:
    """The first so many of one zone, those that were tried last; empty where no zone has enough."""

    def rank(each: WholeSlice) -> tuple[bool, str]:
        return each.node_ids in tried, each.name

    by_zone: dict[str | None, list[WholeSlice]] = {}
    for each in sorted(candidates, key=rank):
        by_zone.setdefault(each.zone, []).append(each)
    enough = [zone[:num_slices] for zone in by_zone.values() if len(zone) >= num_slices]
    best = min(enough, key=lambda zone: [rank(each) for each in reversed(zone)], default=[])
    return tuple(best)


def _words(refused: dict[str, str], free: list[WholeSlice], num_slices: int) -> str:
    """Why there is no offer."""
    if not refused and not free:
        return "there is no such slice"
    head = "no slice is free"
    if free:
        zones = {each.zone for each in free}
        spread = f", in {len(zones)} zones" if len(zones) > 1 else ""
        names = ", ".join(each.name for each in free[:4])
        head = f"{len(free)} of {num_slices} slices are free{spread}: {names}"
    shown = [f"{name}: {reason}" for name, reason in list(refused.items())[:4]]
    more = len(refused) - len(shown)
    details = "; ".join(shown) + (f"; {more} more" if more else "")
    return f"{head} ({details})" if details else head
