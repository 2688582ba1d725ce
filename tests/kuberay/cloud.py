"""GKE: makes the nodes that pods of Ray wait for, a slice's all at once or never, and takes them.

The scheduler puts pods on those nodes and KWOK runs them; both are real. What runs in a pod, a
`Hosts` says: nothing at all, or a real raylet. Where something does, the cloud is the kubelet as
well: a pod whose Ray node has ended fails, and a pod to be deleted is ended and then gone.
"""

import itertools
import logging
import threading
import time
from enum import StrEnum
from typing import Any, Protocol

from control_plane.api import Api, RefusedByServerError, reference
from control_plane.kubelet import node

from autoscaling.provisioning.raycluster import CLUSTER_LABEL, GROUP_LABEL, REPLICA_INDEX_LABEL
from serving.domain.names.gke_names import GKE_CHIPS, HOST_INDEX_LABEL

from .objects import replica_of
from .webhook import num_hosts

logger = logging.getLogger(__name__)

Json = dict[str, Any]

NAMESPACE_LABEL = "tests.slicewise.io/namespace"
_LOOK_PERIOD_S = 0.2
_GONE_CODES = (404, 409)


class Loss(StrEnum):
    """How a host is lost.

    GONE: its pod and its node are gone at once.
    FAILED: its pod is in phase Failed, as a graceful shutdown of a node leaves it; the node stays.
    VANISHED: its node is gone, and nobody has said so: the pod is there until it is collected.
    """

    GONE = "gone"
    FAILED = "failed"
    VANISHED = "vanished"


class Hosts(Protocol):
    """What runs in pods. Called from one thread, except `kill`."""

    def start(self, pod: Json) -> None:
        """Starts what runs in a pod that has its address; blocks until it does."""
        ...

    def is_running(self, pod_name: str) -> bool:
        """Whether it still does."""
        ...

    def stop(self, pod_name: str) -> None:
        """Ends it, as the deletion of a pod does; nothing runs there afterwards."""
        ...

    def kill(self, pod_name: str) -> None:
        """Ends it as a power cut does."""
        ...


class Cloud:
    """The node pools behind the RayClusters of a namespace.

    `delays_s` is how long a slice takes, by group; `None` is a stock-out, and what is not named
    comes at once. `hosts` of `None` are pods in which nothing runs. Otherwise those with chips have
    addresses of this machine, so that something can. A pod whose node has vanished is collected
    `collected_after_s` later; `None` leaves that to the control plane, which takes a minute.
    """

    collected_after_s: float | None = None

    def __init__(
        self,
        api: Api,
        namespace: str,
        delays_s: dict[str, float | None] | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._hosts = hosts
        self.delays_s = {} if delays_s is None else delays_s
        self._asked_at_s: dict[str, float] = {}
        # Pods for which a node was made; the scheduler may put another one of its kind there.
        self._provided: set[str] = set()
        self._nodes: set[str] = set()
        self._used: set[str] = set()
        # The nodes that were made for a slice, by its name.
        self._made: dict[str, set[str]] = {}
        # Which node pool a node is of.
        self._pools: dict[str, str] = {}
        self._started: set[str] = set()
        # Pods whose node has vanished, and since when that is known.
        self._vanished: dict[str, float | None] = {}
        self._lock = threading.Lock()

    def step(self, now_s: float) -> bool:
        """Does everything that is due; whether that was anything."""
        with self._lock:
            pods = self._pods()
            done = self._take_back(pods) | self._collect(now_s)
            if self._hosts is not None:
                done |= self._run(self._hosts, pods)
            return self._deliver_due(pods, now_s) or done

    def is_waiting(self, pod: Json, pods: list[Json]) -> bool:
        """Whether a pod, one of `pods`, has no node yet, and will have none before time passes."""
        return pod["metadata"]["name"] not in self._provided | self._followers(pods)

    def lose(self, slice_name: str, host: int = 0, how: Loss = Loss.GONE) -> None:
        """Takes a host of a slice, such as `v6e-2x2-spot-3`, without notice.

        Raises:
            LookupError: there is no such host.
        """
        for pod in self._pods():
            labels = pod["metadata"]["labels"]
            name = f"{labels.get(GROUP_LABEL)}-{labels.get(REPLICA_INDEX_LABEL)}"
            is_it = name == slice_name and int(labels.get(HOST_INDEX_LABEL, 0)) == host
            if is_it and "deletionTimestamp" not in pod["metadata"]:
                self.lose_pod(pod, how)
                return
        raise LookupError(f"there is no host {host} of a slice {slice_name}")

    def lose_pod(self, pod: Json, how: Loss = Loss.GONE) -> None:
        """The same of the host of a pod."""
        name = pod["metadata"]["name"]
        logger.info("host_lost pod=%s how=%s", name, how)
        with self._lock:
            if self._hosts is not None:
                self._hosts.kill(name)
            if how is Loss.FAILED:
                status = {"phase": "Failed", "reason": "Terminated"}
                self._api.merge(
                    reference("Pod", self._namespace, name), {"status": status}, "status"
                )
                return
            if how is Loss.GONE:
                self._delete("Pod", name)
            else:
                self._vanished[name] = None
            if (place := pod["spec"].get("nodeName")) is not None:
                self._nodes.discard(place)
                self._delete("Node", place)

    def stop_all(self) -> None:
        """Ends whatever runs in any pod."""
        with self._lock:
            for name in list(self._started):
                if self._hosts is not None:
                    self._hosts.kill(name)

    def _pods(self) -> list[Json]:
        """All pods of RayClusters."""
        found = self._api.list("Pod", self._namespace)
        return [pod for pod in found if CLUSTER_LABEL in pod["metadata"].get("labels", {})]

    def _take_back(self, pods: list[Json]) -> bool:
        """Takes node pools whole on which no pod is, unless one is still to come."""
        living = {pod["metadata"]["name"] for pod in pods}
        gone = self._provided - living
        self._provided &= living
        self._provided |= self._followers(pods)
        # Also where the scheduler gave a pod the node that was made for another one.
        for name in self._started - living:
            if self._hosts is not None:
                self._hosts.stop(name)
        self._started &= living
        placed = {pod["metadata"]["name"]: pod["spec"].get("nodeName") for pod in pods}
        self._close(self._nodes & set(placed.values()) - self._used)
        occupied = {self._pools[each] for each in self._nodes & set(placed.values())}
        idle = {each for each in self._nodes if self._pools[each] not in occupied}
        if any(placed[name] is None for name in self._provided):
            idle &= self._used
        for name in idle:
            self._delete("Node", name)
        self._nodes -= idle
        return bool(gone or idle)

    def _followers(self, pods: list[Json]) -> set[str]:
        """Pods of slices that are on their way to a node pool: the scheduler has placed a first."""
        living = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        begun = {replica_of(pod) for pod in living if pod["spec"].get("nodeName") in self._nodes}
        return {pod["metadata"]["name"] for pod in living if replica_of(pod) in begun}

    def _collect(self, now_s: float) -> bool:
        """What the garbage collector of pods does, at another time."""
        if self.collected_after_s is None:
            return False
        due = []
        for name, since_s in self._vanished.items():
            self._vanished[name] = since_s = now_s if since_s is None else since_s
            if now_s >= since_s + self.collected_after_s:
                due.append(name)
        for name in due:
            del self._vanished[name]
            self._delete("Pod", name)
        return bool(due)

    def _close(self, nodes: set[str]) -> None:
        """A node is for one pod: its successor gets another."""
        for name in nodes:
            self._used.add(name)
            self._api.merge(reference("Node", None, name), {"spec": {"unschedulable": True}})

    def _run(self, hosts: Hosts, pods: list[Json]) -> bool:
        """What a kubelet does with its pods."""
        done = False
        for pod in pods:
            name, phase = pod["metadata"]["name"], pod["status"].get("phase")
            if pod["spec"].get("nodeName") not in self._nodes:
                # Either it has none yet, or nobody is left there who could say anything of it.
                continue
            if "deletionTimestamp" in pod["metadata"]:
                hosts.stop(name)
                self._delete("Pod", name)
            elif phase == "Running" and GKE_CHIPS not in _limits(pod):
                continue
            elif phase == "Running" and name not in self._started:
                self._started.add(name)
                hosts.start(pod)
            elif phase == "Running" and not hosts.is_running(name):
                self._fail(pod)
            else:
                continue
            done = True
        return done

    def _fail(self, pod: Json) -> None:
        try:
            status = {"phase": "Failed", "reason": "Error"}
            self._api.merge(pod, {"status": status}, "status")
        except RefusedByServerError as error:
            # It was deleted meanwhile.
            if error.code not in _GONE_CODES:
                raise

    def _deliver_due(self, pods: list[Json], now_s: float) -> bool:
        done = False
        placed = {pod["spec"].get("nodeName") for pod in pods}
        for replica, members in _pending(pods).items():
            asked_at_s = self._asked_at_s.setdefault(replica, now_s)
            delay_s = self.delays_s.get(members[0]["metadata"]["labels"][GROUP_LABEL], 0.0)
            # Another slice of its kind may have taken what came for this one.
            is_served = bool(self._made.get(replica, set()) & self._nodes - placed)
            # A slice of which not every pod is made yet is not asked for.
            is_whole = len(members) == num_hosts(members[0]["spec"])
            if is_whole and not is_served and delay_s is not None and now_s >= asked_at_s + delay_s:
                self._deliver(replica, members)
                done = True
        return done

    def _deliver(self, replica: str, pods: list[Json]) -> None:
        """Every host of a slice comes, in a node pool of its own."""
        pool = f"pool-{next(_numbers)}"
        self._made[replica] = set()
        for pod in pods:
            number = next(_numbers)
            chips = int(_limits(pod).get(GKE_CHIPS, 0))
            # Endpoints of Services may not be on loopback, so pods are there only if they have to.
            is_on_loopback = self._hosts is not None and chips > 0
            made = node(
                f"node-{number}",
                {**pod["spec"].get("nodeSelector", {}), NAMESPACE_LABEL: self._namespace},
                chips=chips,
                pool=pool,
                pod_range=_pod_range(number, is_on_loopback=is_on_loopback),
                # Whoever loses it loses no other: with room for more a gateway lies beside a head.
                pods=1,
            )
            self._api.create(made)
            self._made[replica].add(made["metadata"]["name"])
            self._pools[made["metadata"]["name"]] = pool
            self._provided.add(pod["metadata"]["name"])
        self._nodes |= self._made[replica]
        logger.info("slice_delivered replica=%s hosts=%d", replica, len(pods))

    def _delete(self, kind: str, name: str) -> None:
        namespace = None if kind == "Node" else self._namespace
        try:
            self._api.delete(reference(kind, namespace, name))
        except RefusedByServerError as error:
            if error.code not in _GONE_CODES:
                raise


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


_numbers = itertools.count()


def _pending(pods: list[Json]) -> dict[str, list[Json]]:
    """Pods without a node, by slice."""
    found: dict[str, list[Json]] = {}
    for pod in pods:
        is_new = "nodeName" not in pod["spec"] and "deletionTimestamp" not in pod["metadata"]
        if is_new:
            found.setdefault(replica_of(pod), []).append(pod)
    return found


def _pod_range(number: int, *, is_on_loopback: bool) -> str:
    """Addresses of one node's pods, of which each node has its own."""
    first = 127 if is_on_loopback else 10
    return f"{first}.{number // 250 + 1}.{number % 250}.0/24"


def _limits(pod: Json) -> Json:
    found: Json = pod["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return found
