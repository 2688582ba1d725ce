"""The chaos of a run as a file: what is done to which slice, when or at which load.

Owns the fields of that file, and its reading. Does not own when an event is due and whom it hits
(`resolution`), nor the doing (`actors`).
"""

from pathlib import Path
from typing import Annotated, Literal, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from loadtest.errors import LoadTestError
from loadtest.strict_yaml import fields_at, place_in_file

_DAY_S = 86_400.0
# What stands in a command for what its target turns out to be.
PLACEHOLDERS = ("{slice}", "{node}", "{address}")
Name = Annotated[str, Field(min_length=1, max_length=200)]
Duration = Annotated[float, Field(gt=0, le=_DAY_S)]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class SliceTarget(_Section):
    """The target slice: one by name, or a random one among those that match the description."""

    slice: Name | None = None
    """Its name; then nothing else is said of it."""
    compute_class: Name | None = None
    """Any of this compute class; left out, of any."""
    state: Name | None = None
    """Any in this state, such as `ready`; left out, in any."""

    @model_validator(mode="after")
    def _names_or_describes(self) -> Self:
        if self.slice is not None and (self.compute_class, self.state) != (None, None):
            raise ValueError("allowed: `slice` alone, or `compute_class` and `state`")
        return self

    def __str__(self) -> str:
        """Describes the target in words, for a reason."""
        if self.slice is not None:
            return f"slice {self.slice}"
        described = (self.state, self.compute_class, "slice")
        return " ".join(word for word in described if word is not None)


class ClassTarget(_Section):
    """The target of a compute class as a whole."""

    compute_class: Name


class KindTarget(_Section):
    """The target kind of slice, by its name in the plan of the simulated cluster."""

    kind: Name


class _Event(_Section):
    at_s: Annotated[float, Field(ge=0, le=_DAY_S)] | None = None
    """When, in seconds after the start of the run."""
    at_in_flight: Annotated[int, Field(ge=1)] | None = None
    """Or: as soon as so many requests are in flight."""
    at_requests_per_s: Annotated[float, Field(gt=0)] | None = None
    """Or: as soon as so many requests are sent per second."""

    @model_validator(mode="after")
    def _has_one_moment(self) -> Self:
        moments = (self.at_s, self.at_in_flight, self.at_requests_per_s)
        if sum(moment is not None for moment in moments) != 1:
            raise ValueError("allowed: exactly one of at_s, at_in_flight, at_requests_per_s")
        return self


class NoticeEvent(_Event):
    """Announces that a slice is taken away, and takes it away."""

    action: Literal["preempt", "maintain", "drain"]
    target: SliceTarget = SliceTarget()
    notice_s: Annotated[float, Field(ge=0, le=_DAY_S)] = 15.0
    """How long before."""
    host: Annotated[int, Field(ge=0)] = 0
    """Worker id of the host that is notified."""


class KillEvent(_Event):
    """Kills a slice, or one host of it, without notice."""

    action: Literal["kill"]
    target: SliceTarget = SliceTarget()
    host: Annotated[int, Field(ge=0)] | None = None
    """Worker id; left out, all hosts."""


class StockEvent(_Event):
    """Puts a compute class out of stock, or back into stock."""

    action: Literal["stockout", "stockout_over"]
    target: ClassTarget


class SlowEvent(_Event):
    """Gives a slice's engine a part of the time."""

    action: Literal["slow"]
    target: SliceTarget = SliceTarget()
    factor: Annotated[float, Field(ge=1.1, le=50)] = 3.0
    """How many times as long everything takes."""
    for_s: Duration = 30.0


class PartitionEvent(_Event):
    """Cuts off a slice, which then comes back."""

    action: Literal["partition"]
    target: SliceTarget = SliceTarget()
    for_s: Duration = 10.0


class AddEvent(_Event):
    """Adds one more slice."""

    action: Literal["add"]
    target: KindTarget


class RunEvent(_Event):
    """Runs a command of the user's, for what only a real cluster can do."""

    action: Literal["run"]
    target: SliceTarget | None = None
    """The slice that the command is about."""
    command: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    """The program and its arguments; there is no shell. `{slice}` stands for the slice's name,
    `{node}` and `{address}` for its first host's Ray node id and address."""
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 60.0
    """When the command is killed."""
    for_s: Duration | None = None
    """How long its effect lasts, for the report; left out, it is an instant."""

    @model_validator(mode="after")
    def _knows_whom(self) -> Self:
        if self.target is None and (held := [name for name in PLACEHOLDERS if self.holds(name)]):
            raise ValueError(f"{', '.join(held)} in the command; allowed: only with a target")
        return self

    def holds(self, placeholder: str) -> bool:
        """Returns whether the command contains this placeholder."""
        return any(placeholder in word for word in self.command)


ChaosEvent = Annotated[
    NoticeEvent | KillEvent | StockEvent | SlowEvent | PartitionEvent | AddEvent | RunEvent,
    Field(discriminator="action"),
]


_EVENTS: dict[str, type[_Event]] = {
    action: kind
    for kind in get_args(get_args(ChaosEvent)[0])
    for action in get_args(kind.model_fields["action"].annotation)
}


class ChaosSchedule(_Section):
    """The schedule of everything that is done to the platform in one run."""

    events: Annotated[tuple[ChaosEvent, ...], Field(min_length=1, max_length=10_000, strict=False)]


def load_schedule(path: Path) -> ChaosSchedule:
    """The schedule in a file.

    Raises:
        LoadTestError: it cannot be read, or is invalid; the message lists every problem.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LoadTestError(f"chaos schedule {path} cannot be read: {error}") from error
    try:
        return parse_schedule(raw)
    except LoadTestError as error:
        raise LoadTestError(f"chaos schedule {path}: {error}") from error


def parse_schedule(raw: object) -> ChaosSchedule:
    """The schedule in `raw`, the contents of a YAML file. Pure.

    Raises:
        LoadTestError: it is invalid; the message lists field, value, and what is allowed.
    """
    try:
        return ChaosSchedule.model_validate(raw)
    except ValidationError as error:
        problems = [
            _format_problem(raw, problem)
            for problem in error.errors(include_url=False, include_context=False)
            # Pydantic counts only the valid events; the broken ones are reported themselves.
            if not (problem["type"] == "too_short" and problem["input"])
        ]
        raise LoadTestError("; ".join(problems)) from error


def _format_problem(raw: object, problem: ErrorDetails) -> str:
    path = place_in_file(problem["loc"], raw, "action") or "the file"
    if problem["type"] == "extra_forbidden":
        allowed = fields_at(problem["loc"][:-1], ChaosSchedule, _EVENTS)
        return f"{path}: no such field; allowed: {', '.join(allowed)}"
    value = problem["input"]
    if problem["type"] in ("union_tag_invalid", "union_tag_not_found") and isinstance(value, dict):
        return f"{path}.action: {value.get('action')!r}; allowed: {', '.join(_EVENTS)}"
    # A whole section is not printed again.
    given = "" if isinstance(value, dict | list | BaseModel) else f" (value {value!r})"
    return f"{path}: {problem['msg'].removeprefix('Value error, ')}{given}"
