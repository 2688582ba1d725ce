"""Reads `autoscaling_policy.policy_kwargs` of serve_config.yaml and makes settings from it.

Owns the fields, their strictness, and what a market sets in a class; the defaults of all the rest
are those of `Rules` and `ComputeClass`. Reads profile and price files, no clock, no environment.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autoscaling.observations import ASSUMED_TOKENS, Tokens
from autoscaling.policy.memory import slice_shape_of
from autoscaling.policy.profiles import Profiles
from autoscaling.policy.quotas.records import ChipQuota, Member
from autoscaling.policy.rules import Rules
from autoscaling.prices.table import PricedMarket, PriceError, PriceTable, price_table
from serving.domain.capacity.objectives import ObjectivesConfig
from serving.domain.capacity.slice_profile import CapacityProfile, ProfileError, read_profile
from serving.domain.compute_class import MARKETS, ComputeClass, Market
from serving.domain.topology import TopologyError, slice_shape

# Serve's controller starts anywhere: what the file names is searched beside our packages.
_PROJECT_ROOT = Path(__file__).resolve().parents[1]
_LIST_MARKETS: Mapping[str, PricedMarket] = {
    Market.SPOT: PricedMarket.SPOT,
    Market.FLEX_START: PricedMarket.FLEX_START,
    Market.ON_DEMAND: PricedMarket.ON_DEMAND,
}


class PolicyConfigError(ValueError):
    """The policy's settings cannot be used. The message lists every problem found.

    So does `problems`, one of them each.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


_Positive = Annotated[float, Field(gt=0)]
_NotNegative = Annotated[float, Field(ge=0)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Count = Annotated[int, Field(ge=0, le=100_000)]


def _default(record: type, name: str) -> Any:
    """The default that a field of `record` has: stated there, and nowhere else."""
    return next(field.default for field in fields(record) if field.name == name)


_rule = partial(_default, Rules)
_term = partial(_default, ComputeClass)


class RulesConfig(_Section):
    """The rules of planning; a field left out is as in `autoscaling.policy.rules.Rules`."""

    min_slices: _Count = _rule("min_slices")
    """Slices of all classes together, at least."""
    max_slices: _Count = _rule("max_slices")
    """The same, at most, with orders that wait and while classes are exchanged. Leave room for
    those beside the most that is needed."""
    idle_s: _NotNegative = _rule("idle_s")
    """Without a request for so long, a model goes to zero slices."""
    floor_ratio: _Share = _rule("floor_ratio")
    """Share of the demand that is left when any one group of revocable classes is lost."""
    floor_price_ratio: _NotNegative = _rule("floor_price_ratio")
    """The price up to which slices are bought for that alone, in prices of the cheapest class.
    Beyond it by what they are worth."""
    tpot_margin: _Share = _rule("tpot_margin")
    """Share of the TPOT objective that is planned for."""
    spread: _NotNegative = _rule("spread")
    """Standard deviations of the requests in flight that are kept free."""
    late_ratio: _Share = _rule("late_ratio")
    """Share of requests that may miss an objective. As far as fewer do, less is kept free. With 0
    that is not looked at."""
    forecast_share: _Share = _rule("forecast_share")
    """Share of past forecasts that were no higher than what is planned for."""
    drain_delay_s: _NotNegative = _rule("drain_delay_s")
    """A slice goes after it was more than enough for so long."""
    shortage_ratio: _NotNegative = _rule("shortage_ratio")
    """The worth of not missing a slice for an hour, in hourly prices of the costliest class."""
    max_load_age_s: _Positive = _rule("max_load_age_s")
    """An older load is no load: the last plan stands."""
    backoff_s: _NotNegative = _rule("backoff_s")
    """How long a class backs off after a failure, the first time."""
    max_backoff_s: _NotNegative = _rule("max_backoff_s")
    """The same, at most."""


class PolicyClassConfig(_Section):
    """The terms of a compute class; what is left out is as in `ComputeClass`.

    With a `profile` its slices are of another shape than the model's, or of another generation.

    Of `reserved`, `spot`, `flex-start` and `on-demand` the market is known. Without a price, a
    prepaid class costs nothing more and another one the list price in `region`.
    """

    profile: str | CapacityProfile | None = None
    """What one slice of it carries, if not as the model's profile says: a file, or the profile."""
    usd_per_slice_hour: _NotNegative = 0
    """What a slice costs while it is had."""
    usd_per_chip_hour: _NotNegative = 0
    """The same by the chip, in place of it; needs generation and topology in the profile."""
    is_prepaid: bool = False
    """Paid for whether used or not."""
    is_revocable: bool = False
    """May be taken away at any time, all of it at once."""
    correlation_group: str = ""
    """What is lost together, such as a zone; the class itself, when left out."""
    min_slices: _Count = _term("min_slices")
    """Slices kept whatever the load; the deployment's `min_replicas` where that is more."""
    max_slices: _Count = _term("max_slices")
    """Quota; the deployment's `max_replicas` where that is less."""
    provisioning_s: _NotNegative = _term("provisioning_s")
    """How long a slice usually takes to come, until experience says better."""
    load_s: _NotNegative | None = None
    """How long an engine then takes to be ready; `null`: the profile's `load_s`."""
    losses_per_hour: _NotNegative = _term("losses_per_hour")
    """How often a slice is usually taken away, until experience says better."""
    patience_s: _Positive | None = None
    """How long an order may take before other classes are asked."""
    max_run_s: _Positive | None = None
    """How long a slice is kept at most."""


class AssumedTokens(_Section):
    """The tokens of a request until the first have been measured."""

    input: _Positive = ASSUMED_TOKENS.input
    """Prompt tokens."""
    output: _Positive = ASSUMED_TOKENS.output
    """Output tokens."""


class ModelPolicyConfig(_Section):
    """The settings of one model."""

    profile: str | CapacityProfile
    """What one slice can carry: a file relative to the project root, or the profile itself."""
    objectives: ObjectivesConfig
    """What a request is to see."""
    rules: RulesConfig = RulesConfig()
    """How the policy plans."""
    classes: Annotated[dict[str, PolicyClassConfig], Field(min_length=1)]
    """The compute classes that its deployments name."""
    assumed_tokens: AssumedTokens = AssumedTokens()
    """Tokens of a request until the first have been measured."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Who goes first where models that share a quota lack slices; the higher number does."""


class QuotaConfig(_Section):
    """The chips of a compute class that all models together may have."""

    compute_class: str
    """The class, as models name it."""
    max_chips: Annotated[int, Field(ge=0, le=10_000_000)]
    """Chips of all slices of it, at most."""
    generation: str | None = None
    """For slices of this generation; left out, for all that have the class."""


class PolicyConfig(_Section):
    """The keyword arguments of the policy."""

    models: Annotated[dict[str, ModelPolicyConfig], Field(min_length=1)]
    """By the model's name."""
    quotas: list[QuotaConfig] = Field(default_factory=list)
    """What models share; a class without a quota is bounded by each model's own `max_slices`."""
    decide_every_s: Annotated[float, Field(ge=0.5, le=60)] = 5.0
    """Between two decisions."""
    decision_log: str | None = None
    """File that every decision is appended to, for `slicewise replay`; none, when left out."""
    region: str | None = None
    """Where list prices are looked up for classes without a price of their own."""
    prices: str | None = None
    """File of prices that come before the shipped ones, relative to the project root."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The settings from which the policy of one model is made.

    `profiles` are of those classes whose slices are not as `profile` says.
    """

    model: str
    profile: CapacityProfile
    rules: Rules
    terms: tuple[ComputeClass, ...]
    assumed: Tokens
    priority: int = 0
    profiles: Mapping[str, CapacityProfile] = field(default_factory=dict)

    @property
    def slice_shape(self) -> str:
        """The model's slices in words, whether or not all classes have a deployment now."""
        return slice_shape_of(Profiles(self.profile, self.profiles))


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The settings from which the adapter is made. `members` are the models that share quotas."""

    models: tuple[ModelSettings, ...]
    decide_every_s: float
    decision_log: Path | None
    quotas: tuple[ChipQuota, ...] = ()
    members: tuple[Member, ...] = ()


def read_policy_settings(raw: object, root: Path = _PROJECT_ROOT) -> PolicySettings:
    """The settings in `raw`, the policy's keyword arguments; files are searched below `root`.

    Raises:
        PolicyConfigError: lists every problem found. Correct them all.
    """
    try:
        config = PolicyConfig.model_validate(raw)
    except ValidationError as error:
        problems = (
            f"{'.'.join(map(str, each['loc'])) or 'policy_kwargs'} is {each['input']!r}:"
            f" {each['msg']}"
            for each in error.errors(include_url=False)
        )
        raise PolicyConfigError(*problems) from error
    problems_found: list[str] = []
    models = []
    try:
        prices = price_table(None if config.prices is None else root / config.prices)
    except PriceError as error:
        raise PolicyConfigError(f"prices: {error}") from error
    for name, model in config.models.items():
        try:
            models.append(_model_settings(name, model, root, prices, config.region))
        except PolicyConfigError as error:
            problems_found += error.problems
    if problems_found:
        raise PolicyConfigError(*problems_found)
    quotas, members = _shared_quotas(config.quotas, models)
    log = None if config.decision_log is None else root / config.decision_log
    return PolicySettings(tuple(models), config.decide_every_s, log, quotas, members)


def _model_settings(
    name: str, model: ModelPolicyConfig, root: Path, prices: PriceTable, region: str | None
) -> ModelSettings:
    at = f"models.{name}"
    try:
        profile = _profile(model.profile, root)
        rules = Rules(model.objectives.objectives, **model.rules.model_dump())
    except ProfileError as error:
        raise PolicyConfigError(f"{at}.profile: {error}") from error
    except ValueError as error:
        raise PolicyConfigError(f"{at}.rules: {error}") from error
    try:
        rules.objectives.check(profile)
    except ValueError as error:
        raise PolicyConfigError(f"{at}.{error}") from error
    terms = []
    problems = []
    profiles: dict[str, CapacityProfile] = {}
    for class_name, given in model.classes.items():
        try:
            if given.profile is not None:
                profiles[class_name] = _profile(given.profile, root)
            of_class = profiles.get(class_name, profile)
            if of_class.model != profile.model:
                raise ValueError(f"profile is of {of_class.model!r}; allowed: {profile.model!r}")
            terms.append(_class_terms(class_name, given, of_class, prices, region))
        except ValueError as error:
            problems.append(f"{at}.classes.{class_name}: {error}")
    least = sum(each.min_slices for each in terms)
    if least > rules.max_slices:
        problems.append(
            f"{at}.rules.max_slices is {rules.max_slices}; allowed: {least} or more, which are the"
            " min_slices of the classes"
        )
    if problems:
        raise PolicyConfigError("; ".join(problems))
    assumed = Tokens(model.assumed_tokens.input, model.assumed_tokens.output)
    return ModelSettings(name, profile, rules, tuple(terms), assumed, model.priority, profiles)


def _profile(given: str | CapacityProfile, root: Path) -> CapacityProfile:
    return read_profile(root / given) if isinstance(given, str) else given


def _class_terms(
    name: str,
    config: PolicyClassConfig,
    profile: CapacityProfile,
    prices: PriceTable,
    region: str | None,
) -> ComputeClass:
    """The terms of a class; raises `ValueError` for a contradiction or a missing price."""
    given = config.model_dump(exclude_unset=True, exclude={"profile"})
    terms = _built_in_terms(name) | given
    if terms.get("load_s") is None:
        terms["load_s"] = profile.load_s
    per_chip = terms.pop("usd_per_chip_hour", None)
    if per_chip is not None and "usd_per_slice_hour" in terms:
        raise ValueError("usd_per_slice_hour and usd_per_chip_hour; allowed: one of them")
    if "usd_per_slice_hour" not in terms:
        if per_chip is None:
            per_chip = _list_price(name, bool(terms.get("is_prepaid")), profile, prices, region)
        num_chips = _num_chips(profile) if per_chip else 0
        terms["usd_per_slice_hour"] = per_chip * num_chips
    return ComputeClass(name=name, **terms)


def _built_in_terms(name: str) -> dict[str, Any]:
    """The terms of a class that has the name of a market; none for another."""
    if name not in tuple(Market):
        return {}
    market = MARKETS[Market(name)]
    return {
        "market": Market(name),
        "is_prepaid": market.is_prepaid,
        "is_revocable": market.is_revocable,
        "max_run_s": market.max_run_s,
    }


def _list_price(
    name: str,
    is_prepaid: bool,  # noqa: FBT001 - one fact of the class
    profile: CapacityProfile,
    prices: PriceTable,
    region: str | None,
) -> float:
    if is_prepaid:
        return 0.0
    market = _LIST_MARKETS.get(name)
    if market is None or region is None or profile.generation is None:
        raise ValueError(
            "no price; allowed: usd_per_slice_hour, usd_per_chip_hour, or a built-in class with"
            " `region` and the generation in the profile"
        )
    return prices.lookup(market, profile.generation, region).usd_per_chip_hour


def _shared_quotas(
    given: Sequence[QuotaConfig], models: Sequence[ModelSettings]
) -> tuple[tuple[ChipQuota, ...], tuple[Member, ...]]:
    """Returns the quotas with the models that share them, and those models.

    Raises:
        PolicyConfigError: lists quotas of no model, two for one class of a model, a model whose
            slices have no known number of chips, and minimums that do not fit into a quota.
    """
    problems: list[str] = []
    quotas: list[ChipQuota] = []
    members: dict[str, Member] = {}
    for place, each in enumerate(given):
        at = f"quotas.{place}"
        sharing = [
            model
            for model in models
            if any(terms.name == each.compute_class for terms in model.terms)
            and each.generation in (None, _profile_of(model, each.compute_class).generation)
        ]
        if not sharing:
            problems.append(
                f"{at}: no model has slices of compute class {each.compute_class!r} and generation"
                f" {each.generation!r}; allowed: classes and generations of models"
            )
        for model in sharing:
            try:
                num_chips = _num_chips(model.profile)
                by_class = {name: _num_chips(it) for name, it in model.profiles.items()}
            except ValueError as error:
                problems.append(f"{at}: {model.model} shares it: {error}")
            else:
                members[model.model] = Member(model.model, num_chips, model.priority, by_class)
        names = frozenset(model.model for model in sharing)
        if twice := [
            name
            for other in quotas
            if other.compute_class == each.compute_class
            for name in sorted(names & other.models)
        ]:
            problems.append(f"{at}: {', '.join(twice)} has another quota of {each.compute_class}")
        quota = ChipQuota(each.compute_class, each.max_chips, names)
        problems.extend(_least_problems(at, quota, sharing, members))
        quotas.append(quota)
    if problems:
        raise PolicyConfigError("; ".join(problems))
    return tuple(quotas), tuple(members.values())


def _profile_of(model: ModelSettings, compute_class: str) -> CapacityProfile:
    return model.profiles.get(compute_class, model.profile)


def _least_problems(
    at: str, quota: ChipQuota, sharing: Sequence[ModelSettings], members: Mapping[str, Member]
) -> Iterator[str]:
    """Yields a problem where what models keep at any load is more than the quota."""
    least = sum(
        terms.min_slices * members[model.model].chips_of(terms.name)
        for model in sharing
        if model.model in members
        for terms in model.terms
        if terms.name == quota.compute_class
    )
    if least > quota.max_chips:
        yield (
            f"{at}.max_chips is {quota.max_chips}; allowed: {least} or more, which are the"
            f" min_slices of {', '.join(sorted(quota.models))}"
        )


def _num_chips(profile: CapacityProfile) -> int:
    if profile.generation is None or profile.topology is None:
        raise ValueError(
            "the number of chips of a slice needs generation and topology in the profile"
        )
    try:
        shape = slice_shape(profile.generation, profile.topology)
        return profile.num_slices * shape.num_chips
    except TopologyError as error:
        raise ValueError(f"the profile's slice: {error}") from error
