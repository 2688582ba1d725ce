"""The servers that are measured: Slicewise, and vLLM's own server with the same engine arguments.

Owns starting, stopping and finding their processes. Each runs in a session of its own, as the
client does: Linux shares the CPUs out by session before it shares them out by process.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from deployments.start.ports import free_ports
from tests.e2e.application import (
    PROJECT_ROOT,
    Role,
    RunningApplication,
    application_args,
    demo_model,
    paced_model,
    title,
)

MODEL = "bench"
# Kinds of process. The last is what is no part of a token's way: raylet, controller, the command.
GATEWAY, ENGINE_HOST, HAPROXY, REST = "gateway", "engine host", "HAProxy", "rest of Ray"
ENGINE = "engine"
_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 20.0
_LOG_TAIL_LINES = 40

_SLICEWISE_KINDS = {
    Role.GATEWAY: GATEWAY,
    Role.ENGINE_HOST: ENGINE_HOST,
    Role.HAPROXY: HAPROXY,
    Role.ENGINE_CORE: ENGINE,
    Role.ENGINE_WORKER: ENGINE,
}


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers. `find` looks its processes up by kind, as of now."""

    url: str
    find: Callable[[], Mapping[str, Sequence[psutil.Process]]]

    def processes(self) -> dict[str, Sequence[psutil.Process]]:
        """Its processes; to be asked again before each load, because HAProxy replaces itself."""
        return dict(self.find())

    def all_processes(self) -> list[psutil.Process]:
        """Those of all kinds, as of now."""
        return [each for found in self.find().values() for each in found]


@contextlib.contextmanager
def slicewise(
    model: Mapping[str, Any], checkout: Path = PROJECT_ROOT, num_gateways: int = 1
) -> Iterator[Server]:
    """The application with one model, as `slicewise serve` starts it, when all gateways are up.

    `checkout` is another one than this, with an environment of its own in `.venv`.
    """
    binaries = None if checkout == PROJECT_ROOT else checkout / ".venv" / "bin"
    args = application_args(model, gateway={"replicas": num_gateways})
    application = RunningApplication(
        args, through="slicewise", binaries=binaries, directory=checkout
    )
    with application:
        if num_gateways > 1:
            # Each with its engine.
            application.at_each_gateway(
                num_gateways,
                lambda fleet: len(fleet["models"][0]["engines"]) or None,
                _START_TIMEOUT_S,
            )
        yield Server(
            application.base_url, lambda: _by_kind(application.processes(), _slicewise_kind)
        )


def _slicewise_kind(name: str) -> str | None:
    return next((kind for role, kind in _SLICEWISE_KINDS.items() if re.match(role, name)), None)


def _by_kind(
    processes: Sequence[psutil.Process], kind_of: Callable[[str], str | None]
) -> dict[str, Sequence[psutil.Process]]:
    """By what a process's title says, or else that of the nearest one that started it."""
    own = {process.pid: kind_of(title(process)) for process in processes}
    found: dict[str, list[psutil.Process]] = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            above = [process.pid, *(parent.pid for parent in process.parents())]
            kinds = (kind for pid in above if (kind := own.get(pid)) is not None)
            found.setdefault(next(kinds, REST), []).append(process)
    return dict(found)


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


def paced(
    ttft_ms: float, tpot_ms: float, max_num_seqs: int = 512, *, has_thoughts: bool = True
) -> dict[str, Any]:
    """One paced engine behind the frontend of the shipped configuration, with its parsers.

    Without that of thoughts, which older commits refuse beside a paced engine, unless
    `has_thoughts`.
    """
    pace = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "max_num_seqs": max_num_seqs}
    shipped = demo_model()
    parser = shipped["engine_args"]["structured_outputs_config"]["reasoning_parser"]
    return paced_model(
        1,
        pace,
        name=MODEL,
        engine_args={"reasoning_parser": parser} if has_thoughts else {},
        frontend_args=shipped["frontend_args"],
    )


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
    with tempfile.NamedTemporaryFile(prefix="vllm-server-") as log:
        child = subprocess.Popen(
            command,
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | dict(engine_env),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_answers(url + "/health", child, Path(log.name))
            yield Server(url, lambda: _by_kind(_with_children(child), _vllm_kind))
        finally:
            _end(child)


def _vllm_kind(name: str) -> str:
    # Its frontend is what our gateway is; whatever it starts computes or helps to.
    return ENGINE if name.startswith("VLLM::") else GATEWAY


def _with_children(child: subprocess.Popen[bytes]) -> list[psutil.Process]:
    process = psutil.Process(child.pid)
    return [process, *process.children(recursive=True)]


def _end(child: subprocess.Popen[bytes]) -> None:
    below = psutil.Process(child.pid).children(recursive=True) if child.poll() is None else []
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_STOP_TIMEOUT_S)
    if child.poll() is None:
        child.kill()
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(below, timeout=10)
    child.wait(10)


def _flags(engine_args: Mapping[str, Any]) -> list[str]:
    flags = []
    for name, value in engine_args.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    return flags


def _wait_answers(url: str, child: subprocess.Popen[bytes], log_path: Path) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if child.poll() is not None:
            raise RuntimeError(f"the server ended with {child.returncode}\n{_tail(log_path)}")
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(url, timeout=1).close()
            return
        time.sleep(0.5)
    raise TimeoutError(f"{url} did not answer in {_START_TIMEOUT_S:.0f} s\n{_tail(log_path)}")


def _tail(log_path: Path) -> str:
    return "\n".join(log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
