"""The pods that KubeRay makes of a RayCluster: labels, variables, start commands. Pure.

Followed from what KubeRay 1.7.0 made of our manifests (`tests/data/kuberay/recorded`); the
conformance tests hold one against the other. What no recording shows is left to the API server's
defaults: probes, volumes and ports that our manifests always bring themselves.
"""

import copy
from collections.abc import Mapping
from typing import Any

from autoscaling.provisioning.raycluster import (
    CLUSTER_LABEL,
    GROUP_LABEL,
    NODE_TYPE_LABEL,
    REPLICA_INDEX_LABEL,
    REPLICA_NAME_LABEL,
)
from serving.domain.names.gke_names import GKE_CHIPS, HOST_INDEX_LABEL

from .quantities import cores, num_bytes

Json = dict[str, Any]

VERSION = "v1.7.0"
OURS = {"app.kubernetes.io/created-by": "kuberay-operator", "app.kubernetes.io/name": "kuberay"}
SERVICE_KIND_LABEL, SERVICE_NAME_LABEL = (
    "ray.io/originated-from-crd",
    "ray.io/originated-from-cr-name",
)
_AGENT_PORT, _METRICS_PORT, _GCS_PORT = "52365", "8080", "6379"
_RECREATE_HASH = "ray.io/upgrade-strategy-recreate-hash"
# Ray Serve waits shorter for a lost head than Ray itself; only where a RayService asks for it.
_OF_SERVICES = {
    "RAY_timeout_ms_task_wait_for_death_info": "0",
    "RAY_gcs_server_request_timeout_seconds": "5",
    "RAY_SERVE_KV_TIMEOUT_S": "5",
}
_FROM_POD = {
    "RAY_CLUSTER_NAME": f"metadata.labels['{CLUSTER_LABEL}']",
    "RAY_CLUSTER_NAMESPACE": "metadata.namespace",
    "RAY_CLOUD_INSTANCE_ID": "metadata.name",
    "RAY_NODE_TYPE_NAME": f"metadata.labels['{GROUP_LABEL}']",
}


def head_pod(cluster: Json, spec_hash: str) -> Json:
    """The head's pod, without a name yet. `spec_hash` is of the cluster's spec."""
    name, spec = cluster["metadata"]["name"], cluster["spec"]
    pod = _pod(cluster, spec["headGroupSpec"]["template"], f"{name}-head-")
    metadata, pod_spec = pod["metadata"], pod["spec"]
    metadata["labels"] = _labels(name, "head", "headgroup", f"{name}-head") | metadata["labels"]
    if is_of_service(cluster):
        metadata["labels"].setdefault("ray.io/serve", "false")
    metadata["annotations"] |= {"ray.io/kuberay-version": VERSION, _RECREATE_HASH: spec_hash}
    ray = pod_spec["containers"][0]
    env = _Variables(ray)
    has_autoscaler = bool(spec.get("enableInTreeAutoscaling"))
    if has_autoscaler and _autoscaler_version(spec) == "v2":
        env.set("RAY_enable_autoscaler_v2", "true")
    options = spec.get("gcsFaultToleranceOptions")
    if options:
        uid = cluster["metadata"]["uid"]
        metadata["annotations"] |= {
            "ray.io/external-storage-namespace": uid,
            "ray.io/ft-enabled": "true",
        }
        env.set("RAY_external_storage_namespace", uid)
        env.set("RAY_REDIS_ADDRESS", options["redisAddress"])
        if "redisPassword" in options:
            env.add({"name": "REDIS_PASSWORD"} | options["redisPassword"])
    env.add(*_token(spec))
    command = _command("ray start --head ", _head_parameters(spec))
    _run_ray(ray, env, cluster, command, "127.0.0.1")
    crd = "RayService" if is_of_service(cluster) else "RayCluster"
    env.set("RAY_USAGE_STATS_EXTRA_TAGS", f"kuberay_version={VERSION};kuberay_crd={crd}", -1)
    ray.setdefault("livenessProbe", _probe(timeout_s=5, failures=120, delay_s=30))
    ray.setdefault("readinessProbe", _probe(timeout_s=5, failures=10, delay_s=10))
    for container in pod_spec.get("initContainers", ()):
        _Variables(container).add(*_head_address(cluster))
    if has_autoscaler:
        _add_autoscaler(pod_spec, spec)
    return pod


def worker_pod(
    cluster: Json, group: Json, index: int, host: int = 0, replica_name: str | None = None
) -> Json:
    """The pod of one host of a worker group, without a name yet.

    `index` is of its slice in the group. `replica_name` is the slice's name where it has several
    hosts, and `host` then the number of this one; `None` where it has one.
    """
    name, spec, group_name = cluster["metadata"]["name"], cluster["spec"], group["groupName"]
    pod = _pod(cluster, group["template"], f"{name}-{group_name}-worker-")
    labels = _labels(name, "worker", group_name, f"{name}-worker") | group.get("labels", {})
    labels[REPLICA_INDEX_LABEL] = str(index)
    if replica_name is not None:
        labels |= {REPLICA_NAME_LABEL: replica_name, HOST_INDEX_LABEL: str(host)}
    if is_of_service(cluster):
        labels["ray.io/serve"] = "true"
    pod["metadata"]["labels"] = labels | pod["metadata"]["labels"]
    ray = pod["spec"]["containers"][0]
    wait = _wait_for_head(cluster, ray)
    env = _Variables(ray)
    if spec.get("gcsFaultToleranceOptions"):
        env.set("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    env.add(*_token(spec), *_head_address(cluster))
    command = _command("ray start ", _worker_parameters(cluster, group))
    _run_ray(ray, env, cluster, command, head_address(cluster))
    ray.setdefault("livenessProbe", _probe(timeout_s=2, failures=120, delay_s=30))
    ray.setdefault("readinessProbe", _probe(timeout_s=2, failures=10, delay_s=10))
    if spec.get("enableInTreeAutoscaling") and _autoscaler_version(spec) == "v2":
        pod["spec"]["restartPolicy"] = "Never"
    pod["spec"]["initContainers"] = [*pod["spec"].get("initContainers", ()), wait]
    return pod


def is_of_service(cluster: Json) -> bool:
    """Whether a RayService made it."""
    owners = cluster["metadata"].get("ownerReferences", ())
    return any(owner["kind"] == "RayService" for owner in owners)


def head_service(cluster: Json) -> str:
    """The name of the Service before its head."""
    return f"{cluster['metadata']['name']}-head-svc"


def head_address(cluster: Json) -> str:
    """That Service's name in DNS."""
    return f"{head_service(cluster)}.{cluster['metadata']['namespace']}.svc.cluster.local"


def owner(of: Json) -> Json:
    """A reference by which `of` owns another object: it goes when `of` does."""
    metadata = of["metadata"]
    return {
        "apiVersion": "ray.io/v1",
        "kind": of["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


class _Variables:
    """A container's environment; what is set already stays."""

    def __init__(self, container: Json) -> None:
        self._all = container.setdefault("env", [])

    def set(self, name: str, value: str, place: int | None = None) -> None:
        """Adds a variable: last, or before the one at `place`."""
        if self._is_free(name):
            where = len(self._all) if place is None else len(self._all) + place
            self._all.insert(where, {"name": name, "value": value})

    def add(self, *variables: Json) -> None:
        """Adds variables, each with its name."""
        self._all += [each for each in variables if self._is_free(each["name"])]

    def _is_free(self, name: str) -> bool:
        return all(each["name"] != name for each in self._all)


def _pod(cluster: Json, template: Json, prefix: str) -> Json:
    metadata = template.get("metadata", {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": prefix,
            "namespace": cluster["metadata"]["namespace"],
            "labels": dict(metadata.get("labels", {})),
            "annotations": dict(metadata.get("annotations", {})),
            "ownerReferences": [owner(cluster)],
        },
        "spec": copy.deepcopy(template["spec"]),
    }


def _labels(cluster: str, node_type: str, group: str, identifier: str) -> dict[str, str]:
    return OURS | {
        CLUSTER_LABEL: cluster,
        GROUP_LABEL: group,
        NODE_TYPE_LABEL: node_type,
        "ray.io/identifier": identifier,
        "ray.io/is-ray-node": "yes",
    }


def _run_ray(ray: Json, env: _Variables, cluster: Json, command: str, head: str) -> None:
    """The command of Ray's container and the variables that go with it."""
    env.add(
        *(
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in _FROM_POD.items()
        )
    )
    env.set("KUBERAY_GEN_RAY_START_CMD", command)
    env.set("RAY_PORT", _GCS_PORT)
    for name, value in _OF_SERVICES.items() if is_of_service(cluster) else ():
        env.set(name, value)
    env.set("RAY_ADDRESS", f"{head}:{_GCS_PORT}")
    env.set("RAY_USAGE_STATS_KUBERAY_IN_USE", "1")
    env.set("RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE", "1")
    ray["command"] = ["/bin/bash", "-c", "--"]
    ray["args"] = [f"ulimit -n ${{RAY_START_ULIMIT_OPEN_FILES:-65536}}; {command}"]


def _command(start: str, parameters: Mapping[str, str | None]) -> str:
    """`ray start` with its parameters in alphabetical order; `None` is a flag."""
    words = (
        f" --{name} " if value is None else f" --{name}={value} "
        for name, value in sorted(parameters.items())
    )
    return start + "".join(words)


def _head_parameters(spec: Json) -> dict[str, str | None]:
    group = spec["headGroupSpec"]
    found = _parameters(group["template"]) | group.get("rayStartParams", {})
    if spec.get("enableInTreeAutoscaling"):
        found["no-monitor"] = None
    if "redisPassword" in spec.get("gcsFaultToleranceOptions", {}):
        found["redis-password"] = "$REDIS_PASSWORD"
    return found


def _worker_parameters(cluster: Json, group: Json) -> dict[str, str | None]:
    found = {"address": f"{head_address(cluster)}:{_GCS_PORT}"}
    if group.get("labels"):
        found["labels"] = ",".join(
            f"{name}={value}" for name, value in sorted(group["labels"].items())
        )
    return found | _parameters(group["template"]) | group.get("rayStartParams", {})


def _parameters(template: Json) -> dict[str, str | None]:
    """What Ray is told of its host: the limits of its container."""
    limits = template["spec"]["containers"][0].get("resources", {}).get("limits", {})
    found: dict[str, str | None] = {
        "block": None,
        "dashboard-agent-listen-port": _AGENT_PORT,
        "metrics-export-port": _METRICS_PORT,
    }
    if "cpu" in limits:
        found["num-cpus"] = str(int(cores(limits["cpu"])))
    if "memory" in limits:
        found["memory"] = str(num_bytes(limits["memory"]))
    if GKE_CHIPS in limits:
        found["resources"] = f"'{{\"TPU\":{limits[GKE_CHIPS]}}}'"
    return found


def _token(spec: Json) -> list[Json]:
    options = spec.get("authOptions", {})
    if options.get("mode") != "token":
        return []
    secret = {"name": options["secretName"], "key": "auth_token"}
    return [
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": secret}},
    ]


def _head_address(cluster: Json) -> list[Json]:
    return [
        {"name": "FQ_RAY_IP", "value": head_address(cluster)},
        {"name": "RAY_IP", "value": head_service(cluster)},
    ]


def _wait_for_head(cluster: Json, ray: Json) -> Json:
    """The container that holds a worker back until its head answers."""
    check = f"ray health-check --address {head_address(cluster)}:{_GCS_PORT}"
    few = {"cpu": "200m", "memory": "256Mi"}
    container = {
        "name": "wait-gcs-ready",
        "command": ["/bin/bash", "-c", "--"],
        "args": [f"until {check} > /dev/null 2>&1; do sleep 5; done"],
        "env": list(ray.get("env", ())),
        "resources": {"limits": few, "requests": dict(few)},
    }
    for name in ("image", "imagePullPolicy", "securityContext", "volumeMounts"):
        if name in ray:
            container[name] = copy.deepcopy(ray[name])
    _Variables(container).add(*_token(cluster["spec"]), *_head_address(cluster))
    return container


def _add_autoscaler(pod_spec: Json, spec: Json) -> None:
    options = spec.get("autoscalerOptions", {})
    command = (
        "ray kuberay-autoscaler --cluster-name $(RAY_CLUSTER_NAME) "
        "--cluster-namespace $(RAY_CLUSTER_NAMESPACE)"
    )
    paths = {name: _FROM_POD[name] for name in ("RAY_CLUSTER_NAME", "RAY_CLUSTER_NAMESPACE")}
    from_pod = paths | {"RAY_HEAD_POD_NAME": "metadata.name"}
    container = {
        "name": "autoscaler",
        "image": options.get("image", pod_spec["containers"][0].get("image")),
        "command": ["/bin/bash", "-c", "--"],
        "args": [command],
        "env": [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in from_pod.items()
        ],
        "resources": copy.deepcopy(options.get("resources", {})),
        "volumeMounts": [{"name": "ray-logs", "mountPath": "/tmp/ray"}],
    }
    env = _Variables(container)
    env.set("KUBERAY_CRD_VER", "v1")
    env.set("KUBERAY_GEN_AUTOSCALER_START_CMD", command)
    env.add(*_token(spec), *options.get("env", ()))
    pod_spec["containers"].append(container)
    # Not where the template has one of that name. Read and not recorded: the recorded manifests had
    # another name. Source: KubeRay's `common/pod.go`, `addEmptyDir`, read 2026-11-23.
    volumes = pod_spec.setdefault("volumes", [])
    if all(volume["name"] != "ray-logs" for volume in volumes):
        volumes.append({"name": "ray-logs", "emptyDir": {}})
    if options.get("version") == "v2":
        pod_spec["restartPolicy"] = "Never"


def _autoscaler_version(spec: Json) -> str | None:
    version: str | None = spec.get("autoscalerOptions", {}).get("version")
    return version


def _probe(*, timeout_s: int, failures: int, delay_s: int) -> Json:
    return {
        "httpGet": {"path": "/api/healthz", "port": int(_AGENT_PORT)},
        "initialDelaySeconds": delay_s,
        "periodSeconds": 5,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }
