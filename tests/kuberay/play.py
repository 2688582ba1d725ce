"""Plays recorded scenarios: the same objects in, the same things done to them.

A scenario is a generator over a `Play`. Wherever the recording has a moment, it yields.
"""

import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from control_plane.api import Api, Json, reference
from control_plane.kubelet import HELD

from autoscaling.provisioning.raycluster import CLUSTER_LABEL, GROUP_LABEL, REPLICA_INDEX_LABEL
from serving.domain.names.gke_names import HOST_INDEX_LABEL

from .by_hand import NamespaceByHand
from .cloud import Loss
from .recordings import FOLDER
from .webhook_server import Webhook

RECORDED = FOLDER / "recorded"
# What Kubernetes has before our manifests come.
_NOT_OURS = ("RayCluster", "RayService")


@dataclass(frozen=True)
class Recorded:
    """A recorded scenario: its moments by name, each with the namespace as it was."""

    names: list[str]
    moments: list[dict[str, list[Json]]]


@cache
def recorded(scenario: str) -> Recorded:
    """One of the scenarios, by the name of its file."""
    read = json.loads((RECORDED / f"{scenario}.json").read_text())
    kinds = ("pods", "services", "endpointslices", "rayclusters", "rayservices", "roles")
    kinds += ("rolebindings", "serviceaccounts", "events")
    moments: list[dict[str, list[Json]]] = [{kind: [] for kind in kinds} for _ in read["moments"]]
    for each in read["objects"]:
        for number in each["moments"]:
            moments[number][each["kind"]].append(each["object"])
    return Recorded(read["moments"], moments)


class Play:
    """A namespace in which a scenario is played, and what can be done to it."""

    def __init__(self, api: Api, namespace: str, webhook: Webhook, scenario: str) -> None:
        self.recorded = recorded(scenario)
        self.webhook = webhook
        self.hand = NamespaceByHand(api, namespace)
        self._api = api
        self._namespace = namespace

    # -- what our manifests bring --

    def install(
        self, *, num_groups: int | None = None, as_cluster: bool = False, **counts: int
    ) -> None:
        """Installs what had been installed at the first moment. `counts` are by RayService group.

        A group of which nothing is said has the count that the RayService has at that moment. With
        `num_groups` the RayService has no more worker groups than that; `as_cluster` takes the
        groups of its cluster, where it had been changed since.
        """
        first = self.recorded.moments[0]
        for kind, plural in (
            ("ServiceAccount", "serviceaccounts"),
            ("Role", "roles"),
            ("RoleBinding", "rolebindings"),
            ("Service", "services"),
        ):
            for body in first[plural]:
                owners = body["metadata"].get("ownerReferences", ())
                if not any(each["kind"] in _NOT_OURS for each in owners):
                    self._api.apply(self._ours(kind, body))
        for name, value in self._priorities().items():
            self._api.apply(_priority(name, value))
        if first["rayservices"]:
            (service,) = first["rayservices"]
            body = self._ours("RayService", service)
            config = body["spec"]["rayClusterConfig"]
            if as_cluster:
                config = copy.deepcopy(first["rayclusters"][0]["spec"])
                body["spec"]["rayClusterConfig"] = config
            config["workerGroupSpecs"] = config["workerGroupSpecs"][:num_groups]
            for group in config["workerGroupSpecs"]:
                group["replicas"] = counts.get(group["groupName"], group["replicas"])
        else:
            body = self._ours("RayCluster", first["rayclusters"][0])
        self._api.create(body)

    def limit_chips(self, name: str, chips: int) -> None:
        """A quota of chips, as our manifests set it."""
        quota = reference("ResourceQuota", self._namespace, name)
        quota["spec"] = {"hard": {"requests.google.com/tpu": str(chips)}}
        self._api.create(quota)

        def is_counted() -> bool:
            found = self._api.get("ResourceQuota", self._namespace, name)
            used = found.get("status", {}).get("used", {}).get("requests.google.com/tpu")
            return used is not None and int(used) == self._chips()

        self.hand.wait(is_counted, "the quota is counted")

    def _chips(self) -> int:
        return sum(
            int(container.get("resources", {}).get("limits", {}).get("google.com/tpu", 0))
            for pod in self.hand.pods()
            for container in pod["spec"]["containers"]
        )

    # -- what was done --

    def applications(self, status: str) -> None:
        """From now on all applications of every cluster are so: `DEPLOYING` or `RUNNING`."""
        inside = {"DEPLOYING": "UPDATING", "RUNNING": "HEALTHY"}[status]
        deployments = {name: {"status": inside} for name in ("Gateway", "reserved")}
        found = {"status": status, "serveDeploymentStatuses": deployments}
        self.hand.dashboard.statuses[""] = {"slicewise": found}

    def scale(
        self,
        group: str,
        count: int,
        *named: str,
        names: bool = False,
        mirrored: bool = False,
        maximum: int | None = None,
    ) -> None:
        """Sets the count of a group of the newest cluster, and its `maximum` where it is given.

        With `names` the patch sets the names as well, as our provisioner's does, even to none;
        `mirrored` sets the count in the RayService too.
        """
        cluster = self.clusters()[-1]
        path = f"/spec/workerGroupSpecs/{_place(cluster['spec'], group)}"
        operations: list[Json] = [{"op": "replace", "path": f"{path}/replicas", "value": count}]
        if maximum is not None:
            operations.append({"op": "replace", "path": f"{path}/maxReplicas", "value": maximum})
        if names or named:
            strategy = {"workersToDelete": list(named)}
            operations.append({"op": "add", "path": f"{path}/scaleStrategy", "value": strategy})
        self._api.patch(cluster, operations)
        if mirrored:
            service = self.service()
            place = _place(service["spec"]["rayClusterConfig"], group)
            path = f"/spec/rayClusterConfig/workerGroupSpecs/{place}/replicas"
            self._api.patch(service, [{"op": "replace", "path": path, "value": count}])

    def scale_all(self, counts: dict[str, int]) -> None:
        """Sets the counts of several groups in one patch."""
        cluster = self.clusters()[-1]
        paths = {
            f"/spec/workerGroupSpecs/{_place(cluster['spec'], group)}/replicas": count
            for group, count in counts.items()
        }
        self._api.patch(
            cluster,
            [{"op": "replace", "path": path, "value": count} for path, count in paths.items()],
        )

    def change_service(self, moment: int) -> None:
        """The RayService becomes what it was at a moment."""
        (service,) = self.recorded.moments[moment]["rayservices"]
        self._api.merge(self.service(), {"spec": copy.deepcopy(service["spec"])})

    def lose(self, slice_name: str, host: int = 0, how: Loss = Loss.GONE) -> None:
        """A host is lost, and everybody does what follows."""
        self.hand.lose(slice_name, host, how)
        self.settle()

    def lose_head(self) -> None:
        """The head's pod is gone at once."""
        (head,) = self.hand.pods("headgroup")
        self.hand.cloud.lose_pod(head)
        self.settle()

    def delete_held(self, pod: Json) -> None:
        """Deletes a pod gracefully, and it takes its time."""
        self._api.merge(pod, {"metadata": {"annotations": {HELD: "yes"}}})
        self._api.delete(pod, grace_s=None)
        self.settle()

    def let_go(self, pod: Json) -> None:
        """It is gone at last."""
        self._api.delete(pod)
        self.settle()

    def settle(self, is_done: Callable[[], bool] = lambda: True) -> None:
        """Until nothing moves and `is_done`."""
        self.hand.settle(time.monotonic(), is_done=is_done)

    # -- what is there --

    def clusters(self) -> list[Json]:
        """The RayClusters, the oldest first."""
        found = self._api.list("RayCluster", self._namespace)
        return sorted(found, key=lambda each: str(each["metadata"]["creationTimestamp"]))

    def service(self) -> Json:
        """The RayService."""
        (found,) = self._api.list("RayService", self._namespace)
        return found

    def pod(self, slice_name: str, host: int = 0) -> Json:
        """The pod of a slice's host, by KubeRay's index."""
        for pod in self.hand.pods():
            labels = pod["metadata"]["labels"]
            name = f"{labels[GROUP_LABEL]}-{labels.get(REPLICA_INDEX_LABEL)}"
            if name == slice_name and int(labels.get(HOST_INDEX_LABEL, 0)) == host:
                return pod
        raise LookupError(f"there is no host {host} of {slice_name}")

    def _ours(self, kind: str, body: Json) -> Json:
        """An object of a recording, as somebody would have written it."""
        made = reference(kind, self._namespace, body["metadata"]["name"])
        for name in ("labels", "annotations"):
            if name in body["metadata"]:
                made["metadata"][name] = body["metadata"][name]
        rest = copy.deepcopy(
            {name: value for name, value in body.items() if name not in ("metadata", "status")}
        )
        made |= {name: value for name, value in rest.items() if name not in ("apiVersion", "kind")}
        for name in ("clusterIP", "clusterIPs"):
            made.get("spec", {}).pop(name, None)
        for subject in made.get("subjects", ()):
            subject["namespace"] = self._namespace
        return made

    def _priorities(self) -> dict[str, int]:
        """The priorities that pods of any moment had."""
        specs = [
            pod["spec"]
            for moment in self.recorded.moments
            for pod in moment["pods"]
            if pod["metadata"]["labels"].get(CLUSTER_LABEL)
        ]
        return {
            each["priorityClassName"]: each["priority"]
            for each in specs
            if "priorityClassName" in each
        }


def _priority(name: str, value: int) -> dict[str, Any]:
    body = reference("PriorityClass", None, name)
    return body | {"value": value, "preemptionPolicy": "Never"}


def _place(spec: Json, group: str) -> int:
    names = [each["groupName"] for each in spec["workerGroupSpecs"]]
    return names.index(group)


def recorded_scenarios(folder: Path = RECORDED) -> list[str]:
    """The names of all scenarios."""
    return sorted(path.stem for path in folder.glob("*.json"))
