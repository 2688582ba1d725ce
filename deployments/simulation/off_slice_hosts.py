"""The simulated hosts without chips: of gateways, and of control processes.

Owns their Ray nodes. All share this machine. Does not own the head, which has no successor here.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import psutil

from deployments.simulation.control_plane import ControlPlane
from deployments.simulation.node_processes import kill_all, node_pids, processes_below
from deployments.simulation.plan import SimulationPlan
from serving.domain.names.gke_names import CONTROL_ROLE, ROLE_LABEL

logger = logging.getLogger(__name__)

_END_TIMEOUT_S = 10.0


class UnknownHostError(ValueError):
    """Reports that no host without chips has this name, or this role. The message lists them."""


class HostRole(StrEnum):
    """What a host without chips is for, as our manifests have a worker group for each."""

    GATEWAY = "gateway"
    CONTROL = CONTROL_ROLE


# As the rendered worker groups label their nodes.
_LABELS = {HostRole.GATEWAY: {}, HostRole.CONTROL: {ROLE_LABEL: CONTROL_ROLE}}


@dataclass(frozen=True, slots=True)
class _Host:
    role: HostRole
    node: Any  # a `ray._private.node.Node`


class OffSliceHosts:
    """Starts and ends them by name. Not thread-safe: the cluster calls it under its lock."""

    def __init__(self, control_plane: ControlPlane, plan: SimulationPlan) -> None:
        self._control_plane = control_plane
        self._plan = plan
        self._hosts: dict[str, _Host] = {}
        self._counts: Counter[HostRole] = Counter()

    def start(self) -> None:
        """Starts those of the plan."""
        for _ in range(self._plan.control_hosts):
            self.add(HostRole.CONTROL)
        for _ in range(self._plan.gateway_hosts):
            self.add(HostRole.GATEWAY)

    def add(self, role: str) -> str:
        """Starts one more host of a role; its name, which no other host has had.

        Raises:
            UnknownHostError: there is no such role.
            HeadGoneError: there is no head that it could join.
        """
        if role not in list(HostRole):
            allowed = ", ".join(HostRole)
            raise UnknownHostError(f"role: {role!r} is unknown (allowed: {allowed})")
        kind = HostRole(role)
        with self._control_plane.lock:
            node = self._control_plane.add_node(self._plan.cpus_per_host, labels=_LABELS[kind])
        name = f"{kind}-{self._counts[kind]}"
        self._counts[kind] += 1
        self._hosts[name] = _Host(kind, node)
        logger.info("simulated_host_added host=%s", name)
        return name

    def kill(self, name: str) -> None:
        """Ends a host with all that is on it, at once.

        Raises:
            UnknownHostError: there is no such host.
        """
        if name not in self._hosts:
            allowed = ", ".join(sorted(self._hosts)) or "none"
            raise UnknownHostError(f"host: {name!r} is unknown (allowed: {allowed})")
        node = self._hosts.pop(name).node
        below = processes_below(node_pids(node))
        kill_all(below)
        psutil.wait_procs(below, timeout=_END_TIMEOUT_S)
        self._control_plane.remove_node(node)
        logger.info("simulated_host_killed host=%s", name)

    def describe(self) -> list[dict[str, str]]:
        """Name, role and Ray's node id of each, for users."""
        return [
            {"name": name, "role": host.role, "node_id": str(host.node.node_id)}
            for name, host in sorted(self._hosts.items())
        ]

    def node_ids(self) -> set[str]:
        """Ray's ids of them."""
        return {each["node_id"] for each in self.describe()}

    def stop(self) -> None:
        """Ends all of them. Idempotent."""
        for name in list(self._hosts):
            self.kill(name)
