"""Reads scenarios: YAML files with model, objectives, compute classes, load and time.

Owns the file's form and its reading. Does not own what becomes of it (`preparation`). A scenario
runs with nothing but what ships: traces and spot capacity from files replace its own on request.
"""

from enum import StrEnum
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from autoscaling.prices.table import PricedMarket
from serving.domain.capacity.objectives import ObjectivesConfig
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.limits import REQUEST_DEADLINE_S

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]


class ScenarioError(ValueError):
    """Reports an unusable scenario; the message names each field, its value and what is allowed."""


class _Part(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class AlwaysCapacity(_Part):
    """The capacity of `max_slices` slices, at any time."""

    kind: Literal["always"] = "always"


class RegimeCapacity(_Part):
    """The capacity that comes and goes as a regime of `spot_capacity` draws it."""

    kind: Literal["regime"]
    regime: str
    seed_offset: int = 0
    """Added to the run's seed; classes with the same regime and offset come and go together."""


class CapacityStep(_Part):
    """The number of slices that may exist from an instant on, in seconds."""

    from_s: _NotNegative
    slices: Annotated[int, Field(ge=0)]


class StepsCapacity(_Part):
    """The capacity set by hand; the first step is from 0."""

    kind: Literal["steps"]
    steps: Annotated[list[CapacityStep], Field(min_length=1)]

    @model_validator(mode="after")
    def _begins_and_rises(self) -> "StepsCapacity":
        instants = [step.from_s for step in self.steps]
        if instants[0] != 0 or any(later <= first for first, later in pairwise(instants)):
            raise ValueError("steps must begin at 0 and rise")
        return self


class ScenarioClass(_Part):
    """The compute class: where its slices come from and on which terms. Times in seconds."""

    name: _Name
    market: Annotated[PricedMarket, Field(strict=False)]
    region: str | None = None
    """Where its price is looked up; left out, the scenario's."""
    usd_per_slice_hour: _Positive | None = None
    """Left out, the price table's price per chip-hour times the slice's chips."""
    profile: CapacityProfile | None = None
    """Of its slices, where they are of another shape than the scenario's."""
    correlation_group: str = ""
    min_slices: Annotated[int, Field(ge=0)] = 0
    max_slices: Annotated[int, Field(ge=1)]
    provisioning_s: _NotNegative
    losses_per_hour: _NotNegative = 0.0
    patience_s: _Positive | None = None
    max_run_s: _Positive | None = None
    capacity: Annotated[
        AlwaysCapacity | RegimeCapacity | StepsCapacity, Field(discriminator="kind")
    ] = AlwaysCapacity()

    @property
    def is_prepaid(self) -> bool:
        """Returns whether it is paid for, used or not."""
        return self.market in (PricedMarket.COMMITTED_1Y, PricedMarket.COMMITTED_3Y)


class LengthSource(StrEnum):
    """The source of lengths and bursts where no trace file is given."""

    AZURE_CONV = "azure-conv"
    AZURE_CODE = "azure-code"


class DayLoad(_Part):
    """The load of a weekday built from a trace's hour; exactly one of the two means is given."""

    kind: Literal["day"]
    trace: Annotated[LengthSource, Field(strict=False)]
    mean_requests_per_s: _Positive | None = None
    mean_slices: _Positive | None = None
    """The day's mean work, in slices that it fills at the TPOT objective."""

    @model_validator(mode="after")
    def _one_mean(self) -> "DayLoad":
        if (self.mean_requests_per_s is None) == (self.mean_slices is None):
            raise ValueError("give either mean_requests_per_s or mean_slices")
        return self


class LoadStep(_Part):
    """The constant rate for a while."""

    seconds: _Positive
    requests_per_s: _NotNegative


class StagesLoad(_Part):
    """The load of constant rates in a row, Poisson arrivals, every request of one length."""

    kind: Literal["stages"]
    stages: Annotated[list[LoadStep], Field(min_length=1)]
    input_tokens: Annotated[int, Field(ge=1)]
    output_tokens: Annotated[int, Field(ge=1)]


class RuleConfig(_Part):
    """The requirements on our policy beyond the objectives."""

    min_slices: Annotated[int, Field(ge=0)] = 0
    max_slices: Annotated[int, Field(ge=1)] = 10_000
    floor_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """`None`: as the policy has it when nobody says."""


class Scenario(_Part):
    """The situation to compare policies in."""

    name: _Name
    description: Annotated[str, Field(min_length=1)]
    profile: CapacityProfile
    region: Annotated[str, Field(min_length=1)]
    objectives: ObjectivesConfig
    rules: RuleConfig = RuleConfig()
    classes: Annotated[list[ScenarioClass], Field(min_length=1)]
    load: Annotated[DayLoad | StagesLoad, Field(discriminator="kind")]
    duration_s: _Positive
    request_deadline_s: _Positive = REQUEST_DEADLINE_S
    """How long a request may wait for a slice before it has failed."""
    initial_slices: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """Slices that are ready when the run begins, by class."""
    seeds: Annotated[list[int], Field(min_length=1)]

    @model_validator(mode="after")
    def _hangs_together(self) -> "Scenario":
        names = [each.name for each in self.classes]
        if len(set(names)) < len(names):
            raise ValueError(f"classes are {', '.join(names)}; each name once")
        if unknown := self.initial_slices.keys() - set(names):
            raise ValueError(f"initial_slices names {', '.join(unknown)}; allowed: {names}")
        for each in self.classes:
            profile = self.profile_of(each)
            whose = "profile" if each.profile is None else f"classes.{each.name}.profile"
            if each.usd_per_slice_hour is None and not (profile.generation and profile.topology):
                raise ValueError(
                    f"{whose}.generation and {whose}.topology are needed where a class has no "
                    "usd_per_slice_hour"
                )
            if self.objectives.tpot_s <= profile.base_s:
                raise ValueError(
                    f"objectives.tpot_s is {self.objectives.tpot_s:g}; allowed: more than "
                    f"{whose}.base_s, {profile.base_s:g}"
                )
        self.objectives.objectives.check(self.profile)
        return self

    @property
    def has_shapes(self) -> bool:
        """Returns whether slices of more than one shape are to be had."""
        return any(each.profile is not None for each in self.classes)

    def profile_of(self, config: ScenarioClass) -> CapacityProfile:
        """Returns what a slice of this class carries."""
        return self.profile if config.profile is None else config.profile


def shipped_scenarios() -> tuple[str, ...]:
    """The names of the scenarios that ship with us."""
    folder = files("autoscaling.scenarios")
    return tuple(
        sorted(
            each.name.removesuffix(".yaml")
            for each in folder.iterdir()
            if each.name.endswith(".yaml")
        )
    )


def read_scenario(name_or_path: str) -> Scenario:
    """The scenario of that name, or in that file.

    Raises:
        ScenarioError: there is none, or lists every field that is wrong.
    """
    if name_or_path in shipped_scenarios():
        text = files("autoscaling.scenarios").joinpath(f"{name_or_path}.yaml").read_text("utf-8")
    else:
        try:
            text = Path(name_or_path).read_text(encoding="utf-8")
        except OSError as error:
            known = ", ".join(shipped_scenarios())
            raise ScenarioError(
                f"{name_or_path} is neither a file that can be read nor one of {known}: {error}"
            ) from error
    try:
        return Scenario.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ScenarioError(f"{name_or_path} is no YAML: {error}") from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, each['loc'])) or 'file'} is {each['input']!r:.80}: {each['msg']}"
            for each in error.errors()
        )
        raise ScenarioError(f"{name_or_path}: {problems}") from error
