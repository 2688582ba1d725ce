"""KubeRay's controller of RayServices: the clusters they have, and which of them serves.

A RayService gets a cluster, which is pending until its applications run; then the Services point
to it, and it is the active one. A change of its spec makes a second cluster (`NewCluster`), unless
it only appends worker groups, or the upgrade strategy says `None`. Clusters that serve no more are
left alone here: KubeRay deletes them minutes later.
"""

import copy
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from control_plane.api import Api, RefusedByServerError

from autoscaling.provisioning.raycluster import CLUSTER_LABEL, NODE_TYPE_LABEL

from .dashboard import Dashboard, DashboardAwayError, are_running
from .events import Events
from .ray_pods import SERVICE_KIND_LABEL, SERVICE_NAME_LABEL, VERSION, owner
from .ray_services import service_services
from .spec_hash import HASH_ANNOTATION, NUM_GROUPS_ANNOTATION, annotations, spec_hash
from .status import is_ready, service_status

logger = logging.getLogger(__name__)

Json = dict[str, Any]

_FINALIZER = "ray.io/rayservice-finalizer"
_ACTIVE, _PENDING = "activeServiceStatus", "pendingServiceStatus"
_CHANGED_MEANWHILE = 409


class ServiceController:
    """Looks at the RayServices of a namespace. `suffix` makes up the ends of names."""

    def __init__(
        self, api: Api, namespace: str, dashboard: Dashboard, suffix: Callable[[], str]
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._dashboard = dashboard
        self._suffix = suffix
        self._events = Events(api, "rayservice-controller")
        # Heads that have Serve's configuration, and which. A restart of the operator forgets it.
        self._configured: dict[str, str] = {}

    def step(self) -> bool:
        """One look at every RayService; whether anything was done."""
        found = self._api.list("RayService", self._namespace)
        # Every one is looked at, whatever was done for another.
        done = [self._look_at(service) for service in found]
        return any(done)

    def _look_at(self, service: Json) -> bool:
        if "deletionTimestamp" in service["metadata"]:
            return self._set_finalizers(service, [])
        if self._set_finalizers(service, [_FINALIZER]):
            return True
        status = service.get("status", {})
        active = self._cluster(status, _ACTIVE)
        pending = self._cluster(status, _PENDING)
        done = False
        if pending is None and (active is None or self._needs_another(service, active)):
            pending, done = self._make_cluster(service), True
        elif active is not None and pending is None and _only_appends(service, active):
            active, done = self._bring_up_to_date(service, active), True
        applications = self._serve(service, pending or active)
        if pending is not None and are_running(applications):
            self._switch(service, pending)
            active, pending, done = pending, None, True
        told_active = _shown(active, applications if pending is None else None)
        told_pending = _shown(pending, applications)
        return self._tell(service, told_active, told_pending) or done

    def _set_finalizers(self, service: Json, finalizers: list[str]) -> bool:
        if service["metadata"].get("finalizers", []) == finalizers:
            return False
        self._api.merge(service, {"metadata": {"finalizers": finalizers or None}})
        return True

    def _cluster(self, status: Json, part: str) -> Json | None:
        name = status.get(part, {}).get("rayClusterName")
        return self._api.find("RayCluster", self._namespace, name) if name else None

    @staticmethod
    def _needs_another(service: Json, active: Json) -> bool:
        spec = service["spec"]
        if spec.get("upgradeStrategy", {}).get("type") == "None" or _only_appends(service, active):
            return False
        return spec_hash(spec["rayClusterConfig"]) != _annotation(active, HASH_ANNOTATION)

    def _make_cluster(self, service: Json) -> Json:
        metadata, spec = service["metadata"], _cluster_spec(service)
        origin = {SERVICE_KIND_LABEL: "RayService", SERVICE_NAME_LABEL: metadata["name"]}
        cluster = self._api.create(
            {
                "apiVersion": "ray.io/v1",
                "kind": "RayCluster",
                "metadata": {
                    "name": f"{metadata['name']}-{self._suffix()}",
                    "namespace": self._namespace,
                    "labels": metadata.get("labels", {}) | origin,
                    "annotations": annotations(spec, VERSION),
                    "ownerReferences": [owner(service)],
                },
                "spec": spec,
            }
        )
        words = f"Created the RayCluster {_place(cluster)}"
        self._note(service, "CreatedRayCluster", "Create", words)
        return cluster

    def _bring_up_to_date(self, service: Json, active: Json) -> Json:
        """A cluster becomes what its RayService says, counts included."""
        spec = _cluster_spec(service)
        metadata = active["metadata"] | {
            "annotations": active["metadata"]["annotations"] | annotations(spec, VERSION)
        }
        updated = self._api.replace(active | {"metadata": metadata, "spec": spec})
        words = f"Updated the active RayCluster {_place(active)}"
        self._note(service, "UpdatedRayCluster", "Update", words)
        return updated

    def _serve(self, service: Json, cluster: Json | None) -> Json:
        """Sends Serve's configuration to a head that has not got it; how its applications are."""
        head = self._head(cluster) if cluster is not None else None
        if cluster is None or head is None:
            return {}
        uid, config = head["metadata"]["uid"], service["spec"].get("serveConfigV2", "")
        name = cluster["metadata"]["name"]
        if self._configured.get(uid) != config:
            try:
                self._dashboard.take(name, config)
            except DashboardAwayError as error:
                # It is sent again at the next look.
                logger.info("configuration_not_taken cluster=%s error=%r", name, str(error))
                return {}
            self._configured[uid] = config
            words = f"Updated serve applications to the RayCluster {_place(cluster)}"
            self._note(service, "UpdatedServeApplications", "Update", words)
        return self._dashboard.applications(name)

    def _head(self, cluster: Json) -> Json | None:
        labels = {CLUSTER_LABEL: cluster["metadata"]["name"], NODE_TYPE_LABEL: "head"}
        pods = self._api.list("Pod", self._namespace, labels)
        return next((pod for pod in pods if is_ready(pod)), None)

    def _switch(self, service: Json, cluster: Json) -> None:
        """Points the Services to a cluster; makes them the first time."""
        for body in service_services(service, cluster):
            name = body["metadata"]["name"]
            found = self._api.find("Service", self._namespace, name)
            if found is None:
                self._api.create(body)
                words = f"Created the service {self._namespace}/{name}"
                self._note(service, "CreatedService", "Create", words)
            elif found["spec"]["selector"] != body["spec"]["selector"]:
                self._api.merge(found, {"spec": {"selector": body["spec"]["selector"]}})
                words = f"Updated the service {self._namespace}/{name}"
                self._note(service, "UpdatedService", "Update", words)

    def _num_endpoints(self, service: Json) -> int:
        """How many addresses the Service before Serve's proxies sends traffic to."""
        name = f"{service['metadata']['name']}-serve-svc"
        slices = self._api.list(
            "EndpointSlice", self._namespace, {"kubernetes.io/service-name": name}
        )
        endpoints = [each for found in slices for each in found.get("endpoints") or ()]
        return sum(each["conditions"].get("ready", True) for each in endpoints)

    def _tell(self, service: Json, active: Json, pending: Json) -> bool:
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        status = service_status(service, active, pending, self._num_endpoints(service), now)
        if status == service.get("status"):
            return False
        try:
            self._api.replace(service | {"status": status}, "status")
        except RefusedByServerError as error:
            if error.code != _CHANGED_MEANWHILE:
                raise
        return True

    def _note(self, service: Json, reason: str, action: str, words: str) -> None:
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
        self._events.note(service, reason, action, words, now)


def _only_appends(service: Json, active: Json) -> bool:
    """Whether a RayService differs from its cluster by worker groups after those it had."""
    spec = service["spec"]["rayClusterConfig"]
    before = _annotation(active, NUM_GROUPS_ANNOTATION)
    had = int(before) if before else len(spec["workerGroupSpecs"])
    is_more = len(spec["workerGroupSpecs"]) > had
    return is_more and spec_hash(spec, had) == _annotation(active, HASH_ANNOTATION)


def _cluster_spec(service: Json) -> Json:
    """The cluster that a RayService asks for, as Go writes it: an empty struct is written too."""
    spec: Json = copy.deepcopy(service["spec"]["rayClusterConfig"])
    for group in spec.get("workerGroupSpecs", ()):
        group.setdefault("scaleStrategy", {})
    return spec


def _shown(cluster: Json | None, applications: Json | None) -> Json:
    if cluster is None:
        return {}
    found = {
        "rayClusterName": cluster["metadata"]["name"],
        "rayClusterStatus": cluster.get("status"),
        "applicationStatuses": applications,
    }
    return {name: value for name, value in found.items() if value}


def _annotation(cluster: Json, name: str) -> str | None:
    value: str | None = cluster["metadata"].get("annotations", {}).get(name)
    return value


def _place(of: Json) -> str:
    return f"{of['metadata']['namespace']}/{of['metadata']['name']}"
