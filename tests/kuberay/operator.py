"""KubeRay's operator, as far as worker groups go: which pods it deletes and creates, and when.

The rules are those of KubeRay 1.7.0, `reconcileMultiHostWorkerGroup`, which the team read and wrote
down (`reference/gke-kuberay.md`, section 6). Where the operator looks again at once, so does this
one; otherwise it looks when something has changed.
"""

import logging
import random
import threading
from typing import Any

from autoscaling.provisioning.raycluster import (
    CLUSTER_LABEL,
    GROUP_LABEL,
    NODE_TYPE_LABEL,
    REPLICA_INDEX_LABEL,
)

from .objects import RAYCLUSTER, replica_of, replica_pods
from .store import Json, Store

logger = logging.getLogger(__name__)

# Also without a change the operator looks again; the real one after minutes.
_RESYNC_S = 1.0


class Operator:
    """Keeps the pods of one RayCluster at what its groups ask for."""

    def __init__(self, store: Store, dice: random.Random) -> None:
        self._store = store
        self._dice = dice

    def step(self) -> None:
        """Looks until there is nothing to do."""
        while any(self._reconcile(group) for group in self._groups()):
            pass

    def _groups(self) -> list[Json]:
        spec = self._store.get("rayclusters", RAYCLUSTER)["spec"]
        return list(spec.get("workerGroupSpecs", ()))

    def _reconcile(self, group: Json) -> bool:
        """One look at one group; whether it has to look again."""
        for name, pods in self._replicas(group).items():
            if len(pods) < group["numOfHosts"]:
                self._delete(name, pods, "it is incomplete")
                return True
        for name, pods in self._replicas(group).items():
            if any(pod["status"]["phase"] in ("Failed", "Succeeded") for pod in pods):
                self._delete(name, pods, "a pod of it is unhealthy")
        if self._delete_named(group):
            return True
        return self._create_missing(group) or self._delete_surplus(group)

    def _delete_named(self, group: Json) -> bool:
        named = set(group.get("scaleStrategy", {}).get("workersToDelete") or ())
        doomed = {
            name: pods
            for name, pods in self._replicas(group).items()
            if any(pod["metadata"]["name"] in named for pod in pods)
        }
        for name, pods in doomed.items():
            self._delete(name, pods, "a pod of it is in workersToDelete")
        return bool(doomed)

    def _create_missing(self, group: Json) -> bool:
        replicas = self._replicas(group)
        used = {int(_label(pods[0], REPLICA_INDEX_LABEL)) for pods in replicas.values()}
        missing = _wanted(group) - len(replicas)
        for _ in range(missing):
            index = min(set(range(len(used) + 1)) - used)
            used.add(index)
            others = [pod for pods in self._replicas(group).values() for pod in pods]
            for pod in replica_pods(group, index, others):
                self._store.create("pods", pod)
            logger.info("replica_created slice=%s-%d", group["groupName"], index)
        return missing > 0

    def _delete_surplus(self, group: Json) -> bool:
        """Only without Ray's autoscaler does the operator choose by itself."""
        replicas = self._replicas(group)
        surplus = len(replicas) - _wanted(group)
        if self._has_autoscaler() or surplus <= 0:
            return False
        for name in self._dice.sample(sorted(replicas), surplus):
            self._delete(name, replicas[name], "surplus, chosen at random")
        return True

    def _has_autoscaler(self) -> bool:
        spec = self._store.get("rayclusters", RAYCLUSTER)["spec"]
        return bool(spec.get("enableInTreeAutoscaling"))

    def _replicas(self, group: Json) -> dict[str, list[Json]]:
        """The group's pods by replica, without those being deleted."""
        labels = {
            CLUSTER_LABEL: RAYCLUSTER,
            NODE_TYPE_LABEL: "worker",
            GROUP_LABEL: group["groupName"],
        }
        replicas: dict[str, list[Json]] = {}
        for pod in self._store.list("pods", labels):
            if "deletionTimestamp" not in pod["metadata"]:
                replicas.setdefault(replica_of(pod), []).append(pod)
        return replicas

    def _delete(self, replica: str, pods: list[Json], reason: str) -> None:
        """Asks for deletion; the host ends the pod and then it is gone."""
        logger.info("replica_deleted replica=%s hosts=%d reason=%r", replica, len(pods), reason)
        for pod in pods:
            with self._store.edit("pods", pod["metadata"]["name"]) as stored:
                stored["metadata"]["deletionTimestamp"] = "2026-11-20T00:00:00Z"


class OperatorThread:
    """An operator that runs by itself. A context manager."""

    def __init__(self, store: Store, operator: Operator) -> None:
        self._store = store
        self._operator = operator
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kuberay-operator")

    def __enter__(self) -> "OperatorThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(10)

    def _run(self) -> None:
        version = ""
        while not self._stopping.is_set():
            version = self._store.wait_change(version, _RESYNC_S)
            try:
                self._operator.step()
            except Exception:
                logger.exception("operator_failed")


def _wanted(group: Json) -> int:
    return max(group["minReplicas"], min(group["replicas"], group["maxReplicas"]))


def _label(pod: dict[str, Any], name: str) -> str:
    value: str = pod["metadata"]["labels"][name]
    return value
