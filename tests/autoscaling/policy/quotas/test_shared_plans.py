"""Models over one quota, tick by tick, in a world that gives no chip twice."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from quota_world import SharedWorld

from autoscaling.policy.quotas.records import Member
from tests.autoscaling.policy.policy_world import ON_DEMAND, RESERVED, RULES

CHIPS = 8 * 4
POOL = replace(RESERVED, max_slices=8)
CHAT, CODE = Member("chat", 4), Member("code", 4)


def of_reserved(chat: Member = CHAT, code: Member = CODE) -> SharedWorld:
    return SharedWorld.of({"reserved": CHIPS}, (chat, code), {"chat": (POOL,), "code": (POOL,)})


def test_model_that_wakes_has_its_half_of_what_another_one_had() -> None:
    shared = of_reserved()
    shared.run({"chat": 0.0, "code": 78.0}, 600)
    assert shared.ready() == {"chat": 0, "code": 8}
    shared.run({"chat": 78.0, "code": 78.0}, 300)
    # The one that wakes foresees more still. That takes nothing from work that is there.
    assert shared.ready() == {"chat": 4, "code": 4}
    (refused,) = [each for each in shared.worlds["chat"].plans[-1].refusals if not each.delta < 0]
    assert refused.reason == "no class has room for 16 of 20"


def test_who_comes_first_has_all_it_needs_and_gives_it_back() -> None:
    shared = of_reserved(chat=Member("chat", 4, priority=1))
    shared.run({"chat": 0.0, "code": 78.0}, 600)
    plans = shared.step({"chat": 58.0, "code": 78.0})
    assert [each.reason for each in plans["code"].decisions] == [
        "given up at once: another model lacks it and comes first; of the 32 chips of reserved 2"
        " slices at most are for it now; 6 go at once to who lacks them"
    ]
    shared.run({"chat": 58.0, "code": 78.0}, 300)
    # It foresees more than it will need, for a while, and takes that first as well.
    assert shared.ready() == {"chat": 8, "code": 0}
    shared.run({"chat": 58.0, "code": 78.0}, 9000)
    assert shared.ready() == {"chat": 6, "code": 2}
    shared.run({"chat": 0.0, "code": 78.0}, 1200)
    assert shared.ready() == {"chat": 0, "code": 8}


def test_orders_that_wait_for_another_model_do_not_count_against_the_class() -> None:
    """An equal that has elsewhere to go keeps its slices for minutes; reserved is not to blame."""
    terms = {"chat": (POOL,), "code": (POOL, replace(ON_DEMAND, provisioning_s=900.0))}
    shared = SharedWorld.of({"reserved": CHIPS}, (CHAT, CODE), terms)
    shared.run({"chat": 0.0, "code": 78.0}, 600)
    reasons = set()
    for _ in range(90):
        plans = shared.step({"chat": 78.0, "code": 78.0})
        reasons |= {each.reason for each in plans["chat"].refusals}
    assert not any("backing off" in each for each in reasons)
    shared.run({"chat": 78.0, "code": 78.0}, 1500)
    assert shared.ready("reserved") == {"chat": 8, "code": 0}
    assert shared.ready("on-demand")["code"] == 8


def test_slices_are_moved_for_money_only_once_others_are_ready() -> None:
    costly, cheap = replace(ON_DEMAND, usd_per_slice_hour=90.0), ON_DEMAND
    terms = {"chat": (POOL, costly), "code": (POOL, cheap)}
    shared = SharedWorld.of({"reserved": CHIPS}, (CHAT, CODE), terms)
    shared.run({"chat": 0.0, "code": 78.0}, 600)
    assert shared.ready("reserved") == {"chat": 0, "code": 8}
    fewest = 99
    for _ in range(200):
        shared.step({"chat": 78.0, "code": 78.0})
        fewest = min(fewest, shared.ready()["code"])
    assert fewest == 8
    assert shared.ready("reserved") == {"chat": 8, "code": 0}
    assert shared.ready("on-demand") == {"chat": 0, "code": 8}


def test_equal_savings_move_nothing() -> None:
    terms = {"chat": (POOL, ON_DEMAND), "code": (POOL, ON_DEMAND)}
    shared = SharedWorld.of({"reserved": CHIPS}, (CHAT, CODE), terms)
    shared.run({"chat": 38.0, "code": 78.0}, 1200)
    settled = shared.ready("reserved")
    for step in range(120):
        shared.step({"chat": 38.0 + 9.0 * (step // 40 % 2), "code": 78.0})
        assert shared.ready("reserved") == settled


def test_long_line_takes_no_slices_from_an_equal() -> None:
    """It would grow at the other one then, and slices would go to and fro and load."""
    shared = of_reserved()
    rates = {"chat": 78.0, "code": 78.0}
    shared.run(rates, 900)
    for _ in range(120):
        plans = shared.step(rates, {"chat": 20_000})
        assert shared.ready() == {"chat": 4, "code": 4}
    assert plans["chat"].demand_slices is not None
    assert plans["chat"].demand_slices > 12


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 130), st.floats(0, 130), st.integers(3, 40)), min_size=1, max_size=5
    ),
    st.integers(0, 1),
    st.booleans(),
)
def test_targets_stay_within_the_quota(
    story: list[tuple[float, float, int]],
    priority: int,
    has_more: bool,
) -> None:
    """But for what is there and stays until others are ready, nothing is asked for twice."""
    more = (replace(ON_DEMAND, max_slices=3),) if has_more else ()
    terms = {"chat": (POOL, *more), "code": (POOL, *more)}
    members = (Member("chat", 4, priority), Member("code", 8))
    shared = SharedWorld.of({"reserved": CHIPS}, members, terms, replace(RULES, drain_delay_s=60))
    for chat, code, ticks in story:
        for _ in range(ticks):
            held = shared.chips("reserved")
            plans = shared.step({"chat": chat, "code": code})
            asked = 4 * plans["chat"].targets["reserved"] + 8 * plans["code"].targets["reserved"]
            assert asked <= max(CHIPS, held)
