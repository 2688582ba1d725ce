"""Who takes over which engine, and which engines nobody will. Pure."""

from dataclasses import replace

import pytest

from serving.directory.orphans import OFFER_S, OrphanOffers, fits, is_wanted, outdated
from serving.domain.slice_records import SliceRecord
from tests.supply_builders import life, with_engine

WAITS = replace(life("new"), fingerprint="f")


def orphan(replica_id: str, **changes: object) -> SliceRecord:
    made = replace(with_engine(replica_id), is_orphan=True)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_each_engine_is_offered_to_one_replica() -> None:
    offers = OrphanOffers()
    records = [orphan("a"), orphan("b")]
    others = [replace(WAITS, replica_id=name) for name in ("one", "two", "three")]
    found = [offers.offer(own, records, now_s=0.0) for own in others]
    assert [None if each is None else each.replica_id for each in found] == ["a", "b", None]


def test_engine_that_could_not_be_had_is_offered_again_later() -> None:
    offers = OrphanOffers()
    assert offers.offer(WAITS, [orphan("a")], now_s=0.0) is not None
    assert offers.offer(WAITS, [orphan("a")], now_s=OFFER_S - 1) is None
    assert offers.offer(WAITS, [orphan("a")], now_s=OFFER_S) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "another"},
        {"model": "another"},
        {"compute_class": "reserved"},
        {"is_orphan": False},
        {"part": 1},
    ],
)
def test_only_an_orphan_that_the_replica_would_start_itself_is_offered(
    changes: dict[str, object],
) -> None:
    assert OrphanOffers().offer(WAITS, [orphan("a", **changes)], now_s=0.0) is None


def test_engine_without_a_fingerprint_is_nobodys() -> None:
    assert not fits(replace(WAITS, fingerprint=""), orphan("a", fingerprint=""))


def test_engine_is_wanted_while_a_replica_waits_that_would_start_the_same() -> None:
    own = orphan("a", is_orphan=False)
    assert is_wanted(own, [own, WAITS])
    assert not is_wanted(own, [own])
    assert not is_wanted(own, [own, orphan("b", is_orphan=False)])
    assert not is_wanted(own, [own, replace(WAITS, fingerprint="of a new version")])


def test_waiting_replica_wants_one_engine() -> None:
    own = orphan("a", is_orphan=False)
    assert not is_wanted(own, [own, WAITS, orphan("b")])
    assert is_wanted(own, [own, WAITS, replace(WAITS, replica_id="two"), orphan("b")])


def test_orphan_of_a_version_that_its_deployment_no_longer_has_is_outdated() -> None:
    new = replace(WAITS, fingerprint="of a new version")
    assert outdated([orphan("a"), new]) == (orphan("a"),)
    # Half of the deployment is replaced: somebody of its own version may still come.
    assert outdated([orphan("a"), new, WAITS]) == ()
    # Nobody is there: Serve was shut down, or has not begun yet.
    assert outdated([orphan("a"), replace(new, compute_class="reserved")]) == ()
