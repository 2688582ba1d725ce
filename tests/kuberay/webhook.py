"""What the TPU webhook writes into a new pod with chips. Pure.

Followed from what kuberay-tpu-webhook 1.3.5 did to pods (`tests/data/kuberay`). Where a pod has
KubeRay's index of its slice and an index of its own, it goes by them. Otherwise it counts the names
that the group's other slices have, and takes the number for the new one's index, whether there is a
slice of that name or not.
"""

import copy
import math
from collections.abc import Iterable
from typing import Any

from autoscaling.provisioning.raycluster import (
    CLUSTER_LABEL,
    GROUP_LABEL,
    REPLICA_INDEX_LABEL,
    REPLICA_NAME_LABEL,
    WEBHOOK_SLICE_LABEL,
)
from serving.domain.names.gke_names import (
    GKE_ACCELERATOR,
    GKE_CHIPS,
    GKE_TOPOLOGY,
    HOST_INDEX_LABEL,
)

Json = dict[str, Any]

NAME, WORKER_ID = "TPU_NAME", "TPU_WORKER_ID"
_POOL = "cloud.google.com/gke-nodepool"
_PROCESS_PORT, _DEVICE_PLUGIN_PORT = 8471, 2112
# Generations whose chips are told of their processes.
_WITH_PROCESSES = ("tpu7x",)


def has_chips(pod: Json) -> bool:
    """Whether the webhook has anything to say to a pod."""
    return _chips(pod["spec"]["containers"][0]) > 0


def admitted(pod: Json, others: Iterable[Json]) -> Json:
    """A new pod as the webhook lets it in. `others` are those of its group that stay."""
    pod = copy.deepcopy(pod)
    if not has_chips(pod):
        return pod
    labels, spec = pod["metadata"]["labels"], pod["spec"]
    name, worker_id = _identity(labels, others)
    told: list[Json] = []
    hosts = num_hosts(spec)
    if hosts > 1:
        cluster = labels[CLUSTER_LABEL]
        spec |= {"hostname": f"{name}-{worker_id}", "subdomain": f"{cluster}-headless"}
        spec["affinity"] = _affinity(cluster, labels.get(REPLICA_NAME_LABEL, name))
        told += _neighbours(spec, [f"{name}-{host}.{spec['subdomain']}" for host in range(hosts)])
    told += [_variable(WORKER_ID, worker_id), _variable(NAME, name)]
    address = {"fieldRef": {"fieldPath": "status.hostIP"}}
    told += [
        {"name": "TPU_DEVICE_PLUGIN_HOST_IP", "valueFrom": address},
        _variable("TPU_DEVICE_PLUGIN_ADDR", f"$(TPU_DEVICE_PLUGIN_HOST_IP):{_DEVICE_PLUGIN_PORT}"),
    ]
    spec["containers"][0].setdefault("env", []).extend(told)
    return pod


def told_to(pod: Json) -> dict[str, str]:
    """The variables of a host whose values are written in its pod."""
    return {
        each["name"]: each["value"]
        for each in pod["spec"]["containers"][0].get("env", ())
        if "value" in each
    }


def num_hosts(spec: Json) -> int:
    """The hosts of a slice, by the spec of one of its pods: all its chips by those of a host."""
    chips = _chips(spec["containers"][0])
    if chips == 0:
        return 1
    return math.prod(map(int, spec["nodeSelector"][GKE_TOPOLOGY].split("x"))) // chips


def _identity(labels: dict[str, str], others: Iterable[Json]) -> tuple[str, str]:
    """Name of the slice and number of the host."""
    group = labels[GROUP_LABEL]
    if HOST_INDEX_LABEL in labels and REPLICA_INDEX_LABEL in labels:
        return f"{group}-{labels[REPLICA_INDEX_LABEL]}", labels[HOST_INDEX_LABEL]
    told = [found for found in map(told_to, others) if NAME in found]
    name = f"{group}-{len({each[NAME] for each in told})}"
    used = {int(each[WORKER_ID]) for each in told if each[NAME] == name}
    labels[WEBHOOK_SLICE_LABEL] = name
    return name, str(min(set(range(len(used) + 1)) - used))


def _neighbours(spec: Json, hosts: list[str]) -> list[Json]:
    """What each host of a slice is told of all of them."""
    told = [_variable("TPU_WORKER_HOSTNAMES", ",".join(hosts))]
    if spec["nodeSelector"][GKE_ACCELERATOR] in _WITH_PROCESSES:
        addresses = ",".join(f"{host}:{_PROCESS_PORT}" for host in hosts)
        told.append(_variable("TPU_PROCESS_ADDRESSES", addresses))
        told.append(_variable("TPU_PROCESS_PORT", str(_PROCESS_PORT)))
    return told


def _affinity(cluster: str, replica: str) -> Json:
    """All hosts of a slice in one node pool, and nobody else's in it."""

    def of(*expressions: Json) -> Json:
        return {"labelSelector": {"matchExpressions": list(expressions)}, "topologyKey": _POOL}

    def has(key: str, operator: str, *values: str) -> Json:
        return {"key": key, "operator": operator} | ({"values": list(values)} if values else {})

    ours = has(CLUSTER_LABEL, "In", cluster)
    others = of(has(CLUSTER_LABEL, "NotIn", cluster), has(REPLICA_NAME_LABEL, "Exists"))
    name = "kubernetes.io/metadata.name"
    others["namespaceSelector"] = {"matchExpressions": [has(name, "NotIn", "kube-system")]}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    return {
        "podAffinity": {required: [of(has(REPLICA_NAME_LABEL, "In", replica), ours)]},
        "podAntiAffinity": {
            required: [of(has(REPLICA_NAME_LABEL, "NotIn", replica), ours), others]
        },
    }


def _chips(container: Json) -> int:
    return int(container.get("resources", {}).get("limits", {}).get(GKE_CHIPS, 0))


def _variable(name: str, value: str) -> Json:
    return {"name": name, "value": value}
