"""KubeRay's operator as a client of the API server: the pods, Services and rights of RayClusters.

The shell around pure parts: `worker_groups` decides, `ray_pods` and `ray_services` say what is
made, `status` what is said of it. RayServices are `service_controller.py`'s. One look lists what is
there; nothing is remembered between two looks but the events that were written.
"""

import logging
import random
import secrets
import threading
from datetime import UTC, datetime
from typing import Any

from control_plane.api import Api, RefusedByServerError

from autoscaling.provisioning.raycluster import CLUSTER_LABEL, GROUP_LABEL, NODE_TYPE_LABEL

from .dashboard import Dashboard
from .events import Events, made_now
from .ray_pods import head_pod, worker_pod
from .ray_services import cluster_services, rights
from .service_controller import ServiceController
from .spec_hash import spec_hash
from .status import cluster_status
from .worker_groups import Deletion, look

logger = logging.getLogger(__name__)

Json = dict[str, Any]

_LOOK_PERIOD_S = 0.2
# Kubernetes makes up names from these: no vowels, so that no words come out.
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
_REDIS_CLEANUP = "ray.io/gcs-ft-redis-cleanup-finalizer"
_GONE_CODES = (404, 409)


class Operator:
    """Keeps one namespace at what its RayClusters and RayServices ask for.

    `dashboard` answers in the place of Ray's: it takes Serve's configuration and says how the
    applications are. `dice` name what gets a made-up name, and choose the surplus.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        dashboard: Dashboard,
        dice: random.Random | None = None,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._dice = dice or random.Random(secrets.randbits(64))
        self._events = Events(api, "raycluster-controller")
        self._services = ServiceController(api, namespace, dashboard, self._suffix)

    def step(self) -> bool:
        """One look at everything; whether anything was done."""
        is_changed = self._services.step()
        for cluster in self._api.list("RayCluster", self._namespace):
            is_changed |= self._look_at(cluster)
        return is_changed

    def _look_at(self, cluster: Json) -> bool:
        if "deletionTimestamp" in cluster["metadata"]:
            return self._let_go(cluster)
        if self._hold(cluster):
            return True
        done = self._make_around(cluster)
        # Of one moment: what is done for one group changes no other's pods.
        pods = self._pods(cluster)
        failure = None
        try:
            done |= self._make_head(cluster, pods)
            for group in cluster["spec"].get("workerGroupSpecs", ()):
                did, looks_again = self._look_at_group(cluster, group, pods)
                done |= did
                if looks_again:
                    break
        except RefusedByServerError as error:
            # Groups after this one wait until it can be made.
            failure = str(error)
            words = f"Failed to create worker Pod for the cluster {_place(cluster)}, {failure}"
            self._note(cluster, "FailedToCreateWorkerPod", "Create", words, is_bad=True)
        is_told = self._tell(cluster, self._pods(cluster) if done or failure else pods, failure)
        # What cannot be made is tried again and again, under another name each time.
        return done or (is_told and failure is None)

    def _hold(self, cluster: Json) -> bool:
        """A cluster with Redis is not gone before Redis was cleaned up."""
        finalizers = cluster["metadata"].get("finalizers", [])
        if not cluster["spec"].get("gcsFaultToleranceOptions") or _REDIS_CLEANUP in finalizers:
            return False
        changes = {"metadata": {"finalizers": [*finalizers, _REDIS_CLEANUP]}}
        self._api.merge(cluster, changes)
        return True

    def _let_go(self, cluster: Json) -> bool:
        """Nothing is kept in Redis here, so nothing is cleaned up."""
        if not cluster["metadata"].get("finalizers"):
            return False
        self._api.merge(cluster, {"metadata": {"finalizers": None}})
        return True

    def _make_around(self, cluster: Json) -> bool:
        """Rights, where the autoscaler is on, and Services."""
        has_autoscaler = cluster["spec"].get("enableInTreeAutoscaling")
        wanted = [*(rights(cluster) if has_autoscaler else ()), *cluster_services(cluster)]
        done = False
        for body in wanted:
            kind, name = body["kind"], body["metadata"]["name"]
            if self._api.find(kind, self._namespace, name) is None and made_now(self._api, body):
                words = {"Role": "role", "RoleBinding": "role binding", "Service": "service"}
                what = words.get(kind, "service account")
                words_of = f"Created {what} {self._namespace}/{name}"
                self._note(cluster, f"Created{kind}", "Create", words_of)
                done = True
        return done

    def _make_head(self, cluster: Json, pods: list[Json]) -> bool:
        if any(_label(pod, NODE_TYPE_LABEL) == "head" for pod in pods):
            return False
        pod = self._api.create(head_pod(cluster, spec_hash(cluster["spec"])))
        self._note(cluster, "CreatedHeadPod", "Create", f"Created head Pod {_place(pod)}")
        return True

    def _look_at_group(self, cluster: Json, group: Json, pods: list[Json]) -> tuple[bool, bool]:
        """Whether anything was done, and whether the rest has to wait."""
        members = [
            pod
            for pod in pods
            if _label(pod, GROUP_LABEL) == group["groupName"]
            and _label(pod, NODE_TYPE_LABEL) == "worker"
        ]
        has_autoscaler = bool(cluster["spec"].get("enableInTreeAutoscaling"))
        step = look(group, members, has_autoscaler=has_autoscaler, dice=self._dice)
        for deletion in step.deletions:
            self._delete(cluster, deletion)
        for index in step.indexes:
            self._make_slice(cluster, group, index)
        return bool(step.deletions or step.indexes), step.looks_again

    def _make_slice(self, cluster: Json, group: Json, index: int) -> None:
        hosts = group.get("numOfHosts", 1)
        name = f"{group['groupName']}-{self._suffix()}" if hosts > 1 else None
        for host in range(hosts):
            pod = self._api.create(worker_pod(cluster, group, index, host, name))
            words = f"Created worker Pod {_place(pod)}"
            self._note(cluster, "CreatedWorkerPod", "Create", words)
        logger.info("slice_made group=%s index=%d hosts=%d", group["groupName"], index, hosts)

    def _delete(self, cluster: Json, deletion: Deletion) -> None:
        """Asks for the deletion, with the pod's own grace; who is gone already is not spoken of."""
        pod = deletion.pod
        try:
            self._api.delete(pod | {"apiVersion": "v1", "kind": "Pod"}, grace_s=None)
        except RefusedByServerError as error:
            if error.code in _GONE_CODES:
                return
            raise
        words = f"Deleted worker Pod {_place(pod)}: {deletion.reason}"
        self._note(cluster, "DeletedWorkerPod", "Delete", words)
        logger.info("pod_deleted pod=%s reason=%r", pod["metadata"]["name"], deletion.reason)

    def _tell(self, cluster: Json, pods: list[Json], failure: str | None) -> bool:
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        status = cluster_status(cluster, pods, failure, now)
        if status == cluster.get("status"):
            return False
        try:
            self._api.replace(cluster | {"status": status}, "status")
        except RefusedByServerError as error:
            if error.code not in _GONE_CODES:
                raise
        return True

    def _note(
        self, cluster: Json, reason: str, action: str, words: str, *, is_bad: bool = False
    ) -> None:
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
        self._events.note(cluster, reason, action, words, now, is_bad=is_bad)

    def _pods(self, cluster: Json) -> list[Json]:
        labels = {CLUSTER_LABEL: cluster["metadata"]["name"]}
        return self._api.list("Pod", self._namespace, labels)

    def _suffix(self) -> str:
        return "".join(self._dice.choices(_LETTERS, k=5))


class OperatorThread:
    """An operator that looks by itself, again and again. A context manager."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kuberay-operator")

    def __enter__(self) -> "OperatorThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_PERIOD_S):
            try:
                while self._operator.step() and not self._stopping.is_set():
                    pass
            except Exception:
                logger.exception("operator_failed")


def _place(of: Json) -> str:
    return f"{of['metadata']['namespace']}/{of['metadata']['name']}"


def _label(pod: Json, name: str) -> str | None:
    value: str | None = pod["metadata"]["labels"].get(name)
    return value
