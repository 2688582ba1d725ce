"""A Ray cluster on hosts in namespaces, started by `ray start` as pods do."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deployments.simulation.hosts.namespaces import Host
from deployments.simulation.plan import (
    SimulatedSlices,
    host_environment,
    host_labels,
    host_resources,
)
from deployments.start.serve import child_environment

_GCS_PORT = 6379
_OBJECT_STORE_BYTES = 100 * 1000 * 1000
_CPUS_PER_HOST = 2
_POLL_S = 0.2
_LOG_TAIL = 20_000
# Ends when so many nodes have joined, and says nothing.
_WAIT_JOINED = """
import sys, time
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
while sum(node.state == 0 for node in client.get_all_node_info().values()) < int(sys.argv[2]):
    time.sleep(0.2)
"""


def node_environment(folder: Path) -> dict[str, str]:
    """What a node has in its environment, with Ray's settings, when `folder` is the hosts' own."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLICEWISE_"))}
    # Each host has the folder for itself, and so none has the token that lies in it here.
    inherited["RAY_AUTH_MODE"] = "disabled"
    environment = child_environment(inherited, str(folder)) | {"TMPDIR": str(folder)}
    environment.pop("RAY_ADDRESS")
    return environment


class RayNodes:
    """The head and the nodes that have joined it. They end with their hosts.

    `environment` is what all of them have. What programs write is kept in `logs`.
    """

    def __init__(self, head: Host, environment: Mapping[str, str], logs: Path) -> None:
        self.address = f"{head.address}:{_GCS_PORT}"
        self._head = head
        self._environment = dict(environment)
        self._logs = logs
        self._running: dict[Path, subprocess.Popen[Any]] = {}
        self._num_nodes = 0

    def start_head(self, timeout_s: float) -> None:
        """Starts the head's node, and returns when others can join."""
        self._start(self._head, {}, "--head", f"--port={_GCS_PORT}", "--include-dashboard=false")
        check = self._head.command(_binary("ray"), "health-check", f"--address={self.address}")
        self.wait_until(
            lambda: subprocess.run(check, capture_output=True, check=False).returncode == 0,
            timeout_s,
        )

    def join(
        self,
        host: Host,
        environment: Mapping[str, str],
        resources: Mapping[str, float],
        labels: Mapping[str, str],
    ) -> None:
        """Starts the node of one more host, with what it has beside the others' environment."""
        self._start(
            host,
            environment,
            f"--address={self.address}",
            f"--resources={json.dumps(resources)}",
            f"--labels={','.join(f'{name}={value}' for name, value in labels.items())}",
        )

    def join_slice(
        self, slices: SimulatedSlices, hosts: Sequence[Host], own: Sequence[Mapping[str, str]]
    ) -> None:
        """Starts the nodes of the first of `slices`; each host's environment has its `own` too."""
        name = slices.slice_name(0)
        for worker_id, (host, environment) in enumerate(zip(hosts, own, strict=True)):
            self.join(
                host,
                host_environment(slices, name, worker_id) | dict(environment),
                host_resources(slices, name, worker_id),
                host_labels(slices, name, worker_id),
            )

    def wait_joined(self, timeout_s: float) -> None:
        """Waits until Ray has every node."""
        program = (sys.executable, "-c", _WAIT_JOINED, self.address, str(self._num_nodes))
        waiting = self._head.start(*program, env=self._environment)
        self.wait_until(lambda: waiting.poll() is not None, timeout_s)

    def run_on_head(self, name: str, *arguments: str) -> None:
        """Starts a program of Ray's on the head, for this cluster; it has to go on."""
        program = (_binary(name), *arguments)
        self._launch(self._head, program, self._environment | {"RAY_ADDRESS": self.address})

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        """Waits, as long as everything goes on that was started; fails with what it wrote."""
        deadline_s = time.monotonic() + timeout_s
        while not is_so():
            for path, process in self._running.items():
                assert process.poll() is None, f"ended: {path.read_text()[-_LOG_TAIL:]}"
            assert time.monotonic() < deadline_s, f"not so within {timeout_s:g} s\n{self._tails()}"
            time.sleep(_POLL_S)

    def _start(self, host: Host, environment: Mapping[str, str], *options: str) -> None:
        program = (
            _binary("ray"),
            "start",
            f"--node-ip-address={host.address}",
            f"--num-cpus={_CPUS_PER_HOST}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            "--block",
            *options,
        )
        self._launch(host, program, self._environment | dict(environment))
        self._num_nodes += 1

    def _launch(self, host: Host, program: tuple[str, ...], environment: dict[str, str]) -> None:
        path = self._logs / f"{host.name}-{Path(program[0]).name}.log"
        with path.open("wb") as log:
            self._running[path] = host.start(*program, env=environment, stdout=log, stderr=log)

    def _tails(self) -> str:
        texts = (f"{path.name}\n{path.read_text()[-_LOG_TAIL:]}" for path in self._running)
        return "\n".join(texts)


def _binary(name: str) -> str:
    return str(Path(sys.executable).with_name(name))
