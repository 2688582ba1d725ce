"""Defines `slicewise serve`: it runs `serve run` on a Ray cluster of its own, and ends it all.

Owns the environment of what it starts, the messages at start-up, and the end: when this command
ends, by whatever but SIGKILL, nothing it started goes on. Everything else is `serve run`'s.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import psutil
import typer
import yaml

from deployments.start.failure import start_failure
from deployments.start.ports import free_ports, is_free
from deployments.start.ray_access import (
    AUTH_MODE,
    ON_LOOPBACK,
    TOKEN,
    TOKEN_FILE,
    WITH_TOKEN,
    shell_hint,
    token_file,
)
from deployments.start.tpu_host import ingress_program, ray_environment
from serving.config.api_keys import KeyScope, read_keys
from serving.config.check import check_serve_config
from serving.config.ray_settings import HAPROXY_PROGRAM, RAY_SETTINGS
from serving.config.sections import load_yaml
from serving.config.vllm.vllm_args import installed_vllm_args
from serving.domain.errors import UnsupportedVllmError
from serving.domain.slice_lifecycle import SliceState

# `serve run` stops its replicas one after the other, each with a drain; after that it is killed.
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.5
_CONNECT_S = 5.0
# Ray Serve's own default.
_SERVE_PORT = 8000
# Ports of one cluster besides: four of HAProxy and its fallback, the last for a simulated
# cluster's dashboard, the rest for gateways: Serve gives a port out again only after HAProxy's hard
# stop, two hours, and in that time a gateway that is killed every minute takes 120.
_NUM_PORTS = 256


def child_environment(inherited: Mapping[str, str], ray_folder: str) -> dict[str, str]:
    """Returns the environment of `serve run`; the user's variables win, save the cluster's place.

    `ray_folder` keeps this cluster apart from any other on the machine. Ray's sockets lie below it,
    and their paths may have at most 107 bytes. So does the cluster's token, which is made here.
    """
    # HAProxy takes no longer path than 97 bytes for a socket, and a node's id has 56 of them.
    haproxy_folder = f"{ray_folder}/h"
    ports = free_ports(_NUM_PORTS)
    place = {"RAY_ADDRESS": "local", "RAY_TMPDIR": ray_folder}
    ours = {
        AUTH_MODE: WITH_TOKEN,
        **RAY_SETTINGS,
        HAPROXY_PROGRAM: ingress_program(),
        # By default these are the same for every cluster of a machine, and of every user of it.
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[0]),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[1]),
        # Where HAProxy turns while no gateway is up: with the default, to another cluster's proxy.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[2]),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports[3]),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports[4]),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports[-2]),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{haproxy_folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": haproxy_folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{haproxy_folder}/server-state",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{haproxy_folder}/a",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{haproxy_folder}/m",
        # How long a leaving gateway still listens. The one HAProxy, on this machine, knows at once;
        # those that it has replaced never do, and go elsewhere when they are refused (ADR 21).
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        "PYTHONUNBUFFERED": "1",
    }
    # What is inherited is another cluster's token; in a variable it would win over the file.
    environment = {k: v for k, v in {**ours, **inherited, **place}.items() if k != TOKEN}
    if environment[AUTH_MODE] == WITH_TOKEN:
        environment[TOKEN_FILE] = str(token_file(Path(ray_folder)))
    return environment


def dashboard_port(environment: Mapping[str, str]) -> int:
    """The port that this `child_environment` leaves for Ray's dashboard: its last one."""
    return int(environment["RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"]) + 1


def serve_command(
    config: Annotated[Path, typer.Argument(help="A serve_config.yaml.")],
    verbose: Annotated[bool, typer.Option(help="Show Ray's and vLLM's own log.")] = False,  # noqa: FBT002
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="A running Ray cluster to join, from one of its hosts. [default: one of its own]",
        ),
    ] = None,
) -> None:
    """Serve CONFIG until Ctrl-C: on this machine, or on a running Ray cluster."""
    if address is not None:
        _check_ray(address)
    site = site_of(config)
    with tempfile.TemporaryDirectory(prefix="sw-", ignore_cleanup_errors=True) as folder:
        if address is None:
            code = run_serve(config, Path(folder), site, verbose=verbose)
        else:
            code = join_cluster(config, Path(folder), site, address, verbose=verbose)
    raise typer.Exit(code)


def join_cluster(config: Path, folder: Path, site: "Site", address: str, *, verbose: bool) -> int:
    """Runs `serve run` on a cluster that others run until Ctrl-C, and returns the exit code.

    The application ends with it, and the cluster goes on. `folder` takes the log.
    """
    log = None if verbose else folder / "serve.log"
    environment = ray_environment(os.environ) | {"PYTHONUNBUFFERED": "1", "RAY_ADDRESS": address}
    # Of the head, if that is here: Ray's own place for them.
    ray_folder = Path(os.environ.get("RAY_TMPDIR") or "/tmp")
    return _Launch(config, log, site, {**os.environ, **environment}, ray_folder, None).run()


def _check_ray(address: str) -> None:
    """Ends the command where nobody answers: `serve run` would only say so after a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        _refuse(
            f"no Ray at {address}: {error}; `ray start --head --port=6379` starts one, "
            "docs/operate/tpu-vm.md has all of it"
        )


def site_of(config: Path) -> "Site":
    """Returns where this file's application will answer; ends the command if it cannot serve."""
    settings = _checked_settings(config, os.environ)
    options = settings.get("http_options") or {}
    host, port = options.get("host", "127.0.0.1"), int(options.get("port", _SERVE_PORT))
    if not is_free(host, port):
        _refuse(
            f"port {port} of {host} is in use by another program; "
            f"http_options.port in {config} chooses another one"
        )
    return Site(f"http://127.0.0.1:{port}", _api_key(settings, os.environ))


def run_serve(
    config: Path, folder: Path, site: "Site", *, verbose: bool, ray_address: str | None = None
) -> int:
    """Runs `serve run` until Ctrl-C or its end, ends what it started, and returns the exit code.

    With a `ray_address` it runs on that cluster, which must have been started with
    `child_environment(…, folder)`; with `None` it starts one of its own.
    """
    log = None if verbose else folder / "serve.log"
    environment = child_environment(os.environ, str(folder))
    if ray_address is None:
        environment = {**ON_LOOPBACK, **environment}
    else:
        environment["RAY_ADDRESS"] = ray_address
    return _Launch(config, log, site, environment, folder, str(folder)).run()


def _checked_settings(config: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Reads the file; ends the command with every problem of a file that cannot be served."""
    if not config.is_file():
        _refuse(f"there is no file {config}")
    try:
        settings = load_yaml(config.read_text(encoding="utf-8"))
        problems = check_serve_config(settings, installed_vllm_args(), environment).problems
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        _refuse(f"{config} is not readable as YAML: {error}")
    except UnsupportedVllmError as error:
        _refuse(str(error))
    if problems or not isinstance(settings, dict):
        _refuse(f"{config} cannot be served:\n" + "\n".join(f"  {problem}" for problem in problems))
    return settings


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"slicewise: {reason}", err=True)
    raise typer.Exit(1)


def _api_key(settings: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    """Returns a key for asking the application how it is; `None` where none is needed."""
    if key := environment.get("SLICEWISE_API_KEY"):
        return key
    for application in settings["applications"]:
        auth = (application.get("args") or {}).get("auth") or {}
        text = environment.get(auth.get("keys_env") or "", "")
        if file := auth.get("keys_file"):
            with contextlib.suppress(OSError):  # the gateway reports that it is missing
                text = Path(file).read_text()
        with contextlib.suppress(ValueError):  # and the gateway reports what is no key
            for record in read_keys(text):
                if record.key is not None and KeyScope.FLEET in record.scopes:
                    return record.key
    return None


@dataclass(frozen=True, slots=True, repr=False)
class Site:
    """The address of the application, and a key for it; `None` where none is needed."""

    url: str
    api_key: str | None


class _Launch:
    """Does what `run_serve` says. `log` is `None` when the output goes to the terminal.

    Ray's own files are below `ray_folder`. `own_cluster` is the `RAY_TMPDIR` of what is to end with
    this command beside `serve run`; `None` if the cluster is not ours.
    """

    def __init__(
        self,
        config: Path,
        log: Path | None,
        site: Site,
        environment: Mapping[str, str],
        ray_folder: Path,
        own_cluster: str | None,
    ) -> None:
        self._config = config
        self._log = log
        self._site = site
        self._environment = environment
        self._ray_folder = ray_folder
        self._own_cluster = own_cluster
        self._last_printed = ""
        self._stopping = False

    def run(self) -> int:
        """Runs it. Returns the exit code: 0 after Ctrl-C, 1 when the application failed."""
        # A closed terminal (SIGHUP) ends the command like Ctrl-C does.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        with self._child() as child:
            try:
                return self._watch(child)
            finally:
                self._stop(child)

    @contextlib.contextmanager
    def _child(self) -> Iterator[subprocess.Popen[bytes]]:
        command = [str(Path(sys.executable).with_name("serve")), "run", str(self._config)]
        self._print(f"starting: serve run {self._config}")
        output = self._log.open("wb") if self._log is not None else None
        try:
            yield subprocess.Popen(
                command,
                env=dict(self._environment),
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                # Ctrl-C reaches this command alone, which then ends the rest in order.
                start_new_session=True,
            )
        finally:
            if output is not None:
                output.close()

    def _watch(self, child: subprocess.Popen[bytes]) -> int:
        started_s = time.monotonic()
        is_ready = False
        while not self._stopping:
            if child.poll() is not None:
                self._print("serve run ended:")
                self._show_log()
                return 1
            if not is_ready:
                waited_s = time.monotonic() - started_s
                if self._has_failed(waited_s):
                    return 1
                is_ready = self._report_progress(waited_s)
            time.sleep(_POLL_S)
        return 0

    def _report_progress(self, waited_s: float) -> bool:
        """Prints what has changed; `True` once every engine is ready."""
        fleet = self._fleet()
        if fleet is None:
            self._print_once(
                "Ray, the gateway and the engines are starting (about a minute)", waited_s
            )
            return False
        engines = [engine for model in fleet["models"] for engine in model["engines"]]
        num_ready = sum(bool(engine["linked"]) for engine in engines)
        # It may be hours until there is a slice for these.
        num_waiting = sum(engine["state"] == SliceState.PROVISIONING for engine in engines)
        # What scales may well have no engine before there is a request.
        may_be_idle = fleet["autoscaling"] is not None and not engines
        if not may_be_idle and (not num_ready or num_ready + num_waiting < len(engines)):
            what = f"{num_ready} of {len(engines)} engines ready, the others load"
            self._print_once(f"the gateway is up; {what}", waited_s)
            return False
        others = f", {num_waiting} more wait for slices" if num_waiting else ""
        self._print_once(f"ready: {num_ready} engines{others}", waited_s)
        self._print_first_request(fleet["models"][0]["name"])
        return True

    def _print_first_request(self, model: str) -> None:
        body = {"model": model, "messages": [{"role": "user", "content": "What is Slicewise?"}]}
        url = self._site.url
        typer.echo(f"\nServing on {url}. Try it:\n")
        typer.echo(f"  curl {url}/v1/chat/completions \\")
        if self._site.api_key is not None:
            typer.echo("    -H 'Authorization: Bearer '\"$SLICEWISE_API_KEY\" \\")
        typer.echo("    -H 'Content-Type: application/json' \\")
        typer.echo(f"    -d '{json.dumps(body)}'\n")
        end = "stops everything" if self._own_cluster else "ends the application, and Ray goes on"
        typer.echo(f"Engines and requests: slicewise status. Ctrl-C {end}.")
        if self._own_cluster is not None:
            typer.echo(shell_hint(self._environment, Path(self._own_cluster)))

    def _has_failed(self, waited_s: float) -> bool:
        """Returns whether a part could not start, and prints why. Serve would retry for minutes."""
        logs = sorted(self._ray_folder.glob("ray/session_latest/logs/serve/controller_*.log"))
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        reason = start_failure(lines)
        if reason is None:
            return False
        self._print(f"the application could not be started (after {waited_s:.0f} s)")
        typer.echo(f"slicewise: {reason}", err=True)
        return True

    def _fleet(self) -> dict[str, Any] | None:
        request = urllib.request.Request(f"{self._site.url}/fleet")
        if self._site.api_key is not None:
            request.add_header("Authorization", f"Bearer {self._site.api_key}")
        try:
            with urllib.request.urlopen(request, timeout=2) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except (OSError, ValueError):
            return None

    def _stop(self, child: subprocess.Popen[bytes]) -> None:
        below = _descendants(child.pid)
        if child.poll() is None:
            self._print("stopping")
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(STOP_TIMEOUT_S)
        below += _descendants(child.pid)
        if self._own_cluster is not None:
            below += _of_cluster(self._own_cluster)
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if child.poll() is None:
            child.kill()
        child.wait()
        psutil.wait_procs(below, timeout=10)
        self._print("stopped")

    def _on_signal(self, *_: object) -> None:
        self._stopping = True

    def _show_log(self) -> None:
        if self._log is not None:
            lines = self._log.read_text(errors="replace").splitlines()
            typer.echo("\n".join(lines[-40:]), err=True)

    def _print_once(self, text: str, waited_s: float) -> None:
        if text != self._last_printed:
            self._last_printed = text
            self._print(f"{text} ({waited_s:.0f} s)")

    def _print(self, text: str) -> None:
        typer.echo(f"slicewise: {text}")


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _of_cluster(ray_folder: str) -> list[psutil.Process]:
    """Returns the processes with our environment, at any place: Ray's daemons have no parent."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("RAY_TMPDIR") == ray_folder:
                found.append(process)
    return found
