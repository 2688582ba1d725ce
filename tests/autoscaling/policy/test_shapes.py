"""A model whose classes have slices of several shapes: which are bought, kept and given up."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.profiles import Profiles
from autoscaling.policy.quotas.chip_book import ChipBook
from autoscaling.policy.quotas.records import ChipQuota, Member
from autoscaling.policy.rules import Rules
from autoscaling.policy_config import read_policy_settings
from serving.domain.capacity.engine_rates import EngineRate
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.compute_class import ComputeClass
from tests.autoscaling.policy.policy_world import OBJECTIVES, PROFILE, RULES, World

# Of 100 prompt and 100 output tokens a small slice carries 10 requests per second within 50 ms, and
# a large one, of twice as many chips, 24: it divides its steps' base time among more.
LARGE = PROFILE.model_copy(
    update={"base_s": 0.02, "per_sequence_s": 0.0002, "per_prompt_token_s": 0.00005}
)
# An idle slice is slower than the objective.
TINY = PROFILE.model_copy(update={"base_s": 0.06})
SMALL_SPOT = ComputeClass("small", 4.0, max_slices=50, provisioning_s=60, load_s=60)
LARGE_SPOT = ComputeClass("large", 8.0, max_slices=50, provisioning_s=60, load_s=60)
TINY_SPOT = ComputeClass("tiny", 0.1, max_slices=50, provisioning_s=60, load_s=60)
QUIET = replace(RULES, forecast_share=0.0)


def world_of(*terms: ComputeClass, rules: Rules = QUIET, **profiles: CapacityProfile) -> World:
    terms = terms or (SMALL_SPOT, LARGE_SPOT)
    profiles = profiles or {"large": LARGE}
    return World(SlicewisePolicy(PROFILE, terms, rules, None, profiles), terms)


def test_slice_counts_as_what_it_carries_of_these_requests() -> None:
    profiles = Profiles(PROFILE, {"large": LARGE, "tiny": TINY})
    assert profiles.weight("small", (100.0, 100.0), 0.05) == 1.0
    assert profiles.weight("large", (100.0, 100.0), 0.05) == 2.4
    assert profiles.weight("tiny", (100.0, 100.0), 0.05) == 0.0


@pytest.mark.parametrize(
    ("rate", "slices"),
    [
        (8.0, {"small": 1, "large": 0}),
        # Two small ones cost as much and carry less.
        (18.0, {"small": 0, "large": 1}),
        (38.0, {"small": 0, "large": 2}),
        (118.0, {"small": 0, "large": 5}),
    ],
)
def test_cheapest_shapes_for_the_load_are_bought(rate: float, slices: dict[str, int]) -> None:
    world = world_of()
    plan = world.run(rate, 900)
    assert world.targets == slices
    assert "a slice of large counts as 2.4" in plan.arithmetic


def test_shape_that_is_too_slow_for_the_objective_is_not_bought() -> None:
    world = world_of(SMALL_SPOT, TINY_SPOT, tiny=TINY)
    plan = world.run(18.0, 600)
    assert world.targets == {"small": 2, "tiny": 0}
    assert "a slice of tiny is slower than the objective" in plan.arithmetic


def test_shape_that_is_too_slow_is_not_asked_for_once_its_class_backs_off_either() -> None:
    world = world_of(SMALL_SPOT, TINY_SPOT, tiny=TINY)
    world.dry = {"small"}
    # An order of it is late as well: it was made before its profile was known.
    world.slices = [replace(world._wish("tiny"), requested_at_s=-3600.0)]
    world.run(18.0, 900)
    assert {plan.targets["tiny"] for plan in world.plans} == {0}


def test_one_shape_takes_the_place_of_the_other_only_once_it_is_ready() -> None:
    world = world_of()
    world.run(18.0, 900)
    assert world.targets == {"small": 0, "large": 1}
    fewest_carried = 99.0
    for _ in range(180):
        world.step(8.0)
        carried = world.ready("small") + 2.4 * world.ready("large")
        fewest_carried = min(fewest_carried, carried)
    assert world.targets == {"small": 1, "large": 0}
    assert fewest_carried >= 1


def test_shapes_are_not_exchanged_for_a_little_money() -> None:
    """By themselves 48 requests/s would have two large slices and a small one."""
    world = world_of()
    world.run(58.0, 900)
    for rate in (48.0, 58.0) * 4:
        world.run(rate, 900)
        assert world.targets == {"small": 0, "large": 3}


def test_surplus_of_a_large_slice_is_not_given_up_for_less_than_it_carries() -> None:
    world = world_of()
    world.run(58.0, 900)
    assert world.targets == {"small": 0, "large": 3}
    for rate in (48.0, 38.0, 28.0, 18.0):
        for _ in range(120):
            plan = world.step(rate)
            carried = world.ready("small") + 2.4 * world.ready("large")
            assert plan.demand_slices is not None
            assert carried >= rate / 10


def test_quota_counts_the_chips_of_each_shape() -> None:
    members = (
        Member("chat", 4, chips_by_class={"large": 8}),
        Member("code", 4, chips_by_class={"large": 8}),
    )
    everybody = frozenset({"chat", "code"})
    quotas = (ChipQuota("small", 16, everybody), ChipQuota("large", 16, everybody))
    policies = {
        model: SlicewisePolicy(
            PROFILE, (SMALL_SPOT, LARGE_SPOT), Rules(OBJECTIVES, spread=0), None, {"large": LARGE}
        )
        for model in ("chat", "code")
    }
    worlds = {model: World(each, (SMALL_SPOT, LARGE_SPOT)) for model, each in policies.items()}
    asked = {model: policies[model].ask(world.tick(48.0)) for model, world in worlds.items()}
    book = ChipBook(quotas, members, asked, {})
    planned = {}
    for model in sorted(policies, key=book.place_of):
        planned[model] = policies[model].plan(book.share_of(model)).targets
        book.take(model, planned[model])
    assert sum(8 * each["large"] for each in planned.values()) == 16
    assert sum(4 * each["small"] for each in planned.values()) == 16
    carried = {model: each["small"] + 2.4 * each["large"] for model, each in planned.items()}
    assert abs(carried["chat"] - carried["code"]) <= 2.4


def test_shape_of_several_hosts_is_bought_whole_and_counted_in_its_chips() -> None:
    """A 4x4 of v6e has four hosts and 16 chips: four times a 2x2, and here it carries six times."""
    small = PROFILE.model_copy(update={"generation": "v6e", "topology": "2x2"})
    large = small.model_copy(
        update={
            "topology": "4x4",
            "base_s": 0.02,
            "per_sequence_s": 0.00008,
            "per_prompt_token_s": 0.00002,
        }
    )
    # Both cost as much for each chip.
    each = {"usd_per_chip_hour": 1.0, "is_revocable": False, "provisioning_s": 60.0, "load_s": 60.0}
    classes = {"spot": each, "spot-4x4": each | {"profile": large.model_dump(mode="json")}}
    settings = {
        "models": {
            "m": {
                "profile": small.model_dump(mode="json"),
                "objectives": {"ttft_s": 3.0, "tpot_s": 0.05},
                "rules": {"tpot_margin": 1.0, "spread": 0.0, "forecast_share": 0.0},
                "classes": classes,
            }
        },
        "quotas": [{"compute_class": "spot-4x4", "max_chips": 31}],
    }
    found = read_policy_settings(settings, Path())
    (model,) = found.models

    def planned(rate: float) -> dict[str, int]:
        policy = SlicewisePolicy(model.profile, model.terms, model.rules, None, model.profiles)
        world = World(policy, model.terms)
        for _ in range(90):
            asked = {"m": policy.ask(world.tick(rate))}
            book = ChipBook(found.quotas, found.members, asked, {})
            world.carry_out(policy.plan(book.share_of("m")))
        return world.targets

    assert planned(18.0) == {"spot": 2, "spot-4x4": 0}
    assert planned(58.0) == {"spot": 0, "spot-4x4": 1}
    assert planned(78.0) == {"spot": 2, "spot-4x4": 1}
    # A second one would have 32 chips, of 31.
    assert planned(118.0) == {"spot": 6, "spot-4x4": 1}


def test_what_slices_carry_is_learned_by_their_own_profiles() -> None:
    """Large slices at work as their profile says are no surprise to that of small ones."""
    policy = SlicewisePolicy(PROFILE, (SMALL_SPOT, LARGE_SPOT), QUIET, None, {"large": LARGE})
    world = World(policy, (SMALL_SPOT, LARGE_SPOT))
    # 24 requests per second, and steps as long as planned.
    rate = EngineRate("large-1", "large", 2400.0, 2400.0, 0.05)
    for _ in range(60):
        world.step(24.0, num_waiting=5, full_ratio=1.0, num_in_flight=120, engines=(rate,))
    assert policy.learned.factor({"large": 1}) == pytest.approx(1.0, abs=0.03)
