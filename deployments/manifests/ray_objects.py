"""Renders RayService and RayCluster: head, gateways, control processes, groups of slices. Pure.

Fields: KubeRay 1.7.0's CRDs, read 2026-11-20. The Serve configuration in a RayService is the values
file's own, without its part `cluster`.
"""

import math
from collections.abc import Sequence

import yaml

from deployments.manifests.cluster_config import UpgradeKind
from deployments.manifests.control_pool import num_control_pods
from deployments.manifests.names import CONTROL_GROUP, GATEWAY_GROUP, Json, namespaced_object
from deployments.manifests.pods.control import control_template, gateway_template, head_template
from deployments.manifests.pods.hosts import host_template
from deployments.manifests.redis import PASSWORD_KEY, redis_address
from deployments.manifests.slice_groups import SliceGroup
from deployments.manifests.values import Values
from serving.domain.compute_class import DAY_S, Market
from serving.domain.names.gke_names import (
    CONTROL_ROLE,
    NEVER_IDLE_S,
    ROLE_LABEL,
    with_template_hash,
)

# The Ray that images hold; a test compares it with the installed one.
RAY_VERSION = "2.60.0"
# Ray's autoscaler deletes a pod that has been pending for longer.
_ALLOCATE_VARIABLE = "RAY_AUTOSCALER_RECONCILE_ALLOCATE_STATUS_TIMEOUT_S"
_LONGEST_PATIENCE_S = 7 * DAY_S
# Which slices Ray's autoscaler would take first, should anybody ask it: those that are paid for.
_PRIORITY = {
    Market.RESERVED: 40,
    Market.SPOT: 30,
    Market.FLEX_START: 20,
    Market.ON_DEMAND: 10,
}
# For what is in flight on an old cluster's gateways.
_DELETION_DELAY_S = 600


def ray_service(values: Values, groups: Sequence[SliceGroup]) -> Json:
    """The RayService with everything in it."""
    cluster = values.cluster
    return namespaced_object(cluster, "ray.io/v1", "RayService", cluster.name) | {
        "spec": {
            "excludeHeadPodFromServeSvc": True,
            "rayClusterConfig": _cluster_spec(values, groups),
            "rayClusterDeletionDelaySeconds": _DELETION_DELAY_S,
            "serveConfigV2": serve_config(values),
            "upgradeStrategy": _upgrade(values),
        }
    }


def ray_cluster(values: Values, groups: Sequence[SliceGroup]) -> Json:
    """The same cluster alone, for those who run `serve deploy` themselves."""
    made = namespaced_object(values.cluster, "ray.io/v1", "RayCluster", values.cluster.name)
    return made | {"spec": _cluster_spec(values, groups)}


def serve_config(values: Values) -> str:
    """Returns Ray Serve's configuration as YAML."""
    text: str = yaml.safe_dump(dict(values.serve), sort_keys=False, allow_unicode=True, width=100)
    return text


def _cluster_spec(values: Values, groups: Sequence[SliceGroup]) -> Json:
    cluster = values.cluster
    secrets = cluster.secrets
    password = {"secretKeyRef": {"name": secrets.redis, "key": PASSWORD_KEY}}
    return {
        "authOptions": {"mode": "token", "secretName": secrets.ray_token},
        "autoscalerOptions": _autoscaler(groups),
        # On, but it decides nothing: KubeRay refuses incremental upgrades without it, and deletes
        # slices at random.
        "enableInTreeAutoscaling": True,
        # No externalStorageNamespace: two clusters of one RayService must not share their state.
        "gcsFaultToleranceOptions": {
            "redisAddress": redis_address(cluster),
            "redisPassword": {"valueFrom": password},
        },
        "headGroupSpec": _stamped(
            {
                # Nothing of the application is lost with the head.
                "rayStartParams": {"dashboard-host": "0.0.0.0", "num-cpus": "0"},
                "template": head_template(values),
            }
        ),
        "rayVersion": RAY_VERSION,
        "workerGroupSpecs": [
            _stamped(_gateway_group(values)),
            _stamped(_control_group(values)),
            *(_stamped(_slice_group(values, group)) for group in groups),
        ],
    }


def _stamped(group: Json) -> Json:
    """Puts the hash of what pods are made from on them, by which older ones are told."""
    return group | {"template": with_template_hash(group)}


def _gateway_group(values: Values) -> Json:
    template = gateway_template(values)
    return _group_off_slices(GATEWAY_GROUP, values.app.gateway_count.number, template)


def _control_group(values: Values) -> Json:
    count = num_control_pods(values.cluster, values.app)
    group = _group_off_slices(CONTROL_GROUP, count, control_template(values))
    return group | {"labels": {ROLE_LABEL: CONTROL_ROLE}}


def _group_off_slices(name: str, count: int, template: Json) -> Json:
    """A group of so many pods, no more and no fewer: Ray's autoscaler has nothing to decide."""
    return {
        "groupName": name,
        "idleTimeoutSeconds": NEVER_IDLE_S,
        "maxReplicas": count,
        "minReplicas": count,
        "numOfHosts": 1,
        "rayStartParams": {},
        "replicas": count,
        "template": template,
    }


def _slice_group(values: Values, group: SliceGroup) -> Json:
    return {
        "groupName": group.name,
        # Half-idle slices would be taken apart host by host.
        "idleTimeoutSeconds": NEVER_IDLE_S,
        "labels": group.labels,
        "maxReplicas": group.terms.max_slices,
        "minReplicas": group.terms.min_slices,
        "numOfHosts": group.shape.num_hosts,
        "priority": _PRIORITY[group.market],
        "rayStartParams": {},
        # From here on the slice provisioner sets it.
        "replicas": group.terms.min_slices,
        "template": host_template(values, group),
    }


def _autoscaler(groups: Sequence[SliceGroup]) -> Json:
    patience_s = max(
        (
            _LONGEST_PATIENCE_S if group.terms.patience_s is None else group.terms.patience_s
            for group in groups
        ),
        default=_LONGEST_PATIENCE_S,
    )
    return {
        "env": [{"name": _ALLOCATE_VARIABLE, "value": str(max(3600, math.ceil(patience_s)))}],
        "idleTimeoutSeconds": NEVER_IDLE_S,
        "resources": {
            "limits": {"cpu": "1", "memory": "1Gi"},
            "requests": {"cpu": "500m", "memory": "1Gi"},
        },
        "upscalingMode": "Default",
        "version": "v2",
    }


def _upgrade(values: Values) -> Json:
    upgrade = values.cluster.upgrade
    match upgrade.kind:
        case UpgradeKind.IN_PLACE:
            return {"type": "None"}
        case UpgradeKind.NEW_CLUSTER:
            return {"type": "NewCluster"}
        case UpgradeKind.INCREMENTAL:
            options = {
                "gatewayClassName": values.cluster.gateway_class,
                "intervalSeconds": upgrade.interval_s,
                "maxSurgePercent": upgrade.max_surge_percent,
                "stepSizePercent": upgrade.step_percent,
            }
            return {"type": "NewClusterWithIncrementalUpgrade", "clusterUpgradeOptions": options}
