"""Carries out the actions of a chaos schedule: by a simulated cluster's socket, or by a command.

Every action is bounded in time. Speaks the simulation's API from outside, as it would another
program's.
"""

import http.client
import json
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, assert_never

from loadtest.chaos.resolution import ChaosAction
from loadtest.chaos.schedule import (
    AddEvent,
    KillEvent,
    NoticeEvent,
    PartitionEvent,
    RunEvent,
    SlowEvent,
    StockEvent,
)

# A host starts or ends within a few seconds; a busy machine gets time for several.
_TIMEOUT_S = 60.0
_SHOWN_LENGTH = 300


class ActionFailedError(RuntimeError):
    """Reports that an action was not done, or may not have been. Record it and go on."""


class Actor(Protocol):
    """Does actions. May be called from any thread, one action at a time."""

    def act(self, action: ChaosAction) -> str:
        """Does it and returns what was done, "" if the action shows it.

        Raises:
            ActionFailedError: it was not done, or not in time.
        """
        ...


@dataclass(frozen=True, slots=True)
class SimulationActor:
    """Acts on a simulated cluster; `socket_path` is its control socket."""

    socket_path: Path
    timeout_s: float = _TIMEOUT_S

    def act(self, action: ChaosAction) -> str:
        """Sends the action to the simulation; see `Actor`."""
        command, arguments = _simulated(action)
        result = self._call(command, arguments)
        return result if isinstance(result, str) else ""

    # Any: JSON both ways.
    def _call(self, command: str, arguments: dict[str, Any]) -> Any:
        connection = _UnixConnection(self.socket_path, self.timeout_s)
        try:
            connection.request(
                "POST", f"/{command}", json.dumps(arguments), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException) as error:
            message = f"the simulated cluster at {self.socket_path} does not answer: {error}"
            raise ActionFailedError(message) from error
        except ValueError as error:
            message = f"{command} ended with HTTP {response.status} in the simulated cluster"
            raise ActionFailedError(message) from error
        finally:
            connection.close()
        if "error" in answer:
            raise ActionFailedError(str(answer["error"]))
        return answer["result"]


def _simulated(action: ChaosAction) -> tuple[str, dict[str, Any]]:
    """The command of the simulation's API and its arguments."""
    event, name = action.event, action.target
    match event:
        case NoticeEvent():
            arguments = {"name": name, "notice_s": event.notice_s, "worker_id": event.host}
            return event.action, arguments
        case KillEvent():
            return "kill", {"name": name, "worker_id": event.host}
        case StockEvent():
            is_dry = event.action == "stockout"
            return "stock_out", {"compute_class": name, "is_dry": is_dry}
        case SlowEvent():
            return "slow", {"name": name, "factor": event.factor, "for_s": event.for_s}
        case PartitionEvent():
            return "partition", {"name": name, "for_s": event.for_s}
        case AddEvent():
            return "add", {"kind_name": name}
        case RunEvent():
            raise ActionFailedError("a command is run by a HookActor, not by a simulation")
        case _:
            assert_never(event)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("simulation", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


@dataclass(frozen=True, slots=True)
class HookActor:
    """Runs the commands of `run` events; the other actions go to `simulation`, if there is one."""

    simulation: Actor | None = None

    def act(self, action: ChaosAction) -> str:
        """Runs the action; see `Actor`. The last line that a command prints is its report."""
        if isinstance(action.event, RunEvent):
            return _run(action.event, action)
        if self.simulation is None:
            message = (
                f"{action.event.action} needs a simulated cluster; here only `run` is possible"
            )
            raise ActionFailedError(message)
        return self.simulation.act(action)


def _run(event: RunEvent, action: ChaosAction) -> str:
    command = _filled(event.command, action)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=event.timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        message = f"{command[0]} was killed after {event.timeout_s:g} s"
        raise ActionFailedError(message) from error
    except OSError as error:
        raise ActionFailedError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        said = _last_line(done.stderr) or _last_line(done.stdout)
        raise ActionFailedError(f"{command[0]} ended with {done.returncode}: {said}")
    return _last_line(done.stdout)


def _filled(command: Sequence[str], action: ChaosAction) -> list[str]:
    known = {"{slice}": action.target}
    if action.host is not None:
        known |= {"{node}": action.host.node, "{address}": action.host.address}
    # Not `str.format`: braces of the command's own, as in JSON, stay.
    for placeholder, value in known.items():
        command = [word.replace(placeholder, value) for word in command]
    return list(command)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:_SHOWN_LENGTH] if lines else ""
