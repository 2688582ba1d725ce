"""Starts the application of a first run, watches it, and ends all of it.

Owns the copy of the configuration that is served: its port is free, requests wait long enough for
an engine to return, and an engine ends with its application, so that a second start is one.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from deployments.first_run.hosts.node_processes import processes_of_place
from deployments.start.ports import free_ports
from deployments.status.gateway import FleetUnavailableError, fetch_fleet
from deployments.status.reports import ReportedFleet, parse_fleet

API_KEY_VARIABLE = "SLICEWISE_API_KEY"
# An engine that was killed has to be back within it, on the only slice there is.
_REQUEST_DEADLINE_S = 600.0
_ANSWER_S = 5.0
# `slicewise serve` gives `serve run` 30 s, and then ends what is left.
_STOP_S = 60.0
_LOG_TAIL_LINES, _LOG_TAIL_LENGTH = 5, 800
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class ServedApplication:
    """An application that was started: its command's process, and where it answers and writes.

    `created_s` tells the process from a later one of its number. `address` of `None`: the Ray
    cluster is the application's own, and all of its processes name a folder below `folder`.
    """

    pid: int
    created_s: float
    folder: str
    url: str
    config: str
    log: str
    address: str | None


def served_settings(settings: Mapping[str, Any], port: int) -> dict[str, Any]:
    """Returns the configuration as a first run serves it. Pure."""
    made: dict[str, Any] = yaml.safe_load(yaml.safe_dump(dict(settings)))
    # The run is where Ray's head is, and asks there.
    made["proxy_location"] = "HeadOnly"
    made["http_options"] = {**(made.get("http_options") or {}), "host": "127.0.0.1", "port": port}
    for application in made["applications"]:
        args = application.setdefault("args", {})
        gateway = args.setdefault("gateway", {})
        asked_s = gateway.get("request_deadline_s", 0.0)
        gateway["request_deadline_s"] = max(asked_s, _REQUEST_DEADLINE_S)
        args.setdefault("health", {})["engine_handover_s"] = 0.0
    return made


def start_application(
    settings: Mapping[str, Any], folder: Path, address: str | None
) -> ServedApplication:
    """Starts `slicewise serve`, which goes on when the calling process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    config, log = folder / "serve_config.yaml", folder / "serve.log"
    port = free_ports(1)[0]
    config.write_text(yaml.safe_dump(served_settings(settings, port), sort_keys=False))
    command = [sys.executable, "-m", "deployments.cli", "serve", str(config), "--verbose"]
    if address is not None:
        command += ["--address", address]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            # By its folder every process of a cluster of its own is known.
            env={**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return ServedApplication(
        process.pid,
        psutil.Process(process.pid).create_time(),
        str(folder),
        f"http://127.0.0.1:{port}",
        str(config),
        str(log),
        address,
    )


def fleet_of(application: ServedApplication) -> ReportedFleet | None:
    """Returns what a gateway reports; `None` while nothing answers."""
    key = os.environ.get(API_KEY_VARIABLE)
    try:
        return parse_fleet(fetch_fleet(application.url, key, _ANSWER_S))
    except FleetUnavailableError:
        return None


def num_linked(fleet: ReportedFleet | None) -> int:
    """Returns the number of engines that take requests."""
    models = () if fleet is None else fleet.models
    return sum(bool(engine.linked) for model in models for engine in model.engines)


def wait_linked(application: ServedApplication, num_engines: int, until_s: float) -> str | None:
    """Waits until so many engines take requests; returns why they do not, `None` if they do.

    `until_s` is monotonic.
    """
    while True:
        linked = num_linked(fleet_of(application))
        if linked >= num_engines:
            return None
        if not is_running(application):
            return f"the application has ended: {log_tail(application)}"
        if time.monotonic() > until_s:
            return f"{linked} of {num_engines} engines ready in time: {log_tail(application)}"
        time.sleep(0.5)


def is_running(application: ServedApplication) -> bool:
    """Returns whether its command has not ended."""
    return _command_of(application) is not None


def processes_of(application: ServedApplication) -> Iterator[psutil.Process]:
    """Returns the processes on this machine of an application with a cluster of its own."""
    return processes_of_place(f"{application.folder}/")


def stop_application(application: ServedApplication) -> None:
    """Ends the application as Ctrl-C does, and by force what then still runs. Idempotent."""
    command = _command_of(application)
    left = [] if application.address is not None else list(processes_of(application))
    if command is not None:
        with contextlib.suppress(psutil.Error):
            command.send_signal(signal.SIGINT)
        with contextlib.suppress(psutil.Error):
            _wait_ended(command, _STOP_S)
        left.append(command)
    if application.address is None:
        left += processes_of(application)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=10)


def log_tail(application: ServedApplication) -> str:
    """Returns the last lines of its log."""
    with contextlib.suppress(OSError):
        lines = Path(application.log).read_text(errors="replace").splitlines()
        kept = [_COLOURS.sub("", line).strip() for line in lines[-_LOG_TAIL_LINES:]]
        return " | ".join(filter(None, kept))[-_LOG_TAIL_LENGTH:]
    return "no log"


def next_folder(folder: Path, number: int) -> Path:
    """Returns the folder of a run's application by number. Short: Ray's sockets lie below it."""
    return folder / f"a{number}"


def _command_of(application: ServedApplication) -> psutil.Process | None:
    try:
        process = psutil.Process(application.pid)
        is_ours = process.create_time() == application.created_s
        # Nobody may wait for it: the stage that started it has ended.
        return process if is_ours and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def _wait_ended(process: psutil.Process, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline_s:
            return
        time.sleep(0.1)
