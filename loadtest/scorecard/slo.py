"""The file of objectives: what a run has to keep to, and what makes its client believable.

Owns the file and the judging of values against it. Does not own where the values come from
(`measure`) nor what follows from a miss (`verdict`). Pure but for `read_slo`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from loadtest.scorecard.spread import Spread
from loadtest.strict_yaml import read_strict_yaml
from serving.domain.capacity.objectives import ttft_limit_s

_Seconds = Annotated[float, Field(gt=0)]
_Ratio = Annotated[float, Field(ge=0, le=1)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LatencyLimits(_Part):
    """The most a latency may be, in seconds, at some points of its distribution."""

    mean: _Seconds | None = None
    p50: _Seconds | None = None
    p90: _Seconds | None = None
    p95: _Seconds | None = None
    p99: _Seconds | None = None
    max: _Seconds | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError(f"at least one of {', '.join(type(self).model_fields)} is needed")
        return self


class GoodputLimits(_Part):
    """The limits that a good request keeps, and the share of requests that has to keep them.

    A request is good when it succeeded and met all limits given here, in seconds, measured from its
    scheduled instant. `ttft_per_prompt_token_s` is allowed on top of `ttft_s` for each token of the
    prompt, as in the objectives of the model. `at_least` is a share of all requests that were
    scheduled; `None` to report the share without judging it.
    """

    ttft_s: _Seconds | None = None
    ttft_per_prompt_token_s: Annotated[float, Field(ge=0)] | None = None
    tpot_s: _Seconds | None = None
    e2e_s: _Seconds | None = None
    at_least: _Ratio | None = None

    @model_validator(mode="after")
    def _limits_something(self) -> Self:
        if self.ttft_s is None and self.tpot_s is None and self.e2e_s is None:
            raise ValueError("at least one of ttft_s, tpot_s, e2e_s is needed")
        if self.ttft_per_prompt_token_s is not None and self.ttft_s is None:
            raise ValueError("ttft_per_prompt_token_s needs ttft_s")
        return self

    def ttft_of(self, prompt_tokens: int) -> float | None:
        """Returns the limit of a prompt's first token, in seconds; `None` if there is none."""
        if self.ttft_s is None:
            return None
        return ttft_limit_s(self.ttft_s, self.ttft_per_prompt_token_s or 0.0, prompt_tokens)


class ClientGates(_Part):
    """The required quality of the client, so that its numbers describe the server.

    Above half a core, one Python client reports its own queue: p99 is off by tens of milliseconds.
    """

    loop_lag_p99_s: _Seconds = 0.020
    schedule_lag_p99_s: _Seconds = 0.020
    cpu_p90_ratio: _Ratio = 0.5
    min_rate_ratio: _Ratio = 0.99


class ServiceLevel(_Part):
    """The objectives of a run; what is left out is not judged.

    TTFT and E2E are judged from the scheduled instant. `error_ratio` is the share of requests that
    may fail, `max_lost_tokens` how many tokens may be missing from answers that were checked.
    """

    ttft_s: LatencyLimits | None = None
    tpot_s: LatencyLimits | None = None
    e2e_s: LatencyLimits | None = None
    error_ratio: _Ratio | None = None
    goodput: GoodputLimits | None = None
    min_throughput_tokens_per_s: Annotated[float, Field(gt=0)] | None = None
    max_lost_tokens: Annotated[int, Field(ge=0)] | None = None
    max_cost_usd_per_million_tokens: Annotated[float, Field(gt=0)] | None = None
    client: ClientGates = ClientGates()


NO_OBJECTIVES = ServiceLevel()


def read_slo(path: Path) -> ServiceLevel:
    """The objectives of a file.

    Raises:
        LoadTestError: it is no such file.
    """
    return read_strict_yaml(path, ServiceLevel)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence that objectives are judged on; `None` where nothing was measured."""

    ttft_scheduled_s: Spread
    tpot_s: Spread
    e2e_scheduled_s: Spread
    error_ratio: float | None
    goodput_ratio: float | None
    output_tokens_per_s: float | None
    lost_tokens: int | None
    usd_per_million_output_tokens: float | None


@dataclass(frozen=True, slots=True)
class Objective:
    """The result of one objective.

    `name` is its place in the file, `metric` what of the scorecard it was judged on. `value` is
    `None` without samples, and the objective is then missed. The value must be at most `limit`, or
    at least it where `is_floor`.
    """

    name: str
    metric: str
    value: float | None
    limit: float
    is_floor: bool
    ok: bool


def judge(level: ServiceLevel, evidence: Evidence) -> tuple[Objective, ...]:
    """Returns every objective of `level`, in the order of the file's reference."""
    return (
        *_latency("ttft_s", "ttft_scheduled_s", level.ttft_s, evidence.ttft_scheduled_s),
        *_latency("tpot_s", "tpot_s", level.tpot_s, evidence.tpot_s),
        *_latency("e2e_s", "e2e_scheduled_s", level.e2e_s, evidence.e2e_scheduled_s),
        *_judged("error_ratio", "requests.error_ratio", level.error_ratio, evidence.error_ratio),
        *_judged(
            "goodput.at_least",
            "goodput.ratio",
            level.goodput.at_least if level.goodput is not None else None,
            evidence.goodput_ratio,
            is_floor=True,
        ),
        *_judged(
            "min_throughput_tokens_per_s",
            "throughput.output_tokens_per_s",
            level.min_throughput_tokens_per_s,
            evidence.output_tokens_per_s,
            is_floor=True,
        ),
        *_judged(
            "max_lost_tokens",
            "correctness.lost_tokens",
            level.max_lost_tokens,
            evidence.lost_tokens,
        ),
        *_judged(
            "max_cost_usd_per_million_tokens",
            "cost.usd_per_million_output_tokens",
            level.max_cost_usd_per_million_tokens,
            evidence.usd_per_million_output_tokens,
        ),
    )


def _latency(
    name: str, metric: str, limits: LatencyLimits | None, spread: Spread
) -> Iterator[Objective]:
    if limits is None:
        return
    for point in LatencyLimits.model_fields:
        limit: float | None = getattr(limits, point)
        value: float | None = getattr(spread, point)
        yield from _judged(f"{name}.{point}", f"{metric}.{point}", limit, value)


def _judged(
    name: str, metric: str, limit: float | None, value: float | None, *, is_floor: bool = False
) -> Iterator[Objective]:
    if limit is not None:
        is_met = value is not None and (value >= limit if is_floor else value <= limit)
        yield Objective(name, metric, value, limit, is_floor, is_met)
