"""One owner at a time, and an end for what nobody owns. Pure."""

import pytest

from serving.ownership.lease import ClaimRefusedError, EngineLease

LEASE_S = 3600.0


def owned() -> tuple[EngineLease, int]:
    lease = EngineLease("a", LEASE_S)
    return lease, lease.number


def test_owner_that_is_there_keeps_the_engine() -> None:
    lease, number = owned()
    with pytest.raises(ClaimRefusedError, match="a has it"):
        lease.claim("b")
    assert lease.is_current(number)
    assert not lease.is_run_out(1e9)


def test_successor_gets_a_higher_number_and_what_the_first_says_counts_no_more() -> None:
    lease, first = owned()
    lease.leave(first, 100.0)
    second = lease.claim("b")
    assert second > first
    assert lease.is_current(second)
    assert not lease.is_current(first)
    # It learns late that it was cut off, and means to leave.
    lease.leave(first, 200.0)
    assert lease.is_current(second)
    with pytest.raises(ClaimRefusedError, match="b has it"):
        lease.claim("a")


def test_owner_that_was_cut_off_may_come_back_while_nobody_else_has_come() -> None:
    lease, first = owned()
    lease.leave(first, 100.0)
    again = lease.claim("a")
    assert lease.is_current(again)
    assert not lease.is_current(first)


@pytest.mark.parametrize(("within_s", "ends_at_s"), [(None, 100.0 + LEASE_S), (60.0, 160.0)])
def test_engine_without_owner_ends_in_time(within_s: float | None, ends_at_s: float) -> None:
    lease, number = owned()
    lease.leave(number, 100.0, within_s)
    assert not lease.is_run_out(ends_at_s - 1)
    assert lease.is_run_out(ends_at_s)
    lease.claim("b")
    assert not lease.is_run_out(ends_at_s)


def test_engine_that_ends_is_nobodys_to_claim() -> None:
    lease, number = owned()
    lease.end()
    lease.leave(number, 100.0)
    for owner in ("a", "b"):
        with pytest.raises(ClaimRefusedError, match="the engine ends"):
            lease.claim(owner)
