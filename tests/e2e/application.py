"""The whole application as a test runs it: started from a configuration, watched, ended whole.

Owns ports, folders and processes of one application. All it starts lies in a Ray cluster of its
own below `folder`, so several applications, of other people too, run beside each other.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import yaml

from deployments.simulation.control import call
from deployments.start.ports import free_ports
from deployments.start.ray_access import ON_LOOPBACK
from deployments.start.serve import child_environment
from tests.interrupts import heed_interrupts

from .answers import Answers
from .ingress_log import IngressLog

PROJECT_ROOT = Path(__file__).resolve().parents[2]
# A start takes 30 to 60 s; the first one after packages were unpacked, beside two others on two
# slow cores, has taken more than 270 s.
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 45.0
_POLL_S = 0.1
_LOG_TAIL_LINES = 60


class Role(StrEnum):
    """What a process is in the application; the value is what its title matches."""

    GATEWAY = r"ray::ServeReplica:slicewise:gateway"
    DIRECTORY = r"ray::ServeReplica:slicewise:directory"
    DASHBOARD = r"ray::ServeReplica:slicewise:dashboard"
    SLICE_REPLICA = r"ray::ServeReplica:slicewise:engine-"
    ENGINE_HOST = r"ray::EngineHostActor"
    HOST_AGENT = r"ray::HostAgent"
    ENGINE_CORE = r"VLLM::EngineCore"
    ENGINE_WORKER = r"VLLM::Worker"
    CONTROLLER = r"ray::ServeController"
    HAPROXY = r".*haproxy .*-f "


class StartError(AssertionError):
    """The application did not become ready; the message ends with its log."""


def demo_model(**changes: Any) -> dict[str, Any]:
    """The shipped model as `serve_config.yaml` has it, changed."""
    shipped = yaml.safe_load((PROJECT_ROOT / "serve_config.yaml").read_text())
    model: dict[str, Any] = shipped["applications"][0]["args"]["models"][0]
    return model | changes


def paced_model(
    replicas: int = 1, pace: Mapping[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """A model on `replicas` paced engines. The demo model lends it tokenizer and template."""
    model = {
        "name": "paced",
        "source": "models/slicewise-demo",
        "engine": "paced",
        "paced": dict(pace or {}),
        "deployments": [{"compute_class": "local", "replicas": replicas, "num_cpus": 0.01}],
    }
    return model | changes


def application_args(*models: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    """The `args` of an application with these models; `sections` are `gateway`, `auth`, ..."""
    sections.setdefault("link", {"listen_on": "loopback"})
    return {"models": [dict(model) for model in models], **sections}


def serve_config(args: Mapping[str, Any], port: int, host: str = "127.0.0.1") -> dict[str, Any]:
    """The whole file around `args`."""
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": host, "port": port},
        "logging_config": {"enable_access_log": False},
        "applications": [
            {
                "name": "slicewise",
                "route_prefix": "/",
                "import_path": "serving.app:build",
                "args": dict(args),
            }
        ],
    }


def wait_until(is_so: Callable[[], bool], timeout_s: float) -> float:
    """Seconds until it was so."""
    started_s = time.monotonic()
    while not is_so():
        assert time.monotonic() - started_s < timeout_s, f"not so within {timeout_s:g} s"
        time.sleep(0.05)
    return time.monotonic() - started_s


class RunningApplication(Answers):
    """One application, from its start to the end of its last process. A context manager.

    `through` is the command that starts it: `serve` (`serve run FILE`), `slicewise` (`slicewise
    serve FILE`, which also makes its own folder below ours) or `sim` (`slicewise sim up`, on the
    simulated TPU cluster of `plan`, with `options`). `before` is what starts that command, none by
    default. `environment` is added to what it inherits; `None` takes a variable away. `api_key` is
    what its own questions carry. `binaries` holds the commands and
    `directory` is where they run: of this checkout by default.
    """

    def __init__(
        self,
        args: Mapping[str, Any],
        *,
        through: str = "serve",
        environment: Mapping[str, str | None] | None = None,
        api_key: str = "none",
        plan: Mapping[str, Any] | None = None,
        options: Sequence[str] = (),
        before: Sequence[str] = (),
        binaries: Path | None = None,
        directory: Path = PROJECT_ROOT,
    ) -> None:
        self.plan = plan
        self.args = dict(args)
        if through == "sim":
            # Its hosts are not this machine.
            self.args["link"] = {**self.args.get("link", {}), "listen_on": "node"}
        self.port = free_ports(1)[0]
        super().__init__(f"http://127.0.0.1:{self.port}", api_key)
        # Ray's and HAProxy's sockets lie below it, and their paths have to be short.
        self.folder = Path(tempfile.mkdtemp(prefix="sw-" if through == "serve" else "s-"))
        self.config_path = self.folder / "serve_config.yaml"
        self.plan_path = self.folder / "cluster.yaml"
        self.control_socket = self.folder / "c" / "control.sock"
        self.log_path = self.folder / "output.log"
        self._through = through
        self._options = tuple(options)
        self._before = tuple(before)
        self._binaries = binaries or Path(sys.executable).parent
        self._directory = directory
        self._environment = dict(environment or {})
        self._root: subprocess.Popen[bytes] | None = None
        self._ingress_log: IngressLog | None = None
        self._known: dict[int, psutil.Process] = {}

    # -- life --

    def __enter__(self) -> Self:
        try:
            self.launch()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def launch(self) -> None:
        """Starts the command and returns at once."""
        if self._ingress_log is None:
            self._ingress_log = IngressLog()
        self.write_config(self.args)
        self.plan_path.write_text(yaml.safe_dump(self.plan))
        on_plan = [
            str(self.plan_path),
            *self._options,
            "--socket",
            str(self.control_socket),
            "--config",
        ]
        command = {
            "serve": ["serve", "run"],
            "slicewise": ["slicewise", "serve"],
            "sim": ["slicewise", "sim", "up", *on_plan],
        }[self._through]
        binary = self._binaries / command[0]
        with self.log_path.open("wb") as log:
            self._root = subprocess.Popen(
                [*self._before, str(binary), *command[1:], str(self.config_path)],
                cwd=self._directory,
                env=self.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Below a shell's background job it would be ignored.
                preexec_fn=heed_interrupts,
            )

    def environment(self) -> dict[str, str]:
        """The environment of everything in this cluster, and of commands that address it."""
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLICEWISE_"))
        }
        if self._ingress_log is not None:
            inherited["RAY_SERVE_HAPROXY_LOG_TARGET"] = self._ingress_log.target
        if self._through == "sim":
            # Tests speak to Ray from their own process, which has no token of it.
            inherited["RAY_AUTH_MODE"] = "disabled"
        given = {k: v for k, v in (inherited | self._environment).items() if v is not None}
        if self._through == "serve":
            return {**ON_LOOPBACK, **child_environment(given, str(self.folder))}
        return {"TMPDIR": str(self.folder)} | given

    def write_config(self, args: Mapping[str, Any]) -> Path:
        """Writes the configuration file around `args`; the running application does not notice."""
        self.config_path.write_text(yaml.safe_dump(serve_config(args, self.port)))
        return self.config_path

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until every engine of every model is linked."""
        deadline_s = time.monotonic() + timeout_s
        while not self._is_ready():
            if self._root is not None and self._root.poll() is not None:
                raise StartError(f"ended with {self._root.returncode}\n{self.log_tail()}")
            if time.monotonic() > deadline_s:
                raise StartError(f"not ready within {timeout_s:.0f} s\n{self.log_tail()}")
            if "Deploying app 'slicewise' failed" in self.log_text():
                raise StartError(f"deployment failed\n{self.log_tail()}")
            time.sleep(_POLL_S)
        self.remember_processes()

    def interrupt(self, number: int = signal.SIGINT, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Sends a signal to the command alone; its exit code."""
        assert self._root is not None
        self.remember_processes()
        self._root.send_signal(number)
        return self._root.wait(timeout_s)

    def wait_exit(self, timeout_s: float) -> int:
        """Waits for the command to end by itself; its exit code."""
        assert self._root is not None
        return self._root.wait(timeout_s)

    def stop(self) -> None:
        """Ends everything that was started, in order first and by force then. Idempotent."""
        if self._root is not None and self._root.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.interrupt()
        leftovers = self.processes()
        if self._root is not None and self._root.poll() is None:
            leftovers.append(psutil.Process(self._root.pid))
        for process in leftovers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(leftovers, timeout=10)
        if self._root is not None:
            self._root.wait(10)
        if self._ingress_log is not None:
            self._ingress_log.close()
            self._ingress_log = None
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- what it says --

    def bad_ends(self) -> list[str]:
        """What the ingress says of requests that were not ended as they should, and by whom."""
        return [] if self._ingress_log is None else self._ingress_log.bad_ends()

    def log_text(self) -> str:
        """What the command has printed."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self) -> str:
        """Its last lines, for a failure message."""
        return "\n".join(self.log_text().splitlines()[-_LOG_TAIL_LINES:])

    def log_files(self) -> list[Path]:
        """Every log file of the cluster, and the output of the command."""
        logs = [path for path in self.folder.glob("**/logs/**/*") if path.is_file()]
        return [self.log_path, *logs]

    @property
    def dashboard_url(self) -> str:
        """The address that `serve deploy` and `serve status` take, as Ray printed it."""
        if self._through == "sim":
            return str(self.simulation("describe")["dashboard_url"])
        # Ray prints colours around the address.
        found = re.search(
            r"View the dashboard at .*?((?:127\.0\.0\.1|localhost):\d+)", self.log_text()
        )
        assert found, f"no dashboard in the log\n{self.log_tail()}"
        return f"http://{found[1]}"

    def simulation(self, command: str, **arguments: Any) -> Any:
        """Has the simulated cluster do something; what it returns."""
        return call(self.control_socket, command, **arguments)

    def serve(self, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs `serve ARGUMENTS` against this cluster."""
        environment = self.environment() | {"RAY_DASHBOARD_ADDRESS": self.dashboard_url}
        # `RAY_ADDRESS=local` is for `serve run`; the other commands speak to the dashboard.
        environment.pop("RAY_ADDRESS", None)
        binary = Path(sys.executable).with_name("serve")
        return subprocess.run(
            [str(binary), *arguments],
            cwd=PROJECT_ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    # -- its processes --

    def processes(self, role: Role | None = None) -> list[psutil.Process]:
        """The live processes of this cluster, oldest first; of one role when it is given."""
        found = {process.pid: process for process in self._own_processes()}
        alive = [process for process in found.values() if _is_alive(process)]
        if role is not None:
            alive = [process for process in alive if re.match(role.value, title(process))]
        return sorted(alive, key=lambda process: (process.create_time(), process.pid))

    def below(self, process: psutil.Process, role: Role) -> list[psutil.Process]:
        """The processes of `role` that `process` started, directly or not."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = process.children(recursive=True)
            return [child for child in children if re.match(role.value, title(child))]
        return []

    def remember_processes(self) -> None:
        """Notes the processes of now, so that `processes` finds them wherever they hang later."""
        self._known |= {process.pid: process for process in self._own_processes()}

    def _own_processes(self) -> Iterable[psutil.Process]:
        yield from (process for process in self._known.values() if process.is_running())
        if self._root is not None and self._root.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                yield from psutil.Process(self._root.pid).children(recursive=True)
        folder = str(self.folder)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RAY_TMPDIR", "").startswith(folder):
                    yield process

    # -- inside --

    def _is_ready(self) -> bool:
        try:
            fleet = self.fleet()
        except (httpx.HTTPError, ValueError):
            return False
        wanted = {
            model["name"]: sum(
                deployment.get("replicas", 1) * deployment.get("slice", {}).get("num_engines", 1)
                for deployment in model["deployments"]
            )
            for model in self.args["models"]
        }
        if self._through != "serve" and "Try it:" not in self.log_text():
            return False  # the command has not noticed yet
        return linked_engines(fleet) == wanted


def linked_engines(fleet: Mapping[str, Any]) -> dict[str, int]:
    """How many engines of each model are ready and linked."""
    return {
        model["name"]: sum(
            bool(engine["linked"]) and engine["state"] == "ready" for engine in model["engines"]
        )
        for model in fleet["models"]
    }


def engine_ids(fleet: Mapping[str, Any]) -> set[str]:
    """The ids of all linked engines."""
    return {
        engine["engine_id"]
        for model in fleet["models"]
        for engine in model["engines"]
        if engine["linked"]
    }


def title(process: psutil.Process) -> str:
    """A process's title as it stands; empty once it is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
