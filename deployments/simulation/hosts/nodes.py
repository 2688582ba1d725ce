"""What plays the hosts of a simulated cluster: Ray nodes, apart as hosts are or on this machine.

Both kinds are used alike. Owns the nodes' processes. Does not own which hosts there are, nor Ray's
head.
"""

import contextlib
import logging
import secrets
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, Protocol

import psutil

from deployments.simulation.control_plane import OBJECT_STORE_BYTES, ControlPlane
from deployments.simulation.hosts.namespaces import Host, Hosts
from deployments.simulation.hosts.node_starter import NodeOrder, decode_outcome
from deployments.simulation.node_processes import kill_all, node_pids, processes_below
from deployments.start.ray_access import copy_token

logger = logging.getLogger(__name__)

# A raylet's title begins with the path of its program.
_RAYLET = "raylet"
# A start takes some three seconds, and many times that where many start at once.
START_TIMEOUT_S = 120.0
_NODE_ID_BYTES = 28
_LOG = "node-start.log"
_OVER = "the program that starts nodes has ended"


class NodeStartError(RuntimeError):
    """Ray's node did not come up on a host. The message ends with what Ray wrote."""


class HostNode(Protocol):
    """One host, and the Ray node on it."""

    @property
    def node_id(self) -> str:
        """Ray's name of the node, in hexadecimal digits."""

    def root_pids(self) -> set[int]:
        """Processes of the host; what else runs on it is below them."""

    def is_alive(self) -> bool:
        """Returns whether Ray's own processes still run, or are being started."""

    def wait_started(self) -> None:
        """Waits until the node has been started.

        Raises:
            NodeStartError: it was not.
        """

    def set_network(self, *, is_up: bool) -> None:
        """Takes the host off the network, or puts it back on; only where hosts are separate."""

    def end(self) -> None:
        """Ends the host as a power cut does: the node reports nothing beforehand. Idempotent."""


class HostNodes(Protocol):
    """Where hosts come from."""

    @property
    def machine_address(self) -> str:
        """What a host reaches this machine by."""

    @property
    def are_separate(self) -> bool:
        """Returns whether each host has namespaces and a network address of its own."""

    def start(
        self,
        name: str,
        num_cpus: float,
        resources: Mapping[str, float],
        labels: Mapping[str, str],
        environment: Mapping[str, str],
    ) -> HostNode:
        """Starts a host; returns before its node has joined."""

    def close(self) -> None:
        """Starts no more. The hosts have been ended by their owner."""


class SharedHostNodes:
    """Plays hosts by nodes of this machine: one address, one folder, one table of processes."""

    machine_address = "127.0.0.1"
    are_separate = False

    def __init__(self, control_plane: ControlPlane) -> None:
        self._control_plane = control_plane

    def start(
        self,
        name: str,  # noqa: ARG002 # the machine has but one
        num_cpus: float,
        resources: Mapping[str, float],
        labels: Mapping[str, str],
        environment: Mapping[str, str],
    ) -> HostNode:
        """See `HostNodes`."""
        node = self._control_plane.add_node(
            num_cpus,
            resources=dict(resources),
            labels=dict(labels),
            env_vars=dict(environment),
        )
        return _SharedNode(node, self._control_plane)

    def close(self) -> None:
        """See `HostNodes`."""


class _SharedNode:
    # Any: a `ray._private.node.Node`.
    def __init__(self, node: Any, control_plane: ControlPlane) -> None:
        self._node = node
        self._control_plane = control_plane
        self._is_ended = False

    @property
    def node_id(self) -> str:
        return str(self._node.node_id)

    def root_pids(self) -> set[int]:
        return node_pids(self._node)

    def is_alive(self) -> bool:
        return bool(self._node.remaining_processes_alive())

    def wait_started(self) -> None:
        return

    def set_network(self, *, is_up: bool) -> None:
        raise NotImplementedError("hosts that share a network cannot be taken off it")

    def end(self) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        kill_all(processes_below(self.root_pids()))
        self._control_plane.remove_node(self._node)


class SeparateHostNodes:
    """Plays each host by a node in namespaces of its own, on a network with this machine.

    `network` is entered by the caller, with a `folder` that is Ray's (`RAY_TMPDIR`): so a host's
    logs are in `folder/hosts`, as long as that stays.
    """

    are_separate = True

    def __init__(self, network: Hosts, control_plane: ControlPlane) -> None:
        self._network = network
        self._control_plane = control_plane
        self._starter = NodeStarter()

    @property
    def machine_address(self) -> str:
        """See `HostNodes`."""
        return self._network.machine_address

    def start(
        self,
        name: str,
        num_cpus: float,
        resources: Mapping[str, float],
        labels: Mapping[str, str],
        environment: Mapping[str, str],
    ) -> HostNode:
        """See `HostNodes`."""
        cluster = self._control_plane.cluster
        host = self._network.add(name)
        folder = self._network.folder
        copy_token(folder, host.path(folder))
        node_id = secrets.token_hex(_NODE_ID_BYTES)
        parameters = {
            "gcs_address": cluster.gcs_address,
            "redis_address": cluster.redis_address,
            "node_ip_address": host.address,
            "num_cpus": num_cpus,
            "num_gpus": 0,
            "resources": dict(resources),
            "labels": dict(labels),
            "env_vars": dict(environment) | {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": node_id},
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
            # Nobody reads a host's log here but in its files.
            "include_log_monitor": False,
            "min_worker_port": 0,
            "max_worker_port": 0,
            "node_manager_port": 0,
        }
        log = str(self._network.folder / _LOG)
        outcome = self._starter.start(NodeOrder(node_id, host.first_pid, log, parameters))
        return _SeparateNode(host, node_id, outcome)

    def close(self) -> None:
        """See `HostNodes`."""
        self._starter.close()


class _SeparateNode:
    def __init__(self, host: Host, node_id: str, outcome: "Future[None]") -> None:
        self.node_id = node_id
        self._host = host
        self._outcome = outcome

    def root_pids(self) -> set[int]:
        return {self._host.first_pid}

    def is_alive(self) -> bool:
        if not self._outcome.done():
            return True
        return self._outcome.exception() is None and _RAYLET in _living_names(self.root_pids())

    def wait_started(self) -> None:
        try:
            self._outcome.result(START_TIMEOUT_S)
        except FutureTimeoutError as error:
            raise NodeStartError(f"{self._host.name}: not up in {START_TIMEOUT_S:g} s") from error

    def end(self) -> None:
        self._host.end()

    def set_network(self, *, is_up: bool) -> None:
        if is_up:
            self._host.join()
        else:
            self._host.cut()


def _living_names(roots: set[int]) -> set[str]:
    names = set()
    for process in processes_below(roots):
        # Others end while these are looked at.
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                names.add(process.name())
    return names


class NodeStarter:
    """Runs the program that starts nodes. Thread-safe."""

    def __init__(self) -> None:
        program = [sys.executable, "-m", "deployments.simulation.hosts.node_starter"]
        self._process = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # An interrupt at the terminal is for who orders the hosts' end.
            start_new_session=True,
            cwd=Path.cwd(),
        )
        self._lock = threading.Lock()
        self._open: dict[str, Future[None]] = {}
        self._is_over = False
        self._thread = threading.Thread(target=self._read, name="node-starter", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The program's process."""
        return self._process.pid

    def start(self, order: NodeOrder) -> "Future[None]":
        """Has a node started; what is returned is done when it is, or has a `NodeStartError`.

        Raises:
            NodeStartError: the program has ended.
        """
        outcome: Future[None] = Future()
        with self._lock:
            if self._is_over or self._process.stdin is None:
                raise NodeStartError(_OVER)
            self._open[order.node_id] = outcome
            try:
                self._process.stdin.write(order.encode())
                self._process.stdin.flush()
            except BrokenPipeError as error:
                del self._open[order.node_id]
                raise NodeStartError(_OVER) from error
        return outcome

    def close(self) -> None:
        """Ends the program. What has been started goes on."""
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._process.wait(START_TIMEOUT_S)
        self._thread.join(START_TIMEOUT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            outcome = decode_outcome(line)
            with self._lock:
                future = self._open.pop(outcome.node_id)
            if outcome.problem is None:
                future.set_result(None)
            else:
                logger.error("simulated_node_failed problem=%s", outcome.problem)
                future.set_exception(NodeStartError(outcome.problem))
        with self._lock:
            self._is_over = True
            for future in self._open.values():
                future.set_exception(NodeStartError(_OVER))
            self._open.clear()
