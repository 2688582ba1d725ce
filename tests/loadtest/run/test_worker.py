"""One worker's part of a run, without Locust: what it sends and records, by the golden server."""

import itertools
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import gevent.socket
import pytest
from golden_server import Golden, golden_server

from loadtest.client.check_kind import CheckKind
from loadtest.client.prompt_source import find_prompts
from loadtest.errors import ErrorKind
from loadtest.planned_request import Api
from loadtest.recorder import worker_part
from loadtest.records import RequestRecord, read_records
from loadtest.run.control import Go, encode_message
from loadtest.run.plan import PROMPTS_FILE, RunPlan
from loadtest.run.worker import run_worker
from loadtest.workload.build import build_workload
from loadtest.workload.spec import WorkloadSpec, workload_from_file

pytestmark = pytest.mark.process

EXCHANGE = {"input_tokens": 5, "output_tokens": 5, "api": Api.COMPLETIONS}


def work(
    golden: Golden,
    out_dir: Path,
    models: str,
    workload: WorkloadSpec,
    *,
    is_abandoned: bool = False,
    **plan: object,
) -> list[RequestRecord]:
    """What a worker records of its part."""
    plan = {"duration_s": 0.5, "drain_s": 5.0} | plan
    run_plan = RunPlan.of(
        url=golden.url, workload=workload, models=tuple(models.split(";")), **plan
    )
    prompts = find_prompts(golden.url, run_plan.models, None)
    (out_dir / PROMPTS_FILE).write_text(prompts.model_dump_json())
    ours, theirs = socket.socketpair()
    heard: list[RequestRecord] = []
    with ours, gevent.socket.socket(fileno=theirs.detach()) as control:
        ours.sendall(encode_message(Go(time.monotonic() + 0.05)))
        if is_abandoned:
            ours.shutdown(socket.SHUT_WR)
        run_worker(run_plan, out_dir, 0, None, control, heard.append)
    records = read_records(worker_part(out_dir, 0))
    written = [record for record in records if isinstance(record, RequestRecord)]
    assert written == heard
    return written


@pytest.fixture(scope="module")
def golden() -> Iterator[Golden]:
    with golden_server() as server:
        yield server


def test_open_loop_sends_all_of_its_schedule(golden: Golden, tmp_path: Path) -> None:
    workload = WorkloadSpec.from_rate(40, **EXCHANGE)
    requests = work(golden, tmp_path, "ttft=5,dt=5", workload)
    planned = build_workload(workload, models=["ttft=5,dt=5"], duration_s=0.5, seed=1).requests
    assert {each.request_id: each.offset_s for each in planned} == pytest.approx(
        {request.request_id: request.scheduled_s for request in requests}
    )
    assert all(request.sent_s >= request.scheduled_s for request in requests)
    assert all(request.is_ok for request in requests)


def test_workers_share_a_schedule(golden: Golden, tmp_path: Path) -> None:
    workload = WorkloadSpec.from_rate(40, **EXCHANGE)
    half = work(golden, tmp_path, "ttft=5,dt=5", workload, num_workers=2)
    planned = build_workload(workload, models=["ttft=5,dt=5"], duration_s=0.5, seed=1).requests
    assert {each.request_id for each in half} == {each.request_id for each in planned[::2]}


def test_closed_loop_has_one_request_per_user(tmp_path: Path) -> None:
    with golden_server(num_slots=2) as golden:
        workload = WorkloadSpec.from_users(5, **EXCHANGE)
        requests = work(golden, tmp_path, "ttft=20,dt=5", workload, warmup_s=0.1, duration_s=0.8)
    edges = [(request.sent_s, 1) for request in requests] + [
        (request.ended_s, -1) for request in requests
    ]
    in_flight = list(itertools.accumulate(step for _, step in sorted(edges)))
    assert max(in_flight) == 5
    assert len(requests) > 5
    assert all(request.scheduled_s < 0.8 for request in requests)


def test_user_thinks_between_requests(golden: Golden, tmp_path: Path) -> None:
    workload = WorkloadSpec.from_users(1, think_time_s=0.1, **EXCHANGE)
    requests = work(golden, tmp_path, "ttft=5,dt=5", workload)
    assert len(requests) > 1
    for before, after in itertools.pairwise(requests):
        assert after.scheduled_s >= before.ended_s + 0.1


def test_user_whose_request_failed_pauses(golden: Golden, tmp_path: Path) -> None:
    """A second, and the run is shorter: a server that is gone is not hammered."""
    workload = WorkloadSpec.from_users(2, **EXCHANGE)
    requests = work(golden, tmp_path, "status=500", workload)
    assert [request.error for request in requests] == [ErrorKind.HTTP_5XX] * 2


SESSIONS = """
arrivals: {law: constant, rate_per_s: 4}
lengths: {input: {law: fixed, value: 10}, output: {law: fixed, value: 3}}
sessions: {turns: {law: fixed, value: 3}, think_time_s: {law: fixed, value_s: 0.05}}
api: %s
tenants: {gold: 1}
priorities: {2: 1}
"""


@pytest.mark.parametrize("api", list(Api))
def test_turns_of_a_session_follow_their_answers(tmp_path: Path, api: Api) -> None:
    file = tmp_path / "sessions.yaml"
    file.write_text(SESSIONS % api)
    with golden_server(tokenizer=1) as golden:
        model = "ttft=5,dt=2"
        requests = work(golden, tmp_path, model, workload_from_file(file), duration_s=1.0)
        truths = golden.truth()["requests"]
    by_session = itertools.groupby(sorted(requests, key=_session_and_turn), _session)
    prompt = "messages" if api == Api.CHAT else "prompt"
    num_sessions = 0
    for _, turns in by_session:
        num_sessions += 1
        for before, after in itertools.pairwise(turns):
            assert after.turn == before.turn + 1
            assert after.scheduled_s == pytest.approx(before.ended_s + 0.05, abs=0.001)
            first, then = (truths[each.request_id]["body"][prompt] for each in (before, after))
            assert then[: len(first)] == first
            assert len(then) > len(first)
    assert num_sessions == 4
    planned = {request.turn: request.planned_input_tokens for request in requests}
    assert planned == {0: 10, 1: 23, 2: 36}
    body = truths[requests[0].request_id]["body"]
    assert (body["user"], body["priority"]) == ("gold", 2)
    if api == Api.COMPLETIONS:
        assert all(request.input_tokens == request.planned_input_tokens for request in requests)


def _session(record: RequestRecord) -> str:
    return record.session_id or ""


def _session_and_turn(record: RequestRecord) -> tuple[str, int]:
    return _session(record), record.turn


def test_session_ends_with_a_failed_turn(golden: Golden, tmp_path: Path) -> None:
    file = tmp_path / "sessions.yaml"
    file.write_text(SESSIONS % "completions")
    requests = work(golden, tmp_path, "status=500", workload_from_file(file))
    assert {request.turn for request in requests} == {0}


@pytest.mark.parametrize("api", list(Api))
def test_answers_are_checked_and_wrong_tokens_counted(
    golden: Golden, tmp_path: Path, api: Api
) -> None:
    wrong = "ttft=5,dt=1,wrong=4"
    workload = WorkloadSpec.from_rate(40, input_tokens=5, output_tokens=30, api=api)
    check = {"check": CheckKind.PACED}
    requests = work(golden, tmp_path, f"ttft=5,dt=1;{wrong}", workload, **check)
    assert len({request.model for request in requests}) == 2
    for request in requests:
        is_wrong = int(request.model == wrong)
        found = (request.lost_tokens, request.repeated_tokens, request.foreign_tokens)
        assert found == (is_wrong, 0, is_wrong)


def test_what_is_in_flight_after_the_drain_is_unfinished(golden: Golden, tmp_path: Path) -> None:
    workload = WorkloadSpec.from_rate(20, **EXCHANGE)
    requests = work(golden, tmp_path, "ttft=10,dt=3600000", workload, drain_s=0.1)
    planned = build_workload(workload, models=["m"], duration_s=0.5, seed=1).requests
    assert len(requests) == len(planned)
    assert {request.error for request in requests} == {ErrorKind.UNFINISHED}


def test_users_are_ended_by_the_drain(golden: Golden, tmp_path: Path) -> None:
    workload = WorkloadSpec.from_users(3, **EXCHANGE)
    requests = work(golden, tmp_path, "ttft=10,dt=3600000", workload, drain_s=0.1)
    assert [request.error for request in requests] == [ErrorKind.UNFINISHED] * 3


def test_parent_that_goes_away_ends_the_run(golden: Golden, tmp_path: Path) -> None:
    workload = WorkloadSpec.from_users(3, **EXCHANGE)
    plan = {"duration_s": 3600.0, "is_abandoned": True}
    requests = work(golden, tmp_path, "ttft=10,dt=3600000", workload, **plan)
    assert {request.error for request in requests} <= {ErrorKind.UNFINISHED}
