"""GKE: gives a replica's pods their hosts, all at once or never, and takes hosts away.

Also the kubelet on those hosts: a pod whose Ray node has ended fails; a pod to be deleted is ended
and then gone. What a host is, a `Hosts` says: nothing at all, or a real raylet.
"""

import itertools
import logging
import threading
import time
from typing import Protocol

from autoscaling.provisioning.raycluster import (
    CLUSTER_LABEL,
    GROUP_LABEL,
    NODE_TYPE_LABEL,
    REPLICA_INDEX_LABEL,
)
from serving.domain.gke_names import HOST_INDEX_LABEL

from .objects import RAYCLUSTER, ended_container, replica_of, running_container
from .store import Json, Store

logger = logging.getLogger(__name__)

_LOOK_PERIOD_S = 0.1
# Of this machine, each for one pod: what runs in a pod has an address of its own there.
_addresses = (f"127.1.{number // 250}.{number % 250 + 2}" for number in itertools.count())


class Hosts(Protocol):
    """What runs in pods. Called from one thread, except `kill`."""

    def start(self, group: Json, pod: Json) -> None:
        """Starts what runs in the pod; blocks until it does."""
        ...

    def is_running(self, pod_name: str) -> bool:
        """Whether it still does."""
        ...

    def stop(self, pod_name: str) -> None:
        """Ends it, as the deletion of a pod does."""
        ...

    def kill(self, pod_name: str) -> None:
        """Ends it as a power cut does."""
        ...


class NoHosts:
    """Pods in which nothing runs."""

    def __init__(self) -> None:
        self._running: set[str] = set()

    def start(self, group: Json, pod: Json) -> None:
        self._running.add(pod["metadata"]["name"])

    def is_running(self, pod_name: str) -> bool:
        return pod_name in self._running

    def stop(self, pod_name: str) -> None:
        self._running.discard(pod_name)

    def kill(self, pod_name: str) -> None:
        self._running.discard(pod_name)


class Cloud:
    """The node pools behind one RayCluster. `delays_s` is by group; `None` is a stock-out."""

    def __init__(self, store: Store, hosts: Hosts, delays_s: dict[str, float | None]) -> None:
        self._store = store
        self._hosts = hosts
        self.delays_s = delays_s
        self._asked_at_s: dict[str, float] = {}

    def step(self, now_s: float) -> None:
        """Does everything that is due."""
        for pod in self._pods():
            if "deletionTimestamp" in pod["metadata"]:
                self._hosts.stop(pod["metadata"]["name"])
                self._store.delete("pods", pod["metadata"]["name"])
            elif pod["status"]["phase"] == "Running":
                self._note_end(pod["metadata"]["name"])
        for replica, pods in self._pending().items():
            asked_at_s = self._asked_at_s.setdefault(replica, now_s)
            delay_s = self.delays_s.get(_label(pods[0], GROUP_LABEL), 0.0)
            if delay_s is not None and now_s >= asked_at_s + delay_s:
                self._deliver(pods)

    def preempt(self, slice_name: str, host: int) -> None:
        """Takes one host away, without notice."""
        group, _, index = slice_name.rpartition("-")
        for pod in self._pods():
            place = (_label(pod, GROUP_LABEL), _label(pod, REPLICA_INDEX_LABEL))
            if place == (group, index) and _host_of(pod) == host:
                logger.info("host_preempted slice=%s host=%d", slice_name, host)
                self._hosts.kill(pod["metadata"]["name"])

    def stop_all(self) -> None:
        """Ends whatever runs in any pod."""
        for pod in self._pods():
            self._hosts.kill(pod["metadata"]["name"])

    def _pods(self) -> list[Json]:
        return self._store.list("pods", {CLUSTER_LABEL: RAYCLUSTER, NODE_TYPE_LABEL: "worker"})

    def _pending(self) -> dict[str, list[Json]]:
        replicas: dict[str, list[Json]] = {}
        for pod in self._pods():
            is_new = pod["status"]["phase"] == "Pending"
            if is_new and "deletionTimestamp" not in pod["metadata"]:
                replicas.setdefault(replica_of(pod), []).append(pod)
        return replicas

    def _deliver(self, pods: list[Json]) -> None:
        """Every host of a slice comes, and only then is any pod said to run."""
        cluster = self._store.get("rayclusters", RAYCLUSTER)
        groups = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
        for pod in pods:
            # A pod has its address before its first container runs, and so before Ray knows it.
            with self._store.edit("pods", pod["metadata"]["name"]) as stored:
                stored["status"]["podIP"] = pod["status"]["podIP"] = next(_addresses)
            self._hosts.start(groups[_label(pod, GROUP_LABEL)], pod)
        for pod in pods:
            with self._store.edit("pods", pod["metadata"]["name"]) as stored:
                stored["status"] = {
                    "phase": "Running",
                    "podIP": pod["status"]["podIP"],
                    "containerStatuses": [running_container()],
                }
        logger.info("slice_delivered slice=%s hosts=%d", _slice_of(pods[0]), len(pods))

    def _note_end(self, pod_name: str) -> None:
        if not self._hosts.is_running(pod_name):
            with self._store.edit("pods", pod_name) as stored:
                ended = {"phase": "Failed", "containerStatuses": [ended_container()]}
                stored["status"] = stored["status"] | ended


class CloudThread:
    """A cloud that runs by itself. A context manager; ends what still runs."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gke")

    def __enter__(self) -> "CloudThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(60)
        self._cloud.stop_all()

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_PERIOD_S):
            try:
                self._cloud.step(time.monotonic())
            except Exception:
                logger.exception("cloud_failed")


def _slice_of(pod: Json) -> str:
    return f"{_label(pod, GROUP_LABEL)}-{_label(pod, REPLICA_INDEX_LABEL)}"


def _host_of(pod: Json) -> int:
    return int(pod["metadata"]["labels"].get(HOST_INDEX_LABEL, 0))


def _label(pod: Json, name: str) -> str:
    value: str = pod["metadata"]["labels"][name]
    return value
