"""Whole runs against the golden server: what they report is compared with what it knows."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from golden_server import Golden, golden_server

from loadtest.client.check_kind import CheckKind
from loadtest.errors import ExitCode, LoadTestError
from loadtest.planned_request import Api
from loadtest.records import (
    ClientSample,
    EventRecord,
    FleetSample,
    RequestRecord,
    RunEnd,
    RunStart,
    read_records,
)
from loadtest.run.launch import LoadSource, LoadTestOptions, launch
from loadtest.run.plan import PLAN_FILE, PROMPTS_FILE, RunPlan
from loadtest.run.supervisor import RunFailedError, RunParts, run_load
from loadtest.workload.spec import WorkloadSpec

pytestmark = pytest.mark.process

NS_PER_S = 1e9
FLEET = {
    "slices": [
        {"name": "a", "compute_class": "spot", "state": "ready", "num_chips": 8, "hosts": []},
        {"name": "b", "compute_class": "spot", "state": "ready", "num_chips": 8, "hosts": []},
        {"name": None, "compute_class": "spot", "state": "requested", "num_chips": None},
    ]
}
CHAOS = """
events:
  - {at_s: 0.5, action: run, command: [echo, "at a time, {slice}"], target: {slice: a}}
  - {at_in_flight: 1, action: run, command: [echo, "at a load"]}
  - {at_s: 9999, action: run, command: [echo, never]}
"""


@dataclass(frozen=True)
class Told:
    """What a run left behind."""

    start: RunStart
    requests: list[RequestRecord]
    client: list[ClientSample]
    fleet: list[FleetSample]
    events: list[EventRecord]
    end: RunEnd
    card: dict
    lines: list[str]

    @property
    def client_error_s(self) -> float:
        """By how much the client says it was late; what it reports may be off by that."""
        return max((sample.loop_lag_s for sample in self.client), default=0.0)


def told_by(out_dir: Path, lines: list[str]) -> Told:
    start, *records, end = read_records(out_dir / "requests.jsonl")
    assert isinstance(start, RunStart)
    assert isinstance(end, RunEnd)
    return Told(
        start,
        [record for record in records if isinstance(record, RequestRecord)],
        [record for record in records if isinstance(record, ClientSample)],
        [record for record in records if isinstance(record, FleetSample)],
        [record for record in records if isinstance(record, EventRecord)],
        end,
        json.loads((out_dir / "scorecard.json").read_text()),
        lines,
    )


def run(
    golden: Golden,
    out_dir: Path,
    source: LoadSource,
    duration_s: float,
    *,
    models: tuple[str, ...] = (),
    num_workers: int = 1,
    warmup_s: float = 0.0,
    drain_s: float = 20.0,
    check: CheckKind = CheckKind.NONE,
    chaos: Path | None = None,
    expected: ExitCode | None = None,
) -> Told:
    lines: list[str] = []
    options = LoadTestOptions(
        golden.url,
        source,
        duration_s,
        out_dir,
        models=models,
        num_workers=num_workers,
        warmup_s=warmup_s,
        drain_s=drain_s,
        check=check,
        chaos=chaos,
    )
    code = launch(options, {}, lines.append)
    if expected is not None:
        # A machine that is busy with something else makes the client say that it was late.
        assert code in (expected, ExitCode.CLIENT_INVALID)
    return told_by(out_dir, lines)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def strays(reported: dict, true_s: list[float], told: Told) -> list[str]:
    """Percentiles further than 2 % or 2 ms from the truth, and what the client says it was late."""
    assert reported["n"] == len(true_s)
    found = []
    for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        true = percentile(true_s, share)
        if abs(reported[name] - true) > max(0.002, 0.02 * true) + told.client_error_s:
            found.append(f"{name} {reported[name]:.4f} for a true {true:.4f}")
    return found


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Told, dict]]:
    model = "ttft=80,dt=10"
    with golden_server(models=f"{model};other", tokenizer=1, fleet=json.dumps(FLEET)) as golden:
        out_dir = tmp_path_factory.mktemp("runs") / "steady"
        source = LoadSource(rate_per_s=40, input_tokens=30, output_tokens=20)
        chaos = tmp_path_factory.mktemp("chaos") / "chaos.yaml"
        chaos.write_text(CHAOS)
        told = run(
            golden,
            out_dir,
            source,
            2.5,
            models=(model,),
            num_workers=2,
            chaos=chaos,
            expected=ExitCode.OK,
        )
        yield told, golden.truth()["requests"]


def test_reported_latencies_are_the_servers(steady: tuple[Told, dict], tmp_path: Path) -> None:
    """On a machine that is busy with something else, the way to the server takes time as well.

    Nobody can tell that time from the client's error, so a run that strays is repeated; an error of
    ours would show every time.
    """
    told, truths = steady
    tries = [latency_strays(told, truths)]
    model = "ttft=80,dt=10"
    while tries[-1] and len(tries) < 4:
        with golden_server(models=model, tokenizer=1) as golden:
            source = LoadSource(rate_per_s=40, input_tokens=30, output_tokens=20)
            again = run(golden, tmp_path / str(len(tries)), source, 2.5, models=(model,))
            tries.append(latency_strays(again, golden.truth()["requests"]))
    assert tries[-1] == [], tries


def latency_strays(told: Told, truths: dict) -> list[str]:
    written = [[at_ns / NS_PER_S for at_ns in truth["written_ns"]] for truth in truths.values()]
    received_s = [truth["received_ns"] / NS_PER_S for truth in truths.values()]
    firsts = [times[0] - at_s for times, at_s in zip(written, received_s, strict=True)]
    lasts = [times[-1] - at_s for times, at_s in zip(written, received_s, strict=True)]
    paces = [(times[-1] - times[0]) / (len(times) - 1) for times in written]
    return [
        f"{name}: {stray}"
        for name, true_s in (("ttft_s", firsts), ("e2e_s", lasts), ("tpot_s", paces))
        for stray in strays(told.card[name], true_s, told)
    ]


def test_every_scheduled_request_is_sent_once_and_recorded(steady: tuple[Told, dict]) -> None:
    told, truths = steady
    assert len(told.requests) == told.start.num_scheduled == len(truths)
    assert {request.request_id for request in told.requests} == truths.keys()
    assert {request.worker for request in told.requests} == {0, 1}
    assert told.card["requests"] == told.card["requests"] | {"total": len(truths), "failed": 0}
    assert told.end.reason is None


def test_chat_prompts_have_exactly_the_tokens_asked_for(steady: tuple[Told, dict]) -> None:
    told, _ = steady
    assert {request.input_tokens for request in told.requests} == {30}
    assert {request.output_tokens for request in told.requests} == {20}
    assert not any("estimates" in line for line in told.lines)


def test_requests_say_what_an_openai_server_needs(steady: tuple[Told, dict]) -> None:
    _, truths = steady
    body = next(iter(truths.values()))["body"]
    assert body | {"messages": None} == {
        "model": "ttft=80,dt=10",
        "messages": None,
        "max_tokens": 20,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_records_are_in_order_of_time(steady: tuple[Told, dict]) -> None:
    told, _ = steady
    ends_s = [request.ended_s for request in told.requests]
    assert ends_s == sorted(ends_s)


def test_client_watches_itself(steady: tuple[Told, dict]) -> None:
    told, _ = steady
    assert {sample.worker for sample in told.client} == {0, 1}
    assert all(sample.cpu_ratio > 0 for sample in told.client)
    assert all(sum(sample.loop_lag_counts.values()) > 0 for sample in told.client)
    assert sum(sample.num_sent for sample in told.client) <= len(told.requests)
    assert max(sample.num_token_events for sample in told.client) > 0


def test_fleet_is_sampled(steady: tuple[Told, dict]) -> None:
    told, _ = steady
    counts = {"ready": {"slices": 2, "chips": 16}, "requested": {"slices": 1, "chips": 0}}
    assert len(told.fleet) >= 2
    assert all(sample.slices == {"spot": counts} for sample in told.fleet)


def test_chaos_is_done_at_its_time_and_at_its_load(steady: tuple[Told, dict]) -> None:
    told, _ = steady
    done = {event.detail.split(": ")[-1]: event for event in told.events}
    assert done.keys() == {"at a time, a", "at a load"}
    assert done["at a time, a"].at_s >= 0.5
    assert [event.error for event in told.events] == [None, None]


def test_used_folder_is_refused(steady: tuple[Told, dict], tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").touch()
    with golden_server() as golden, pytest.raises(LoadTestError, match="holds a run already"):
        run(golden, tmp_path, LoadSource(rate_per_s=1), 1)


@pytest.mark.long
def test_worker_that_cannot_begin_fails_the_run_in_its_own_words(tmp_path: Path) -> None:
    workload = WorkloadSpec.from_rate(1, input_tokens=1, output_tokens=1)
    plan = RunPlan.of(url="http://127.0.0.1:1", workload=workload, models=("m",), duration_s=1.0)
    plan.write(tmp_path / PLAN_FILE)
    (tmp_path / PROMPTS_FILE).write_text("{}")
    parts = RunParts(tmp_path, None, [], None, print)
    with pytest.raises(RunFailedError, match=r"(?s)worker 0 ended with 1.*PromptFile") as caught:
        run_load(plan, parts)
    assert "a worker ended before the run began" in str(caught.value)
    assert not (tmp_path / "requests.jsonl").exists()


@pytest.mark.long
def test_stall_of_the_server_is_not_omitted(tmp_path: Path) -> None:
    """While a server stands still for 5 s, requests are sent on schedule and wait their time."""
    stall_after_s, stall_for_s, ttft_s = 1.0, 5.0, 0.05
    with golden_server(stall_after_s=stall_after_s, stall_for_s=stall_for_s) as golden:
        source = LoadSource(rate_per_s=20, input_tokens=5, output_tokens=5, api=Api.COMPLETIONS)
        told = run(golden, tmp_path / "run", source, 8, expected=ExitCode.OK)
        truth = golden.truth()
    start_monotonic_s = told.start.at_unix_s - (time.time() - time.monotonic())
    from_s, until_s = (at / NS_PER_S - start_monotonic_s for at in truth["stall_ns"])
    assert until_s - from_s >= stall_for_s

    scheduled_s = [request.scheduled_s for request in told.requests]
    by_hand = []
    for at_s in scheduled_s:
        read_s = until_s if from_s <= at_s < until_s else at_s
        first_s = read_s + ttft_s
        if from_s <= first_s < until_s:
            first_s = until_s
        by_hand.append(first_s - at_s)
    assert strays(told.card["ttft_scheduled_s"], by_hand, told) == []

    sent = sum(from_s <= request.sent_s < until_s for request in told.requests)
    due = sum(from_s <= at_s < until_s for at_s in scheduled_s)
    late = sum(at_s < until_s <= at_s + told.client_error_s for at_s in scheduled_s)
    assert due > 60
    assert due - late <= sent <= due + late


@pytest.mark.long
def test_recorded_answers_are_known_to_the_next_run(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    with golden_server(models="ttft=5,dt=1") as golden:
        source = LoadSource(rate_per_s=20, input_tokens=5, output_tokens=10, api=Api.COMPLETIONS)
        for name in ("first", "second"):
            options = LoadTestOptions(
                golden.url,
                source,
                1,
                tmp_path / name,
                num_workers=2,
                check=CheckKind.RECORDED,
                answers_file=answers,
            )
            launch(options, {}, lambda _line: None)
    first, second = (told_by(tmp_path / name, []) for name in ("first", "second"))
    assert first.card["correctness"]["checked"] == 0
    assert second.card["correctness"]["checked"] == len(second.requests) > 0
    assert {request.lost_tokens for request in second.requests} == {0}
