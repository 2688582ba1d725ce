"""The life of a slice: which states follow which, and where its time went."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.domain.slice_lifecycle import (
    HELD_STATES,
    WAITING,
    EndCause,
    SliceLifecycle,
    SliceState,
    TransitionError,
)

WHOLE = [
    SliceState.PROVISIONING,
    SliceState.RESERVED,
    SliceState.PROBING,
    SliceState.LOADING,
    SliceState.READY,
    SliceState.DRAINING,
]


def live(*states: SliceState, start_s: float = 100.0) -> SliceLifecycle:
    """A life that entered one state a second."""
    life = SliceLifecycle.begin(start_s)
    for number, state in enumerate(states, 1):
        life = life.enter(state, start_s + number, str(state), slice_name="spot-0")
    return life


def test_whole_life_adds_up() -> None:
    life = live(*WHOLE).end(EndCause.PREEMPTED, 110.0, "preempted")
    assert life.state == SliceState.GONE
    assert (life.cause, life.slice_name) == (EndCause.PREEMPTED, "spot-0")
    seconds = life.seconds_by_state(500.0)
    assert seconds[SliceState.DRAINING] == 4.0
    assert sum(seconds.values()) == 10.0
    assert SliceState.GONE not in seconds


@pytest.mark.parametrize("state", [state for state in SliceState if state != SliceState.REQUESTED])
def test_no_state_is_entered_from_behind(state: SliceState) -> None:
    life = live(*WHOLE[: WHOLE.index(state) + 1] if state in WHOLE else WHOLE)
    with pytest.raises(TransitionError, match="no way from"):
        life.enter(SliceState.REQUESTED, 200.0, "again")


def test_slice_cannot_take_requests_before_its_engine_has_loaded() -> None:
    with pytest.raises(TransitionError, match="no way from reserved to ready"):
        live(SliceState.RESERVED).enter(SliceState.READY, 200.0, "too early")


def test_first_cause_of_an_end_is_kept() -> None:
    ended = live(SliceState.RESERVED).end(EndCause.BOOT_FAILED, 105.0, "probe failed")
    assert ended.end(EndCause.RELEASED, 106.0, "shut down") is ended


def test_same_state_again_changes_the_reason_only() -> None:
    life = live(SliceState.PROVISIONING)
    again = life.enter(SliceState.PROVISIONING, 150.0, "still none is free")
    assert (again.reason, again.entered_at_s) == ("still none is free", life.entered_at_s)
    assert len(again.transitions) == len(life.transitions)


def test_clock_that_goes_backwards_takes_no_time_away() -> None:
    life = live(SliceState.RESERVED).enter(SliceState.LOADING, 50.0, "the clock was set back")
    assert life.seconds_by_state(60.0)[SliceState.LOADING] == 0.0
    assert sum(life.seconds_by_state(60.0).values()) == 1.0


def test_every_state_either_waits_or_holds_or_is_gone() -> None:
    assert WAITING | HELD_STATES | {SliceState.GONE} == frozenset(SliceState)
    assert not WAITING & HELD_STATES


@given(
    steps=st.integers(0, len(WHOLE)),
    times=st.lists(st.floats(-1e3, 1e3), min_size=8, max_size=8),
    ends=st.booleans(),
)
def test_time_in_states_always_sums_to_the_lifetime(
    steps: int, times: list[float], ends: bool
) -> None:
    life = SliceLifecycle.begin(1000.0)
    for state, offset_s in zip(WHOLE[:steps], times, strict=False):
        life = life.enter(state, 1000.0 + offset_s, "")
    if ends:
        life = life.end(EndCause.RELEASED, 1000.0 + times[6], "")
    now_s = 1000.0 + times[7]
    seconds = life.seconds_by_state(now_s)
    assert all(each >= 0 for each in seconds.values())
    first, last = life.transitions[0], life.transitions[-1]
    end_s = last.at_s if ends else max(now_s, last.at_s)
    assert sum(seconds.values()) == pytest.approx(end_s - first.at_s, abs=1e-6)
