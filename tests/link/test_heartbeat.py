import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.link.heartbeat import HeartbeatConfig, Pulse

CONFIG = HeartbeatConfig(interval_s=0.25, timeout_s=1.0)


def death_of_silent_peer(pulse: Pulse, now_s: float = 0.0) -> float:
    """When a peer that says nothing is judged dead, with every tick on time."""
    for _ in range(1000):
        now_s = max(now_s, pulse.due_at_s)
        if pulse.tick(now_s).is_peer_dead:
            return now_s
    raise AssertionError("never judged dead")


def test_silent_peer_is_dead_exactly_at_the_timeout() -> None:
    pulse = Pulse(CONFIG, now_s=10.0)
    pulse.heard_at_s = 10.1
    assert death_of_silent_peer(pulse) == pytest.approx(11.1)


def test_tick_of_a_timer_rounded_down_judges_all_the_same() -> None:
    pulse = Pulse(CONFIG, now_s=0.0)
    for now_s in (0.25, 0.5, 0.75):
        assert pulse.tick(now_s - 0.0005).is_ping_due
    assert pulse.tick(pulse.due_at_s - 0.0005).is_peer_dead


def test_peer_that_is_heard_lives_and_is_pinged_every_interval() -> None:
    pulse = Pulse(CONFIG, now_s=0.0)
    now_s, pinged_at_s = 0.0, []
    while now_s < 10:
        now_s = pulse.due_at_s
        pulse.heard_at_s = now_s - 0.2
        beat = pulse.tick(now_s)
        assert not beat.is_peer_dead
        if beat.is_ping_due:
            pinged_at_s.append(now_s)
    assert len(pinged_at_s) == 40


@given(st.floats(0.3, 1000), st.floats(0, 0.9))
def test_pause_of_our_own_loop_is_not_the_peers_silence(pause_s: float, silent_s: float) -> None:
    pulse = Pulse(CONFIG, now_s=0.0)
    while pulse.due_at_s <= silent_s:
        assert not pulse.tick(pulse.due_at_s).is_peer_dead
    woken_at_s = pulse.due_at_s + pause_s
    assert not pulse.tick(woken_at_s).is_peer_dead
    # The socket is read now, before the next tick.
    pulse.heard_at_s = woken_at_s
    assert not pulse.tick(pulse.due_at_s).is_peer_dead


@given(st.floats(0.3, 1000))
def test_peer_still_silent_after_our_pause_is_dead_within_one_timeout(pause_s: float) -> None:
    pulse = Pulse(CONFIG, now_s=0.0)
    woken_at_s = pulse.due_at_s + pause_s
    assert not pulse.tick(woken_at_s).is_peer_dead
    assert death_of_silent_peer(pulse, woken_at_s) <= woken_at_s + CONFIG.timeout_s + 1e-6


def test_peer_is_judged_even_when_every_tick_is_late() -> None:
    pulse = Pulse(CONFIG, now_s=0.0)
    for _ in range(1000):
        if pulse.tick(pulse.due_at_s + 0.5).is_peer_dead:
            return
    raise AssertionError("never judged dead")


@pytest.mark.parametrize(("interval_s", "timeout_s"), [(0, 1), (1, 1), (2, 1), (-1, 1)])
def test_interval_outside_the_timeout_is_refused(interval_s: float, timeout_s: float) -> None:
    with pytest.raises(ValueError, match="interval_s"):
        HeartbeatConfig(interval_s, timeout_s)
