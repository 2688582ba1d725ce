"""The grants of free slices: who gets which, the one that has waited longest first.

Owns the pending grants and the order of those who wait. Grants only keep replicas from racing for
one slice; the lock is the placement group, and a directory that restarts and forgets its grants
does no harm. A replica that needs several slices is granted all of them or none, so that no two
replicas wait for each other's. Slices that are too few for it are kept for it for a while, or those
who need one would take each as it comes. Pure: callers pass `now_s`, on one monotonic clock.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from serving.domain.inventory import Slice, SliceRequest
from serving.domain.slice_records import SliceRecord
from serving.domain.supply.found import SliceMatches

# How long a grant keeps others away. The placement group stands in less (0.2 to 1.4 s, Ray 2.60),
# and from then on the slice is not free.
GRANT_S = 15.0
# For how long slices are kept for a replica that needs more of them, and then for how long not:
# chips that wait are paid for.
KEEP_S = 300.0


@dataclass(frozen=True, slots=True)
class Grant:
    """The slices that a replica may reserve now, with the reason; without any it has to wait.

    An `engine` is one without a replica, which it may take over instead.
    """

    slices: tuple[Slice, ...]
    reason: str
    engine: SliceRecord | None = None


@dataclass(frozen=True, slots=True)
class SliceWish:
    """A replica that waits: `since_s` is on any clock, the same for all.

    `excluded` are the node ids of slices that it could not reserve a moment ago: they come last.
    """

    replica_id: str
    request: SliceRequest
    since_s: float
    excluded: frozenset[frozenset[str]] = field(default_factory=frozenset)


class PendingGrants:
    """The pending grants, by replica."""

    def __init__(self) -> None:
        self._out: dict[str, tuple[frozenset[str], float]] = {}
        # Since when slices have been kept for a replica that needs more.
        self._kept_since_s: dict[str, float] = {}

    def share(
        self,
        wishes: Iterable[SliceWish],
        match: Callable[[SliceRequest], SliceMatches],
        now_s: float,
        failed_at_s: Mapping[frozenset[str], float] = MappingProxyType({}),
    ) -> dict[str, Grant]:
        """Returns a grant for each of `wishes`, by replica; their earlier grants are withdrawn.

        `match` says which slices are of a kind. `failed_at_s` has the last failure of slices by
        their nodes: those that failed latest come last. Several slices are of one zone, because
        they work as one.
        """
        ordered = sorted(wishes, key=lambda wish: (wish.since_s, wish.replica_id))
        waiting = {wish.replica_id for wish in ordered}
        self._out = {
            who: grant
            for who, grant in self._out.items()
            if grant[1] > now_s and who not in waiting
        }
        self._kept_since_s = {
            who: since_s for who, since_s in self._kept_since_s.items() if who in waiting
        }
        kept: dict[str, str] = {}  # for whom a host is kept, by node id
        grants = {}
        for wish in ordered:
            grants[wish.replica_id] = self._grant(
                wish, match(wish.request), now_s, failed_at_s, kept
            )
        return grants

    def _grant(
        self,
        wish: SliceWish,
        matches: SliceMatches,
        now_s: float,
        failed_at_s: Mapping[frozenset[str], float],
        kept: dict[str, str],
    ) -> Grant:
        promised = frozenset[str]().union(*(node_ids for node_ids, _ in self._out.values()))
        refused = dict(matches.refused)
        candidates = []
        for free in matches.free:
            keeper = next((kept[each] for each in free.node_ids if each in kept), None)
            if free.node_ids & promised:
                refused[free.name] = "granted to another replica"
            elif keeper is not None:
                refused[free.name] = f"kept for {keeper}, which needs several and waited longer"
            else:
                candidates.append(free)
        chosen = _choose(candidates, wish, failed_at_s)
        if not chosen:
            if candidates and self._is_kept_for(wish, now_s):
                kept |= dict.fromkeys(
                    (each for free in candidates for each in free.node_ids), wish.replica_id
                )
            return Grant((), _no_grant_reason(refused, candidates, wish.request.num_slices))
        node_ids = frozenset[str]().union(*(each.node_ids for each in chosen))
        self._out[wish.replica_id] = (node_ids, now_s + GRANT_S)
        self._kept_since_s.pop(wish.replica_id, None)
        names = " and ".join(each.name for each in chosen)
        return Grant(chosen, f"{names} {'is' if len(chosen) == 1 else 'are'} free")

    def _is_kept_for(self, wish: SliceWish, now_s: float) -> bool:
        """Returns whether slices that are too few for this replica are kept for it now."""
        if wish.request.num_slices == 1:
            return False
        since_s = self._kept_since_s.setdefault(wish.replica_id, now_s)
        return (now_s - since_s) % (2 * KEEP_S) < KEEP_S


def _choose(
    candidates: Iterable[Slice], wish: SliceWish, failed_at_s: Mapping[frozenset[str], float]
) -> tuple[Slice, ...]:
    """Returns as many as are wished, of one zone; an empty tuple if there are too few.

    Those that never failed come first, then those whose failure is longest ago, and last those that
    the replica could not reserve.
    """
    num_slices = wish.request.num_slices

    def rank(each: Slice) -> tuple[bool, float, str]:
        return each.node_ids in wish.excluded, failed_at_s.get(each.node_ids, 0.0), each.name

    by_zone: dict[str | None, list[Slice]] = {}
    for each in sorted(candidates, key=rank):
        by_zone.setdefault(each.zone, []).append(each)
    enough = [zone[:num_slices] for zone in by_zone.values() if len(zone) >= num_slices]
    best = min(enough, key=lambda zone: [rank(each) for each in reversed(zone)], default=[])
    return tuple(best)


def _no_grant_reason(refused: dict[str, str], free: list[Slice], num_slices: int) -> str:
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
