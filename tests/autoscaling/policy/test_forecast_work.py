"""What is forecast is work: requests that become longer at some time of the day are foreseen."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_world import PROFILE, RULES, SPOT, World, load

from autoscaling.policy.forecast import DAY_S, Forecaster
from autoscaling.policy.memory import decode_memory, encode_memory, slice_shape_of
from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.profiles import Profiles
from autoscaling.records import Fleet, Observation

QUIET = replace(RULES, forecast_share=0.0)
SLOW = replace(SPOT, provisioning_s=600.0, load_s=300.0)
TICK_S = 60.0
NOON_S = DAY_S / 2
SWELL_S = 3600.0
# As many requests every day, up and down: so the season is known to be right before noon comes.
RATE, RATE_SWELL, RATE_PERIOD_S = 40.0, 8.0, 7200.0
# By the profile a slice carries 10 requests per second of 100 and 100 tokens, 5 of twice as many.
SHORT, LONG = 100.0, 200.0


def law(input_tokens: float, output_tokens: float) -> float:
    """Slices for a request per second of so many tokens."""
    return 1e-4 * input_tokens + 1e-3 * output_tokens


def rate_at(at_s: float) -> float:
    """Requests per second."""
    return RATE + RATE_SWELL * math.sin(2 * math.pi * at_s / RATE_PERIOD_S)


def tokens_at(at_s: float) -> float:
    """Tokens of prompts and answers: twice as many from an hour after noon on, for two hours."""
    since_noon_s = at_s % DAY_S - NOON_S
    rise = min(max(since_noon_s / SWELL_S, 0.0), 1.0)
    fall = min(max((since_noon_s - 3 * SWELL_S) / SWELL_S, 0.0), 1.0)
    return SHORT + (LONG - SHORT) * (rise - fall)


def test_longer_requests_at_noon_are_foreseen_on_the_second_day() -> None:
    policy = SlicewisePolicy(PROFILE, [SLOW], QUIET)
    lead_s = SLOW.provisioning_s + SLOW.load_s
    short_s = {0: 0.0, 1: 0.0}  # slice-seconds that are missing, by the day
    for tick in range(round(2 * DAY_S / TICK_S)):
        now_s = TICK_S * tick
        tokens = tokens_at(now_s)
        seen = load(rate_at(now_s), now_s, input_tokens_mean=tokens, output_tokens_mean=tokens)
        plan = policy.decide(Observation(now_s, seen, Fleet((), {})))
        if 0 < now_s % DAY_S - NOON_S < SWELL_S:
            # What is asked for now is there then.
            then_s = now_s + lead_s
            needed = rate_at(then_s) / 10 * tokens_at(then_s) / SHORT
            missing = max(0.0, needed - (plan.demand_slices or 0))
            short_s[int(now_s // DAY_S)] += missing * TICK_S
            if now_s > DAY_S:
                assert "by season" in plan.arithmetic
    # A forecast of requests alone leaves 2,650 on either day.
    assert short_s[1] < 60
    assert short_s[0] > 400, "the first day cannot know"


def test_restart_keeps_what_is_known_of_lengths() -> None:
    policy = SlicewisePolicy(PROFILE, [SLOW], QUIET)
    needs: dict[str, list[float | None]] = {"same": [], "restarted": []}
    policies = {"same": policy}
    for tick in range(round((DAY_S + NOON_S + SWELL_S) / TICK_S)):
        now_s = TICK_S * tick
        tokens = tokens_at(now_s)
        seen = load(rate_at(now_s), now_s, input_tokens_mean=tokens, output_tokens_mean=tokens)
        if now_s == DAY_S + NOON_S - SWELL_S:
            memory = decode_memory(
                encode_memory(policy.to_record(now_s)), slice_shape_of(Profiles(PROFILE)), now_s
            )
            policies["restarted"] = SlicewisePolicy(PROFILE, [SLOW], QUIET, memory)
        for name, each in policies.items():
            plan = each.decide(Observation(now_s, seen, Fleet((), {})))
            if now_s >= DAY_S + NOON_S:
                needs[name].append(plan.demand_slices)
    assert max(filter(None, needs["same"])) > 1.8 * RATE / 10
    same, anew = needs["same"], needs["restarted"]
    assert sum(a != b for a, b in zip(same, anew, strict=True)) <= len(same) / 20


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0, 500), st.floats(1, 5000)), min_size=1, max_size=80),
    st.floats(0.1, 10),
)
def test_work_is_what_the_law_makes_of_it(looks: list[tuple[float, float]], times: float) -> None:
    """Requests that all take so many times as much are so many times the work, at any horizon."""
    usual = Forecaster(law)
    dearer = Forecaster(lambda *tokens: times * law(*tokens))
    for place, (rate, tokens) in enumerate(looks):
        for each in (usual, dearer):
            each.observe(30.0 * place, rate, tokens, tokens)
    low, high = (each.at(30.0 * len(looks), 300.0, 0.9) for each in (usual, dearer))
    assert high.slices == pytest.approx(times * low.slices, rel=1e-6, abs=1e-9)
    assert dearer.rate == usual.rate
    assert dearer.tokens == usual.tokens


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 500), st.floats(1, 5000)), min_size=1, max_size=80))
def test_lengths_stay_within_what_was_seen(looks: list[tuple[float, float]]) -> None:
    forecaster = Forecaster(law)
    for place, (rate, tokens) in enumerate(looks):
        forecaster.observe(30.0 * place, rate, tokens, 2 * tokens)
    busy = [tokens for rate, tokens in looks if rate > 0]
    found = forecaster.tokens
    if busy:
        assert min(busy) * (1 - 1e-9) <= found[0] <= max(busy) * (1 + 1e-9)
        assert found[1] == pytest.approx(2 * found[0])
    else:
        told = [(0.0, 0.0), *((tokens, 2 * tokens) for _, tokens in looks)]
        assert found in told, "what is assumed of a request before the first"


@pytest.mark.parametrize("ticks", range(4))
@pytest.mark.parametrize("restarts", [False, True])
def test_first_burst_of_a_model_costs_what_is_assumed_of_a_request(
    ticks: int, restarts: bool
) -> None:
    world = World.of()
    world.run(0, 600 + 10 * ticks)
    if restarts:
        memory = world.policy.to_record(world.now_s)
        world.policy = SlicewisePolicy(PROFILE, world.terms, RULES, memory)
        world.step(0)
    world.step(118)
    assert sum(world.targets.values()) >= 12
