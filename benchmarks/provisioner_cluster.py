"""A large RayCluster on a real API server: a thousand slices of four hosts as recorded pods.

etcd and kube-apiserver alone: nobody schedules, runs or deletes what is made here. Each pod is a
host of a slice as KubeRay and the TPU webhook made it, with names, indices and addresses of its
own. `managedFields` are added by the server, as by any.
"""

import copy
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoscaling.provisioning.raycluster import (
    CLUSTER_LABEL,
    GROUP_LABEL,
    REPLICA_INDEX_LABEL,
    REPLICA_NAME_LABEL,
    WEBHOOK_SLICE_LABEL,
)
from deployments.manifests.platform import CLASS_RULES, CONDITION_RULES, PROVISIONER_RULES
from serving.domain.names.gke_names import COMPUTE_CLASS_LABEL, GKE_TOPOLOGY, HOST_INDEX_LABEL
from tests.control_plane.api import Api, reference

RECORDING = (
    Path(__file__).resolve().parents[2]
    / "shared/data/kuberay-recordings/07-multi-host-slices/1-scaled-to-three.json"
)
NAMESPACE, CLUSTER, SERVICE, ACCOUNT = "serving", "llm-abcde", "llm", "llm-head"
# Whose the recorded objects are by their labels.
INSTALLATION = "llm-tpu7x"
GENERATION, TOPOLOGY, NUM_HOSTS, CHIPS_PER_HOST = "tpu7x", "2x2x4", 4, 4
MAX_REPLICAS = 400
# More do not make the server faster.
_NUM_WRITERS = 8

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Group:
    """A worker group: its name and the compute class of its slices."""

    name: str
    compute_class: str


def pod_name(group: Group, number: int, host: int) -> str:
    """The name of the pod of a host of slice `number`."""
    return f"{CLUSTER}-{group.name}-worker-{number}-{host}"


def pod_address(number: int, host: int) -> str:
    """Its address."""
    return f"10.{number >> 8}.{number & 255}.{host}"


class LargeCluster:
    """Makes the objects through the API.

    Raises:
        FileNotFoundError: the recording is not beside the repository.
    """

    def __init__(self, api: Api, num_slices: int) -> None:
        self._api = api
        self._recorded = json.loads(RECORDING.read_text())
        self._num_slices = num_slices
        self.groups: list[Group] = []

    def make(self) -> None:
        """Makes namespace, rights, RayService, RayCluster and the pods of all slices, running."""
        for body in self._surroundings():
            self._api.apply(body)
        service = self._made(self._recorded["rayservices"][0], "RayService", SERVICE)
        specs = self._specs(self._recorded["rayclusters"][0]["spec"]["workerGroupSpecs"])
        service["spec"]["rayClusterConfig"]["workerGroupSpecs"] = specs
        service = self._api.create(service)
        cluster = self._made(self._recorded["rayclusters"][0], "RayCluster", CLUSTER)
        cluster["spec"]["workerGroupSpecs"] = specs
        cluster["metadata"]["ownerReferences"] = [_owner(service)]
        cluster = self._api.create(cluster)
        active = {"activeServiceStatus": {"rayClusterName": CLUSTER}}
        self._api.merge(service, {"status": active}, "status")
        with ThreadPoolExecutor(_NUM_WRITERS) as writers:
            list(writers.map(self._make_pod, self._pods(cluster)))

    def pod_bytes(self) -> int:
        """The size of one of its pods as the API returns it."""
        first = self._api.list("Pod", NAMESPACE, {GROUP_LABEL: self.groups[0].name})[0]
        return len(json.dumps(first, separators=(",", ":")))

    def touch_pods(self, condition: str) -> int:
        """Changes the status of every pod as kubelets do; returns the number of pods.

        Nothing that a plan needs is changed.
        """

        def touch(pod: Json) -> None:
            conditions = [*pod["status"]["conditions"], {"type": condition, "status": "True"}]
            self._api.merge(pod, {"status": {"conditions": conditions}}, "status")

        num_pods = 0
        for group in self.groups:
            pods = self._api.list("Pod", NAMESPACE, {GROUP_LABEL: group.name})
            with ThreadPoolExecutor(_NUM_WRITERS) as writers:
                list(writers.map(touch, pods))
            num_pods += len(pods)
        return num_pods

    def slice_names(self) -> Iterator[tuple[Group, str]]:
        """The slices, by turns of the groups."""
        for number in range(self._num_slices):
            group = self.groups[number % len(self.groups)]
            yield group, f"{group.name}-{number // len(self.groups)}"

    def _surroundings(self) -> Iterator[Json]:
        yield reference("Namespace", None, NAMESPACE)
        pod = self._recorded_host()
        for name in (ACCOUNT, "default", pod["spec"]["serviceAccountName"]):
            yield reference("ServiceAccount", NAMESPACE, name)
        priority = reference("PriorityClass", None, pod["spec"]["priorityClassName"])
        priority |= {"apiVersion": "scheduling.k8s.io/v1", "value": pod["spec"]["priority"]}
        yield priority | {"preemptionPolicy": pod["spec"]["preemptionPolicy"]}
        yield from _rights("Role", NAMESPACE, [*PROVISIONER_RULES, *CONDITION_RULES])
        yield from _rights("ClusterRole", None, CLASS_RULES)

    def _specs(self, recorded: Sequence[Json]) -> list[Json]:
        """The recorded groups of two hosts, as groups of four."""
        specs = []
        for spec in recorded:
            if spec["numOfHosts"] != 2:
                continue
            made = copy.deepcopy(spec)
            made["groupName"] = spec["groupName"].replace("2x2x2", TOPOLOGY)
            made |= {"numOfHosts": NUM_HOSTS, "maxReplicas": MAX_REPLICAS, "minReplicas": 0}
            made["template"]["spec"]["nodeSelector"][GKE_TOPOLOGY] = TOPOLOGY
            made["scaleStrategy"] = {}
            specs.append(made)
            self.groups.append(Group(made["groupName"], made["labels"][COMPUTE_CLASS_LABEL]))
        for number, made in enumerate(specs):
            made["replicas"] = len(range(number, self._num_slices, len(specs)))
        return specs

    def _pods(self, cluster: Json) -> Iterator[Json]:
        for number, (group, slice_name) in enumerate(self.slice_names()):
            for host in range(NUM_HOSTS):
                yield self._pod(cluster, group, slice_name, number, host)

    def _pod(self, cluster: Json, group: Group, slice_name: str, number: int, host: int) -> Json:
        pod = self._made(self._recorded_host(), "Pod", pod_name(group, number, host))
        pod["metadata"]["ownerReferences"] = [_owner(cluster)]
        pod["metadata"]["labels"] |= {
            CLUSTER_LABEL: CLUSTER,
            GROUP_LABEL: group.name,
            REPLICA_NAME_LABEL: f"{group.name}-{number}",
            REPLICA_INDEX_LABEL: slice_name.removeprefix(f"{group.name}-"),
            WEBHOOK_SLICE_LABEL: slice_name,
            HOST_INDEX_LABEL: str(host),
        }
        pod["spec"]["nodeName"] = f"gke-{number}-{host}"
        address = pod_address(number, host)
        pod["status"] |= {"podIP": address, "podIPs": [{"ip": address}]}
        return pod

    def _make_pod(self, pod: Json) -> None:
        status = pod.pop("status")
        self._api.merge(self._api.create(pod), {"status": status}, "status")

    def _recorded_host(self) -> Json:
        found: Json = next(
            pod
            for pod in self._recorded["pods"]
            if HOST_INDEX_LABEL in pod["metadata"]["labels"] and "hostname" in pod["spec"]
        )
        return found

    def _made(self, recorded: Json, kind: str, name: str) -> Json:
        body = copy.deepcopy(recorded) | reference(kind, NAMESPACE, name)
        kept = {key: recorded["metadata"].get(key) or {} for key in ("labels", "annotations")}
        body["metadata"] |= copy.deepcopy(kept)
        if kind != "Pod":
            body.pop("status", None)
        return body


def _rights(kind: str, namespace: str | None, rules: Sequence[Json]) -> Iterator[Json]:
    """Gives the account these rights, in a namespace or in the whole cluster."""
    yield reference(kind, namespace, "provisioner") | {"rules": [dict(rule) for rule in rules]}
    binding = reference(f"{kind}Binding", namespace, "provisioner")
    group = "rbac.authorization.k8s.io"
    binding["roleRef"] = {"apiGroup": group, "kind": kind, "name": "provisioner"}
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}
    yield binding | {"subjects": [subject]}


def _owner(body: Json) -> Json:
    metadata = body["metadata"]
    words = {key: body[key] for key in ("apiVersion", "kind")}
    return words | {"name": metadata["name"], "uid": metadata["uid"], "controller": True}
