"""Defines what the policy of one model remembers beyond a restart: season, classes, slices.

Owns the form of that record, its version, and when it may be used again. Pure: times are wall-clock
seconds, and the caller keeps the bytes.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autoscaling.policy.profiles import Profiles
from serving.domain.capacity.slice_profile import CapacityProfile

VERSION: Literal[1] = 1
# The clocks of two hosts differ by less.
_CLOCK_SKEW_S = 60.0

_Tuple = Field(strict=False)
_NotNegative = Annotated[float, Field(ge=0)]
_Duration = Annotated[float, Field(ge=0, le=30 * 86_400.0)]
_Sum = Annotated[float, Field(ge=0, le=1e15)]


class PolicyMemoryError(ValueError):
    """The bytes are no memory that this policy can use. Begin with an empty one."""


class _Record(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class ForecastErrors(_Record):
    """The past errors of one method of forecasting, as shares of the forecast, oldest first."""

    horizon_s: _Duration
    method: Literal["trend", "season"]
    errors: Annotated[tuple[float, ...], _Tuple]
    mean_error: _NotNegative | None
    """The mean of their sizes; `null`: none was ever known."""


class ForecastRecord(_Record):
    """The load of the last day by the minute, and how wrong forecasts of it were."""

    since_s: float
    """When the first minute began."""
    rates: Annotated[tuple[_NotNegative | None, ...], _Tuple, Field(max_length=2880)]
    """In requests per second, minute by minute; `null` where none was measured."""
    input_tokens: Annotated[tuple[_NotNegative | None, ...], _Tuple, Field(max_length=2880)] = ()
    """Uncached prompt tokens of a request on average, of the same minutes; an earlier build wrote
    none."""
    output_tokens: Annotated[tuple[_NotNegative | None, ...], _Tuple, Field(max_length=2880)] = ()
    """Output tokens, likewise."""
    errors: Annotated[tuple[ForecastErrors, ...], _Tuple]


class BackoffRecord(_Record):
    """The back-off of a class; see `Backoff`. `null` times: it has never failed."""

    reason: str
    until_s: float | None
    failed_at_s: float | None
    length_s: _Duration
    is_out_of_stock: bool
    is_in_episode: bool


class ClassRecord(_Record):
    """The experience of one class; see `ClassHistory`. Durations in seconds, latest last."""

    provisioning_s: Annotated[tuple[_Duration, ...], _Tuple]
    load_s: Annotated[tuple[_Duration, ...], _Tuple]
    held_hours: _NotNegative
    had_hours: _NotNegative
    num_losses: _NotNegative
    """Those count less with time; an earlier build wrote whole numbers."""
    num_outages: _NotNegative
    """Likewise."""
    backoff: BackoffRecord


class CapacityRecord(_Record):
    """What slices of one class were seen to carry; see `ClassCapacity`."""

    factor: Annotated[float, Field(gt=0)]
    num_observations: _NotNegative
    is_room_short: bool = False


class FitRecord(_Record):
    """Sums over the steps that engines of one class took in the last hours; see `LawFit`."""

    weight: _Sum
    x: _Sum
    y: _Sum
    xx: _Sum
    xy: _Sum
    yy: _Sum


class LearnedRecord(_Record):
    """What was learned of slices by one profile, by compute class; see `LearnedCapacity`."""

    profile_key: str
    classes: dict[str, CapacityRecord]
    fits: dict[str, FitRecord] = Field(default_factory=dict)
    """An earlier build wrote none."""


class PolicyRecord(_Record):
    """The memory of one model's policy. `slice_shape` is the slice for which it was learned."""

    version: Literal[1]
    written_at_s: float
    slice_shape: str
    forecast: ForecastRecord
    learned: LearnedRecord
    classes: dict[str, ClassRecord]
    reserve_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """How much of its reserve the need keeps; see `Reserve`. An earlier build wrote none."""
    busy_at_s: float | None = None
    """When there was work last; `null`: never, as far as is known. An earlier build wrote none."""


def slice_shape_of(profiles: Profiles) -> str:
    """Returns a model's slices in words: other slices are bought, and load, otherwise."""
    of_classes = (f"{name} {_shape(it)}" for name, it in sorted(profiles.by_class.items()))
    return ", ".join((_shape(profiles.own), *of_classes))


def _shape(profile: CapacityProfile) -> str:
    return f"{profile.num_slices} x {profile.generation} {profile.topology}"


def encode_memory(record: PolicyRecord) -> bytes:
    """Encodes the memory as JSON."""
    return record.model_dump_json().encode()


def decode_memory(text: bytes, slice_shape: str, now_s: float) -> PolicyRecord:
    """Returns the memory in the JSON that `encode_memory` made, for slices of `slice_shape`.

    Raises:
        PolicyMemoryError: it is damaged, of another version or slice, or of the future.
    """
    try:
        record = PolicyRecord.model_validate_json(text)
    except ValidationError as error:
        where = ", ".join(".".join(map(str, each["loc"])) or "all" for each in error.errors())
        raise PolicyMemoryError(
            f"not a memory of version {VERSION} (wrong at: {where[:200]})"
        ) from error
    if record.slice_shape != slice_shape:
        raise PolicyMemoryError(
            f"slice_shape is {record.slice_shape!r}; the policy's slices are {slice_shape!r}"
        )
    if record.written_at_s > now_s + _CLOCK_SKEW_S:
        ahead_s = record.written_at_s - now_s
        raise PolicyMemoryError(f"written_at_s is {ahead_s:.0f} s ahead of this clock")
    return record
