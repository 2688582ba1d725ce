"""The kinds of slices that a values file asks for: one KubeRay worker group and ComputeClass each.

Owns their names, bounds, labels and times. What a slice is comes from `serving.domain.topology`,
what reservations select and how long a drain takes from `serving.config.slice_settings`. Pure.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from deployments.manifests.cluster_config import ClusterConfig, GkeClassConfig
from serving.config.application import AppConfig
from serving.config.models import DeploymentConfig
from serving.config.slice_settings import drain_s, node_labels, replica_end_s
from serving.config.slices import MARKET_LABEL
from serving.domain.compute_class import ComputeClass, Market
from serving.domain.inventory import (
    ACCELERATOR_LABEL,
    POD_TYPE_LABEL,
    TOPOLOGY_LABEL,
    ZONE_LABEL,
)
from serving.domain.names.gke_names import COMPUTE_CLASS_LABEL
from serving.domain.topology import SliceShape, slice_shape

# A slice is named after its group, `-` and a number, and that name is a label's value.
MAX_GROUP_NAME = 58
# Beyond the end of what was on it: for Ray's node to end its processes.
NODE_END_S = 20
# A spot node's shutdown where nothing is configured. Source: GKE's page on spot VMs, read 2026-11.
SPOT_SHUTDOWN_S = 30
# The part of it that GKE's own pods get. Source: the same; older versions gave them 5 s.
SPOT_CRITICAL_S = 15
# A slice that is taken away is replaced from the notice on: both exist for a while.
_ROOM_FOR_REPLACEMENTS = 2


@dataclass(frozen=True, slots=True)
class SliceGroup:
    """The slices of one compute class, one shape and one set of zones.

    `terms` are those of the compute class, with the bounds and the price of this shape's slices.
    `wanted_slices` is how many replicas may need at most. `drain_s` is how long before its end a
    slice begins to drain. `spot_shutdown_s` is what is relied on of a spot node's shutdown, GKE's
    own pods included. `num_engines` is the most that share one of the slices.
    """

    terms: ComputeClass
    market: Market
    shape: SliceShape
    zones: tuple[str, ...]
    is_zonal: bool
    wanted_slices: int
    drain_s: float
    reservation: str | None
    reservation_project: str | None
    node_labels: Mapping[str, str] = field(hash=False)
    spot_shutdown_s: int
    num_engines: int = 1

    @property
    def name(self) -> str:
        """The name of worker group and ComputeClass, and the beginning of its slices' names."""
        zone = f"-{self.zones[0]}" if self.is_zonal else ""
        return f"{shape_name(self.shape)}-{self.terms.name}{zone}"

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its hosts in Ray, beside those that only the host itself can know."""
        zone = {ZONE_LABEL: self.zones[0]} if len(self.zones) == 1 else {}
        return {
            COMPUTE_CLASS_LABEL: self.terms.name,
            MARKET_LABEL: self.market.value,
            POD_TYPE_LABEL: self.shape.ray_pod_type,
            TOPOLOGY_LABEL: self.shape.topology,
            ACCELERATOR_LABEL: self.shape.ray_accelerator_type,
            **zone,
            **self.node_labels,
        }

    @property
    def grace_s(self) -> int:
        """Returns how long Kubernetes waits from notifying a pod of its end to killing it."""
        needed_s = math.ceil(replica_end_s(self.drain_s)) + NODE_END_S
        return max(needed_s, self.shutdown_window_s or 0)

    @property
    def shutdown_window_s(self) -> int | None:
        """Returns what pods get when their node is shut down; `None`: their grace.

        Only spot nodes are shut down by their kubelet. Source: GKE's pages on spot VMs and on the
        disruption of nodes with TPUs, read 2026-11.
        """
        if self.market != Market.SPOT:
            return None
        return self.spot_shutdown_s - spot_critical_s(self.spot_shutdown_s, self.drain_s)

    @property
    def end_within_s(self) -> int:
        """Returns how soon after the call of its end a host of the group may be gone."""
        window_s = self.shutdown_window_s
        return self.grace_s if window_s is None else min(self.grace_s, window_s)


def spot_critical_s(shutdown_s: int, drain_s: float) -> int:
    """Returns the share of GKE's own pods in a spot node's shutdown, so that ours can drain.

    In the shutdown that nobody has configured it is what it is.
    """
    if shutdown_s <= SPOT_SHUTDOWN_S:
        return SPOT_CRITICAL_S
    return max(0, min(SPOT_CRITICAL_S, int(shutdown_s - drain_s)))


def shape_name(shape: SliceShape) -> str:
    """Returns `v6e-4x4`, or `v6e-2x4-4t` where the topology also exists with larger hosts."""
    name = f"{shape.generation}-{shape.topology}"
    is_default = shape == slice_shape(shape.generation, shape.topology)
    return name if is_default else f"{name}-{shape.chips_per_host}t"


def slice_groups(cluster: ClusterConfig, app: AppConfig) -> list[SliceGroup]:
    """Returns every group that the deployments of `app` need, by name."""
    by_kind: dict[tuple[str, SliceShape, str | None], list[DeploymentConfig]] = {}
    for model in app.models:
        for deployment in model.deployments:
            if deployment.slice is not None:
                wanted = deployment.slice
                key = (deployment.compute_class, wanted.shape, wanted.zone)
                by_kind.setdefault(key, []).append(deployment)
    groups = [_group(cluster, app, deployments) for deployments in by_kind.values()]
    return sorted(groups, key=lambda group: group.name)


def _group(
    cluster: ClusterConfig, app: AppConfig, deployments: list[DeploymentConfig]
) -> SliceGroup:
    """The group of deployments that want the same."""
    first = deployments[0]
    assert first.slice is not None  # its caller's condition
    compute_class = app.compute_class(first.compute_class)
    entry = cluster.class_config(first.compute_class)
    wanted = sum(
        deployment.most_replicas * deployment.slice.num_slices
        for deployment in deployments
        if deployment.slice is not None
    )
    most = entry.max_slices
    if most is None:
        most = max(_ROOM_FOR_REPLACEMENTS * wanted, entry.min_slices, 1)
    return SliceGroup(
        terms=compute_class.terms(first.slice.shape.num_chips, entry.min_slices, most),
        market=compute_class.market,
        shape=first.slice.shape,
        zones=_zones(cluster, entry, first.slice.zone),
        is_zonal=first.slice.zone is not None,
        wanted_slices=wanted,
        drain_s=drain_s(compute_class),
        reservation=entry.reservation,
        reservation_project=entry.reservation_project,
        node_labels=node_labels(app, first),
        spot_shutdown_s=cluster.spot_shutdown_s,
        num_engines=max(deployment.num_engines for deployment in deployments),
    )


def _zones(cluster: ClusterConfig, entry: GkeClassConfig, zone: str | None) -> tuple[str, ...]:
    if zone is not None:
        return (zone,)
    return entry.zones or cluster.zones
