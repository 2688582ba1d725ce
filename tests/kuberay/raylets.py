"""Pods that are real Ray nodes: raylets on this machine with the chips and labels of a TPU host.

What a raylet says of itself comes from its pod alone: from the `ray start` that KubeRay wrote into
it, from its variables, and from its node selector, by which GKE's device plugin tells a container
the topology and type of its slice. Ray would find chips and cores by itself; this machine has none
of the former, so they are as the command says, and one core of the latter for every pod.
"""

from typing import Any

import psutil
from ray.cluster_utils import Cluster

from serving.domain.names.gke_names import GKE_ACCELERATOR, GKE_CHIPS, GKE_TOPOLOGY
from serving.domain.topology import Generation, SliceShape, shapes, slice_shape

from .start_command import start_parameters, variables_of
from .webhook import NAME, WORKER_ID

Json = dict[str, Any]

OBJECT_STORE_BYTES = 80 * 1024 * 1024
# Of the pod's variables those by which a raylet says who it is. The others are for the container.
_IDENTITY = ("RAY_CLOUD_INSTANCE_ID", "RAY_NODE_TYPE_NAME", NAME, WORKER_ID)


class RayletHosts:
    """Ray nodes by pod name, in `cluster`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._nodes: dict[str, Any] = {}

    def start(self, pod: Json) -> None:
        """Starts a raylet; it registers by itself within seconds."""
        labels, resources = described(pod)
        shape, variables = _shape_of(pod), variables_of(pod)
        identity = {name: variables[name] for name in _IDENTITY if name in variables}
        self._nodes[pod["metadata"]["name"]] = self._cluster.add_node(
            wait=False,
            node_ip_address=pod["status"]["podIP"],
            num_cpus=1,
            resources=resources,
            labels=labels,
            env_vars={
                **identity,
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


def described(pod: Json) -> tuple[dict[str, str], dict[str, float]]:
    """The labels and resources that Ray gives the node in a pod."""
    labels, resources = start_parameters(pod)
    variables, shape = variables_of(pod), _shape_of(pod)
    found = {
        "ray.io/accelerator-type": shape.ray_accelerator_type,
        "ray.io/tpu-topology": shape.topology,
        "ray.io/tpu-pod-type": shape.ray_pod_type,
        "ray.io/node-group": variables["RAY_NODE_TYPE_NAME"],
    }
    resources[f"accelerator_type:{shape.ray_accelerator_type}"] = 1
    # A pod that the webhook did not see is of no slice, as far as Ray can tell.
    if NAME in variables:
        found["ray.io/tpu-slice-name"] = variables[NAME]
        found["ray.io/tpu-worker-id"] = variables[WORKER_ID]
        resources[variables[NAME]] = 1
        if variables[WORKER_ID] == "0":
            resources[f"TPU-{shape.ray_pod_type}-head"] = 1
    # What the command says wins over what is found, as in Ray.
    return found | labels, resources


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


def _shape_of(pod: Json) -> SliceShape:
    selector = pod["spec"]["nodeSelector"]
    generation = next(
        each for each in Generation if shapes(each)[0].gke_accelerator == selector[GKE_ACCELERATOR]
    )
    chips = int(pod["spec"]["containers"][0]["resources"]["limits"][GKE_CHIPS])
    return slice_shape(generation, selector[GKE_TOPOLOGY], chips)
