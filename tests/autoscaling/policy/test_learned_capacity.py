"""What slices carry is learned where they can carry no more, and from most of them."""

import random
from dataclasses import replace

import pytest
from closed_loop import ON_DEMAND, RATE, RULES, ClosedLoop, law
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaling.policy.capacity.learned_capacity import (
    LearnedCapacity,
    learned_of_record,
    nothing_learned,
)
from autoscaling.policy.capacity.shown_capacity import (
    LEAST_FACTOR,
    MOST_FACTOR,
    carried_factor,
    paced_factor,
)
from autoscaling.policy.memory import (
    FitRecord,
    LearnedRecord,
    decode_memory,
    encode_memory,
    slice_shape_of,
)
from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.profiles import Profiles
from autoscaling.records import ModelLoad
from serving.domain.capacity.engine_rates import EngineRate
from serving.domain.capacity.slice_profile import CapacityProfile

PLANNED_S = RULES.objectives.tpot_s * RULES.tpot_margin
PROFILE = law(10.0)
SHAPE = Profiles(PROFILE)
FULL = {"num_waiting": 50, "full_ratio": 1.0}


def at_work(
    share: float, name: str = "s", compute_class: str = "spot", step_s: float = PLANNED_S
) -> EngineRate:
    """An engine that carries this share of what the profile says of steps so long."""
    rate = share * PROFILE.max_requests_per_s(100.0, 100.0, step_s)
    return EngineRate(name, compute_class, 100.0 * rate, 100.0 * rate, step_s)


def load(*engines: EngineRate, **fields: float) -> ModelLoad:
    return ModelLoad(0.0, 10.0, 100.0, 100.0, engines=engines, **fields)  # type: ignore[arg-type]


def learn(*loads: ModelLoad, times: int = 1) -> LearnedCapacity:
    learned = nothing_learned(SHAPE)
    for each in loads * times:
        learned = learned.seen(30.0, each, SHAPE, RULES)
    return learned


@pytest.mark.parametrize("share", [0.5, 0.8, 1.0, 1.5])
@pytest.mark.parametrize("step_s", [0.03, PLANNED_S, 0.09])
def test_what_full_engines_carry_is_their_capacity(share: float, step_s: float) -> None:
    engine = at_work(share, step_s=step_s)
    learned = learn(load(engine, **FULL), times=20)
    expected = carried_factor(engine, PROFILE, RULES)
    assert learned.factor({"spot": 1}) == pytest.approx(expected)
    if step_s >= PLANNED_S:
        assert expected == pytest.approx(share)


def test_slices_that_are_not_saturated_teach_nothing() -> None:
    idle = at_work(0.3, step_s=0.03)
    for known in (
        load(idle),
        load(idle, num_waiting=9, full_ratio=0.5),
        load(idle, full_ratio=1.0),
    ):
        assert learn(known, times=20).factor({"spot": 1}) == 1.0


def test_long_steps_without_sequences_are_no_saturation() -> None:
    slow = EngineRate("s", "spot", 20.0, 20.0, 0.2)
    assert learn(load(slow), times=20).factor({"spot": 1}) == 1.0
    assert learn(load(at_work(0.6, step_s=0.09)), times=20).factor({"spot": 1}) < 0.7


def test_one_slow_slice_of_ten_is_reported_and_not_learned() -> None:
    engines = [at_work(0.9, f"s{number}") for number in range(9)]
    learned = learn(load(*engines, at_work(0.3, "bad"), **FULL), times=20)
    assert learned.factor({"spot": 10}) == pytest.approx(0.9)
    assert [each.engine_id for each in learned.slow] == ["bad"]
    assert str(learned.slow[0]) == (
        "slice of bad is slow: it carries 0.33 of the profile's law, others of spot 0.90;"
        " nothing is learned from it"
    )
    assert learn(load(at_work(0.9), at_work(0.3, "other"), **FULL)).slow == (), "who is right?"


def test_few_observations_count_for_less() -> None:
    factors = [learn(load(at_work(0.5), **FULL), times=n).factor({"spot": 1}) for n in (1, 4, 8, 9)]
    assert factors == pytest.approx([1 - 0.5 / 8, 0.75, 0.5, 0.5])
    many = load(*(at_work(0.5, f"s{number}") for number in range(8)), **FULL)
    assert learn(many).factor({"spot": 8}) == pytest.approx(0.5)


def test_what_is_learned_is_bounded() -> None:
    assert learn(load(at_work(0.05), **FULL), times=20).factor({"spot": 1}) == pytest.approx(
        LEAST_FACTOR
    )


def test_it_is_kept_while_nothing_is_saturated_and_more_within_the_objective_proves_more() -> None:
    low = learn(load(at_work(0.5), **FULL), times=20)
    for _ in range(1000):
        low = low.seen(30.0, load(at_work(0.2, step_s=0.03)), SHAPE, RULES)
    assert low.factor({"spot": 1}) == pytest.approx(0.5)
    for _ in range(40):
        low = low.seen(30.0, load(at_work(0.8, step_s=0.99 * PLANNED_S)), SHAPE, RULES)
    assert low.factor({"spot": 1}) == pytest.approx(0.8, abs=0.02)


def test_classes_are_learned_apart_and_weigh_by_their_slices() -> None:
    engines = at_work(0.5, "a", "spot"), at_work(0.9, "b", "flex-start")
    learned = learn(load(*engines, **FULL), times=20)
    assert learned.factor({"spot": 1}) == pytest.approx(0.5)
    assert learned.factor({"spot": 1, "flex-start": 3}) == pytest.approx(0.8)
    assert learned.factor({"reserved": 4}) == pytest.approx(0.7), "as others are"


def test_it_survives_a_restart_and_not_another_profile() -> None:
    learned = learn(load(at_work(0.5), **FULL), times=20)
    record = LearnedRecord.model_validate_json(learned.to_record().model_dump_json())
    assert learned_of_record(record, SHAPE).factor({"spot": 1}) == pytest.approx(0.5)
    assert learned_of_record(record, SHAPE).fits == learned.fits
    renamed = PROFILE.model_copy(update={"source": "the same numbers, measured again"})
    assert learned_of_record(record, Profiles(renamed)).classes
    assert not learned_of_record(record, Profiles(law(11.0))).classes


def test_record_of_an_earlier_build_has_no_steps_and_is_used() -> None:
    fields = learn(load(at_work(0.5), **FULL), times=20).to_record().model_dump()
    del fields["fits"]
    learned = learned_of_record(LearnedRecord.model_validate(fields), SHAPE)
    assert learned.fits == {}
    assert learned.factor({"spot": 1}) == pytest.approx(0.5)


sums = st.one_of(st.just(0.0), st.floats(0.0, 1e15), st.floats(0.0, 100.0))


@given(fit=st.builds(FitRecord, weight=sums, x=sums, y=sums, xx=sums, xy=sums, yy=sums))
@settings(max_examples=200)
def test_damaged_sums_of_steps_make_no_law_that_cannot_be(fit: FitRecord) -> None:
    record = replace_fits(learn(load(at_work(0.5), **FULL), times=20).to_record(), fit)
    learned = learned_of_record(record, SHAPE)
    for _ in range(3):
        learned = learned.seen(30.0, load(at_pace(1.2, 30.0)), SHAPE, RULES)
    assert 1 / 3 <= learned.factor({"spot": 1}) <= 3


def replace_fits(record: LearnedRecord, fit: FitRecord) -> LearnedRecord:
    return record.model_copy(update={"fits": {"spot": fit}})


# -- below saturation --


def at_pace(
    times: float,
    running: float,
    name: str = "s",
    prompt_tokens: float = 2.0,
    times_work: float = 1.0,
) -> EngineRate:
    """An engine by a law so many times as slow, with so much in each of its steps.

    What is in them takes `times_work` as long as by that law.
    """
    work_s = running * PROFILE.per_sequence_s + prompt_tokens * PROFILE.per_prompt_token_s
    step_s = times * (PROFILE.base_s + times_work * work_s)
    return EngineRate(name, "spot", prompt_tokens / step_s, running / step_s, step_s)


@given(st.floats(0.5, 1.5), st.floats(10, 100), st.floats(0, 60))
def test_pace_says_what_an_engine_could_carry(
    times: float, running: float, prompt_tokens: float
) -> None:
    engine = at_pace(times, running, prompt_tokens=prompt_tokens)
    found = paced_factor(engine, PROFILE, RULES)
    if found is None:
        work_s = engine.step_s / times - PROFILE.base_s
        assert work_s <= 0.3 * (PROFILE.base_s + work_s) * (1 + 1e-9)
        return
    real = PROFILE.model_copy(
        update={
            name: times * getattr(PROFILE, name)
            for name in ("base_s", "per_sequence_s", "per_prompt_token_s")
        }
    )
    tokens = engine.prompt_tokens_per_s, engine.output_tokens_per_s
    expected = real.max_requests_per_s(*tokens, PLANNED_S) / PROFILE.max_requests_per_s(
        *tokens, PLANNED_S
    )
    expected = min(max(expected, LEAST_FACTOR), 2.0)
    # A slow engine may carry less: only what is in its steps may be slow.
    assert found == pytest.approx(expected) if times <= 1 else found <= expected * (1 + 1e-9)


@given(st.floats(1.05, 2.5), st.floats(10, 100), st.floats(0, 60))
def test_pace_says_no_more_than_is_true_where_only_work_is_slow(
    times: float, running: float, prompt_tokens: float
) -> None:
    engine = at_pace(1.0, running, prompt_tokens=prompt_tokens, times_work=times)
    found = paced_factor(engine, PROFILE, RULES)
    assert found is None or found <= max(1 / times, LEAST_FACTOR) * (1 + 1e-9)


def test_engine_with_little_to_do_says_nothing_of_a_full_one() -> None:
    assert paced_factor(at_pace(0.7, 3.0), PROFILE, RULES) is None
    assert paced_factor(at_pace(0.7, 8.0), PROFILE, RULES) is None
    assert paced_factor(at_pace(0.7, 30.0), PROFILE, RULES) is not None
    assert learn(load(at_pace(0.7, 8.0)), times=20).factor({"spot": 1}) == 1.0


def learn_from_noise(
    times: float,
    num_slices: int,
    seed: int,
    learned: LearnedCapacity | None = None,
    noise: float = 0.01,
) -> LearnedCapacity:
    """Eight hours of engines by a law so many times as slow, with steps that scatter."""
    chance = random.Random(seed)
    learned = learned or nothing_learned(SHAPE)
    for _ in range(8 * 360):
        engines = (
            at_pace(times * chance.gauss(1, noise), 30.0, f"s{number}")
            for number in range(num_slices)
        )
        learned = learned.seen(10.0, load(*engines), SHAPE, RULES)
    return learned


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_slices", [1, 3, 10])
def test_profile_that_is_right_stays_as_it_is_under_noise(num_slices: int, seed: int) -> None:
    learned = learn_from_noise(1.0, num_slices, seed)
    assert learned.factor({"spot": num_slices}) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("num_slices", [1, 3])
def test_steps_that_scatter_more_do_not_make_a_profile_too_pessimistic(num_slices: int) -> None:
    """The highest of eight hours is not what a slice carries: it was learned as 1.17 of one."""
    learned = learn_from_noise(1.0, num_slices, 1, noise=0.03)
    assert learned.factor({"spot": num_slices}) == pytest.approx(1.0, abs=0.04)
    quick = paced_factor(at_pace(1 / 1.2, 30.0), PROFILE, RULES)
    assert quick is not None
    learned = learn_from_noise(1 / 1.2, num_slices, 2, learned, noise=0.03)
    assert learned.factor({"spot": num_slices}) == pytest.approx(quick, rel=0.04)


@pytest.mark.parametrize("num_slices", [1, 3, 10])
def test_profile_that_is_a_fifth_wrong_is_corrected_under_noise(num_slices: int) -> None:
    """Also after hours in which it was right."""
    quick = paced_factor(at_pace(1 / 1.2, 30.0), PROFILE, RULES)
    assert quick is not None
    assert quick > 1.2
    for before in (None, learn_from_noise(1.0, num_slices, 1)):
        learned = learn_from_noise(1 / 1.2, num_slices, 2, before)
        factor = learned.factor({"spot": num_slices})
        assert quick * 0.98 <= factor <= quick * 1.06


@pytest.mark.parametrize("running", [20.0, 30.0, 40.0])
def test_what_full_slices_taught_is_not_forgotten_with_little_to_do(running: float) -> None:
    """A profile that says half as much again as is true: quiet hours do not make it true."""
    chance = random.Random(4)
    learned = learn(load(at_work(1 / 1.5), **FULL), times=20)
    for _ in range(8 * 360):
        paces = [chance.gauss(1, 0.01) for _ in range(3)]
        engines = [
            at_pace(pace, running, f"s{number}", times_work=1.5)
            for number, pace in enumerate(paces)
        ]
        learned = learned.seen(10.0, load(*engines), SHAPE, RULES)
    assert learned.factor({"spot": 3}) == pytest.approx(1 / 1.5, rel=0.06)


def test_what_once_looked_quicker_than_the_law_is_forgotten() -> None:
    learned = learn(load(at_pace(0.95, 30.0)))
    assert 1 < learned.factor({"spot": 1}) < 1.05
    for _ in range(40):
        learned = learned.seen(30.0, load(at_pace(1.0, 30.0)), SHAPE, RULES)
    assert learned.factor({"spot": 1}) == pytest.approx(1.0, abs=0.001)


def test_steps_as_the_law_has_them_lift_what_was_learned_low_to_the_law() -> None:
    learned = learn(load(at_work(0.5), **FULL), times=20)
    learned = replace(
        learned,
        classes={
            name: replace(each, is_room_short=False) for name, each in learned.classes.items()
        },
    )
    for _ in range(100):
        learned = learned.seen(30.0, load(at_pace(1.0, 30.0)), SHAPE, RULES)
    assert learned.factor({"spot": 1}) == pytest.approx(1.0, abs=0.01)


def test_median_pace_is_learned_and_one_slow_slice_is_told() -> None:
    engines = [at_pace(0.8, 30.0, f"s{number}") for number in range(9)]
    learned = learn(load(*engines, at_pace(1.6, 30.0, "bad")), times=20)
    expected = paced_factor(engines[0], PROFILE, RULES)
    assert learned.factor({"spot": 10}) == pytest.approx(expected)
    assert [each.engine_id for each in learned.slow] == ["bad"]


def test_pace_proves_nothing_where_room_ran_out_before_time() -> None:
    quick = at_pace(0.8, 30.0)
    assert quick.step_s < PLANNED_S
    full = learn(load(quick, **FULL), times=20)
    expected = carried_factor(quick, PROFILE, RULES)
    assert expected is not None
    assert expected < 1
    record = LearnedRecord.model_validate_json(full.to_record().model_dump_json())
    for known in (full, learned_of_record(record, SHAPE)):
        for _ in range(100):
            known = known.seen(30.0, load(quick), SHAPE, RULES)
        assert known.factor({"spot": 1}) == pytest.approx(expected)


# -- the loop closed --


@pytest.mark.parametrize(("times_too_good", "most"), [(0.5, 30), (0.67, 28), (1.0, 27)])
def test_pessimistic_profile_is_corrected_while_nothing_is_full(
    times_too_good: float, most: int
) -> None:
    world, profile = loop(24, times_too_good, 0.025, num_ready=round(27 / times_too_good))
    world.run(3600)
    assert not any(each.num_waiting for each in world.loads)
    assert 24 <= world.target <= most, world.told(300)
    by_law = RATE / profile.max_requests_per_s(100.0, 100.0, PLANNED_S)
    assert by_law == pytest.approx(24 / times_too_good, rel=0.01)


def loop(
    need: int, times_too_good: float, base_s: float, **changes: object
) -> tuple[ClosedLoop, CapacityProfile]:
    seqs = 256 if base_s < 0.01 else 128
    profile = law(times_too_good * RATE / need, base_s, seqs)
    policy = SlicewisePolicy(profile, [ON_DEMAND], RULES)
    return ClosedLoop(policy, law(RATE / need, base_s, seqs), **changes), profile  # type: ignore[arg-type]


@pytest.mark.parametrize("base_s", [0.001, 0.025])
@pytest.mark.parametrize("times_too_good", [0.67, 1.0, 1.2, 1.5, 2.0])
@pytest.mark.parametrize(
    "need", [pytest.param(24, marks=pytest.mark.long), 27, pytest.param(30, marks=pytest.mark.long)]
)
def test_real_need_is_reached_whatever_the_profile_says(
    need: int, times_too_good: float, base_s: float
) -> None:
    """The need, and up to three slices of spread: a profile that is right has as many."""
    world, _ = loop(need, times_too_good, base_s)
    world.run(2400)
    assert need <= world.target <= need + 3, world.told(300)
    assert world.waiting == pytest.approx(0), world.told(300)
    if times_too_good != 1.0:
        assert "slices were seen to carry" in world.plans[-1].arithmetic


def test_additions_say_what_slices_were_seen_to_carry() -> None:
    world, _ = loop(24, 2.0, 0.001)
    world.run(900)
    reasons = [each.reason for plan in world.plans for each in plan.decisions if each.delta > 0]
    assert any("slices were seen to carry 0.5" in reason for reason in reasons)


def test_slow_slice_of_ten_costs_one_slice_and_is_told() -> None:
    world, _ = loop(24, 1.0, 0.001, num_clients=3000, slow={"s-0": 0.5})
    world.run(300)
    assert world.plans[-1].alerts
    assert "slice of s-0 is slow" in world.plans[-1].alerts[0]
    assert world.policy.learned.factor({ON_DEMAND.name: 10}) == pytest.approx(1.0, abs=0.05)


def test_next_policy_knows_what_the_one_before_had_learned() -> None:
    world, profile = loop(24, 2.0, 0.001)
    world.run(1500)
    text = encode_memory(world.policy.to_record(world.now_s))
    memory = decode_memory(text, slice_shape_of(Profiles(profile)), world.now_s)
    learned = learned_of_record(memory.learned, Profiles(profile))
    world.policy = SlicewisePolicy(profile, [ON_DEMAND], RULES, memory)
    before = world.target
    world.run(900)
    # The last slice goes as soon as steps show that it may.
    assert before - 1 <= world.target <= before
    assert replace(world.policy.learned, slow=()).factor({}) == pytest.approx(
        learned.factor({}), rel=0.1
    )


def test_profile_with_twice_the_work_is_corrected_by_loads_that_differ() -> None:
    """With the base time right, steps of one load alone would say less than there is."""
    said = PROFILE.model_copy(
        update={
            "per_sequence_s": 2 * PROFILE.per_sequence_s,
            "per_prompt_token_s": 2 * PROFILE.per_prompt_token_s,
        }
    )
    profiles = Profiles(said)
    learned = nothing_learned(profiles)
    chance = random.Random(1)
    for _ in range(2 * 360):
        engines = [
            at_pace(chance.gauss(1, 0.02), running, f"s{running:g}")
            for running in (10.0, 15.0, 20.0)
        ]
        learned = learned.seen(10.0, load(*engines), profiles, RULES)
    assert learned.factor({"spot": 3}) == pytest.approx(2.0, abs=0.1)
    alone = paced_factor(engines[1], said, RULES)
    assert alone is not None
    assert alone < 1.7


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-4000, 100), st.floats(0.2, 3)), min_size=1, max_size=30))
def test_what_is_believed_is_bounded_whatever_the_time_between_looks(
    looks: list[tuple[float, float]],
) -> None:
    learned = nothing_learned(SHAPE)
    for elapsed_s, share in looks:
        learned = learned.seen(elapsed_s, load(at_work(share), **FULL), SHAPE, RULES)
        known = learned.classes["spot"]
        assert 0 <= known.confidence <= 1
        assert LEAST_FACTOR <= known.believed <= MOST_FACTOR
        assert learned.fits["spot"].is_possible
        learned.to_record()
