"""What an operator does to an application: update, refuse, watch, stop."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from .answers import ANSWER_TIMEOUT_S
from .application import (
    Role,
    RunningApplication,
    application_args,
    demo_model,
    engine_ids,
    linked_engines,
    paced_model,
    serve_config,
)
from .conftest import OPERATOR_KEY, operated_args

pytestmark = pytest.mark.e2e

BODY = {"model": "paced", "prompt": "a", "max_tokens": 4}


@pytest.fixture
def application(operated_application: RunningApplication) -> RunningApplication:
    return operated_application


def post(application: RunningApplication, **changes: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {application.api_key}"}
    url = f"{application.base_url}/v1/completions"
    return httpx.post(url, json=BODY | changes, headers=headers, timeout=ANSWER_TIMEOUT_S)


class Caller(threading.Thread):
    """Asks without a pause and notes every answer that is not an answer."""

    def __init__(self, application: RunningApplication) -> None:
        super().__init__(daemon=True)
        self._application = application
        self._stop_asking = threading.Event()
        self.num_answers = 0
        self.failures: list[str] = []

    def run(self) -> None:
        while not self._stop_asking.is_set():
            try:
                answer = post(self._application, max_tokens=20)
            except httpx.HTTPError as error:
                self.failures.append(repr(error))
                continue
            if answer.status_code == 200:
                self.num_answers += 1
            else:
                self.failures.append(f"{answer.status_code} {answer.text}")

    def finish(self) -> None:
        self._stop_asking.set()
        self.join(30)


@contextlib.contextmanager
def calling(application: RunningApplication) -> Iterator[Caller]:
    caller = Caller(application)
    caller.start()
    try:
        yield caller
    finally:
        caller.finish()


def wait_status(application: RunningApplication, word: str, timeout_s: float = 180) -> str:
    """Waits until `serve status` says `word`; all that it says then."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        status = application.serve("status").stdout
        if f"status: {word}" in status:
            return status
        assert time.monotonic() < deadline_s, status


def test_keys_come_from_the_environment(application: RunningApplication) -> None:
    assert post(application).status_code == 200
    url = f"{application.base_url}/v1/completions"
    assert httpx.post(url, json=BODY).status_code == 401
    for path in application.log_files():
        assert OPERATOR_KEY.encode() not in path.read_bytes(), path.name


def test_status_names_every_deployment(application: RunningApplication) -> None:
    status = wait_status(application, "RUNNING")
    for name in ("slicewise:", "gateway:", "engine-paced-local:", "directory:"):
        assert name in status


def explained(application: RunningApplication, request_id: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "deployments.cli", "explain", request_id)
    return subprocess.run(
        [*command, "--url", application.base_url],
        env={**os.environ, "SLICEWISE_API_KEY": str(application.api_key)},
        capture_output=True,
        text=True,
        timeout=ANSWER_TIMEOUT_S,
        check=False,
    )


def test_requests_are_explained_whichever_gateway_had_them(
    application: RunningApplication,
) -> None:
    ids = [post(application).headers["x-request-id"] for _ in range(6)]
    runs = {request_id: explained(application, request_id) for request_id in ids}
    gateways = set()
    for request_id, run in runs.items():
        assert run.returncode == 0, run.stderr
        assert f"request {request_id} at gateway " in run.stdout
        assert "goes to " in run.stdout
        assert "ended, length, with 4 tokens" in run.stdout
        gateways.add(run.stdout.split()[4])
    assert len(gateways) == 2
    unknown = explained(application, "nobody's")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "no gateway knows request nobody's" in unknown.stderr


def test_bad_config_is_refused_while_the_application_goes_on(
    application: RunningApplication, tmp_path: Path
) -> None:
    before = engine_ids(application.fleet())
    bad = tmp_path / "bad.yaml"
    args = operated_args(request_deadline_s=-5)
    bad.write_text(yaml.safe_dump(serve_config(args, application.port)))
    with calling(application) as caller:
        assert application.serve("deploy", str(bad)).returncode == 0
        status = wait_status(application, "DEPLOY_FAILED")
    message = " ".join(status.split())
    assert "gateway.request_deadline_s" in message
    assert "(value -5)" in message
    assert "more than 0, at most 86400" in message
    assert caller.failures == []
    assert caller.num_answers > 0
    assert engine_ids(application.fleet()) == before
    # The good one again; nothing restarts.
    good = application.write_config(operated_args())
    assert application.serve("deploy", str(good)).returncode == 0
    wait_status(application, "RUNNING")


def test_more_replicas_are_added_to_those_that_run(
    application: RunningApplication, tmp_path: Path
) -> None:
    before = engine_ids(application.fleet())
    assert len(before) == 2
    config = serve_config(operated_args(), application.port)
    config["applications"][0]["deployments"] = [{"name": "engine-paced-local", "num_replicas": 3}]
    more = tmp_path / "more.yaml"
    more.write_text(yaml.safe_dump(config))
    assert application.serve("deploy", str(more)).returncode == 0
    fleet = application.wait_fleet(lambda fleet: linked_engines(fleet) == {"paced": 3}, 180)
    assert before < engine_ids(fleet)
    assert application.serve("deploy", str(application.config_path)).returncode == 0
    application.wait_fleet(lambda fleet: len(engine_ids(fleet)) == 2, 180)


def test_update_of_a_gateway_option_loses_no_request(application: RunningApplication) -> None:
    changed = application.write_config(operated_args(max_body_bytes=2048))
    with calling(application) as caller:
        assert application.serve("deploy", str(changed)).returncode == 0
        deadline_s = time.monotonic() + 240
        while post(application, prompt="x" * 4096).status_code != 413:
            assert time.monotonic() < deadline_s, "the old gateway still answers"
        wait_status(application, "RUNNING", 120)
    assert caller.failures == []
    assert caller.num_answers > 20


def test_request_without_an_engine_in_time_is_503_with_retry_after(
    application: RunningApplication,
) -> None:
    # Stopped, not killed: nobody replaces them, and they are silent.
    hosts = application.processes(Role.ENGINE_HOST)
    for host in hosts:
        host.suspend()
    try:
        application.wait_fleet(lambda fleet: linked_engines(fleet) == {"paced": 0}, 180)
        answer = post(application)
    finally:
        for host in hosts:
            with contextlib.suppress(psutil.NoSuchProcess):
                host.resume()
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    error = answer.json()["error"]
    assert error["code"] == "no_engine_in_time"
    # Of the two seconds that it has, it spent some before it stood in line.
    assert re.search(r"within (1\.\d|2\.0) s;", error["message"])
    application.wait_fleet(lambda fleet: linked_engines(fleet) == {"paced": 2}, 180)
    assert post(application).status_code == 200


@pytest.mark.long
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, id="ctrl-c"), pytest.param(signal.SIGTERM, id="sigterm")],
)
def test_farewell_leaves_no_process(number: signal.Signals) -> None:
    application = RunningApplication(application_args(paced_model(1)), through="slicewise")
    with application:
        started = application.processes()
        assert len(started) > 5
        code = application.interrupt(number)
        assert code == 0
        assert "Try it:\n\n  curl http://127.0.0.1" in application.log_text()
        assert [process for process in started if process.is_running()] == []
        assert application.processes() == []
        assert list(application.folder.glob("sw-*")) == []


def test_serve_command_refuses_a_bad_config_within_seconds() -> None:
    args = application_args(paced_model(1), gateway={"replicas": 0})
    application = RunningApplication(args, through="slicewise")
    try:
        application.launch()
        assert application.wait_exit(30) == 1
        text = application.log_text()
        assert "applications[0].args.gateway.replicas" in text
        assert "value 0" in text
        assert "allowed: " in text
        assert application.processes() == []
    finally:
        application.stop()


@pytest.mark.long
@pytest.mark.starts_engine
def test_serve_command_tells_why_vllm_refuses_its_arguments() -> None:
    arguments = demo_model()["engine_args"] | {"max_model_len": 100_000}
    args = application_args(demo_model(engine_args=arguments))
    application = RunningApplication(args, through="slicewise")
    try:
        application.launch()
        assert application.wait_exit(150) == 1
        assert "max_model_len (100000) is greater than" in application.log_text()
        assert application.processes() == []
    finally:
        application.stop()


def test_serve_command_refuses_a_port_in_use(application: RunningApplication) -> None:
    other = RunningApplication(application_args(paced_model(1)), through="slicewise")
    other.port = application.port
    try:
        other.launch()
        assert other.wait_exit(30) == 1
        assert f"port {application.port} of 127.0.0.1 is in use" in other.log_text()
    finally:
        other.stop()


@pytest.mark.long
def test_shutdown_without_a_handover_ends_engines_too() -> None:
    """As shipped they wait ten minutes for whoever deploys again: `test_adoption.py` has that."""
    args = application_args(paced_model(2), health={"engine_handover_s": 0})
    with RunningApplication(args) as application:
        assert len(application.processes(Role.ENGINE_HOST)) == 2
        assert application.serve("shutdown", "-y", timeout_s=90).returncode == 0
        _, alive = psutil.wait_procs(application.processes(Role.ENGINE_HOST), timeout=30)
        assert alive == []
        assert application.processes(Role.GATEWAY) == []
