"""Renders GKE ComputeClasses: one per market for serving, and one ladder of markets per shape.

A serving class has one rule, because neither GKE nor KubeRay reports which rule of several won, and
Ray would have to guess what its slices cost. Field names and limits: GKE's ComputeClass CRD at
8067eaeb (2026-08-21), read 2026-11-20. Pure.
"""

from collections.abc import Iterable, Sequence

from deployments.manifests.cluster_config import ClusterConfig, Provisioning
from deployments.manifests.hosts.disk import boot_disk_type, local_ssds
from deployments.manifests.hosts.kernel import class_rule
from deployments.manifests.names import Json
from deployments.manifests.slice_groups import SliceGroup, shape_name, spot_critical_s
from serving.domain.compute_class import MAX_FLEX_START_RUN_S, Market
from serving.domain.topology import Generation

# The longest notice that a spot node may get of its end, and the part of it that GKE's own pods
# get. Source: the CRD's enum and GKE's spot VM page, read 2026-11-20 (GKE 1.35.0-gke.1171000 and
# later); unproven for TPU hosts. So it is asked for, and relied on only where `spot_shutdown_s`
# says so.
LONGEST_SPOT_SHUTDOWN_S = 120
# How long before the end of a flex-start node GKE makes its replacement.
_RECYCLE_LEAD_S = 3600
# How long flex-start is tried for before GKE reports a failure; below 15 minutes it is ignored.
# Source: GKE cluster autoscaler at 7d250507, read 2026-11-20.
_CAPACITY_WAIT_S = 1800
_CONSOLIDATION_MINUTES = 10
# What is paid for already comes first, then what is usually cheapest.
_LADDER = (Market.RESERVED, Market.SPOT, Market.FLEX_START, Market.ON_DEMAND)
_CONTROL_FAMILIES = ("n4", "n2")


# Facts on DRANET: GKE's page on managed DRANET, and the CRD's own words; read 2026-11-22.
NETWORK_PROFILE = "auto"  # GKE makes the networks that the machine type has interfaces for


def compute_classes(cluster: ClusterConfig, groups: Sequence[SliceGroup]) -> list[Json]:
    """Returns one class for each group, one ladder for each shape with several markets; by name."""
    made = [_serving_class(cluster, group) for group in groups]
    by_shape: dict[str, list[SliceGroup]] = {}
    for group in groups:
        by_shape.setdefault(shape_name(group.shape), []).append(group)
    for name, members in by_shape.items():
        if len(members) > 1 and cluster.provisioning == Provisioning.AUTO:
            made.append(_ladder(cluster, name, members))
    return sorted(made, key=lambda compute_class: str(compute_class["metadata"]["name"]))


def control_class(cluster: ClusterConfig) -> Json:
    """Returns where all runs that needs no chips: ordinary machines, the cheaper family first."""
    rules = [{"machineFamily": family, "spot": False} for family in _CONTROL_FAMILIES]
    description = f"Head, gateways and control processes of {cluster.name}"
    return _compute_class(control_class_name(cluster), rules, description)


def control_class_name(cluster: ClusterConfig) -> str:
    """The name of `control_class`."""
    return f"{cluster.name}-control"


def workload_policy(group: SliceGroup) -> str | None:
    """The workload policy that a group's slices need, made by hand; `None` if they need none."""
    # Source: GKE's page on TPU7x, read 2026-11-20.
    if group.shape.generation == Generation.TPU7X and group.shape.num_hosts > 1:
        return f"slicewise-{shape_name(group.shape)}"
    return None


def node_pool_names(group: SliceGroup) -> list[str]:
    """The pools of a group where you make them: a slice of several hosts is one whole pool."""
    if group.shape.num_hosts == 1:
        return [group.name]
    return [f"{group.name}-{number}" for number in range(group.terms.max_slices)]


def _serving_class(cluster: ClusterConfig, group: SliceGroup) -> Json:
    shape = group.shape
    hosts = f"{shape.num_hosts} hosts" if shape.num_hosts > 1 else "1 host"
    description = (
        f"{shape.generation} {shape.topology} slices of {hosts} with {shape.chips_per_host} chips, "
        f"{group.market}"
    )
    if cluster.provisioning == Provisioning.NODE_POOLS:
        rules: list[Json] = [{"nodepools": node_pool_names(group)}]
        return _compute_class(group.name, rules, description, is_auto=False)
    made = _compute_class(group.name, [_rule(cluster, group)], description)
    if cluster.dranet:
        made["spec"]["priorities"][0]["acceleratorNetworkProfile"] = NETWORK_PROFILE
        made["spec"]["nodePoolConfig"]["dra"] = {"networking": {"enabled": True}}
    return made


def _ladder(cluster: ClusterConfig, name: str, groups: Iterable[SliceGroup]) -> Json:
    """Ranks groups by price if all but reserved ones have one; else in the usual order."""

    def place(group: SliceGroup) -> tuple[bool, float, int, str]:
        price = group.terms.usd_per_slice_hour
        is_paid_for = group.market == Market.RESERVED
        order = _LADDER.index(group.market)
        return not is_paid_for, float(order) if price is None else price, order, group.name

    known = list(groups)
    if any(
        member.terms.usd_per_slice_hour is None
        for member in known
        if member.market != Market.RESERVED
    ):
        known.sort(key=lambda group: (_LADDER.index(group.market), group.name))
    else:
        known.sort(key=place)
    description = (
        f"{name} slices from the first market that has some; not for serving, "
        "because it hides from Ray which one that was"
    )
    rules = [_rule(cluster, group) for group in known]
    return _compute_class(f"{name}-cost-optimised", rules, description)


def _rule(cluster: ClusterConfig, group: SliceGroup) -> Json:
    shape = group.shape
    rule: Json = {
        "machineType": shape.gke_machine_type,
        "tpu": {
            "type": shape.gke_accelerator,
            "count": shape.chips_per_host,
            "topology": shape.topology,
        },
    }
    rule["storage"] = {
        "bootDiskType": boot_disk_type(cluster.host, shape.generation),
        "bootDiskSize": cluster.host.boot_disk.size_gb,
    }
    if (count := local_ssds(cluster.host)) is not None:
        rule["storage"]["localSSDCount"] = count
    policy = workload_policy(group)
    if policy is not None:
        rule["placement"] = {"policyName": policy}
    rule |= _market_rule(group)
    if kernel := class_rule(cluster, group):
        rule["nodeSystemConfig"] = rule.get("nodeSystemConfig", {}) | {"linuxNodeConfig": kernel}
    return rule


def _market_rule(group: SliceGroup) -> Json:
    # The reservation names its zones itself; GKE refuses them at both places.
    if group.market == Market.RESERVED:
        named: Json = {"name": group.reservation, "zones": list(group.zones)}
        if group.reservation_project is not None:
            named["project"] = group.reservation_project
        return {"reservations": {"affinity": "Specific", "specific": [named]}, "spot": False}
    where: Json = {"location": {"zones": list(group.zones)}}
    if group.market == Market.ON_DEMAND:
        return where | {"spot": False}
    if group.market == Market.SPOT:
        kubelet = {
            "shutdownGracePeriodSeconds": LONGEST_SPOT_SHUTDOWN_S,
            "shutdownGracePeriodCriticalPodsSeconds": spot_critical_s(
                LONGEST_SPOT_SHUTDOWN_S, group.drain_s
            ),
        }
        return where | {"spot": True, "nodeSystemConfig": {"kubeletConfig": kubelet}}
    longest_s = int(group.terms.max_run_s or MAX_FLEX_START_RUN_S)
    flex: Json = {"enabled": True}
    if longest_s > _RECYCLE_LEAD_S:
        flex["nodeRecycling"] = {"leadTimeSeconds": _RECYCLE_LEAD_S}
    wait = {"capacityCheckWaitTimeSeconds": _CAPACITY_WAIT_S} if group.shape.num_hosts > 1 else {}
    return where | {"flexStart": flex, "maxRunDurationSeconds": longest_s} | wait


def _compute_class(name: str, rules: list[Json], description: str, *, is_auto: bool = True) -> Json:
    config = {
        "imageType": "cos_containerd",
        "imageStreaming": {"enabled": True},
        "workloadMetadata": "GKE_METADATA",
    }
    return {
        "apiVersion": "cloud.google.com/v1",
        "kind": "ComputeClass",
        "metadata": {"name": name},
        "spec": {
            "description": description,
            "priorities": rules,
            "nodePoolAutoCreation": {"enabled": is_auto},
            # To move running engines to a better rule would restart them.
            "activeMigration": {"optimizeRulePriority": False},
            # Anything else would be machines without chips.
            "whenUnsatisfiable": "DoNotScaleUp",
            # Only hosts on which nothing runs any more are given back.
            "autoscalingPolicy": {
                "consolidationDelayMinutes": _CONSOLIDATION_MINUTES,
                "consolidationThreshold": 0,
            },
            **({"nodePoolConfig": config} if is_auto else {}),
        },
    }
