"""What a policy has learned outlives it; what is no such record is refused by name."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_world import FLEX, ON_DEMAND, PROFILE, RESERVED, RULES, SPOT, TICK_S, World, load

from autoscaling.policy.classes.class_history import ClassHistory
from autoscaling.policy.forecast import DAY_S, Forecaster
from autoscaling.policy.memory import (
    PolicyMemoryError,
    PolicyRecord,
    decode_memory,
    encode_memory,
    slice_shape_of,
)
from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.profiles import Profiles
from autoscaling.records import Fleet, Observation, SliceLoss, SliceView
from serving.domain.slice_lifecycle import SliceState

SHAPE = slice_shape_of(Profiles(PROFILE))
QUIET = replace(RULES, forecast_share=0.0)
TWO_HOURS_S = 7200.0


def swell(at_s: float) -> float:
    """Three to five slices' work, up and down every two hours: a season shows in a day."""
    return 39.0 + 15.0 * math.sin(2 * math.pi * at_s / TWO_HOURS_S)


def law(input_tokens: float, output_tokens: float) -> float:
    """Slices for a request per second of so many tokens."""
    return 1e-4 * input_tokens + 1e-3 * output_tokens


def restarted(record: PolicyRecord, now_s: float) -> SlicewisePolicy:
    """Another policy, with what was kept as bytes."""
    memory = decode_memory(encode_memory(record), SHAPE, now_s)
    return SlicewisePolicy(PROFILE, [RESERVED, SPOT], QUIET, memory)


def test_season_survives_a_restart() -> None:
    policies = {"same": SlicewisePolicy(PROFILE, [RESERVED, SPOT], QUIET)}
    restart_s = DAY_S + TWO_HOURS_S
    by_season = dict.fromkeys(("same", "restarted", "forgetful"), 0)
    needs: dict[str, list[float | None]] = {name: [] for name in by_season}
    for tick in range(round((restart_s + TWO_HOURS_S) / 30)):
        now_s = 30.0 * tick
        if now_s == restart_s:
            # The controller was away for ten minutes.
            policies["restarted"] = restarted(policies["same"].to_record(now_s - 600), now_s)
            policies["forgetful"] = SlicewisePolicy(PROFILE, [RESERVED, SPOT], QUIET)
        seen = Observation(now_s, load(swell(now_s), now_s), Fleet((), {}))
        for name, policy in policies.items():
            plan = policy.decide(seen)
            if now_s >= restart_s:
                by_season[name] += "by season" in plan.arithmetic
                needs[name].append(plan.demand_slices)
    assert by_season["forgetful"] == 0
    assert by_season["restarted"] == by_season["same"] == 240
    # The last five minutes are a new policy's own, as they are after any pause.
    same, anew = needs["same"][10:], needs["restarted"][10:]
    assert sum(a != b for a, b in zip(same, anew, strict=True)) <= len(same) / 50


def test_drought_survives_a_restart() -> None:
    world = World.of(RESERVED, replace(SPOT, patience_s=90.0), ON_DEMAND)
    world.dry.add("spot")
    world.run(48.0, 900)
    assert world.targets == {"reserved": 2, "spot": 3, "on-demand": 3}
    terms = list(world.terms)
    memory = world.policy.to_record(world.now_s)
    # The orders are as old for whoever looks, but spot has been lost and not delivered since.
    world.slices = [
        replace(each, requested_at_s=world.now_s) if each.state == SliceState.PROVISIONING else each
        for each in world.slices
    ]
    world.policy = SlicewisePolicy(PROFILE, terms, RULES, memory)
    plan = world.step(48.0)
    assert plan.targets == {"reserved": 2, "spot": 3, "on-demand": 3}
    reasons = [each.reason for each in plan.refusals if each.compute_class == "spot"]
    assert reasons
    assert reasons[0].startswith("backing off: an order is")
    world.policy = SlicewisePolicy(PROFILE, terms, RULES)
    assert not [each for each in world.step(48.0).refusals if each.compute_class == "spot"]


@st.composite
def lives(draw: st.DrawFn) -> Iterator[tuple[float, list[SliceView], list[SliceLoss]]]:
    """What is seen of a class at one look after the other."""
    looks = []
    now_s = 0.0
    for number in range(draw(st.integers(1, 15))):
        now_s += draw(st.sampled_from([5.0, 60.0, 700.0, 4000.0]))
        states = draw(st.lists(st.sampled_from(list(SliceState)), max_size=4))
        slices = [
            SliceView(f"s-{place}", "spot", state, now_s, now_s - 90.0 * place)
            for place, state in enumerate(states)
        ]
        causes = draw(st.lists(st.sampled_from(["preempted", "unhealthy"]), max_size=3))
        losses = [SliceLoss(f"l-{number}", "spot", now_s, cause) for cause in causes]
        looks.append((now_s, slices, losses))
    return looks  # type: ignore[return-value]


@settings(deadline=None)
@given(lives())
def test_experience_of_a_class_comes_back(
    looks: list[tuple[float, list[SliceView], list[SliceLoss]]],
) -> None:
    history = ClassHistory(SPOT, RULES)
    for now_s, slices, losses in looks:
        history.observe(now_s, slices, losses)
    again = ClassHistory.from_record(SPOT, RULES, history.to_record(), now_s)
    assert again.to_record() == history.to_record()
    for name in ("lead_s", "losses_per_hour", "outages_per_hour", "backoff_reason"):
        assert getattr(again, name) == getattr(history, name)
    for later_s in (0.0, 100.0, 5000.0):
        assert again.is_healthy(now_s + later_s) == history.is_healthy(now_s + later_s)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0, 500), min_size=1, max_size=200), st.floats(30, 3000))
def test_forecast_comes_back_once_and_the_same_again(rates: list[float], horizon_s: float) -> None:
    forecaster = Forecaster(law)
    for place, rate in enumerate(rates):
        forecaster.observe(40.0 * place, rate, 100.0 + 7 * place, 50.0 + place)
        forecaster.at(40.0 * place, horizon_s, 0.9)
    record = forecaster.to_record()
    assert Forecaster.from_record(record, law).to_record() == record
    assert len(record.rates) <= 40 * len(rates) / 60 + 1


def test_record_of_a_day_is_small() -> None:
    policy = SlicewisePolicy(PROFILE, [RESERVED, SPOT, FLEX, ON_DEMAND], QUIET)
    for tick in range(round(1.2 * DAY_S / 30)):
        now_s = 1_795_226_400.0 + 30.0 * tick
        policy.decide(Observation(now_s, load(swell(now_s), now_s), Fleet((), {})))
    assert len(encode_memory(policy.to_record(now_s))) < 36_000


def small_record() -> PolicyRecord:
    world = World.of(RESERVED, SPOT)
    world.run(38.0, 600)
    world.lose("spot")
    world.run(38.0, 600)
    return world.policy.to_record(world.now_s)


RECORD = small_record()
FIELDS = json.loads(encode_memory(RECORD))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "wrong at: all"),
        (encode_memory(RECORD)[:-9], "wrong at: all"),
        (json.dumps(FIELDS | {"version": 0}).encode(), "wrong at: version"),
        (json.dumps(FIELDS | {"forecast": {"rates": []}}).encode(), "forecast.since_s"),
        (json.dumps(FIELDS | {"more": 1}).encode(), "wrong at: more"),
        (json.dumps(FIELDS | {"slice_shape": "2 x v5e 4x4"}).encode(), "slice_shape is '2 x v5e"),
        (json.dumps(FIELDS | {"written_at_s": 1e9}).encode(), "ahead of this clock"),
    ],
)
def test_what_cannot_be_used_is_refused_and_named(text: bytes, why: str) -> None:
    with pytest.raises(PolicyMemoryError, match=why):
        decode_memory(text, SHAPE, RECORD.written_at_s)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_no_damage_stops_a_policy(data: st.DataObject) -> None:
    text = bytearray(encode_memory(RECORD))
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.sampled_from(b'0179.-,"[]e'))
    try:
        memory = decode_memory(bytes(text), SHAPE, RECORD.written_at_s)
    except PolicyMemoryError:
        return
    world = World.of(RESERVED, SPOT)
    world.policy = SlicewisePolicy(PROFILE, [RESERVED, SPOT], RULES, memory)
    world.now_s = RECORD.written_at_s
    for _ in range(4):
        plan = world.step(38.0)
        world.now_s += 10 * TICK_S
    assert sum(plan.targets.values()) >= 4


def test_class_that_is_new_or_gone_is_no_matter() -> None:
    policy = SlicewisePolicy(PROFILE, [RESERVED, FLEX], RULES, RECORD)
    now_s = RECORD.written_at_s + 5
    plan = policy.decide(Observation(now_s, load(38.0, now_s), Fleet((), {})))
    assert plan.targets == {"reserved": 2, "flex-start": 2}
    assert set(policy.to_record(now_s).classes) == {"reserved", "flex-start"}


@pytest.mark.parametrize("restarts", [False, True])
def test_time_without_a_request_goes_on_over_a_restart(restarts: bool) -> None:
    rules = replace(RULES, idle_s=4 * 3600.0)
    world = World.of(rules=rules)
    world.run(9, 1800)
    world.run(0, 600)
    if restarts:
        memory = decode_memory(
            encode_memory(world.policy.to_record(world.now_s)), SHAPE, world.now_s
        )
        world.policy = SlicewisePolicy(PROFILE, world.terms, rules, memory)
    world.run(0, 3 * 3600)
    assert sum(world.targets.values()) == 1
    world.run(0, 3600)
    assert sum(world.targets.values()) == 0


def test_record_of_the_earlier_build_is_read() -> None:
    world = World.of(SPOT, ON_DEMAND)
    world.run(98, 900)
    world.lose("spot")
    world.run(98, 300)
    written = json.loads(encode_memory(world.policy.to_record(world.now_s)))
    del written["busy_at_s"]
    for each in written["classes"].values():
        each["num_losses"], each["num_outages"] = 10, 1
    record = decode_memory(json.dumps(written).encode(), SHAPE, world.now_s)
    assert record.busy_at_s is None
    assert record.classes["spot"].num_losses == 10
    again = SlicewisePolicy(PROFILE, world.terms, RULES, record)
    assert again.to_record(world.now_s).classes["spot"].num_outages == 1
