"""The servers that are compared: Slicewise, and vLLM's own server with the same engine arguments.

Owns starting, stopping and the CPU time of their processes. Each runs in a session of its own, as
the client does: Linux shares the CPUs out by session before it shares them out by process.
"""

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from deployments.start.ports import free_ports
from tests.e2e.application import (
    Role,
    RunningApplication,
    application_args,
    demo_model,
    paced_model,
)

MODEL = "bench"
# The role of what is no part of a token's way: raylet, controller, the command itself.
REST = "rest of Ray"
_START_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers. `find` looks its processes up by what they are, as of now."""

    name: str
    url: str
    find: Callable[[], Mapping[str, Sequence[psutil.Process]]]

    def processes(self) -> dict[str, Sequence[psutil.Process]]:
        """Its processes; to be asked again after a load, because HAProxy replaces itself."""
        return dict(self.find())


def cpu_s(processes: Mapping[str, Sequence[psutil.Process]]) -> dict[str, float]:
    """CPU seconds used so far by each role, user and system; left out if a process has ended."""
    used = {}
    for role, members in processes.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            used[role] = sum(sum(process.cpu_times()[:2]) for process in members)
    return used


@contextlib.contextmanager
def slicewise(model: Mapping[str, Any]) -> Iterator[Server]:
    """The application with one model, as `slicewise serve` starts it."""
    roles = {
        "gateway": Role.GATEWAY,
        "engine host": Role.ENGINE_HOST,
        "HAProxy": Role.HAPROXY,
    }
    with RunningApplication(application_args(model), through="slicewise") as application:

        def find() -> Mapping[str, Sequence[psutil.Process]]:
            # A reload leaves an old HAProxy behind for a while: the last one has the load.
            found = {name: application.processes(role)[-1:] for name, role in roles.items()}
            named = {process.pid for processes in found.values() for process in processes}
            rest = [each for each in application.processes() if each.pid not in named]
            return {name: each for name, each in (found | {REST: rest}).items() if each}

        yield Server("Slicewise", application.base_url, find)


def vllm_model(engine_args: Mapping[str, Any], engine_env: Mapping[str, str]) -> dict[str, Any]:
    """One vLLM engine of the shipped model."""
    deployments = [{"compute_class": "local", "replicas": 1}]
    return demo_model(
        name=MODEL,
        engine_args=dict(engine_args),
        engine_env=dict(engine_env),
        frontend_args={},
        deployments=deployments,
    )


def paced(ttft_ms: float, tpot_ms: float, max_num_seqs: int = 512) -> dict[str, Any]:
    """One paced engine."""
    pace = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "max_num_seqs": max_num_seqs}
    return paced_model(1, pace, name=MODEL)


@contextlib.contextmanager
def vllm_server(
    source: str, engine_args: Mapping[str, Any], engine_env: Mapping[str, str]
) -> Iterator[Server]:
    """`python -m vllm.entrypoints.openai.api_server` with the same engine arguments."""
    port = free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", source]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--disable-uvicorn-access-log", *_flags(engine_args)]
    child = subprocess.Popen(
        command,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | dict(engine_env),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_answers(url + "/health", child)
        yield Server("vLLM's own server", url, lambda: {"server": [psutil.Process(child.pid)]})
    finally:
        below = psutil.Process(child.pid).children(recursive=True) if child.poll() is None else []
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(20)
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _flags(engine_args: Mapping[str, Any]) -> list[str]:
    flags = []
    for name, value in engine_args.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    return flags


def _wait_answers(url: str, child: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if child.poll() is not None:
            raise RuntimeError(f"the server ended with {child.returncode}")
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(url, timeout=1).close()
            return
        time.sleep(0.5)
    raise TimeoutError(f"{url} did not answer within {_START_TIMEOUT_S:.0f} s")
