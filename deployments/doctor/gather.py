"""Reads the environment, each value with a time limit. Decides nothing.

A call that may hang in native code or in a name server runs in a process that can be ended.
"""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import yaml

from deployments.doctor.cluster import RayAnswer, Reach, Token
from deployments.doctor.findings import Unknown
from deployments.doctor.host import Chips, Holder, Metadata
from deployments.doctor.versions import Packages, lock_name, parse_lock
from deployments.start.ports import is_free
from deployments.status.gateway import FleetUnavailableError, fetch_fleet
from deployments.status.reports import ReportedFleet, parse_fleet
from serving.config.check import CheckReport, check_serve_config
from serving.config.sections import load_yaml
from serving.config.vllm.vllm_args import installed_vllm_args
from serving.domain.errors import UnsupportedVllmError
from serving.exporters.chips import chips_on_bus
from serving.exporters.collector import CollectError
from serving.exporters.host_sources import PciCollector

_ROOT = Path(__file__).resolve().parents[2]
_CONNECT_S = 2.0
# Ray's import alone takes seconds on a busy machine.
_CHILD_S = 30.0
_METADATA_S = 5.0
_RAY_CALL_S = 5.0
_Value = TypeVar("_Value")


def packages(lock: Path | None) -> Packages:
    """Reads what is installed, and the pins of `lock` or of the repository's lock for it."""
    installed = {
        (distribution.name or "").lower().replace("_", "-"): distribution.version
        for distribution in metadata.distributions()
    }
    path = lock if lock is not None else _ROOT / lock_name(installed)
    python = (sys.version_info.major, sys.version_info.minor)
    try:
        pins = parse_lock(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return Packages(python, installed, None, {})
    name = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path
    return Packages(python, installed, f"{name}", pins)


def chips() -> Chips | Unknown:
    """The chips of this host."""
    try:
        bus = PciCollector().collect(0.0)
    except CollectError as error:
        return Unknown(f"{error}")
    if bus is None:
        return Chips(has_bus=False)
    found = chips_on_bus(bus)
    closed = [chip.dev_path for chip in found if not os.access(chip.dev_path, os.R_OK | os.W_OK)]
    return Chips(found, tuple(closed))


def config(path: Path) -> CheckReport | Unknown:
    """Checks a serve config; `Unknown` if it cannot be read."""
    try:
        settings = load_yaml(path.read_text(encoding="utf-8"))
        return check_serve_config(settings, installed_vllm_args())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, UnsupportedVllmError) as error:
        return Unknown(f"not readable: {error}")


def gateway(url: str, api_key: str | None, timeout_s: float = 5.0) -> ReportedFleet | Unknown:
    """Returns what a gateway reports of its fleet."""

    def ask() -> ReportedFleet | Unknown:
        try:
            return parse_fleet(fetch_fleet(url, api_key, timeout_s))
        except FleetUnavailableError as error:
            return Unknown(f"{error}")

    return within(2 * timeout_s, ask)


def token(environment: Mapping[str, str]) -> Token:
    """Returns how this process authenticates to Ray."""
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    is_given = bool(environment.get("RAY_AUTH_TOKEN"))
    with contextlib.suppress(OSError):
        is_given = is_given or bool(path.read_text(errors="replace").strip())
    return Token(environment.get("RAY_AUTH_MODE"), is_given)


def ray_address(option: str | None, environment: Mapping[str, str]) -> str:
    """Returns the option, RAY_ADDRESS, or what `ray start` left here; empty for no address."""
    named = option or environment.get("RAY_ADDRESS") or "auto"
    if named == "local":
        return ""
    if named != "auto":
        return named
    file = Path(environment.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
    with contextlib.suppress(OSError):
        return file.read_text(errors="replace").strip()
    return ""


def ask_ray(address: str) -> RayAnswer:
    """Returns Ray's nodes, or the stage that the request reached."""
    if not address:
        return RayAnswer(Reach.NO_ADDRESS)
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        return RayAnswer(Reach.UNREACHABLE, address, "not host:port")
    problem = within(2 * _CONNECT_S, lambda: _connect(host.strip("[]"), int(port)))
    if problem is not None:
        return RayAnswer(
            Reach.UNREACHABLE, address, problem.reason if isinstance(problem, Unknown) else problem
        )
    answer = _child("deployments.doctor.ask_ray", [address, f"{_RAY_CALL_S}"], _CHILD_S)
    if isinstance(answer, Unknown):
        return RayAnswer(Reach.SILENT, address, answer.reason)
    return RayAnswer(
        Reach(answer["reach"]),
        address,
        answer["detail"],
        tuple(answer.get("nodes", ())),
        answer.get("cluster", ""),
        answer.get("here", ""),
    )


def ask_metadata() -> Metadata | Unknown:
    """Returns what the metadata server reports of this host."""
    answer = _child("deployments.doctor.ask_metadata", [], _METADATA_S)
    if isinstance(answer, Unknown):
        return answer
    return Unknown(answer["error"]) if "error" in answer else Metadata(**answer)


def holder(port: int, path: str, word: str) -> Holder:
    """Returns who has a port of this machine; it is ours if `path` answers with `word` in it."""
    if is_free("127.0.0.1", port):
        return Holder.NOBODY

    def ask() -> Holder:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_CONNECT_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read(1 << 20).decode(errors="replace")
            is_ours = answer.status == http.HTTPStatus.OK and word in body
            return Holder.EXPECTED if is_ours else Holder.OTHER
        except TimeoutError:
            return Holder.UNKNOWN
        except (OSError, http.client.HTTPException):
            return Holder.OTHER
        finally:
            connection.close()

    found = within(3 * _CONNECT_S, ask)
    return Holder.UNKNOWN if isinstance(found, Unknown) else found


def plain_holder(port: int) -> Holder:
    """Returns who has a port that does not speak HTTP."""
    return Holder.NOBODY if is_free("127.0.0.1", port) else Holder.OTHER


def within(limit_s: float, function: Callable[[], _Value]) -> _Value | Unknown:
    """Returns the result of `function` if it comes in time; a late one ends with this process."""
    results: list[_Value | Unknown] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:  # noqa: BLE001 - whatever it was, it is what was found
            results.append(Unknown(f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return results[0] if results else Unknown(f"no answer in {limit_s:g} s")


def _child(module: str, arguments: list[str], limit_s: float) -> dict[str, Any] | Unknown:
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return Unknown(f"in {limit_s:g} s")
    lines = done.stdout.splitlines()
    try:
        answer: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    except ValueError:
        answer = {}
    if answer:
        return answer
    said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return Unknown(said[-1][:200])


def _connect(host: str, port: int) -> str | None:
    """Returns why there is no connection; `None` if there is one."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return f"{error}"
    return None
