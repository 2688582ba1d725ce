"""Pods that are real Ray nodes: raylets on this machine with the chips and labels of a TPU host."""

from typing import Any

import psutil
from ray.cluster_utils import Cluster

from autoscaling.provisioning.raycluster import GROUP_LABEL
from serving.domain.gke_names import GKE_ACCELERATOR, GKE_CHIPS, GKE_TOPOLOGY
from serving.domain.topology import Generation, SliceShape, shapes, slice_shape

from .store import Json
from .webhook import NAME, WORKER_ID, told_to

OBJECT_STORE_BYTES = 80 * 1024 * 1024


class RayletHosts:
    """Ray nodes by pod name, in `cluster`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._nodes: dict[str, Any] = {}

    def start(self, group: Json, pod: Json) -> None:
        """Starts a raylet; it registers by itself within seconds."""
        labels = pod["metadata"]["labels"]
        shape = _shape_of(group)
        told = told_to(pod)
        slice_name, worker_id = told[NAME], told[WORKER_ID]
        # What Ray would find on a TPU host by itself; the group's own labels win, as in Ray.
        found = {
            "ray.io/accelerator-type": shape.ray_accelerator_type,
            "ray.io/tpu-slice-name": slice_name,
            "ray.io/tpu-worker-id": worker_id,
            "ray.io/tpu-topology": shape.topology,
            "ray.io/tpu-pod-type": shape.ray_pod_type,
            "ray.io/node-group": labels[GROUP_LABEL],
        }
        resources = {
            "TPU": shape.chips_per_host,
            slice_name: 1,
            f"accelerator_type:{shape.ray_accelerator_type}": 1,
        }
        if worker_id == "0":
            resources[f"TPU-{shape.ray_pod_type}-head"] = 1
        self._nodes[pod["metadata"]["name"]] = self._cluster.add_node(
            wait=False,
            node_ip_address=pod["status"]["podIP"],
            num_cpus=1,
            resources=resources,
            labels=found | group["labels"],
            # What KubeRay and the TPU webhook put into the pod's environment.
            env_vars={
                "RAY_CLOUD_INSTANCE_ID": pod["metadata"]["name"],
                "RAY_NODE_TYPE_NAME": labels[GROUP_LABEL],
                **told,
                "TPU_TOPOLOGY": shape.topology,
                "TPU_ACCELERATOR_TYPE": shape.ray_pod_type,
            },
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
        )

    def is_running(self, pod_name: str) -> bool:
        """Whether its raylet runs."""
        node = self._nodes.get(pod_name)
        return node is not None and node.all_processes["raylet"][0].process.poll() is None

    def stop(self, pod_name: str) -> None:
        """As a deleted pod ends: the raylet says goodbye."""
        self._end(pod_name, is_graceful=True)

    def kill(self, pod_name: str) -> None:
        """As if the power were cut."""
        self._end(pod_name, is_graceful=False)

    def _end(self, pod_name: str, *, is_graceful: bool) -> None:
        node = self._nodes.pop(pod_name, None)
        if node is None:
            return
        below = descendants(node)
        self._cluster.remove_node(node, allow_graceful=is_graceful)
        for process in below:
            if process.is_running():
                process.kill()


def descendants(node: Any) -> list[psutil.Process]:
    """Every process of a Ray node, its workers and agents included."""
    found = []
    for kind in node.all_processes.values():
        for info in kind:
            try:
                process = psutil.Process(info.process.pid)
                found += [process, *process.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
    return found


def _shape_of(group: Json) -> SliceShape:
    spec = group["template"]["spec"]
    selector = spec["nodeSelector"]
    generation = next(
        each for each in Generation if shapes(each)[0].gke_accelerator == selector[GKE_ACCELERATOR]
    )
    chips = int(spec["containers"][0]["resources"]["limits"][GKE_CHIPS])
    return slice_shape(generation, selector[GKE_TOPOLOGY], chips)
