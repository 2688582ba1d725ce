"""The arithmetic from records to slices that have to exist."""

import pytest
from provisioning_builders import (
    RESERVED,
    SPOT,
    Entry,
    changing_hands,
    group,
    holding,
    leased,
    leaving,
    released,
    report_of,
    waiting,
)

from autoscaling.provisioning.demand import SliceDemand, demands_of
from serving.domain.supply.records import WaitingReplica


def joining(num_slices: int) -> WaitingReplica:
    return waiting(num_slices=num_slices)


NAMES = [f"s-{index}" for index in range(3)]


def demand(*entries: Entry) -> SliceDemand:
    made = group(*NAMES)
    return demands_of(report_of(entries, [made]), [made]).by_group[made.name]


@pytest.mark.parametrize(
    ("records", "num_wanted", "num_to_exist"),
    [
        pytest.param([], 0, 0, id="nobody"),
        pytest.param([waiting(), waiting()], 2, 2, id="two wait"),
        pytest.param([holding("s-0"), waiting()], 2, 2, id="one has a slice, one waits"),
        pytest.param([leased("s-0"), waiting()], 1, 2, id="leased: no supply, and no demand"),
        pytest.param(
            [changing_hands("s-0"), waiting()], 1, 1, id="it waits until it says that it has it"
        ),
        pytest.param(
            [changing_hands("s-9"), waiting()], 1, 1, id="it was lost, and Ray does not know it yet"
        ),
        pytest.param([holding("s-9"), waiting()], 2, 2, id="one is gone, its replica will notice"),
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
def test_demand_of_records(records: list[Entry], num_wanted: int, num_to_exist: int) -> None:
    found = demand(*records)
    assert (found.num_wanted, found.num_to_exist) == (num_wanted, num_to_exist)


@pytest.mark.parametrize(
    ("records", "within"),
    [
        pytest.param([joining(2)], {2: 2, 1: 0, 0: 0}, id="two or none"),
        pytest.param(
            [joining(2), joining(2)],
            {4: 4, 3: 2, 2: 2, 1: 0},
            id="one before half",
        ),
        pytest.param(
            [joining(3), joining(2)],
            {5: 5, 4: 2, 3: 2, 2: 2},
            id="few before many",
        ),
        pytest.param([joining(2), waiting()], {3: 3, 2: 1, 1: 1}, id="beside one alone"),
        pytest.param([joining(2), holding("s-0")], {3: 3, 2: 1}, id="beside one that is held"),
        # One of two is lost, the whole one is handed back: only one more is needed.
        pytest.param(
            [leaving("s-0"), released("s-1"), joining(2)],
            {3: 3, 2: 2},
            id="after a loss",
        ),
        # What is too many anyway is not ours to cut: the group's bound does.
        pytest.param([holding("s-0"), holding("s-1"), waiting()], {1: 3}, id="nothing is joined"),
    ],
)
def test_demand_of_joined_slices_is_for_whole_replicas(
    records: list[Entry], within: dict[int, int]
) -> None:
    found = demand(*records)
    assert {most: found.to_exist_within(most) for most in within} == within


def test_replica_that_takes_a_slice_is_counted_where_that_slice_is() -> None:
    """Another group of the kind would make one more for it."""
    taken, other = group("s-0", name="z-group"), group(name="a-group", max_replicas=4)
    made = [taken, other]
    demands = demands_of(report_of([changing_hands("s-0"), waiting()], made), made).by_group
    assert {name: each.num_to_exist for name, each in demands.items()} == {
        "a-group": 0,
        "z-group": 1,
    }
    assert demands["z-group"].occupied == {taken.slices[0].incarnation}


def test_demand_tells_held_leaving_released_and_leased_apart() -> None:
    found = demand(holding("s-0"), leaving("s-1"), released("s-2"), waiting(), waiting())
    sizes = [len(each) for each in (found.held, found.leaving, found.released, found.leased)]
    assert sizes == [1, 1, 1, 0]
    assert found.occupied == found.held | found.leaving | found.released
    assert found.arithmetic == "1 held + 1 waiting + 1 leaving + 1 released = 4"
    assert demand(leased("s-0")).arithmetic.endswith("0 released + 1 leased = 1")


def test_demand_names_slices_as_kubernetes_has_them() -> None:
    made = group(*NAMES)
    found = demands_of(report_of([holding("s-1")], [made]), [made]).by_group[made.name]
    assert found.held == {made.slices[1].incarnation}


def test_replica_of_a_slice_that_we_replace_waits_for_what_is_made_in_its_place() -> None:
    """One that is taken away is replaced from the notice on; this one needs no slice beside it."""
    made = group(*NAMES)
    report = report_of([holding("s-0"), leaving("s-1"), waiting()], [made])
    replacing = {made.slices[1].incarnation}
    # Its next life may be heard of before the end of this one.
    for each in (report, report_of([holding("s-0"), holding("s-1"), waiting()], [made])):
        found = demands_of(each, [made], replacing=replacing).by_group[made.name]
        assert found.arithmetic == "1 held + 0 waiting + 0 leaving + 1 released = 2"
    again = demands_of(report, [made]).by_group[made.name]
    assert again.arithmetic == "1 held + 1 waiting + 1 leaving + 0 released = 3"


def test_successor_of_a_slice_that_is_handed_over_is_the_one_that_came_last() -> None:
    """The one that has waited for longer needs a slice of its own, in a zone of its own."""
    old, young = waiting(since_s=1.0, zone="us-a"), waiting(since_s=2.0)
    groups = [group("s-0", name="any"), group(name="zonal", zone="us-a")]
    found = demands_of(report_of([released("s-0"), young, old], groups), groups).by_group
    assert {name: each.num_waiting for name, each in found.items()} == {"any": 0, "zonal": 1}


def test_demand_is_counted_per_group_and_kinds_that_nobody_makes_are_named() -> None:
    spot, reserved = group(*NAMES), group("r-0", kind=RESERVED)
    entries = [waiting(SPOT), waiting(RESERVED), holding("r-0", RESERVED)]
    found = demands_of(report_of(entries, [spot, reserved]), [spot, reserved])
    counted = {name: each.num_to_exist for name, each in found.by_group.items()}
    assert (counted, found.unmade) == ({"spot-group": 1, "reserved-group": 2}, ())
    alone = demands_of(report_of(entries, [spot]), [spot])
    assert alone.unmade == (RESERVED,)
