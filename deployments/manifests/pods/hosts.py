"""Renders the pods of hosts of slices. Pure."""

from deployments.manifests.cluster_config import ClusterConfig
from deployments.manifests.hosts.environment import (
    CACHE_FOLDER,
    cache_volume,
    host_environment,
    host_memory_gib,
    reconnect,
)
from deployments.manifests.hosts.exporter import (
    LIBTPU_PORT_NAME,
    RUN_VOLUME,
    exporter_container,
)
from deployments.manifests.hosts.kernel import init_containers
from deployments.manifests.hosts.rights import host_container_security, host_pod_security
from deployments.manifests.names import (
    METRICS_PORT,
    NETWORK_CLAIMS,
    RUN_FOLDER,
    Component,
    Json,
    priority_class,
    service_account,
)
from deployments.manifests.pods.environment import secret_volumes
from deployments.manifests.pods.parts import (
    USER,
    agent_ready,
    container_security,
    memory_volume,
    mount_bucket,
    pod_template,
    ray_container,
)
from deployments.manifests.slice_groups import SliceGroup
from deployments.manifests.values import Values
from serving.config.slice_spec import RUN_DIR_VARIABLE
from serving.domain.names.gke_names import (
    COMPUTE_CLASS_LABEL,
    GKE_ACCELERATOR,
    GKE_CHIPS,
    GKE_COMPUTE_CLASS,
    GKE_TOPOLOGY,
    HOST_INDEX_LABEL,
)
from serving.slices.local.notes import END_WITHIN_VARIABLE
from serving.tpu.chips import LIBTPU_PORT

# Tells the agents of a host; needs neither Ray nor a network. `-I`: the image's Python, as it is.
_TELL_AGENT = ("python", "-I", "-m", "serving.slices.local.tell_agent")
NODE_READER_MODULE = "autoscaling.node_reader"
_TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"  # where every program looks


def host_template(values: Values, group: SliceGroup) -> Json:
    """Returns one host of a slice of `group`: all of its chips, and time to drain at its end."""
    cluster, shape = values.cluster, group.shape
    memory_gib = host_memory_gib(cluster.host, shape)
    size = {
        "cpu": str(cluster.host.cpus_per_chip * shape.chips_per_host),
        "memory": f"{memory_gib}Gi",
        GKE_CHIPS: str(shape.chips_per_host),
    }
    ports = {"metrics": METRICS_PORT, LIBTPU_PORT_NAME: LIBTPU_PORT}
    container = ray_container(values, "ray-worker", cluster.images.tpu, size, ports)
    container["env"] += [*reconnect(cluster), *host_environment(cluster.host, shape)]
    container["securityContext"] = host_container_security(cluster.host)
    # No proxy runs here, which is what KubeRay would wait for.
    container["readinessProbe"] = agent_ready()
    # Where nobody holds the slice, as on one that was dropped by name, it returns at once. Ray is
    # not told: its node ends by the signal that follows, before it could be given anything.
    container["lifecycle"] = {"preStop": {"exec": {"command": list(_TELL_AGENT)}}}
    container["env"] += [{"name": END_WITHIN_VARIABLE, "value": str(group.end_within_s)}]
    container["volumeMounts"] += [
        {"name": "cache", "mountPath": CACHE_FOLDER},
        {"name": RUN_VOLUME, "mountPath": RUN_FOLDER},
    ]
    spec: Json = {
        "automountServiceAccountToken": False,
        "containers": [container],
        "initContainers": [
            *init_containers(cluster, group),
            _node_reader(cluster),
            exporter_container(cluster.images.tpu, group),
        ],
        "nodeSelector": {
            GKE_COMPUTE_CLASS: group.name,
            GKE_ACCELERATOR: shape.gke_accelerator,
            GKE_TOPOLOGY: shape.topology,
        },
        "priorityClassName": priority_class(cluster, Component.ENGINE),
        "securityContext": host_pod_security(cluster.host, USER),
        "serviceAccountName": service_account(cluster, Component.ENGINE),
        "terminationGracePeriodSeconds": group.grace_s,
        # None for spot or flex-start: nodes of a class have no such taint, and with flex-start's
        # GKE refuses every other rule.
        "tolerations": [
            {"key": GKE_CHIPS, "operator": "Exists", "effect": "NoSchedule"},
            {
                "key": GKE_COMPUTE_CLASS,
                "operator": "Equal",
                "value": group.name,
                "effect": "NoSchedule",
            },
        ],
        "volumes": [
            memory_volume("dshm", max(4, memory_gib // 2)),
            cache_volume(cluster.host.cache),
            {"name": RUN_VOLUME, "emptyDir": {}},
            _node_reader_token(),
            *secret_volumes(values, is_gateway=False),
        ],
    }
    template = pod_template(cluster, Component.ENGINE, spec)
    template["metadata"]["labels"][COMPUTE_CLASS_LABEL] = group.terms.name
    if shape.num_hosts == 1:
        template["metadata"]["labels"][HOST_INDEX_LABEL] = "0"
    if cluster.bucket is not None:
        mount_bucket(template, cluster.bucket)
    if cluster.dranet:
        spec["resourceClaims"] = [{"name": "netdev", "resourceClaimTemplateName": NETWORK_CLAIMS}]
        container["resources"]["claims"] = [{"name": "netdev"}]
    return template


def _node_reader(cluster: ClusterConfig) -> Json:
    """Returns the container that tells the host's agent what Kubernetes announces of its node.

    In the pod and not once a node: it shares a folder of the pod with the agent, which needs
    neither root nor a folder of the node, and lives exactly as long as the host. It runs the host's
    image, which is there.
    """
    field = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    # Measured: 36 MiB resident on Linux x86-64, Python 3.11, 2026-11-23; idle but for a bookmark
    # each minute.
    size = {"cpu": "10m", "memory": "96Mi"}
    return {
        "name": "node-reader",
        "image": cluster.images.tpu,
        # A sidecar: it begins before Ray and ends after it.
        "restartPolicy": "Always",
        "command": ["python", "-m", NODE_READER_MODULE],
        "env": [
            {"name": "NODE_NAME", "valueFrom": field},
            {"name": RUN_DIR_VARIABLE, "value": RUN_FOLDER},
        ],
        "resources": {"requests": dict(size), "limits": {"memory": size["memory"]}},
        "securityContext": container_security() | {"readOnlyRootFilesystem": True},
        "volumeMounts": [
            {"name": "node-reader-token", "mountPath": _TOKEN_FOLDER, "readOnly": True},
            {"name": RUN_VOLUME, "mountPath": RUN_FOLDER},
        ],
    }


def _node_reader_token() -> Json:
    """Returns what Kubernetes would mount into every container, for the one that needs it."""
    certificate = {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    token = {"path": "token", "expirationSeconds": 3607}  # as Kubernetes' own
    sources = [{"serviceAccountToken": token}, {"configMap": certificate}]
    return {"name": "node-reader-token", "projected": {"defaultMode": 0o440, "sources": sources}}
