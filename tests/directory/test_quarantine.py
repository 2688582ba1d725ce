import pytest

from serving.directory.quarantine import FORGET_S, Quarantine

NODES = frozenset({"a", "b", "c", "d"})
OTHERS = frozenset({"w", "x", "y", "z"})
HOUR_S = 3600.0


def test_time_in_quarantine_doubles_up_to_an_hour() -> None:
    quarantine, now_s, times_s = Quarantine(), 0.0, []
    for _ in range(10):
        until_s = quarantine.note_failure("slice-0", NODES, now_s)
        times_s.append(until_s - now_s)
        now_s = until_s
    assert times_s == [30, 60, 120, 240, 480, 960, 1920, HOUR_S, HOUR_S, HOUR_S]


def test_slice_is_barred_until_its_time_is_over() -> None:
    quarantine = Quarantine()
    assert quarantine.quarantined_until_s(NODES, 0.0) is None
    quarantine.note_failure("slice-0", NODES, 100.0)
    assert quarantine.quarantined_until_s(NODES, 129.9) == 130.0
    assert quarantine.quarantined_until_s(NODES, 130.0) is None
    assert quarantine.quarantined_until_s(OTHERS, 101.0) is None


def test_success_makes_the_next_failure_the_first() -> None:
    quarantine = Quarantine()
    quarantine.note_failure("slice-0", NODES, 0.0)
    quarantine.note_success("slice-0")
    assert quarantine.quarantined_until_s(NODES, 1.0) is None
    assert quarantine.note_failure("slice-0", NODES, 50.0) == 80.0


@pytest.mark.parametrize(("after_s", "time_s"), [(FORGET_S - 1, 60.0), (FORGET_S, 30.0)])
def test_failure_is_forgotten_after_a_day(after_s: float, time_s: float) -> None:
    quarantine = Quarantine()
    quarantine.note_failure("slice-0", NODES, 0.0)
    assert quarantine.note_failure("slice-0", NODES, after_s) == after_s + time_s


def test_new_incarnation_leaves_quarantine_and_starts_anew() -> None:
    quarantine = Quarantine()
    quarantine.note_failure("slice-0", NODES, 0.0)
    replaced = frozenset({"e", "f", "g", "h"})
    assert quarantine.quarantined_until_s(replaced, 1.0) is None
    assert quarantine.note_failure("slice-0", replaced, 1.0) == 31.0


@pytest.mark.parametrize(("suspects", "is_barred"), [({"b"}, True), ({"a"}, False), (set(), False)])
def test_partly_replaced_slice_stays_while_it_has_the_host_that_failed(
    suspects: set[str], is_barred: bool
) -> None:
    quarantine = Quarantine()
    quarantine.note_failure("slice-0", NODES, 0.0, suspects=frozenset(suspects))
    partly = frozenset({"e", "b", "c", "d"})
    assert (quarantine.quarantined_until_s(partly, 1.0) is not None) == is_barred
    again_s = quarantine.note_failure("slice-0", partly, 1.0)
    assert again_s == (61.0 if is_barred else 31.0)


def test_a_thousand_failures_in_a_row_are_an_hour_each() -> None:
    quarantine, now_s = Quarantine(), 0.0
    for _ in range(2000):
        now_s = quarantine.note_failure("slice-0", NODES, now_s)
    assert quarantine.note_failure("slice-0", NODES, now_s) == now_s + HOUR_S


def test_two_living_slices_of_one_name_are_kept_off_each_for_itself() -> None:
    quarantine = Quarantine()
    quarantine.note_failure("slice-0", NODES, 0.0)
    assert quarantine.quarantined_until_s(OTHERS, 1.0) is None
    assert quarantine.note_failure("slice-0", OTHERS, 1.0) == 31.0
    assert quarantine.quarantined_until_s(NODES, 2.0) == 30.0
    assert quarantine.note_failure("slice-0", NODES, 40.0) == 100.0
