"""What a real KubeRay and TPU webhook made of our manifests: see `tests/data/kuberay/README.md`."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoscaling.provisioning.groups import WorkerGroup
from autoscaling.provisioning.raycluster import (
    CLUSTER_LABEL,
    GROUP_LABEL,
    NODE_TYPE_LABEL,
    decode_worker_pod,
    read_groups,
)
from serving.domain.inventory import ObservedHost, observe_hosts
from serving.domain.names.gke_names import GKE_CHIPS

FOLDER = Path(__file__).parents[1] / "data" / "kuberay"

Json = dict[str, Any]


@dataclass(frozen=True)
class Recording:
    """One moment of a namespace."""

    rayclusters: list[Json]
    pods: list[Json]

    def pods_of(self, raycluster: str) -> list[Json]:
        """The Ray pods of a cluster, the head's included."""
        return [pod for pod in self.pods if pod["metadata"]["labels"][CLUSTER_LABEL] == raycluster]

    def hosts(self) -> list[Json]:
        """The pods that have chips."""
        return [pod for pod in self.pods if _chips(pod)]

    def group(self, name: str) -> WorkerGroup:
        """A worker group, as the provisioner reads it."""
        for cluster in self.rayclusters:
            pods = self.pods_of(cluster["metadata"]["name"])
            workers = [
                decode_worker_pod(json.dumps(pod).encode())
                for pod in pods
                if pod["metadata"]["labels"][NODE_TYPE_LABEL] == "worker"
            ]
            groups, notes = read_groups(cluster, workers)
            assert notes == []
            for group in groups:
                if group.name == name:
                    return group
        raise LookupError(f"no group {name} was recorded")

    def observed(self) -> list[ObservedHost]:
        """The hosts as a replica finds them in Ray."""
        nodes = [self.ray_node(pod) for pod in self.hosts()]
        free = {node["NodeID"]: node["Resources"] for node in nodes}
        # KubeRay tells Ray each pod's name (RAY_CLOUD_INSTANCE_ID).
        pods = {node_id(pod): pod["metadata"]["name"] for pod in self.hosts()}
        return observe_hosts(nodes, free, (), pods)

    def ray_node(self, pod: Json) -> Json:
        """A recorded host as `ray.nodes()` lists it: the group's labels, and the webhook's words.

        Ray takes name and worker id of a slice from `TPU_NAME` and `TPU_WORKER_ID` (2.60, read
        2026-11-22); its node id is made up here from the pod's name.
        """
        labels = pod["metadata"]["labels"]
        env = environment(pod)
        found = {"ray.io/node-group": labels[GROUP_LABEL]}
        if "TPU_NAME" in env:
            found["ray.io/tpu-slice-name"] = env["TPU_NAME"]
        if "TPU_WORKER_ID" in env:
            found["ray.io/tpu-worker-id"] = env["TPU_WORKER_ID"]
        (spec,) = (
            spec
            for cluster in self.rayclusters
            if cluster["metadata"]["name"] == labels[CLUSTER_LABEL]
            for spec in cluster["spec"]["workerGroupSpecs"]
            if spec["groupName"] == labels[GROUP_LABEL]
        )
        return {
            "NodeID": node_id(pod),
            "Alive": True,
            "NodeManagerAddress": pod["status"]["podIP"],
            "Resources": {"TPU": _chips(pod)},
            "Labels": found | spec["labels"],
        }


def recording(name: str) -> Recording:
    """One of the recordings, by the name of its file."""
    read = json.loads((FOLDER / f"{name}.json").read_text())
    return Recording(read["rayclusters"], read["pods"])


def node_id(pod: Json) -> str:
    """The id of the Ray node in a recorded pod."""
    return hashlib.sha256(pod["metadata"]["name"].encode()).hexdigest()[:56]


def environment(pod: Json) -> dict[str, str]:
    """What the webhook told a pod; nothing where it did not see it."""
    return {each["name"]: each["value"] for each in pod["spec"]["containers"][0].get("env", ())}


def _chips(pod: Json) -> float:
    return float(pod["spec"]["containers"][0]["resources"]["limits"].get(GKE_CHIPS, 0))
