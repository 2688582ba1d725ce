"""A compute class is the same record, whichever section describes it."""

import dataclasses

import pytest

from serving.config.slices import ComputeClassConfig
from serving.domain.compute_class import ComputeClass, Market
from tests.autoscaling.test_policy_config import terms as planned

# Of the slice in that module's profile, v6e 2x4.
NUM_CHIPS = 8


def provisioned(name: str, **config: object) -> ComputeClass:
    declared = ComputeClassConfig.model_validate({"name": name, "market": name} | config)
    return declared.terms(NUM_CHIPS, min_slices=1, max_slices=9)


@pytest.mark.parametrize("market", [market.value for market in Market])
def test_policy_and_manifests_read_the_same_terms(market: str) -> None:
    bounds = {"min_slices": 1, "max_slices": 9}
    shared = {"usd_per_chip_hour": 1.25, "patience_s": 60.0}
    there = planned(market, bounds | shared)
    here = provisioned(market, **shared)
    # Only the policy expects times of its slices; only the other knows the notice.
    known = {"provisioning_s": there.provisioning_s, "load_s": there.load_s}
    assert dataclasses.replace(here, drain_notice_s=None, **known) == there
    assert here.drain_notice_s is not None


def test_class_without_a_price_is_none_that_can_be_planned_with() -> None:
    unpriced = provisioned("spot")
    assert unpriced.usd_per_slice_hour is None
    with pytest.raises(ValueError, match="spot: usd_per_slice_hour is not known"):
        _ = unpriced.price
    assert provisioned("spot", usd_per_chip_hour=0.5).price == 0.5 * NUM_CHIPS
