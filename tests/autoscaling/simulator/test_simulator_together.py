"""Days of several models in one world: chips are there once, and nothing else ties them."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from simulated_days import OBJECTIVES, class_setup, profile, steady

from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.quotas.records import ChipQuota, Member
from autoscaling.policy.rules import Rules
from autoscaling.simulator.outcome import SimulationOutcome
from autoscaling.simulator.run import SimulationSetup, simulate, simulate_together
from autoscaling.simulator.world.arrivals import Requests
from autoscaling.simulator.world.slices import SliceRun

# Whole hours, request by request.
pytestmark = pytest.mark.slow

END_S = 3600.0
POOL = class_setup("reserved", is_prepaid=True, max_slices=8, usd_per_slice_hour=2.0)
QUOTA = ChipQuota("reserved", 32, frozenset({"chat", "code"}))
CHAT, CODE = Member("chat", 4, priority=1), Member("code", 4)
RULES = Rules(OBJECTIVES, drain_delay_s=120.0)


def late(requests: Requests, from_s: float) -> Requests:
    return replace(requests, arrival_s=requests.arrival_s + from_s)


def setups(ready: Mapping[str, int] | None = None) -> dict[str, SimulationSetup]:
    """Code needs nearly all of the quota the whole time, chat half of it after half an hour."""
    traffic = {"code": steady(100.0, END_S, seed=2), "chat": late(steady(55.0, 1800.0), 1800.0)}
    return {
        model: SimulationSetup(
            requests,
            profile(),
            (POOL,),
            OBJECTIVES,
            duration_s=END_S,
            ready_at_start={"reserved": (ready or {"code": 7}).get(model, 0)},
        )
        for model, requests in traffic.items()
    }


def outcomes(*members: Member, shares: bool = True) -> Mapping[str, SimulationOutcome]:
    days = setups()
    policies = {
        model: SlicewisePolicy(profile(), [POOL.terms], RULES) for model in ("chat", "code")
    }
    return simulate_together(days, policies, [QUOTA], members, shares=shares)


def most_at_once(lives: list[SliceRun]) -> int:
    changes = sorted(
        change
        for life in lives
        if life.held_at_s is not None
        for change in ((life.held_at_s, 1), (life.ended_at_s, -1))
    )
    return int(np.cumsum([each for _, each in changes]).max())


def test_chips_are_there_once_and_go_to_who_comes_first() -> None:
    found = outcomes(CHAT, CODE)
    assert most_at_once([*found["chat"].lives, *found["code"].lives]) <= 8
    alone = outcomes(CHAT, CODE, shares=False)
    assert most_at_once([*alone["chat"].lives, *alone["code"].lives]) <= 8
    # Without shares chat has what code leaves, though it comes first.
    assert alone["chat"].service.slo_ratio < 0.3
    assert found["chat"].service.slo_ratio > alone["chat"].service.slo_ratio + 0.4
    assert found["code"].service.slo_ratio < alone["code"].service.slo_ratio


def test_same_days_have_the_same_outcome() -> None:
    first, again = outcomes(CHAT, CODE), outcomes(CHAT, CODE)
    assert {model: each.service for model, each in first.items()} == {
        model: each.service for model, each in again.items()
    }


def test_models_without_a_quota_have_days_of_their_own() -> None:
    day = setups()["code"]
    together = simulate_together(
        {"code": day}, {"code": SlicewisePolicy(profile(), [POOL.terms], RULES)}, [], []
    )
    alone = simulate(day, SlicewisePolicy(profile(), [POOL.terms], RULES))
    assert together["code"].service == alone.service
    assert together["code"].lives == alone.lives


def test_more_at_the_start_than_the_quota_has_is_refused() -> None:
    days = setups({"code": 7, "chat": 2})
    with pytest.raises(ValueError, match="reserved: 2 slices at the start exceed the quota"):
        simulate_together(days, {}, [QUOTA], [CHAT, CODE])
