"""The TPU exporter beside Ray in the pod of each TPU host. Pure.

It is a sidecar because a runtime's metric service is reached within its pod, and the pod is what
tells slice, host and model. Nothing runs once a node: the exporter's other source, the device
plugin's page, is reached from the pod as well, and a node without a pod of ours has no chips of
ours.

The TPU webhook writes TPU_NAME and TPU_WORKER_ID into containers that ask for chips, and the device
plugin its variables too; this one asks for none. So it has the slice from the labels that KubeRay
gives each pod at its creation, and the rest from the rendering. Both names are then the ones that
Slicewise has: group, `-`, KubeRay's index.
"""

from deployments.manifests.names import EXPORTER_PORT, EXPORTER_PORT_NAME, RUN_FOLDER, Json
from deployments.manifests.slice_groups import SliceGroup
from serving.domain.names.gke_names import HOST_INDEX_LABEL
from serving.tpu.chips import metrics_ports

# Of the run folder, in which processes of ours say what they work for; all containers share it.
RUN_VOLUME = "run"
# GKE collects duty cycle and memory where libtpu's port is declared. Source: google/skills,
# `gke-ai-troubleshooting-tpu-metrics-monitoring` at 1af7775, read 2026-11-20.
LIBTPU_PORT_NAME = "libtpu"
# The port of GKE's TPU device plugin. Source: tpu-metrics page of GKE, read 2026-11-20.
_DEVICE_PLUGIN_PORT = 2112
_REPLICA_INDEX_LABEL = "ray.io/worker-group-replica-index"
_USER = 1000


def exporter_container(image: str, group: SliceGroup) -> Json:
    """Returns the sidecar: it restarts by itself, and holds up neither start nor end of the pod."""
    shape, size = group.shape, {"cpu": "100m", "memory": "192Mi"}
    return {
        "name": "tpu-exporter",
        "image": image,
        # Kubernetes restarts it by itself; it restarts no container of a Ray pod.
        "restartPolicy": "Always",
        "command": ["python", "-m", "serving.exporters"],
        "args": [
            f"--port={EXPORTER_PORT}",
            *(f"--libtpu=127.0.0.1:{port}" for port in metrics_ports(shape, group.num_engines)),
            f"--device-plugin=$(NODE_IP):{_DEVICE_PLUGIN_PORT}",
            f"--run-dir={RUN_FOLDER}",
            f"--expected-chips={shape.chips_per_host}",
        ],
        "env": _identity(group),
        "ports": [{"containerPort": EXPORTER_PORT, "name": EXPORTER_PORT_NAME}],
        "resources": {"requests": dict(size), "limits": dict(size)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": _USER,
        },
        "volumeMounts": [{"name": RUN_VOLUME, "mountPath": RUN_FOLDER, "readOnly": True}],
    }


def _identity(group: SliceGroup) -> list[Json]:
    """Returns the variables of `serving.exporters.identity`."""
    shape = group.shape
    return [
        _field("NODE_IP", "status.hostIP"),
        _field("SLICEWISE_NODE", "spec.nodeName"),
        _field("SLICE_INDEX", f"metadata.labels['{_REPLICA_INDEX_LABEL}']"),
        {"name": "SLICEWISE_SLICE", "value": f"{group.name}-$(SLICE_INDEX)"},
        _field("SLICEWISE_WORKER", f"metadata.labels['{HOST_INDEX_LABEL}']"),
        {"name": "SLICEWISE_ACCELERATOR", "value": shape.ray_pod_type},
        {"name": "SLICEWISE_TOPOLOGY", "value": shape.topology},
        {"name": "SLICEWISE_COMPUTE_CLASS", "value": group.terms.name},
    ]


def _field(name: str, path: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
