"""The grants of free slices: a slice is granted to one replica at a time.

Owns the pending grants. They only keep replicas from racing for one slice; the lock is the
placement group, and a directory that restarts and forgets its grants does no harm. A replica that
needs several slices is granted all of them or none, so that no two replicas wait for each other's.
Pure: callers pass `now_s`, on one monotonic clock.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from serving.domain.inventory import Slice, SliceMatches

# How long a grant keeps others away. The placement group stands in less (0.2 to 1.4 s, Ray 2.60),
# and from then on the slice is not free.
GRANT_S = 15.0


@dataclass(frozen=True, slots=True)
class Grant:
    """The slices that a replica may reserve now, with the reason; without any it has to wait."""

    slices: tuple[Slice, ...]
    reason: str


class PendingGrants:
    """The pending grants, by replica."""

    def __init__(self) -> None:
        self._out: dict[str, tuple[frozenset[str], float]] = {}

    def grant(
        self,
        replica_id: str,
        match_slices: SliceMatches,
        now_s: float,
        quarantined_until_s: Callable[[Slice], float | None],
        *,
        num_slices: int = 1,
        excluded: Iterable[frozenset[str]] = (),
    ) -> Grant:
        """Grants `num_slices` free slices to this replica alone and withdraws its earlier grant.

        `quarantined_until_s` returns the end of a slice's quarantine (`None`: it is in none).
        `excluded` are the slices that the replica could not reserve a moment ago: they come last.
        Several slices are of one zone, because they work as one.
        """
        self._out.pop(replica_id, None)
        self._out = {who: grant for who, grant in self._out.items() if grant[1] > now_s}
        promised = frozenset[str]().union(*(node_ids for node_ids, _ in self._out.values()))
        refused = dict(match_slices.refused)
        candidates = []
        for free in match_slices.free:
            quarantined_until = quarantined_until_s(free)
            if quarantined_until is not None:
                refused[free.name] = f"in quarantine for another {quarantined_until - now_s:.0f} s"
            elif free.node_ids & promised:
                refused[free.name] = "granted to another replica"
            else:
                candidates.append(free)
        chosen = _choose(candidates, num_slices, frozenset(excluded))
        if not chosen:
            return Grant((), _no_grant_reason(refused, candidates, num_slices))
        node_ids = frozenset[str]().union(*(each.node_ids for each in chosen))
        self._out[replica_id] = (node_ids, now_s + GRANT_S)
        names = " and ".join(each.name for each in chosen)
        return Grant(chosen, f"{names} {'is' if len(chosen) == 1 else 'are'} free")


def _choose(
    candidates: Iterable[Slice], num_slices: int, excluded: frozenset[frozenset[str]]
) -> tuple[Slice, ...]:
    """Returns `num_slices` of one zone, with `excluded` ones last; an empty tuple if too few."""

    def rank(each: Slice) -> tuple[bool, str]:
        return each.node_ids in excluded, each.name

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
