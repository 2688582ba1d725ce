"""Workload files: what they may say, what is refused and how; the command line's short forms."""

import math
from pathlib import Path

import pytest

from loadtest.errors import LoadTestError
from loadtest.planned_request import Api
from loadtest.workload.arrival_laws import (
    ClosedArrivals,
    ConstantArrivals,
    GammaArrivals,
    PoissonArrivals,
    ReplayArrivals,
    ServegenArrivals,
)
from loadtest.workload.laws import FixedCount, FixedWait
from loadtest.workload.spec import Lengths, WorkloadSpec, workload_from_file

EXAMPLES = sorted((Path(__file__).parents[3] / "loadtest/workloads").glob("*.yaml"))
LENGTHS = "lengths: {input: {law: fixed, value: 8}, output: {law: fixed, value: 4}}\n"
POISSON = "arrivals: {law: poisson, rate_per_s: 2}\n"


def read(folder: Path, text: str) -> WorkloadSpec:
    path = folder / "workload.yaml"
    path.write_text(text)
    return workload_from_file(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_workloads_and_survive_json(path: Path) -> None:
    spec = workload_from_file(path)

    assert WorkloadSpec.model_validate_json(spec.model_dump_json()) == spec


def test_everything_may_be_said_at_once_and_survives_json(tmp_path: Path) -> None:
    spec = read(
        tmp_path,
        """
arrivals: {law: closed, num_users: 3, think_time_s: {law: exponential, mean_s: 2}}
lengths:
  input: {law: lognormal, p50: 100, p99: 900, max: 1000}
  output: {law: uniform, min: 1, max: 9}
prefixes: {count: 4, tokens: {law: fixed, value: 64}, zipf: 0}
sessions: {turns: {law: fixed, value: 3}, think_time_s: {law: lognormal, p50_s: 1, p99_s: 9}}
api: completions
mix: [{model: base, weight: 3}, {model: lora, api: chat}]
tenants: {acme: 2}
priorities: {0: 9, -1: 1}
max_context_tokens: 4096
""",
    )

    assert spec.priorities == {0: 9, -1: 1}
    assert spec.mix[1].api is Api.CHAT
    assert spec.mix[0].api is None
    assert WorkloadSpec.model_validate_json(spec.model_dump_json()) == spec


def test_a_trace_is_found_from_the_folder_of_the_file(tmp_path: Path) -> None:
    replay = read(tmp_path, "arrivals: {law: replay, trace: t.csv}")
    drawn = read(tmp_path, POISSON + "lengths: {trace: /data/t.csv}")

    assert isinstance(replay.arrivals, ReplayArrivals)
    assert replay.arrivals.trace == tmp_path / "t.csv"
    assert drawn.lengths == Lengths(trace=Path("/data/t.csv"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "arrivals: {law: poisson, rate_per_s: -3}\n" + LENGTHS,
            r"arrivals\.rate_per_s is -3; allowed: greater than 0$",
        ),
        (
            "arrivals: {law: poisson, rate_per_s: '3'}\n" + LENGTHS,
            r"arrivals\.rate_per_s is '3'; allowed: a valid number$",
        ),
        ("arrivals: {law: poisson, rate_per_s: .inf}\n" + LENGTHS, r"Out of range|finite numbers"),
        (
            "arrivals: {law: poison, rate_per_s: 3}\n" + LENGTHS,
            r"arrivals\.law is 'poison'; allowed: 'constant', 'poisson'",
        ),
        ("arrivals: {rate_per_s: 3}\n" + LENGTHS, r"arrivals\.law is missing$"),
        ("arrivals: {law: poisson}\n" + LENGTHS, r"arrivals\.rate_per_s is missing$"),
        ("arrivals: {law: gamma, rate_per_s: 1, cv: 0}\n" + LENGTHS, r"arrivals\.cv is 0; allowed"),
        (LENGTHS, r"arrivals is missing$"),
        (POISSON, r"lengths\.input or lengths\.output is missing; allowed: both, or a trace$"),
        (POISSON + LENGTHS + "burst: 1", r"burst is unknown$"),
        (
            POISSON + "lengths: {input: {law: fixed, value: 0}, output: {law: fixed, value: 1}}",
            r"lengths\.input\.value is 0; allowed: greater than or equal to 1$",
        ),
        (
            POISSON + "lengths: {input: {law: uniform, min: 9, max: 2}}",
            r"lengths\.input: max is 2; allowed: at least min, 9$",
        ),
        (
            POISSON + "lengths: {input: {law: lognormal, p50: 9, p99: 9, max: 99}}",
            r"lengths\.input: p99 is 9; allowed: above p50, 9$",
        ),
        (
            POISSON + "lengths: {input: {law: lognormal, p50: 9, p99: 90, max: 8}}",
            r"lengths\.input: max is 8; allowed: at least p50, 9$",
        ),
        (
            POISSON + "lengths: {trace: x, input: {law: fixed, value: 3}}",
            r"lengths: input beside trace; allowed: one of the two$",
        ),
        (
            "arrivals: {law: replay, trace: x}\nlengths: {trace: y}",
            r"lengths\.trace beside a replay",
        ),
        (
            "arrivals: {law: replay, trace: x}\n"
            "sessions: {turns: {law: fixed, value: 2}, think_time_s: {law: fixed, value_s: 1}}",
            r"sessions beside a replay",
        ),
        (
            POISSON + "lengths: {trace: y}\n"
            "sessions: {turns: {law: fixed, value: 2}, think_time_s: {law: fixed, value_s: 1}}",
            r"sessions beside lengths\.trace",
        ),
        (
            "arrivals: {law: servegen, trace: x, scale: 2, rate_per_s: 3}\n" + LENGTHS,
            r"scale is 2 beside rate_per_s",
        ),
        (
            "arrivals: {law: steps, points: [{at_s: 1, rate_per_s: 1}]}\n" + LENGTHS,
            r"the first at_s is 1; allowed: 0$",
        ),
        (
            "arrivals: {law: ramp, points: [{at_s: 1, rate_per_s: 1}, {at_s: 1, rate_per_s: 2}]}\n"
            + LENGTHS,
            r"at_s is 1 after 1; allowed: ascending$",
        ),
        (
            "arrivals: {law: ramp, points: [{at_s: 0, rate_per_s: 0}]}\n" + LENGTHS,
            r"every rate_per_s is 0",
        ),
        (
            "arrivals: {law: ramp, points: [{at_s: 0, rate_per_s: x}]}\n" + LENGTHS,
            r"arrivals\.points\[0\]\.rate_per_s is 'x'; allowed: a valid number$",
        ),
        (POISSON + LENGTHS + "mix: [{model: a}, {model: a}]", r"mix has a with chat twice"),
        (POISSON + LENGTHS + "tenants: {a: 0}", r"tenants\.a is 0; allowed: greater than 0$"),
        (POISSON + LENGTHS + "priorities: {high: 1}", r"priorities\.high is 'high'; allowed"),
        ("- 1", r"allowed: fields of a workload"),
        ("a: [", r"not readable as YAML"),
        ("arrivals: 2026-11-21", r"arrivals is '2026-11-21'; allowed: an object$"),
    ],
)
def test_a_wrong_file_is_refused_with_field_value_and_what_is_allowed(
    tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises(LoadTestError, match=problem) as refusal:
        read(tmp_path, text)

    assert str(refusal.value).startswith(str(tmp_path / "workload.yaml"))


def test_every_problem_of_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError) as refusal:
        read(tmp_path, "arrivals: {law: poisson, rate_per_s: 0}\ntenants: {a: 0}\nfoo: 1")

    assert len(str(refusal.value).splitlines()) == 3


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match="not readable"):
        workload_from_file(tmp_path / "none.yaml")


def test_a_rate_is_poisson_even_or_bursty_by_its_burstiness() -> None:
    def arrivals(burstiness: float) -> object:
        spec = WorkloadSpec.from_rate(
            3, input_tokens=10, output_tokens=5, burstiness=burstiness, api=Api.COMPLETIONS
        )
        assert spec.lengths == Lengths(input=FixedCount(value=10), output=FixedCount(value=5))
        assert spec.api is Api.COMPLETIONS
        return spec.arrivals

    assert arrivals(1) == PoissonArrivals(rate_per_s=3)
    assert arrivals(math.inf) == ConstantArrivals(rate_per_s=3)
    assert arrivals(0.25) == GammaArrivals(rate_per_s=3, cv=2)


@pytest.mark.parametrize("burstiness", [0.0, -1.0, math.nan])
def test_a_burstiness_that_is_none_is_refused(burstiness: float) -> None:
    with pytest.raises(LoadTestError, match=r"burstiness is .*; allowed: above 0"):
        WorkloadSpec.from_rate(3, input_tokens=1, output_tokens=1, burstiness=burstiness)


def test_a_value_of_the_command_line_is_refused_as_in_a_file() -> None:
    with pytest.raises(LoadTestError, match=r"workload: lengths\.input\.value is 0; allowed"):
        WorkloadSpec.from_rate(3, input_tokens=0, output_tokens=1)


def test_users_are_a_closed_loop() -> None:
    spec = WorkloadSpec.from_users(7, input_tokens=10, output_tokens=5, think_time_s=1.5)

    assert spec.arrivals == ClosedArrivals(num_users=7, think_time_s=FixedWait(value_s=1.5))


def test_a_trace_is_replayed_and_servegen_is_a_law(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"prompt": "x", "offset_s": 0}')

    replay = WorkloadSpec.from_trace(trace, scale=2.0, rate_per_s=3.0, output_tokens=9)
    law = WorkloadSpec.from_trace(tmp_path, rate_per_s=3.0, input_tokens=8, output_tokens=9)

    assert replay.arrivals == ReplayArrivals(trace=trace, scale=2.0, rate_per_s=3.0)
    assert replay.lengths == Lengths(output=FixedCount(value=9))
    assert law.arrivals == ServegenArrivals(trace=tmp_path, rate_per_s=3.0)


def test_servegen_without_lengths_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match=r"lengths\.input or lengths\.output is missing"):
        WorkloadSpec.from_trace(tmp_path)


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match="it cannot be read"):
        WorkloadSpec.from_trace(tmp_path / "none")


def test_the_example_of_the_documentation_is_a_workload(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/reference/workloads.md").read_text()
    example = page.split("```yaml\n")[1].split("```")[0]

    spec = read(tmp_path, example)

    # It shows every field.
    assert all(getattr(spec, name) for name in WorkloadSpec.model_fields)
