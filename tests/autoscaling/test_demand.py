"""The arithmetic from records to slices that have to exist."""

from dataclasses import replace

import pytest
from provisioning_builders import (
    RESERVED,
    SPOT,
    gone,
    holding,
    joining,
    leaving,
    released,
    waiting,
)

from autoscaling.provisioning.demand import SliceDemand, TakenSlice, demand_by_kind
from serving.domain.slice_records import SliceRecord


def demand(*records: SliceRecord) -> SliceDemand:
    return demand_by_kind(records).get(SPOT, SliceDemand(SPOT))


@pytest.mark.parametrize(
    ("records", "num_wanted", "num_to_exist"),
    [
        pytest.param([], 0, 0, id="nobody"),
        pytest.param([waiting(), waiting()], 2, 2, id="two wait"),
        pytest.param([holding("s-0"), waiting()], 2, 2, id="one has a slice, one waits"),
        pytest.param([gone("s-0")], 0, 0, id="a life that has ended wants nothing"),
        pytest.param([released("s-0")], 0, 1, id="scale-down: still there, not replaced"),
        pytest.param([leaving("s-0"), waiting()], 1, 2, id="notice: the next life waits already"),
        pytest.param(
            [leaving("s-0"), holding("s-1")],
            1,
            2,
            id="the next life has its slice, the old one still drains",
        ),
        pytest.param([leaving("s-0"), waiting(), waiting()], 2, 3, id="a scale-up waits besides"),
        pytest.param(
            [leaving("s-0"), leaving("s-1"), waiting(), waiting()], 2, 4, id="two notices"
        ),
        pytest.param([leaving("s-0")], 0, 1, id="given up while its slice drains"),
        pytest.param([released("s-0"), waiting()], 0, 1, id="upgrade: the same slice again"),
        pytest.param([released("s-0"), waiting(), waiting()], 1, 2, id="upgrade and scale-up"),
    ],
)
def test_demand_of_records(records: list[SliceRecord], num_wanted: int, num_to_exist: int) -> None:
    found = demand(*records)
    assert (found.num_wanted, found.num_to_exist) == (num_wanted, num_to_exist)


@pytest.mark.parametrize(
    ("records", "within"),
    [
        pytest.param([*joining(2)], {2: 2, 1: 0, 0: 0}, id="two or none"),
        pytest.param([*joining(2), *joining(2)], {4: 4, 3: 2, 2: 2, 1: 0}, id="one before half"),
        pytest.param([*joining(3), *joining(2)], {5: 5, 4: 2, 3: 2, 2: 2}, id="few before many"),
        pytest.param([*joining(2), waiting()], {3: 3, 2: 1, 1: 1}, id="beside one alone"),
        pytest.param([*joining(2), holding("s-0")], {3: 3, 2: 1}, id="beside one that is held"),
        # One of two is lost, the whole one is handed back: only one more is needed.
        pytest.param(
            [leaving("s-0"), released("s-1"), *joining(2)], {3: 3, 2: 2}, id="after a loss"
        ),
        # What is too many anyway is not ours to cut: the group's bound does.
        pytest.param([holding("s-0"), holding("s-1"), waiting()], {1: 3}, id="nothing is joined"),
    ],
)
def test_demand_of_joined_slices_is_for_whole_replicas(
    records: list[SliceRecord], within: dict[int, int]
) -> None:
    found = demand(*records)
    assert {most: found.to_exist_within(most) for most in within} == within


def test_demand_tells_held_leaving_and_released_apart() -> None:
    found = demand(holding("s-0"), leaving("s-1"), released("s-2"), waiting(), waiting())
    assert found.held == {TakenSlice("s-0")}
    assert found.leaving == {TakenSlice("s-1")}
    assert found.released == {TakenSlice("s-2")}
    assert found.occupied == found.held | found.leaving | found.released
    assert found.arithmetic == "1 held + 1 waiting + 1 leaving + 1 released = 4"


def test_demand_slice_named_twice_counts_once_and_as_held() -> None:
    """A replica that has not noticed the loss, and one on the replacement of the same name."""
    found = demand(leaving("s-0"), holding("s-0"), released("s-0"))
    assert (found.held, found.leaving, found.released) == (
        {TakenSlice("s-0")},
        frozenset(),
        frozenset(),
    )
    assert found.num_to_exist == 1


def test_demand_of_two_single_hosts_with_one_name_is_two_slices() -> None:
    held = [holding("s-2", address="10.0.0.7"), holding("s-2", address="10.0.0.8")]
    assert demand(*held).num_to_exist == 2
    # Two records of one host are of one slice.
    assert demand(held[0], replace(held[0], replica_id="other")).num_to_exist == 1


def test_demand_is_counted_per_kind() -> None:
    found = demand_by_kind([waiting(SPOT), waiting(RESERVED), holding("r-0", RESERVED)])
    assert {kind: each.num_to_exist for kind, each in found.items()} == {SPOT: 1, RESERVED: 2}
    assert list(found) == sorted(found)


def test_demand_of_a_class_without_slices_is_none() -> None:
    local = replace(waiting(), compute_class="local", generation=None, topology=None)
    assert demand_by_kind([local]) == {}


def test_demand_knows_the_addresses_of_hosts_in_use() -> None:
    found = demand(holding("node-a1b2", address="10.0.0.7"), waiting())
    assert found.addresses == {"10.0.0.7"}


def test_demand_of_a_holder_without_a_name_is_still_counted() -> None:
    record = holding("s-0")
    nameless = replace(record, life=replace(record.life, slice_name=None))
    assert demand(nameless).num_to_exist == 1
