"""Ray Serve LLM as a server to compare with: its application on a Ray cluster of its own.

Owns its configuration, its start and its end. What it runs in place of a model is
`paced_ray_engine`. It needs a package that Slicewise does without (`REQUIREMENTS`).
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.servers import MODEL, REST, Server
from deployments.start.ports import free_ports
from deployments.start.serve import child_environment
from serving.artifacts.model_source import resolve_source
from tests.e2e.application import PROJECT_ROOT, title
from tests.interrupts import heed_interrupts

REQUIREMENTS = ("pyarrow", "jsonref")
_SOURCE = "models/slicewise-demo"
_START_TIMEOUT_S = 180.0
_ANSWER_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.5
_LOG_TAIL_LINES = 60


class Mode(StrEnum):
    """How Ray Serve LLM is started; each is what its documentation offers."""

    DEFAULT = "default"  # no flags: Python proxy, ingress replica, model replica
    OPTIMIZED = "throughput flags"  # the same path, HAProxy and every flag for throughput
    DIRECT = "direct streaming"  # HAProxy to the model replica itself, and every flag


_HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
_FLAGS = {
    Mode.DEFAULT: {},
    Mode.OPTIMIZED: _HAPROXY,
    Mode.DIRECT: _HAPROXY | {"RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1"},
}
# What Slicewise sets for its own application, and Ray Serve LLM is to run without.
_OURS = ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD")

# By the beginnings of process titles; what matches none is Ray's own (raylet, controller, ...).
_ROLES = {
    "ray::ProxyActor": "proxy",
    "ray::ServeReplica:ray-llm:OpenAiIngress": "ingress",
    "ray::ServeReplica:ray-llm:LLMServer": "model replica",
    "ray::ServeReplica:ray-llm:LLMRouter": "router",
}


def missing_packages() -> list[str]:
    """Which of `REQUIREMENTS` are not installed."""
    return [name for name in REQUIREMENTS if importlib.util.find_spec(name) is None]


@dataclass(frozen=True, slots=True)
class _Site:
    """One start: where everything lies."""

    folder: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def ray_serve_llm(mode: Mode, pace: Mapping[str, Any]) -> Iterator[Server]:
    """Ray Serve LLM with one model replica on a paced engine.

    `pace` are the options of `PacedConfig`.
    """
    # Ray's and HAProxy's sockets lie below it, and their paths have to be short.
    site = _Site(Path(tempfile.mkdtemp(prefix="r-")), free_ports(1)[0])
    config = site.folder / "serve_config.yaml"
    config.write_text(yaml.safe_dump(_serve_config(site.port, pace)))
    log_path = site.folder / "output.log"
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "ray.serve.scripts", "run", str(config)],
            cwd=PROJECT_ROOT,
            env=_environment(mode, site.folder),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Below a shell's background job it would be ignored.
            preexec_fn=heed_interrupts,
        )
    try:
        _wait_answers(site.url, child, log_path)
        yield Server(site.url, lambda: _by_role(site.folder))
    finally:
        _stop(child, site.folder)


def _environment(mode: Mode, folder: Path) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLICEWISE_"))}
    place = child_environment(inherited, str(folder))
    ours = {name: value for name, value in place.items() if name not in _OURS}
    engine = {
        "RAYLLM_VLLM_ENGINE_CLS": "benchmarks.paced_ray_engine.PacedVLLMEngine",
        "PYTHONPATH": str(PROJECT_ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CONFIGURE_LOGGING": "0",
    }
    return ours | engine | _FLAGS[mode]


def _serve_config(port: int, pace: Mapping[str, Any]) -> dict[str, Any]:
    model = {
        "model_loading_config": {"model_id": MODEL, "model_source": resolve_source(_SOURCE)},
        "engine_kwargs": {"max_model_len": pace["max_model_len"]},
        "accelerator_config": {"kind": "cpu"},
        # Reservations, not limits: Ray would not place the whole application on two cores.
        "placement_group_config": {"bundles": [{"CPU": 0.01}]},
        "deployment_config": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.1}},
        "experimental_configs": {"paced": dict(pace)},
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "logging_config": {"enable_access_log": False},
        "applications": [
            {
                "name": "ray-llm",
                "route_prefix": "/",
                "import_path": "ray.serve.llm:build_openai_app",
                "args": {"llm_configs": [model]},
            }
        ],
    }


def _by_role(folder: Path) -> dict[str, Sequence[psutil.Process]]:
    found: dict[str, list[psutil.Process]] = {}
    for process in _cluster(folder):
        found.setdefault(_role_of(title(process)), []).append(process)
    return dict(found)


def _role_of(name: str) -> str:
    if "haproxy" in name and " -f " in name:
        return "HAProxy"
    return next((role for start, role in _ROLES.items() if name.startswith(start)), REST)


def _cluster(folder: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RAY_TMPDIR") == str(folder):
                yield process


def _wait_answers(url: str, child: subprocess.Popen[bytes], log_path: Path) -> None:
    # The ingress lists its models before there is a replica; only an answer shows that there is.
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if child.poll() is not None:
            raise RuntimeError(f"ended with {child.returncode}\n{_tail(log_path)}")
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S).close()
            return
        time.sleep(_POLL_S)
    raise TimeoutError(f"{url} did not answer in {_START_TIMEOUT_S:.0f} s\n{_tail(log_path)}")


def _tail(log_path: Path) -> str:
    return "\n".join(log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])


def _stop(child: subprocess.Popen[bytes], folder: Path) -> None:
    """Ends it in order first and by force then."""
    leftovers = list(_cluster(folder))
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_STOP_TIMEOUT_S)
    leftovers += _cluster(folder)
    for process in leftovers:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(leftovers, timeout=10)
    child.wait(10)
    shutil.rmtree(folder, ignore_errors=True)
