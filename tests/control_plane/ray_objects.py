"""RayServices, RayClusters and worker pods in a namespace, from the manifests that we render.

No operator is there: tests make what KubeRay would make.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import yaml

from autoscaling.provisioning.raycluster import (
    CLUSTER_LABEL,
    GROUP_LABEL,
    NODE_TYPE_LABEL,
    REPLICA_INDEX_LABEL,
    REPLICA_NAME_LABEL,
)
from deployments.manifests.cluster_config import ClusterConfig
from deployments.manifests.platform import provisioner_rights, service_accounts
from deployments.manifests.render import render
from deployments.manifests.values import Values, parse_values
from serving.domain.names.gke_names import HOST_INDEX_LABEL
from tests.deployments.manifests.examples import ROOT

from .api import Api, RefusedByServerError, reference

Json = dict[str, Any]

SERVICE = "llm"
CLUSTER = "llm-abcde"
SPOT, RESERVED = "v6e-2x4-4t-spot", "v6e-2x4-4t-reserved"
NUM_HOSTS = 2
# Whoever deletes it stays deleted-to-be until a test takes this away.
FINALIZER = "tests.slicewise.io/held"
_numbers = itertools.count()


def values(namespace: str) -> Values:
    """The example on slices of two hosts, in a namespace."""
    raw = yaml.safe_load((ROOT / "deployments" / "values" / "example.yaml").read_text())
    raw["cluster"]["name"], raw["cluster"]["namespace"] = SERVICE, namespace
    raw["cluster"]["classes"][0] = {"compute_class": "reserved", "reservation": "ours"}
    wanted = {"generation": "v6e", "topology": "2x4", "chips_per_host": 4}
    (model,) = raw["applications"][0]["args"]["models"]
    model["deployments"] = [
        {"compute_class": name, "slice": wanted} for name in ("reserved", "spot")
    ]
    return parse_values(raw, None)


@contextmanager
def made_namespace(api: Api) -> Iterator[Values]:
    """A namespace of its own, with our service accounts and rights; emptied afterwards."""
    namespace = f"watch-{next(_numbers)}"
    api.apply(reference("Namespace", None, namespace))
    api.apply(reference("ServiceAccount", namespace, "default"))
    found = values(namespace)
    for body in (*service_accounts(found.cluster), *provisioner_rights(found.cluster)):
        api.apply(body)
    try:
        yield found
    finally:
        for kind in ("RayService", "RayCluster", "Pod"):
            for body in api.list(kind, namespace):
                with suppress(RefusedByServerError):  # gone with its owner
                    api.merge(body, {"metadata": {"finalizers": None}})
                    api.delete(body)
        for body in provisioner_rights(found.cluster):
            if "namespace" not in body["metadata"]:
                api.delete(body)


def make_service(api: Api, found: Values) -> Json:
    """The RayService as rendered."""
    text = render(found, "values.yaml")["kuberay/rayservice/rayservice.yaml"]
    return api.apply(yaml.safe_load(text))


def make_cluster(api: Api, service: Json, name: str = CLUSTER) -> Json:
    """The RayCluster that KubeRay would make of it, which is the active one from then on."""
    namespace = service["metadata"]["namespace"]
    body = reference("RayCluster", namespace, name)
    body["metadata"]["ownerReferences"] = [owner(service)]
    body["spec"] = service["spec"]["rayClusterConfig"]
    made = api.create(body)
    active = {"activeServiceStatus": {"rayClusterName": name}}
    api.merge(service, {"status": active}, "status")
    return made


def owner(body: Json) -> Json:
    """What an object that it made says of it."""
    metadata = body["metadata"]
    words = {key: body[key] for key in ("apiVersion", "kind")}
    return words | {"name": metadata["name"], "uid": metadata["uid"], "controller": True}


def host_pods(
    cluster: Json, group: str, index: int, *, finalizers: Sequence[str] = ()
) -> list[Json]:
    """The pods of a new slice, to be created. No scheduler looks at them."""
    number, metadata = next(_numbers), cluster["metadata"]
    pods = []
    for host in range(NUM_HOSTS):
        pod = reference("Pod", metadata["namespace"], f"{group}-{number}-{host}")
        pod["metadata"] |= {
            "labels": {
                CLUSTER_LABEL: metadata["name"],
                NODE_TYPE_LABEL: "worker",
                GROUP_LABEL: group,
                REPLICA_NAME_LABEL: f"{group}-{number}",
                REPLICA_INDEX_LABEL: str(index),
                HOST_INDEX_LABEL: str(host),
            },
            "ownerReferences": [owner(cluster)],
            "finalizers": list(finalizers),
        }
        pod["spec"] = {
            "schedulerName": "nobody",
            "containers": [{"name": "ray-worker", "image": "none"}],
        }
        pods.append(pod)
    return pods


def make_slice(api: Api, cluster: Json, group: str, index: int, **options: Any) -> list[Json]:
    """Creates the pods of a slice, which do not run yet."""
    return [api.create(pod) for pod in host_pods(cluster, group, index, **options)]


def run_pod(api: Api, pod: Json, address: str) -> None:
    """What a kubelet would say of a pod that runs."""
    api.merge(pod, {"status": {"phase": "Running", "podIP": address}}, "status")


def set_count(api: Api, cluster: Json, group: str, count: int) -> None:
    """Another writer changes the count of a group."""
    specs = cluster["spec"]["workerGroupSpecs"]
    position = next(i for i, spec in enumerate(specs) if spec["groupName"] == group)
    path = f"/spec/workerGroupSpecs/{position}/replicas"
    api.patch(cluster, [{"op": "replace", "path": path, "value": count}])


def service_account(config: ClusterConfig) -> str:
    """The head's, under which the provisioner acts."""
    _, binding, *_ = provisioner_rights(config)
    name: str = binding["subjects"][0]["name"]
    return name
