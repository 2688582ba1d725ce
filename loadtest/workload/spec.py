"""Defines a workload as its file states it: arrivals, lengths, sharing, sessions, models.

Owns the fields, their bounds and the rules between them. Does not own what is made of them
(`build`). A file is YAML; unknown keys are refused.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self, TypeVar

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from loadtest.errors import LoadTestError
from loadtest.planned_request import Api
from loadtest.strict_yaml import YamlLoader, place_in_file
from loadtest.workload.arrival_laws import Arrivals, ReplayArrivals
from loadtest.workload.laws import Count, CountLaw, Part, WaitLaw
from loadtest.workload.traces import TraceError, TraceFormat, detect_format

Weight = Annotated[float, Field(gt=0)]


class Lengths(Part):
    """The tokens of prompts and of answers.

    `trace` takes the requests of a file in a random order, all once before any comes again, each
    with its prompt or its sharing. `input` and `output` stand instead of what rows state, of this
    trace or of a replay; without rows, both are needed.
    """

    input: CountLaw | None = None
    output: CountLaw | None = None
    trace: Path | None = None

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if self.trace is not None and self.input is not None:
            raise ValueError("input beside trace; allowed: one of the two")
        return self


class SharedPrefixes(Part):
    """The prefixes that many prompts share, such as system prompts.

    Each prompt gets one of `count`, in front of what `lengths` gives and in addition to it; a
    session gets one with its first turn. Prefix k is chosen in proportion to k ** -`zipf` (0: all
    equally often). The length of each is drawn once.
    """

    count: Count
    tokens: CountLaw
    zipf: Annotated[float, Field(ge=0, le=10)] = 1.0


class Sessions(Part):
    """The conversations in place of single requests; what arrives is their first turn.

    `lengths.input` is what each turn adds to the conversation. `think_time_s` passes between an
    answer and the next turn.
    """

    turns: CountLaw
    think_time_s: WaitLaw


class MixEntry(Part):
    """The share of a model in the requests. `api` is the workload's where it is `None`."""

    model: Annotated[str, Field(min_length=1)]
    weight: Weight = 1.0
    api: Api | None = None


class WorkloadSpec(Part):
    """The specification of a workload. The seed of the run decides everything left to chance.

    `lengths` may be left out where arrivals are a replay, which has its own. An empty `mix` is all
    models of the run in equal parts; empty `tenants` are none, empty `priorities` are 0. The
    weights of each need not sum to 1. `max_context_tokens` is for a server with a short context
    (`None`: no bound): no answer is planned beyond half of it, a first prompt is cut to what that
    leaves, and a session ends before the turn that would go beyond.
    """

    arrivals: Arrivals
    lengths: Lengths | None = None
    prefixes: SharedPrefixes | None = None
    sessions: Sessions | None = None
    api: Api = Api.CHAT
    mix: tuple[MixEntry, ...] = ()
    tenants: Mapping[str, Weight] = Field(default_factory=dict)
    priorities: Mapping[int, Weight] = Field(default_factory=dict)
    max_context_tokens: Annotated[int, Field(ge=2)] | None = None

    @model_validator(mode="after")
    def _checked(self) -> Self:
        lengths = self.lengths or Lengths()
        is_replay = isinstance(self.arrivals, ReplayArrivals)
        if is_replay and lengths.trace is not None:
            raise ValueError("lengths.trace beside a replay; allowed: one trace of requests")
        if is_replay and self.sessions is not None:
            raise ValueError("sessions beside a replay; allowed: those of the trace")
        if lengths.trace is not None and self.sessions is not None:
            raise ValueError("sessions beside lengths.trace; allowed: those of the trace")
        has_rows = is_replay or lengths.trace is not None
        if not has_rows and (lengths.input is None or lengths.output is None):
            raise ValueError(
                "lengths.input or lengths.output is missing; allowed: both, or a trace"
            )
        models = [(entry.model, entry.api or self.api) for entry in self.mix]
        for model, api in models:
            if models.count((model, api)) > 1:
                raise ValueError(f"mix has {model} with {api} twice; allowed: once")
        return self

    @classmethod
    def from_rate(
        cls,
        rate_per_s: float,
        *,
        input_tokens: int,
        output_tokens: int,
        burstiness: float = 1.0,
        api: Api = Api.CHAT,
    ) -> Self:
        """Makes a workload of requests of one length at a steady rate.

        `burstiness` is the shape of gamma gaps, as `vllm bench serve` has it: 1 is Poisson, less
        comes in bursts, infinity is even.

        Raises:
            LoadTestError: a value out of its range.
        """
        if not burstiness > 0:
            raise LoadTestError(f"burstiness is {burstiness:g}; allowed: above 0")
        if burstiness == 1:
            arrivals: dict[str, object] = {"law": "poisson"}
        elif math.isinf(burstiness):
            arrivals = {"law": "constant"}
        else:
            arrivals = {"law": "gamma", "cv": burstiness**-0.5}
        arrivals["rate_per_s"] = rate_per_s
        lengths = _fixed(input_tokens, output_tokens)
        return _parsed(cls, {"arrivals": arrivals, "lengths": lengths, "api": api}, "workload")

    @classmethod
    def from_users(
        cls,
        num_users: int,
        *,
        input_tokens: int,
        output_tokens: int,
        think_time_s: float = 0.0,
        api: Api = Api.CHAT,
    ) -> Self:
        """Returns a closed loop of users with requests of one length.

        Raises:
            LoadTestError: a value out of its range.
        """
        think_time = {"law": "fixed", "value_s": think_time_s}
        arrivals = {"law": "closed", "num_users": num_users, "think_time_s": think_time}
        lengths = _fixed(input_tokens, output_tokens)
        return _parsed(cls, {"arrivals": arrivals, "lengths": lengths, "api": api}, "workload")

    @classmethod
    def from_trace(
        cls,
        path: Path,
        *,
        scale: float = 1.0,
        rate_per_s: float | None = None,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        api: Api = Api.CHAT,
    ) -> Self:
        """Returns a trace as it is, or ServeGen's laws with requests of one length.

        `scale` and `rate_per_s` as in `ReplayArrivals` and `ServegenArrivals`. The token counts
        stand instead of the trace's; ServeGen's laws have none and need both.

        Raises:
            LoadTestError: a value out of its range, or no trace that can be read.
        """
        try:
            is_servegen = detect_format(path) is TraceFormat.SERVEGEN
        except TraceError as error:
            raise LoadTestError(str(error)) from error
        arrivals = {
            "law": "servegen" if is_servegen else "replay",
            "trace": str(path),
            "scale": scale,
            "rate_per_s": rate_per_s,
        }
        lengths = _fixed(input_tokens, output_tokens)
        return _parsed(cls, {"arrivals": arrivals, "lengths": lengths, "api": api}, "workload")


def workload_from_file(path: Path) -> WorkloadSpec:
    """The workload of a YAML or JSON file. Traces are found from the file's own folder.

    Raises:
        LoadTestError: it cannot be read, or has what is not allowed; every problem is named.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), YamlLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LoadTestError(f"{path}: not readable as YAML: {error}") from error
    if not isinstance(content, dict):
        raise LoadTestError(f"{path}: {str(content)[:60]!r}; allowed: fields of a workload")
    for part in (content.get("arrivals"), content.get("lengths")):
        if isinstance(part, dict) and isinstance(part.get("trace"), str):
            part["trace"] = str(path.parent / part["trace"])
    return _parsed(WorkloadSpec, content, str(path))


_Spec = TypeVar("_Spec", bound=WorkloadSpec)


def _parsed(kind: type[_Spec], fields: Mapping[str, object], source: str) -> _Spec:
    """Parses the fields as JSON: strict, but a list is a tuple and a text is a path."""
    try:
        document = json.dumps(fields, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise LoadTestError(f"{source}: {error}; allowed: texts, finite numbers, lists") from error
    try:
        return kind.model_validate_json(document)
    except ValidationError as error:
        lines = (f"{source}: {_problem(problem, fields)}" for problem in _innermost(error))
        raise LoadTestError("\n".join(lines)) from error


def _innermost(error: ValidationError) -> list[ErrorDetails]:
    """The problems less those of a whole whose parts have problems of their own."""
    found = error.errors(include_url=False)
    wholes = {problem["loc"][:length] for problem in found for length in range(len(problem["loc"]))}
    return [problem for problem in found if problem["loc"] not in wholes]


def _problem(problem: ErrorDetails, fields: Mapping[str, object]) -> str:
    path = place_in_file(problem["loc"], fields, "law") or "workload"
    shown = "" if isinstance(problem["input"], Mapping) else f" is {problem['input']!r}"
    match problem["type"]:
        case "missing":
            return f"{path} is missing"
        case "extra_forbidden":
            return f"{path} is unknown"
        case "union_tag_not_found":
            return f"{path}.law is missing"
        case "union_tag_invalid":
            said = problem["ctx"]
            return f"{path}.law is {said['tag']!r}; allowed: {said['expected_tags']}"
        case "value_error":
            return f"{path}: {problem['msg'].removeprefix('Value error, ')}"
    return f"{path}{shown}; allowed: {problem['msg'].removeprefix('Input should be ')}"


def _fixed(input_tokens: int | None, output_tokens: int | None) -> dict[str, object] | None:
    given = {"input": input_tokens, "output": output_tokens}
    laws: dict[str, object] = {
        key: {"law": "fixed", "value": value} for key, value in given.items() if value is not None
    }
    return laws or None
