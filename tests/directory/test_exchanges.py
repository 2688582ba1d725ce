"""Whichever replicas Serve ends, the slices go that the plan gives up first. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.directory.exchanges import PATIENCE_S, TOLD_AFTER_S, Exchanges
from serving.directory.orphans import OrphanOffers, is_wanted
from serving.domain.slice_lifecycle import SliceState
from serving.domain.slice_records import SliceRecord
from tests.supply_builders import hosts_of, life, with_engine

NOW_S = 100.0


def ready(name: str, **changes: object) -> SliceRecord:
    made = with_engine(name)
    return replace(made, **changes)  # type: ignore[arg-type]


def giver(
    own: SliceRecord, records: Sequence[SliceRecord], order: Sequence[str], barred: str = ""
) -> str | None:
    """The replica that is to give its slice up for the engine of `own`, which Serve ends."""
    exchanges = Exchanges()
    stays = exchanges.leave(own, records, order, {barred}, NOW_S)
    told = [
        each.replica_id
        for each in records
        if exchanges.leave_reason(each, NOW_S + TOLD_AFTER_S) is not None
    ]
    assert len(told) == stays
    return told[0] if told else None


def test_replica_with_the_slice_that_goes_first_gives_it_up() -> None:
    records = [ready(name) for name in "abc"]
    assert giver(records[0], records, ["c", "b", "a"]) == "c"
    assert giver(records[1], records, ["c", "b", "a"]) == "c"


def test_slice_that_goes_first_goes_with_its_own_replica() -> None:
    records = [ready(name) for name in "abc"]
    assert giver(records[2], records, ["c", "b", "a"]) is None


def test_without_an_order_serves_choice_stands() -> None:
    records = [ready(name) for name in "abc"]
    assert giver(records[0], records, []) is None
    assert giver(records[0], records, ["a", "gone"]) is None


def test_slice_that_the_plan_does_not_know_goes_last() -> None:
    records = [ready("new"), ready("b")]
    assert giver(records[0], records, ["b"]) == "b"
    assert giver(records[1], records, ["b"]) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "of a new version"},  # and no exchange at all
        {"model": "another"},
        {"compute_class": "reserved"},
        {"is_orphan": True},
        {"hosts": ()},
        {"part": 1},
    ],
)
def test_only_a_replica_of_the_same_engines_gives_its_slice_up(changes: dict[str, object]) -> None:
    other = ready("b", **changes)
    assert giver(ready("a"), [ready("a"), other], ["b", "a"]) is None


def test_replica_that_leaves_its_slice_anyway_gives_none_up() -> None:
    drains = replace(life("b", hosts_of("b"), SliceState.DRAINING), fingerprint="f")
    assert giver(ready("a"), [ready("a"), drains, ready("c")], ["b", "c", "a"]) == "c"
    assert giver(ready("a"), [ready("a"), ready("b")], ["b", "a"], barred="b") is None
    # Nor is a slice kept that has to go itself.
    assert giver(ready("a"), [ready("a"), ready("b")], ["b", "a"], barred="a") is None


def test_slice_that_loads_is_given_up_for_an_engine_that_serves() -> None:
    loads = replace(life("b", hosts_of("b"), SliceState.LOADING), fingerprint="f")
    assert giver(ready("a"), [ready("a"), loads], ["b", "a"]) == "b"


def test_compute_class_without_slices_leaves_it_to_serve() -> None:
    own, other = ready("a", hosts=()), ready("b", hosts=())
    assert giver(own, [own, other], ["b", "a"]) is None


def test_replica_is_told_once_the_other_has_let_go() -> None:
    records = [ready("a"), ready("b")]
    exchanges = Exchanges()
    assert exchanges.leave(records[0], records, ["b", "a"], (), NOW_S)
    assert exchanges.leave_reason(records[1], NOW_S + TOLD_AFTER_S / 2) is None
    assert exchanges.leave_reason(records[1], NOW_S + TOLD_AFTER_S) == (
        "the plan gives it up before s, and one replica fewer is wanted"
    )


def test_replica_that_has_left_its_slice_is_not_told_again() -> None:
    records = [ready("a"), ready("b")]
    exchanges = Exchanges()
    exchanges.leave(records[0], records, ["b", "a"], (), NOW_S)
    # The same id, as after a slice that was lost while the engine loaded.
    begun_anew = replace(life("b", hosts_of("a"), at_s=5.0), fingerprint="f")
    assert exchanges.leave_reason(begun_anew, NOW_S + TOLD_AFTER_S) is None


def test_another_gives_its_slice_up_where_the_first_does_not_come() -> None:
    records = [ready("a", is_orphan=True), ready("c")]
    exchanges = Exchanges()
    assert exchanges.leave(ready("a"), [ready("b"), *records], ["b", "c", "a"], (), NOW_S)
    assert exchanges.look(records, (), NOW_S + PATIENCE_S - 1) == {}
    assert exchanges.leave_reason(records[1], NOW_S + PATIENCE_S) is None
    assert exchanges.look(records, (), NOW_S + PATIENCE_S) == {}
    later_s = NOW_S + PATIENCE_S + TOLD_AFTER_S
    assert exchanges.leave_reason(records[1], later_s) is not None


def test_engine_for_which_nobody_gives_a_slice_up_is_not_wanted() -> None:
    own = ready("a", is_orphan=True)
    exchanges = Exchanges()
    assert exchanges.leave(ready("a"), [ready("a"), ready("b")], ["b", "a"], (), NOW_S)
    assert exchanges.look([own], (), NOW_S + 1) == {}
    assert list(exchanges.look([own], (), NOW_S + PATIENCE_S)) == ["a"]
    assert exchanges.look([], (), NOW_S + PATIENCE_S) == {}


def test_exchange_is_over_once_the_engine_is_taken_over() -> None:
    records = [ready("a"), ready("b")]
    exchanges = Exchanges()
    exchanges.leave(records[0], records, ["b", "a"], (), NOW_S)
    exchanges.look([records[1]], (), NOW_S)
    assert exchanges.leave_reason(records[1], NOW_S + TOLD_AFTER_S) is None


@dataclass
class Replica:
    """A replica: its present life, and how many it has had."""

    name: str
    record: SliceRecord
    num_lives: int = 1


@dataclass
class Deployment:
    """Replicas, their slices and the directory's side of an exchange, second by second."""

    order: list[str]
    replicas: dict[str, Replica]
    orphans: dict[str, SliceRecord] = field(default_factory=dict)
    exchanges: Exchanges = field(default_factory=Exchanges)
    offers: OrphanOffers = field(default_factory=OrphanOffers)
    now_s: float = NOW_S

    @property
    def records(self) -> list[SliceRecord]:
        return [each.record for each in self.replicas.values()] + list(self.orphans.values())

    def slices(self) -> set[str]:
        """The slices that somebody has, each by the replica that had it first."""
        return {host.node_id for record in self.records for host in record.hosts}

    def end(self, name: str) -> None:
        """Serve ends a replica."""
        own = self.replicas[name].record
        if own.state == SliceState.READY:
            stays = is_wanted(own, self.records) or self.exchanges.leave(
                own, self.records, self.order, (), self.now_s
            )
            if stays:
                self.orphans[own.replica_id] = replace(own, is_orphan=True)
        del self.replicas[name]

    def second(self) -> None:
        """Each replica renews its record, and does as it is told."""
        self.now_s += 1.0
        unwanted = self.exchanges.look(self.records, (), self.now_s)
        self.orphans = {name: own for name, own in self.orphans.items() if name not in unwanted}
        for replica in self.replicas.values():
            if self.exchanges.leave_reason(replica.record, self.now_s) is not None:
                replica.num_lives += 1
                replica_id = f"{replica.name}~{replica.num_lives}"
                replica.record = replace(life(replica_id, at_s=self.now_s), fingerprint="f")
            elif not replica.record.hosts:
                engine = self.offers.offer(replica.record, self.records, self.now_s)
                if engine is not None:
                    del self.orphans[engine.replica_id]
                    own = replica.record.replica_id
                    replica.record = replace(engine, replica_id=own, is_orphan=False)


@given(data=st.data())
def test_whichever_replicas_serve_ends_the_first_slices_of_the_order_go(
    data: st.DataObject,
) -> None:
    names = [f"r{number}" for number in range(data.draw(st.integers(1, 6), label="replicas"))]
    order = data.draw(st.permutations(names), label="order")
    ends = data.draw(st.lists(st.sampled_from(names), unique=True), label="ends")
    deployment = Deployment(order, {name: Replica(name, ready(name)) for name in names})
    for name in ends:
        deployment.end(name)
        for _ in range(data.draw(st.integers(0, 4), label="seconds")):
            deployment.second()
    for _ in range(len(names) * int(PATIENCE_S + 3)):
        deployment.second()
    left = {host.node_id for name in order[len(ends) :] for host in ready(name).hosts}
    assert deployment.slices() == left
    assert not deployment.orphans
    assert all(each.record.hosts for each in deployment.replicas.values())
