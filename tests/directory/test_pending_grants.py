"""Which replica is granted which slice. Pure."""

from collections.abc import Iterable

import pytest

from serving.directory.pending_grants import GRANT_S, KEEP_S, Grant, PendingGrants, SliceWish
from serving.domain.inventory import ZONE_LABEL, Slice, SliceRequest
from serving.domain.supply.found import SliceMatches
from tests.supply_builders import host


def free(*names: str, zone: str | None = None) -> tuple[Slice, ...]:
    labels = {} if zone is None else {ZONE_LABEL: zone}
    return tuple(
        Slice(
            name,
            tuple(host(name, index, node_id=f"{name}/{index}", labels=labels) for index in (0, 1)),
        )
        for name in names
    )


def wish(
    replica_id: str, num_slices: int = 1, *, since_s: float = 0.0, excluded: Iterable[str] = ()
) -> SliceWish:
    request = SliceRequest("spot", "v6e-8", "2x4", 2, 4, {}, num_slices)
    nodes = frozenset(frozenset({f"{name}/0", f"{name}/1"}) for name in excluded)
    return SliceWish(replica_id, request, since_s, nodes)


class Sharing:
    """One directory's grants, asked again and again."""

    def __init__(self) -> None:
        self._grants = PendingGrants()

    def share(
        self,
        found: tuple[Slice, ...],
        *wishes: SliceWish,
        at_s: float = 0.0,
        failed_at_s: dict[frozenset[str], float] | None = None,
    ) -> dict[str, Grant]:
        return self._grants.share(
            wishes, lambda _: SliceMatches(found, {}), at_s, failed_at_s or {}
        )

    def names(self, *arguments: object, **options: object) -> dict[str, list[str]]:
        grants = self.share(*arguments, **options)  # type: ignore[arg-type]
        return {who: [each.name for each in grant.slices] for who, grant in grants.items()}


def test_two_replicas_are_never_granted_one_slice() -> None:
    sharing = Sharing()
    asked = [wish("r1"), wish("r2"), wish("r3")]
    assert sharing.names(free("a", "b"), *asked) == {"r1": ["a"], "r2": ["b"], "r3": []}
    late = sharing.share(free("a", "b"), wish("r4"))["r4"]
    assert (late.slices, "a: granted to another replica" in late.reason) == ((), True)


def test_slice_goes_to_the_replica_that_has_waited_longest() -> None:
    asked = [wish("young", since_s=20.0), wish("old", since_s=10.0)]
    assert Sharing().names(free("a"), *asked) == {"old": ["a"], "young": []}


def test_grant_that_was_not_taken_up_goes_to_the_next() -> None:
    sharing = Sharing()
    sharing.share(free("a"), wish("r1"))
    assert sharing.names(free("a"), wish("r2"), at_s=GRANT_S - 1) == {"r2": []}
    assert sharing.names(free("a"), wish("r2"), at_s=GRANT_S) == {"r2": ["a"]}


def test_replica_that_asks_again_gives_its_earlier_grant_back() -> None:
    sharing = Sharing()
    sharing.share(free("a", "b"), wish("r1"))
    assert sharing.names(free("a", "b"), wish("r1", excluded=["a"])) == {"r1": ["b"]}
    assert sharing.names(free("a", "b"), wish("r2")) == {"r2": ["a"]}


def test_joined_slices_are_granted_together_or_not_at_all() -> None:
    """Two replicas that want two of three: neither is left with one."""
    grants = Sharing().share(free("a", "b", "c"), wish("r1", 2), wish("r2", 2))
    assert [each.name for each in grants["r1"].slices] == ["a", "b"]
    assert grants["r1"].reason == "a and b are free"
    assert grants["r2"].slices == ()
    assert grants["r2"].reason == (
        "1 of 2 slices are free: c (a: granted to another replica; b: granted to another replica)"
    )


def test_joined_replica_is_not_starved_by_those_that_need_one() -> None:
    """Slices come one by one, and there is always somebody who would take one."""
    sharing = Sharing()
    joined = wish("joined", 2, since_s=0.0)
    first = sharing.share(free("a"), joined, wish("r1", since_s=5.0))
    assert first["r1"].slices == ()
    assert "a: kept for joined, which needs several and waited longer" in first["r1"].reason
    both = sharing.names(free("a", "b"), joined, wish("r1", since_s=5.0), at_s=KEEP_S - 1)
    assert both == {"joined": ["a", "b"], "r1": []}


def test_slice_is_kept_for_a_joined_replica_only_for_a_while() -> None:
    """What never becomes two is not idle for ever, nor is the joined replica forgotten."""
    sharing = Sharing()
    asked = [wish("joined", 2), wish("r1", since_s=5.0)]
    taken = {}
    for at_s in (0.0, KEEP_S - 1, KEEP_S, 2 * KEEP_S - 1, 2 * KEEP_S):
        taken[at_s] = sharing.names(free("a"), *asked, at_s=at_s)["r1"] == ["a"]
    assert taken == {
        0.0: False, KEEP_S - 1: False, KEEP_S: True, 2 * KEEP_S - 1: True, 2 * KEEP_S: False,
    }  # fmt: skip


def test_nothing_is_kept_for_a_joined_replica_that_came_later() -> None:
    asked = [wish("joined", 2, since_s=5.0), wish("r1", since_s=0.0)]
    assert Sharing().names(free("a"), *asked)["r1"] == ["a"]


def test_joined_slices_are_of_one_zone() -> None:
    found = (*free("a", zone="us-a"), *free("b", "c", zone="us-b"))
    assert Sharing().names(found, wish("r", 2)) == {"r": ["b", "c"]}
    apart = Sharing().share(found[:2], wish("r", 2))["r"]
    assert (apart.slices, apart.reason) == ((), "2 of 2 slices are free, in 2 zones: a, b")


def test_slices_that_were_tried_come_last() -> None:
    assert Sharing().names(free("a", "b", "c"), wish("r", 2, excluded="ab")) == {"r": ["c", "a"]}


def test_slice_whose_failure_is_longest_ago_comes_before_one_that_has_just_failed() -> None:
    failed = {
        frozenset({"a/0", "a/1"}): 300.0,
        frozenset({"b/0", "b/1"}): 200.0,
    }
    sharing = Sharing()
    order = []
    for number in range(3):
        (taken,) = sharing.share(
            free("a", "b", "c"), wish(f"r{number}"), failed_at_s=failed
        ).values()
        order += [each.name for each in taken.slices]
    assert order == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("refused", "reason"),
    [({}, "there is no such slice"), ({"a": "it is taken"}, "no slice is free (a: it is taken)")],
)
def test_replica_learns_why_it_gets_none(refused: dict[str, str], reason: str) -> None:
    grants = PendingGrants().share([wish("r")], lambda _: SliceMatches((), refused), 0.0)
    assert grants["r"] == Grant((), reason)
