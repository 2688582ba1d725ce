"""Which slices are replaced when their group has another template. Pure."""

from dataclasses import replace

from provisioning_builders import (
    Entry,
    Said,
    group,
    holding,
    leased,
    observed,
    released,
    report_of,
)

from autoscaling.provisioning.carry.rolling import REASON, replaced_now
from autoscaling.provisioning.demand import records_by_slice
from autoscaling.provisioning.groups import WorkerGroup
from serving.domain.slice_lifecycle import SliceState
from serving.domain.supply.pods import ObservedSlice, PodPhase
from serving.domain.supply.records import SupplyState


def old(name: str, *phases: PodPhase) -> ObservedSlice:
    """A slice whose pods are of the template of before."""
    return replace(observed(name, *phases), is_outdated=True)


def free(name: str) -> Entry:
    return replace(holding(name), state=SupplyState.FREE, holder=None)


def quarantined(name: str) -> Entry:
    return replace(holding(name), state=SupplyState.QUARANTINED, holder=None)


def loading(name: str) -> Said:
    """A replica that has the slice, and whose engine is not ready yet."""
    ready = holding(name)
    assert ready.holder is not None
    return replace(ready, holder=replace(ready.holder, state=SliceState.LOADING))


def replaced(
    made: WorkerGroup,
    *entries: Entry,
    replacing: dict[str, str] | None = None,
    num_waiting: int = 0,
) -> list[str]:
    """The names of the slices that are replaced now; `num_waiting` replicas look for slices."""
    by_slice = records_by_slice(report_of(entries, [made]), [made])
    chosen = replaced_now([made], by_slice, replacing or {}, {made.name: num_waiting})
    assert set(chosen.values()) <= {REASON}
    return [each.name for each in made.slices if each.incarnation in chosen]


def test_slices_of_an_older_template_are_replaced_one_at_a_time() -> None:
    made = group(old("s-0"), old("s-1"), old("s-2"))
    assert replaced(made, *map(holding, ("s-0", "s-1", "s-2"))) == ["s-0"]


def test_slice_that_nobody_has_is_replaced_before_one_that_serves() -> None:
    made = group(old("s-0"), old("s-1"))
    assert replaced(made, holding("s-0"), free("s-1")) == ["s-1"]


def test_slice_that_is_being_replaced_stays_so_until_it_is_gone() -> None:
    made = group(old("s-0"), old("s-1"))
    going = {made.slices[1].incarnation: REASON}
    draining = replace(holding("s-1"), state=SupplyState.CONDEMNED)
    assert replaced(made, holding("s-0"), draining, replacing=going) == ["s-1"]


def test_next_slice_waits_until_the_group_is_whole_again() -> None:
    """A template with which no host comes up costs one slice."""
    successor = observed("s-0", PodPhase.PENDING, PodPhase.PENDING)
    made = group(successor, old("s-1"))
    pending = replace(holding("s-0"), state=SupplyState.PENDING, holder=None)
    assert replaced(made, pending, holding("s-1")) == []
    booting = replace(pending, state=SupplyState.BOOTING)
    assert replaced(group(observed("s-0"), old("s-1")), booting, holding("s-1")) == []
    assert replaced(group(observed("s-0"), old("s-1")), holding("s-0"), holding("s-1")) == ["s-1"]
    # One more is asked for, and its pods are not there yet.
    assert replaced(group(old("s-1"), replicas=2), holding("s-1")) == []


def test_serving_slice_is_replaced_when_every_other_engine_is_ready_and_not_before() -> None:
    """Slices of two: never is more than one of them away."""
    made = group(observed("s-0"), old("s-1"))
    for successor in (free("s-0"), quarantined("s-0"), leased("s-0"), loading("s-0")):
        assert replaced(made, successor, holding("s-1"), num_waiting=1) == [], successor
    assert replaced(made, loading("s-0"), holding("s-1")) == []
    assert replaced(made, released("s-0"), holding("s-1")) == []
    assert replaced(made, holding("s-0"), holding("s-1")) == ["s-1"]


def test_slice_that_nobody_wants_holds_no_other_up() -> None:
    made = group(observed("s-0"), old("s-1"))
    assert replaced(made, free("s-0"), holding("s-1")) == ["s-1"]
    assert replaced(made, quarantined("s-0"), holding("s-1")) == ["s-1"]


def test_replica_for_which_there_is_no_slice_holds_nothing_up() -> None:
    made = group(old("s-0"), old("s-1"))
    assert replaced(made, holding("s-0"), holding("s-1"), num_waiting=1) == ["s-0"]


def test_slices_on_which_no_engine_gets_ready_are_replaced_all_the_same() -> None:
    """Or what mends their template would wait for them."""
    made = group(old("s-0"), old("s-1"))
    assert replaced(made, loading("s-0"), loading("s-1")) == ["s-0"]
    assert replaced(made, loading("s-0"), quarantined("s-1"), num_waiting=1) == ["s-1"]
    assert replaced(made, holding("s-0"), loading("s-1")) == ["s-1"]
    # The first one has come, and nothing serves on the second one.
    assert replaced(group(observed("s-0"), old("s-1")), loading("s-0"), loading("s-1")) == ["s-1"]


def test_slice_that_the_directory_does_not_know_holds_the_next_one_up() -> None:
    assert replaced(group(old("s-0"), observed("s-1")), holding("s-0")) == []


def test_slices_without_machines_are_replaced_all_at_once() -> None:
    waits = [old(f"s-{index}", PodPhase.PENDING, PodPhase.PENDING) for index in (0, 1)]
    assert replaced(group(*waits, old("s-2")), holding("s-2")) == ["s-0", "s-1"]


def test_nobody_is_asked_to_leave_what_nobody_reports_to_have() -> None:
    assert replaced(group(old("s-0")), leased("s-0")) == []


def test_groups_are_rolled_beside_each_other() -> None:
    first, second = group(old("a-0"), name="a"), group(old("b-0"), name="b")
    entries = [holding("a-0"), holding("b-0")]
    by_slice = records_by_slice(report_of(entries, [first, second]), [first, second])
    assert len(replaced_now([first, second], by_slice, {}, {})) == 2


def test_nothing_is_replaced_where_every_slice_is_of_the_present_template() -> None:
    assert replaced(group("s-0", "s-1"), holding("s-0"), free("s-1")) == []
