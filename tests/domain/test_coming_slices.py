"""Which of those who wait have a slice on its way. Pure."""

from dataclasses import replace

import pytest

from serving.domain.supply.coming import coming_since
from serving.domain.supply.faults import SliceFaults
from serving.domain.supply.found import find_slices
from serving.domain.supply.records import SupplyRecord, SupplyState, WaitingReplica
from serving.domain.supply.survey import survey
from tests.supply_builders import group_of, host, hosts_of, life, pods_of

BOOTING = survey(
    find_slices([], [group_of(pods_of("s-0"), pods_of("s-1"))]), (), SliceFaults(), {}, 100.0
)


def wish(life_id: str, since_s: float, **changes: object) -> WaitingReplica:
    made = WaitingReplica(life_id, "demo", "spot", "v6e", "2x4", since_s)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_those_that_came_first_get_what_boots() -> None:
    waiting = [wish("c", 3.0), wish("a", 1.0), wish("b", 2.0)]
    assert coming_since(waiting, BOOTING) == {"a": 100.0, "b": 100.0}


def test_joined_slices_come_together_or_not_at_all() -> None:
    assert coming_since([wish("a", 1.0, num_slices=2)], BOOTING) == {"a": 100.0}
    assert coming_since([wish("a", 1.0, num_slices=3), wish("b", 2.0)], BOOTING) == {"b": 100.0}


@pytest.mark.parametrize(
    "changes",
    [{"compute_class": "reserved"}, {"topology": "4x4"}, {"generation": "v5e"}, {"zone": "z"}],
)
def test_slice_of_another_kind_is_not_coming(changes: dict[str, object]) -> None:
    assert coming_since([wish("a", 1.0, **changes)], BOOTING) == {}


@pytest.mark.parametrize("state", list(SupplyState))
def test_only_what_boots_or_is_free_comes(state: SupplyState) -> None:
    (record, _) = BOOTING
    found = coming_since([wish("a", 1.0)], [replace(record, state=state)])
    assert bool(found) == (state in (SupplyState.BOOTING, SupplyState.FREE))


def test_slice_that_is_handed_on_comes_and_one_that_is_held_or_taken_away_does_not() -> None:
    def holds(state: str, drain_deadline_s: float | None) -> tuple[SupplyRecord, ...]:
        hosts = hosts_of("s-0", num_free_chips=0)
        holder = life("r", hosts, state, drain_deadline_s=drain_deadline_s)  # type: ignore[arg-type]
        return survey(
            find_slices(hosts, [group_of(pods_of("s-0"))]), (holder,), SliceFaults(), {}, 5.0
        )

    assert coming_since([wish("a", 1.0)], holds("draining", None)) == {"a": 5.0}
    assert coming_since([wish("a", 1.0)], holds("draining", 60.0)) == {}
    assert coming_since([wish("a", 1.0)], holds("ready", None)) == {}


def test_half_a_slice_that_nobody_completes_is_not_coming() -> None:
    alone = survey(find_slices([host("s-0-pod-0")], []), (), SliceFaults(), {}, 5.0)
    assert [record.state for record in alone] == [SupplyState.BOOTING]
    assert coming_since([wish("a", 1.0)], alone) == {}
