"""Runs programs on the hosts of a run: on this machine, or through Ray on those of a cluster.

What has to be done where the chips are cannot be done where the command runs: under a RayJob that
is the head, which has none.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

# The first word of a program that is the interpreter of its host, wherever that has it.
PYTHON = "python"
# What a program on a Ray node is told: its host's number in the slice, and host 0's address.
WORKER_VARIABLE = "SLICEWISE_FIRST_RUN_WORKER"
FIRST_HOST_VARIABLE = "SLICEWISE_FIRST_RUN_FIRST_HOST"
_RAY_S = 30.0


@dataclass(frozen=True, slots=True)
class HostAnswer:
    """What a program on one host came to. `status` of `None`: it did not end in time."""

    host: str
    status: int | None
    output: str
    errors: str

    def last_json(self) -> dict[str, Any] | None:
        """Returns the JSON object in the last line of its output; `None` if there is none."""
        lines = self.output.strip().splitlines()
        try:
            found = json.loads(lines[-1]) if lines else None
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def complaint(self) -> str:
        """Returns its last words."""
        lines = self.errors.strip().splitlines() or self.output.strip().splitlines()
        ended = "not in time" if self.status is None else f"status {self.status}"
        return f"{ended}: {lines[-1][:300] if lines else 'it said nothing'}"


class RunHosts(Protocol):
    """The hosts that have the chips; without chips all of them."""

    def run(
        self,
        program: Sequence[str],
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
        host: str | None = None,
    ) -> list[HostAnswer]:
        """Runs a program on one host or, with `None`, on all at once.

        Raises:
            HostsUnreachableError: Ray does not answer, or has no such host.
        """
        ...


class HostsUnreachableError(Exception):
    """The hosts cannot be reached; the message says why."""


class ThisHost:
    """The machine on which the command runs."""

    name = "this host"

    def run(
        self,
        program: Sequence[str],
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
        host: str | None = None,
    ) -> list[HostAnswer]:
        """Runs a program here; see `RunHosts.run`."""
        if host not in (None, self.name):
            raise HostsUnreachableError(f"there is no host {host!r}; allowed: {self.name!r}")
        return [run_here(self.name, program, timeout_s, environment or {})]


class RayHosts:
    """The hosts of a Ray cluster, asked by a program of its own: Ray's client may hang."""

    def __init__(self, address: str) -> None:
        self._address = address

    def run(
        self,
        program: Sequence[str],
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
        host: str | None = None,
    ) -> list[HostAnswer]:
        """Runs a program in a Ray task on each host; see `RunHosts.run`."""
        request = {
            "program": list(program),
            "timeout_s": timeout_s,
            "environment": dict(environment or {}),
            "host": host,
        }
        command = [sys.executable, "-m", "deployments.first_run.hosts.ray_tasks", self._address]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(request),
                capture_output=True,
                text=True,
                timeout=timeout_s + _RAY_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise HostsUnreachableError(f"no answer of Ray at {self._address} in time") from error
        try:
            answers = json.loads(done.stdout.strip().splitlines()[-1])
            return [HostAnswer(**answer) for answer in answers]
        except (ValueError, IndexError, TypeError) as error:
            words = done.stderr.strip().splitlines() or ["it said nothing"]
            raise HostsUnreachableError(f"Ray at {self._address}: {words[-1][:300]}") from error


def hosts_of(address: str | None) -> RunHosts:
    """Returns the hosts of a run."""
    return ThisHost() if address is None else RayHosts(address)


def run_here(
    name: str, program: Sequence[str], timeout_s: float, environment: Mapping[str, str]
) -> HostAnswer:
    """Runs a program on the machine that calls."""
    words = [sys.executable if program[0] == PYTHON else program[0], *program[1:]]
    try:
        done = subprocess.run(
            words,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return HostAnswer(name, None, "", "")
    return HostAnswer(name, done.returncode, done.stdout, done.stderr)
