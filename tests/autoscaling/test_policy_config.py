"""What the policy's keyword arguments may say, what is filled in, and how a mistake is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaling.policy.quotas.records import ChipQuota, Member
from autoscaling.policy.rules import Rules
from autoscaling.policy_config import PolicyConfigError, PolicySettings, read_policy_settings
from autoscaling.prices.table import PricedMarket, price_table
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile, write_profile
from serving.domain.compute_class import ComputeClass, Market

ROOT = Path(__file__).parents[2]
PROFILE: dict[str, Any] = {
    "model": "m",
    "engine": "paced",
    "generation": "v6e",
    "topology": "2x4",
    "base_s": 0.02,
    "per_sequence_s": 0.001,
    "per_prompt_token_s": 0.0,
    "max_num_seqs": 64,
    "load_s": 45.0,
    "measured_on": "2026-11-21",
    "source": "made up",
}


def settings(
    classes: dict[str, Any] | None = None,
    *,
    profile: Any = PROFILE,
    root: Path = ROOT,
    rules: dict[str, Any] | None = None,
    **more: Any,
) -> PolicySettings:
    model = {
        "profile": profile,
        "objectives": {"ttft_s": 3.0, "tpot_s": 0.05},
        "rules": rules or {},
        "classes": {"reserved": {}} if classes is None else classes,
    }
    return read_policy_settings({"models": {"m": model}} | more, root)


def terms(name: str, config: dict[str, Any], **more: Any) -> ComputeClass:
    (model,) = settings({name: config}, **more).models
    (found,) = model.terms
    return found


def test_what_is_left_out_is_as_rules_and_terms_have_it() -> None:
    found = settings({"own": {"usd_per_slice_hour": 3.0}})
    (model,) = found.models
    assert model.rules == Rules(Objectives(3.0, 0.05))
    assert model.terms == (ComputeClass("own", 3.0, load_s=45.0),)
    assert (found.decide_every_s, found.decision_log) == (5.0, None)


def test_what_is_given_is_taken() -> None:
    found = settings(rules={"idle_s": 5.0, "max_slices": 7}, decision_log="logs/d.jsonl")
    assert (found.models[0].rules.idle_s, found.models[0].rules.max_slices) == (5.0, 7)
    assert found.decision_log == ROOT / "logs" / "d.jsonl"
    given = {"usd_per_slice_hour": 1.0, "patience_s": 9.0, "load_s": 2.0, "is_revocable": False}
    expected = ComputeClass("spot", 1.0, patience_s=9.0, load_s=2.0, market=Market.SPOT)
    assert terms("spot", given) == expected


def test_how_much_a_missing_slice_weighs_can_be_said() -> None:
    assert settings(rules={"shortage_ratio": 2.5}).models[0].rules.shortage_ratio == 2.5
    with pytest.raises(PolicyConfigError, match="shortage_ratio is -1"):
        settings(rules={"shortage_ratio": -1.0})


def test_built_in_classes_know_their_market() -> None:
    price = {"usd_per_slice_hour": 1.0}
    assert terms("reserved", {}).is_prepaid
    assert terms("reserved", {}).usd_per_slice_hour == 0.0
    assert terms("spot", price).is_revocable
    assert terms("flex-start", price).max_run_s == 7 * 24 * 3600
    assert not terms("on-demand", price).is_revocable


def test_price_by_the_chip_is_that_of_all_chips() -> None:
    price = {"usd_per_chip_hour": 1.5}
    assert terms("spot", price).usd_per_slice_hour == 12.0
    # Of an engine over joined slices, that is of all of them.
    assert terms("spot", price, profile=PROFILE | {"num_slices": 2}).usd_per_slice_hour == 24.0


def test_class_without_a_price_has_the_list_price_of_the_region() -> None:
    region = "us-east5"
    listed = price_table().lookup(PricedMarket.ON_DEMAND, "v6e", region).usd_per_chip_hour
    assert terms("on-demand", {}, region=region).usd_per_slice_hour == pytest.approx(8 * listed)


def test_profile_may_stand_in_a_file_below_the_root(tmp_path: Path) -> None:
    profile = CapacityProfile.model_validate(PROFILE)
    write_profile(profile, tmp_path / "profile.yaml")
    assert settings(profile="profile.yaml", root=tmp_path).models[0].profile == profile


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"decide_every": 1}, r"decide_every is 1: Extra inputs"),
        ({"decide_every_s": 0.1}, r"decide_every_s is 0\.1: .*greater than or equal to 0\.5"),
        ({"classes": {}}, r"models\.m\.classes is \{\}"),
        ({"classes": {"spot": {"usd_per_hour": 1.0}}}, r"classes\.spot\.usd_per_hour is 1\.0"),
        ({"classes": {"own": {}}}, r"models\.m\.classes\.own: no price; allowed: usd_per_slice"),
        ({"classes": {"spot": {}}, "region": "mars"}, r"classes\.spot: no price for market=spot"),
        (
            {"classes": {"own": {"usd_per_slice_hour": 1.0, "usd_per_chip_hour": 1.0}}},
            r"usd_per_slice_hour and usd_per_chip_hour; allowed: one of them",
        ),
        (
            {"classes": {"reserved": {"min_slices": 3, "max_slices": 2}}},
            r"classes\.reserved: .*min_slices=3 must lie in 0\.\.2",
        ),
        ({"rules": {"min_slices": 3, "max_slices": 2}}, r"models\.m\.rules: min_slices is 3"),
        (
            {"rules": {"max_slices": 2}, "classes": {"reserved": {"min_slices": 3}}},
            r"models\.m\.rules\.max_slices is 2; allowed: 3 or more, which are the min_slices",
        ),
        ({"rules": {"floor_ratio": 1.5}}, r"rules\.floor_ratio is 1\.5"),
        ({"profile": "nowhere.yaml"}, r"models\.m\.profile: .*nowhere\.yaml cannot be read"),
        ({"profile": PROFILE | {"base_s": 0.0}}, r"profile.*base_s is 0\.0"),
        ({"prices": "nowhere.yaml"}, r"prices: .*nowhere\.yaml cannot be read"),
        (
            {
                "profile": PROFILE | {"topology": None},
                "classes": {"spot": {"usd_per_chip_hour": 1.0}},
            },
            r"needs generation and topology in the profile",
        ),
    ],
)
def test_mistake_is_refused_with_field_and_value(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(PolicyConfigError, match=complaint):
        settings(**changes)


def test_every_problem_of_the_classes_is_told_at_once() -> None:
    with pytest.raises(PolicyConfigError) as refused:
        settings({"own": {}, "other": {}})
    assert "classes.own" in str(refused.value)
    assert "classes.other" in str(refused.value)


def test_shipped_application_can_be_read_and_plays_the_law_of_its_profile() -> None:
    file = yaml.safe_load((ROOT / "deployments" / "sim" / "autoscaling.yaml").read_text())
    (application,) = file["applications"]
    found = read_policy_settings(application["autoscaling_policy"]["policy_kwargs"])
    (served,) = application["args"]["models"]
    (model,) = found.models
    assert model.model == served["name"]
    assert [each.name for each in model.terms] == [
        deployment["compute_class"] for deployment in served["deployments"]
    ]
    pace = served["paced"]
    assert model.profile.base_s == pace["tpot_ms"] / 1000
    assert model.profile.per_sequence_s == pace["tpot_per_seq_ms"] / 1000
    assert model.profile.max_num_seqs == pace["max_num_seqs"]


def test_objective_by_prompt_length_is_bounded_by_the_profile() -> None:
    by_length = {"ttft_s": 3.0, "tpot_s": 0.05, "ttft_per_prompt_token_s": 2e-4}
    profile = PROFILE | {"per_prompt_token_s": 1e-4}
    model = {"profile": profile, "objectives": by_length, "classes": {"reserved": {}}}
    (found,) = read_policy_settings({"models": {"m": model}}, ROOT).models
    assert found.rules.objectives == Objectives(3.0, 0.05, 2e-4)
    model["profile"] = PROFILE | {"per_prompt_token_s": 0.9e-4}
    message = r"models\.m\.objectives\.ttft_per_prompt_token_s is 0\.0002; allowed: at most 0\.0001"
    with pytest.raises(PolicyConfigError, match=message):
        read_policy_settings({"models": {"m": model}}, ROOT)


def two_models(*quotas: dict[str, Any], **changes: Any) -> PolicySettings:
    """Two models of eight and of four chips a slice; `changes` are of the second one."""
    first = {
        "profile": PROFILE,
        "objectives": {"ttft_s": 3.0, "tpot_s": 0.05},
        "classes": {"reserved": {"min_slices": 1}},
        "priority": 5,
    }
    second = first | {"profile": PROFILE | {"topology": "2x2"}, "priority": -1} | changes
    return read_policy_settings({"models": {"m": first, "n": second}, "quotas": list(quotas)})


def test_quota_is_shared_by_the_models_that_have_the_class() -> None:
    found = two_models({"compute_class": "reserved", "max_chips": 64})
    assert found.quotas == (ChipQuota("reserved", 64, frozenset({"m", "n"})),)
    assert found.members == (Member("m", 8, 5), Member("n", 4, -1))
    of_its_own = two_models(
        {"compute_class": "reserved", "max_chips": 64, "generation": "v6e"},
        {"compute_class": "reserved", "max_chips": 16, "generation": "v5e"},
        profile=PROFILE | {"generation": "v5e", "topology": "2x2"},
    )
    assert [each.models for each in of_its_own.quotas] == [{"m"}, {"n"}]
    assert (settings().quotas, settings().members) == ((), ())


@pytest.mark.parametrize(
    ("quotas", "changes", "complaint"),
    [
        ([{"compute_class": "reserved"}], {}, r"quotas\.0\.max_chips is .*: Field required"),
        (
            [{"compute_class": "reserved", "max_chips": -4}],
            {},
            r"quotas\.0\.max_chips is -4: .*greater than or equal to 0",
        ),
        (
            [{"compute_class": "spot", "max_chips": 4}],
            {},
            r"quotas\.0: no model has slices of compute class 'spot' and generation None",
        ),
        (
            [{"compute_class": "reserved", "max_chips": 4, "generation": "v5p"}],
            {},
            r"quotas\.0: no model has slices of .* generation 'v5p'; allowed: classes and generat",
        ),
        (
            [
                {"compute_class": "reserved", "max_chips": 64},
                {"compute_class": "reserved", "max_chips": 32, "generation": "v6e"},
            ],
            {},
            r"quotas\.1: m, n has another quota of reserved",
        ),
        (
            [{"compute_class": "reserved", "max_chips": 8}],
            {},
            r"quotas\.0\.max_chips is 8; allowed: 12 or more, which are the min_slices of m, n",
        ),
        (
            [{"compute_class": "reserved", "max_chips": 64}],
            {"profile": PROFILE | {"topology": None}},
            r"quotas\.0: n shares it: the number of chips of a slice needs generation and to",
        ),
        (
            [{"compute_class": "reserved", "max_chips": 64}],
            {"priority": 5000},
            r"models\.n\.priority is 5000: .*less than or equal to 1000",
        ),
    ],
)
def test_quota_that_cannot_be_is_refused(
    quotas: list[dict[str, Any]], changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(PolicyConfigError, match=complaint):
        two_models(*quotas, **changes)


def test_class_may_have_slices_of_another_shape() -> None:
    large = PROFILE | {"topology": "4x4", "base_s": 0.01, "load_s": 90.0}
    classes = {
        "spot": {"usd_per_chip_hour": 1.0},
        "spot-4x4": {"usd_per_chip_hour": 1.0, "is_revocable": True, "profile": large},
    }
    found = settings(classes, quotas=[{"compute_class": "spot-4x4", "max_chips": 64}])
    (model,) = found.models
    assert model.profiles == {"spot-4x4": CapacityProfile.model_validate(large)}
    assert [(each.usd_per_slice_hour, each.load_s) for each in model.terms] == [
        (8.0, 45.0),
        (16.0, 90.0),
    ]
    (member,) = found.members
    assert (member.chips_of("spot"), member.chips_of("spot-4x4")) == (8, 16)
    with pytest.raises(PolicyConfigError, match=r"classes\.spot: profile is of 'other'"):
        settings({"spot": {"usd_per_slice_hour": 1.0, "profile": large | {"model": "other"}}})
    with pytest.raises(PolicyConfigError, match=r"classes\.spot: .*nowhere\.yaml cannot be read"):
        settings({"spot": {"usd_per_slice_hour": 1.0, "profile": "nowhere.yaml"}})
