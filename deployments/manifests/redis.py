"""Renders a Redis for the state of Ray's head: one pod, its disk, its network policy. Pure.

One pod and no replicas: Ray wants a single shard, and asks it again for as long as it is away. What
it holds is on a disk that outlives the pod. Memorystore outlives a zone as well: give its address
instead.
"""

from deployments.manifests.cluster_config import ClusterConfig, OwnRedisConfig
from deployments.manifests.names import (
    INSTANCE_LABEL,
    NAME_LABEL,
    REDIS_PORT,
    Component,
    Json,
    component_labels,
    namespaced_object,
    priority_class,
    redis_name,
    service_account,
)
from deployments.manifests.pods.environment import from_secret
from deployments.manifests.pods.parts import container_security, pod_security

PASSWORD_KEY = "password"  # the name of a key in the Secret
_DATA_FOLDER, _CONFIG_FOLDER = "/data", "/etc/redis"
# The password goes by a file, because a command line is read by everybody on the host. Every write
# is on the disk before it is answered: Ray's head writes little, and counts on all of it.
_START = (
    "umask 077; "
    f'printf \'requirepass "%s"\\n\' "$REDIS_PASSWORD" > {_CONFIG_FOLDER}/redis.conf; '
    f"exec redis-server {_CONFIG_FOLDER}/redis.conf --dir {_DATA_FOLDER} --port {REDIS_PORT} "
    '--appendonly yes --appendfsync always --save "" --maxmemory-policy noeviction'
)
# redis-cli takes the password from this variable.
_PING = f'REDISCLI_AUTH="$REDIS_PASSWORD" redis-cli -p {REDIS_PORT} ping | grep -q PONG'


def redis_address(cluster: ClusterConfig) -> str:
    """Returns host and port of the Redis that keeps the state of Ray's head."""
    if cluster.redis.address is not None:
        return cluster.redis.address
    return f"{redis_name(cluster)}.{cluster.namespace}.svc:{REDIS_PORT}"


def redis_objects(cluster: ClusterConfig, own: OwnRedisConfig) -> list[Json]:
    """Renders the Service, the pod with its disk, its protection, and its network policy."""
    labels, head = redis_labels(cluster), component_labels(cluster, Component.HEAD)
    return [
        _object(cluster, "v1", "Service")
        | {
            "spec": {
                "ports": [{"name": "redis", "port": REDIS_PORT, "targetPort": REDIS_PORT}],
                "selector": labels,
            }
        },
        _object(cluster, "apps/v1", "StatefulSet") | {"spec": _stateful_set(cluster, own)},
        _object(cluster, "policy/v1", "PodDisruptionBudget")
        | {"spec": {"minAvailable": 1, "selector": {"matchLabels": labels}}},
        _object(cluster, "networking.k8s.io/v1", "NetworkPolicy")
        | {
            "spec": {
                "ingress": [
                    {
                        "from": [{"podSelector": {"matchLabels": head}}],
                        "ports": [{"port": REDIS_PORT, "protocol": "TCP"}],
                    }
                ],
                "podSelector": {"matchLabels": labels},
                "policyTypes": ["Ingress"],
            }
        },
    ]


def redis_labels(cluster: ClusterConfig) -> dict[str, str]:
    """Returns labels unlike those of our other pods, since their network rules must not apply."""
    return {NAME_LABEL: "slicewise-redis", INSTANCE_LABEL: cluster.name}


def _stateful_set(cluster: ClusterConfig, own: OwnRedisConfig) -> Json:
    labels = redis_labels(cluster)
    claim: Json = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": f"{own.storage_gib}Gi"}},
    }
    if own.storage_class is not None:
        claim["storageClassName"] = own.storage_class
    return {
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain", "whenScaled": "Retain"},
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "serviceName": redis_name(cluster),
        # No node selector: not every family of machines takes the disks of the default class.
        "template": {"metadata": {"labels": labels}, "spec": _pod(cluster, own)},
        "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim}],
    }


def _pod(cluster: ClusterConfig, own: OwnRedisConfig) -> Json:
    size = {"cpu": "500m", "memory": f"{own.memory_gib}Gi"}
    ping = {"exec": {"command": ["/bin/sh", "-c", _PING]}, "timeoutSeconds": 3}
    container = {
        "name": "redis",
        "image": own.image,
        "command": ["/bin/sh", "-c", _START],
        "env": [from_secret("REDIS_PASSWORD", cluster.secrets.redis, PASSWORD_KEY)],
        "livenessProbe": ping | {"periodSeconds": 10, "failureThreshold": 6},
        "ports": [{"containerPort": REDIS_PORT, "name": "redis"}],
        "readinessProbe": ping | {"periodSeconds": 5},
        "resources": {"requests": dict(size), "limits": dict(size)},
        "securityContext": container_security() | {"readOnlyRootFilesystem": True},
        "volumeMounts": [
            {"name": "data", "mountPath": _DATA_FOLDER},
            {"name": "config", "mountPath": _CONFIG_FOLDER},
        ],
    }
    return {
        "automountServiceAccountToken": False,
        "containers": [container],
        "priorityClassName": priority_class(cluster, Component.HEAD),
        "securityContext": pod_security(),
        "serviceAccountName": service_account(cluster, Component.REDIS),
        "terminationGracePeriodSeconds": 30,
        "volumes": [{"name": "config", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}],
    }


def _object(cluster: ClusterConfig, api_version: str, kind: str) -> Json:
    made = namespaced_object(cluster, api_version, kind, redis_name(cluster))
    made["metadata"]["labels"] = redis_labels(cluster)
    return made
