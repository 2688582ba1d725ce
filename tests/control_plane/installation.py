"""An installation as it stands on the API server once KubeRay has made its cluster."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deployments.validation.documents import Folder

from .api import Api
from .kubectl import Kubectl
from .test_manifests_are_taken import applied

Json = dict[str, Any]
CLUSTER = "llm-abcde"
_FIRST = ("Namespace", "ServiceAccount", "PriorityClass")


@dataclass
class Installation:
    """What was applied, and what KubeRay has made of it."""

    api: Api
    kubectl: Kubectl
    service: Json
    cluster: Json
    pods: list[Json]


@contextmanager
def installed(api: Api, kubectl: Kubectl, folder: Folder, **slices: int) -> Iterator[Installation]:
    """The RayService of a folder with a cluster and its pods; gone afterwards.

    `slices` are the slices of each group, its name with `_` for `-`; other groups have none.
    """
    first = [one.body for kind in _FIRST for one in folder.of_kind(kind)]
    service = copy.deepcopy(folder.of_kind("RayService")[0].body)
    namespace = service["metadata"]["namespace"]
    with applied(api, first):
        kubectl.apply(service)
        stored = kubectl.get("RayService", service["metadata"]["name"], namespace)
        made: list[Json] = [stored]
        try:
            spec = copy.deepcopy(stored["spec"]["rayClusterConfig"])
            wanted = {name.replace("_", "-"): count for name, count in slices.items()}
            for group in spec["workerGroupSpecs"]:
                group["replicas"] = wanted.get(group["groupName"], group["replicas"])
            metadata = {"name": CLUSTER, "namespace": namespace}
            cluster = api.create(
                {
                    "apiVersion": "ray.io/v1",
                    "kind": "RayCluster",
                    "metadata": metadata,
                    "spec": spec,
                }
            )
            made.append(cluster)
            kubectl.set_status(stored, {"activeServiceStatus": {"rayClusterName": CLUSTER}})
            made += (pods := [api.create(pod) for pod in _pods(spec, namespace)])
            yield Installation(api, kubectl, service, cluster, pods)
        finally:
            for body in reversed(made):
                api.delete(body)


def _pods(spec: Json, namespace: str) -> Iterator[Json]:
    """The pods of a cluster as KubeRay makes them, as far as anybody here reads them."""
    head = spec["headGroupSpec"]["template"]
    yield _pod(head, namespace, "headgroup", "head")
    for group in spec["workerGroupSpecs"]:
        for _ in range(group["replicas"] * group["numOfHosts"]):
            yield _pod(group["template"], namespace, group["groupName"], "worker")


def _pod(template: Json, namespace: str, group: str, node_type: str) -> Json:
    kuberays = {
        "app.kubernetes.io/name": "kuberay",
        "ray.io/cluster": CLUSTER,
        "ray.io/group": group,
        "ray.io/node-type": node_type,
    }
    metadata = copy.deepcopy(template["metadata"])
    metadata |= {"generateName": f"{CLUSTER}-{group}-", "namespace": namespace}
    metadata["labels"] = metadata["labels"] | kuberays
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": copy.deepcopy(template["spec"]),
    }
