"""The parts that pods of several kinds have in common. Pure.

No pod but a TPU host's runs as root, and none has a secret in it: Secrets are referred to by name.
"""

from deployments.manifests.cluster_config import ClusterConfig, PodConfig, Provisioning
from deployments.manifests.compute_classes import control_class_name
from deployments.manifests.names import (
    DATA_FOLDER,
    Component,
    Json,
    component_labels,
    priority_class,
    service_account,
)
from deployments.manifests.pods.environment import environment, secret_mounts
from deployments.manifests.values import Values
from serving.domain.names.gke_names import GKE_COMPUTE_CLASS

USER = 1000
# Ray's agent on every node: whether its raylet lives. Source: Ray 2.60, read 2026-11-22.
_AGENT_PORT, _AGENT_HEALTH = 52365, "/api/healthz"


def ray_container(
    values: Values, name: str, image: str, size: dict[str, str], ports: dict[str, int]
) -> Json:
    """Returns Ray's container, the first of its pod, as KubeRay requires."""
    is_gateway = name == "ray-head" or "serve" in ports
    return {
        "name": name,
        "image": image,
        "env": environment(values, is_gateway=is_gateway),
        "ports": [{"containerPort": number, "name": port} for port, number in ports.items()],
        "resources": {"requests": dict(size), "limits": dict(size)},
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": "dshm", "mountPath": "/dev/shm"},  # the pod's own
            *secret_mounts(values, is_gateway=is_gateway),
        ],
    }


def mount_bucket(template: Json, bucket: str) -> None:
    """Mounts the bucket by GKE's driver. Its sidecar has no limits, because weights are large."""
    limits = {f"gke-gcsfuse/{what}-limit": "0" for what in ("cpu", "memory", "ephemeral-storage")}
    template["metadata"]["annotations"] |= {"gke-gcsfuse/volumes": "true"} | limits
    spec = template["spec"]
    # By it the sidecar gets the pod's identity, and with it the right to read.
    spec["automountServiceAccountToken"] = True
    spec["volumes"].append(
        {
            "name": "data",
            "csi": {
                "driver": "gcsfuse.csi.storage.gke.io",
                "readOnly": True,
                "volumeAttributes": {"bucketName": bucket, "mountOptions": "implicit-dirs"},
            },
        }
    )
    mount = {"name": "data", "mountPath": DATA_FOLDER, "readOnly": True}
    spec["containers"][0]["volumeMounts"].append(mount)


def control_spec(cluster: ClusterConfig, component: Component, grace_s: int) -> Json:
    """Returns what pods off TPU hosts have in common; `grace_s` is for their end."""
    spec: Json = {
        "automountServiceAccountToken": False,
        "priorityClassName": priority_class(cluster, component),
        "securityContext": pod_security(),
        "serviceAccountName": service_account(cluster, component),
        "terminationGracePeriodSeconds": grace_s,
    }
    if cluster.provisioning == Provisioning.AUTO:
        spec["nodeSelector"] = {GKE_COMPUTE_CLASS: control_class_name(cluster)}
    return spec


def pod_template(cluster: ClusterConfig, component: Component, spec: Json) -> Json:
    """Returns the template of a component's pods."""
    return {
        "metadata": {
            "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
            "labels": component_labels(cluster, component),
        },
        "spec": spec,
    }


def ready(path: str, port: int) -> Json:
    """Returns the probe by which a pod takes requests."""
    # KubeRay's own for workers of a RayService runs wget, which no image has.
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": 5,
        "timeoutSeconds": 2,
        "failureThreshold": 2,
    }


def agent_ready() -> Json:
    """Returns the probe of a pod that serves no requests: Ray's agent answers."""
    return ready(_AGENT_HEALTH, _AGENT_PORT)


def size_of(pod: PodConfig) -> dict[str, str]:
    """Returns what Ray's container asks for."""
    return {"cpu": str(pod.cpus), "memory": f"{pod.memory_gib}Gi"}


def memory_volume(name: str, gib: int) -> Json:
    """Returns a volume in memory, up to `gib`."""
    return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": f"{gib}Gi"}}


def pod_security() -> Json:
    """The security context of a pod that does not run as root."""
    return {
        "fsGroup": USER,
        "runAsNonRoot": True,
        "runAsUser": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Json:
    """The security context of a container that gets no more rights than it begins with."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
