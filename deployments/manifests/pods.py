"""Renders the pods of a Ray cluster: head, gateways, hosts of slices. Pure.

No pod but a TPU host's runs as root, and none has a secret in it: Secrets are referred to by name.
"""

import math
import shlex

from deployments.manifests.cluster_config import ClusterConfig, PodConfig, Provisioning
from deployments.manifests.compute_classes import control_class_name
from deployments.manifests.hosts.environment import (
    CACHE_FOLDER,
    cache_volume,
    host_environment,
    host_memory_gib,
    reconnect,
)
from deployments.manifests.hosts.exporter import (
    LIBTPU_PORT,
    LIBTPU_PORT_NAME,
    RUN_VOLUME,
    exporter_container,
)
from deployments.manifests.hosts.kernel import init_containers
from deployments.manifests.hosts.rights import host_container_security, host_pod_security
from deployments.manifests.names import (
    DASHBOARD_PORT,
    DATA_FOLDER,
    METRICS_PORT,
    NETWORK_CLAIMS,
    PROVISIONER_PORT,
    READY_PATH,
    RUN_FOLDER,
    SERVE_PORT,
    Component,
    Json,
    component_labels,
    gateway_port,
    priority_class,
    service_account,
)
from deployments.manifests.pod_environment import (
    TOKEN_KEY,
    environment,
    from_secret,
    secret_mounts,
    secret_volumes,
)
from deployments.manifests.slice_groups import NODE_END_S, SliceGroup
from deployments.manifests.values import Values
from serving.config.slice_spec import RUN_DIR_VARIABLE
from serving.domain.gke_names import (
    COMPUTE_CLASS_LABEL,
    GKE_ACCELERATOR,
    GKE_CHIPS,
    GKE_COMPUTE_CLASS,
    GKE_TOPOLOGY,
    HOST_INDEX_LABEL,
)
from serving.slices.local.notes import END_WITHIN_VARIABLE

_USER = 1000
_RAY_FOLDER = "/tmp/ray"  # in the pod, where Ray's processes find each other
# KubeRay's own name for it: of another one it makes a second, for the autoscaler beside the head
# alone. Source: KubeRay 1.7.0 `common/pod.go`, read 2026-11-23.
_RAY_VOLUME = "ray-logs"
_GCS_PORT = 6379
# Ray's agent on every node: whether its raylet lives. Source: Ray 2.60, read 2026-11-22.
_AGENT_PORT, _AGENT_HEALTH = 52365, "/api/healthz"
# Tells the agents of a host; needs neither Ray nor a network. `-I`: the image's Python, as it is.
_TELL_AGENT = ("python", "-I", "-m", "serving.slices.local.tell_agent")
NODE_READER_MODULE = "autoscaling.node_reader"
_TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"  # where every program looks
# Nothing of the application is on it, so there is nothing to wait for but its own end.
_HEAD_GRACE_S = 120
# Serve ends a gateway whose node drains once another one has taken its place.
_SUCCESSOR_S = 120


def head_template(values: Values) -> Json:
    """The head, with the slice provisioner beside Ray."""
    cluster = values.cluster
    ports = {
        "gcs-server": _GCS_PORT,
        "dashboard": DASHBOARD_PORT,
        "metrics": METRICS_PORT,
        # Its proxy serves nobody but Prometheus.
        "serve": SERVE_PORT,
    }
    container = _container(values, "ray-head", cluster.images.cpu, _size(cluster.head), ports)
    spec = _control_spec(cluster, Component.HEAD, _HEAD_GRACE_S)
    # It patches worker groups, as Ray's autoscaler does.
    spec["automountServiceAccountToken"] = True
    spec |= {"containers": [container], "initContainers": [_provisioner(values)]}
    spec["volumes"] = [
        _memory("dshm", 4),
        {"name": _RAY_VOLUME, "emptyDir": {}},
        *secret_volumes(values),
    ]
    container["volumeMounts"] += [{"name": _RAY_VOLUME, "mountPath": _RAY_FOLDER}]
    return _template(cluster, Component.HEAD, spec)


def gateway_template(values: Values) -> Json:
    """Returns one gateway's pod: Serve's proxy, gateways, the directory and slice replicas.

    At its end all of them have time to leave; it is gone as soon as they have.
    """
    cluster = values.cluster
    ports = {"serve": SERVE_PORT, "metrics": METRICS_PORT}
    # Each gateway's own page: Prometheus looks only at ports that are declared.
    ports |= {gateway_port(n): port for n, port in enumerate(values.app.gateway.metrics_ports)}
    size = _size(cluster.gateway_pod)
    container = _container(values, "ray-worker", cluster.images.cpu, size, ports)
    container["env"] += reconnect(cluster)
    # Traffic goes where a proxy reaches a gateway, once its cluster has had an engine.
    container["readinessProbe"] = _ready(READY_PATH, SERVE_PORT)
    leave_s = math.ceil(values.app.rollout.gateway_drain_s) + _SUCCESSOR_S
    # A head that is away, as it may be in the same upgrade, is told once it is back.
    tell = f"until {_drain_command(leave_s)}; do sleep 5; done"
    container["lifecycle"] = _before_end(f"{tell}; sleep {leave_s}")
    spec = _control_spec(cluster, Component.GATEWAY, leave_s + NODE_END_S)
    spec |= {"containers": [container]}
    spec["volumes"] = [_memory("dshm", 4), *secret_volumes(values)]
    spec["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": component_labels(cluster, Component.GATEWAY)},
        }
    ]
    template = _template(cluster, Component.GATEWAY, spec)
    if cluster.bucket is not None:
        _mount_bucket(template, cluster.bucket)
    return template


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
    container = _container(values, "ray-worker", cluster.images.tpu, size, ports)
    container["env"] += [*reconnect(cluster), *host_environment(cluster.host, shape)]
    container["securityContext"] = host_container_security(cluster.host)
    # No proxy runs here, which is what KubeRay would wait for.
    container["readinessProbe"] = _ready(_AGENT_HEALTH, _AGENT_PORT)
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
        "securityContext": host_pod_security(cluster.host, _USER),
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
            _memory("dshm", max(4, memory_gib // 2)),
            cache_volume(cluster.host.cache),
            {"name": RUN_VOLUME, "emptyDir": {}},
            _node_reader_token(),
            *secret_volumes(values, is_gateway=False),
        ],
    }
    template = _template(cluster, Component.ENGINE, spec)
    template["metadata"]["labels"][COMPUTE_CLASS_LABEL] = group.terms.name
    if shape.num_hosts == 1:
        template["metadata"]["labels"][HOST_INDEX_LABEL] = "0"
    if cluster.bucket is not None:
        _mount_bucket(template, cluster.bucket)
    if cluster.dranet:
        spec["resourceClaims"] = [{"name": "netdev", "resourceClaimTemplateName": NETWORK_CLAIMS}]
        container["resources"]["claims"] = [{"name": "netdev"}]
    return template


def _drain_command(deadline_s: int) -> str:
    """Returns what tells Ray in a pod that its node ends in so long: all that is there leaves."""
    return (
        "ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION "
        f"--reason-message 'its pod is deleted' --deadline-remaining-seconds {deadline_s}"
    )


def _before_end(command: str) -> Json:
    """What a container does before it is ended; if its Ray node ends sooner, so does this."""
    return {"preStop": {"exec": {"command": ["/bin/sh", "-c", command]}}}


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


def _provisioner(values: Values) -> Json:
    cluster = values.cluster
    provision = (
        f"slicewise provision --namespace={cluster.namespace} "
        f'--raycluster="$RAYCLUSTER" --application={shlex.quote(values.application)} '
        f"--installation={cluster.name} --metrics-port={PROVISIONER_PORT}"
    )
    wait = (
        f"until ray health-check --address 127.0.0.1:{_GCS_PORT} >/dev/null 2>&1; do sleep 2; done"
    )
    size = {"cpu": "500m", "memory": "1Gi"}
    field = "metadata.labels['ray.io/cluster']"
    return {
        "name": "slice-provisioner",
        "image": cluster.images.cpu,
        # A sidecar, which Kubernetes restarts by itself; it restarts no container of a Ray pod.
        "restartPolicy": "Always",
        "command": ["/bin/sh", "-c", f"{wait}; exec {provision}"],
        "env": [
            {"name": "RAYCLUSTER", "valueFrom": {"fieldRef": {"fieldPath": field}}},
            {"name": "RAY_AUTH_MODE", "value": "token"},
            from_secret("RAY_AUTH_TOKEN", cluster.secrets.ray_token, TOKEN_KEY),
        ],
        "ports": [{"containerPort": PROVISIONER_PORT, "name": "provisioner"}],
        "resources": {"requests": dict(size), "limits": dict(size)},
        "securityContext": container_security(),
        "volumeMounts": [{"name": _RAY_VOLUME, "mountPath": _RAY_FOLDER}],
    }


def _container(
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


def _mount_bucket(template: Json, bucket: str) -> None:
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


def _control_spec(cluster: ClusterConfig, component: Component, grace_s: int) -> Json:
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


def _template(cluster: ClusterConfig, component: Component, spec: Json) -> Json:
    return {
        "metadata": {
            "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
            "labels": component_labels(cluster, component),
        },
        "spec": spec,
    }


def _ready(path: str, port: int) -> Json:
    # KubeRay's own for workers of a RayService runs wget, which no image has.
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": 5,
        "timeoutSeconds": 2,
        "failureThreshold": 2,
    }


def _size(pod: PodConfig) -> dict[str, str]:
    return {"cpu": str(pod.cpus), "memory": f"{pod.memory_gib}Gi"}


def _memory(name: str, gib: int) -> Json:
    return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": f"{gib}Gi"}}


def pod_security() -> Json:
    """The security context of a pod that does not run as root."""
    return {
        "fsGroup": _USER,
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Json:
    """The security context of a container that gets no more rights than it begins with."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
