"""Makes the JSON patches that scale worker groups. Pure.

KubeRay's rules that matter here (v1.7.0, numOfHosts above 1): one replica is one slice;
`workersToDelete` naming any pod of it deletes all; nothing else is deleted while Ray's autoscaler
is on, however far the count falls.
"""

from collections.abc import Iterable
from typing import Any

from autoscaling.provisioning.plan import Change
from autoscaling.provisioning.raycluster import Json


def scaling_patch(change: Change, position: int, uid: str | None) -> list[dict[str, Any]]:
    """Returns one JSON patch with the new count and every pod of the slices to drop.

    Count and names travel together, or KubeRay would act on half of it. One name of a slice would
    do for KubeRay; Ray's autoscaler takes those that are not named for hosts that stay, and where
    it writes before they go, it raises a count that is lower than theirs (Ray 2.60,
    `KubeRayProvider._initialize_scale_request`): a slice more is bought. The tests refuse it when
    the cluster is not the one with this uid (`None`: its uid is not known), when groups were
    reordered, or when another writer (Ray's autoscaler, a user) has changed the count that the plan
    started from.
    """
    path = f"/spec/workerGroupSpecs/{position}"
    doomed = [pod.name for drop in change.drops for pod in drop.slice.pods]
    same_cluster = [] if uid is None else [{"op": "test", "path": "/metadata/uid", "value": uid}]
    return [
        *same_cluster,
        {"op": "test", "path": f"{path}/groupName", "value": change.group.name},
        {"op": "test", "path": f"{path}/replicas", "value": change.group.replicas},
        {"op": "replace", "path": f"{path}/replicas", "value": change.replicas},
        # `add` also replaces; the field is not there before the first deletion.
        {"op": "add", "path": f"{path}/scaleStrategy", "value": {"workersToDelete": doomed}},
    ]


def positions(specs: Iterable[Json]) -> dict[str, int]:
    """Returns the position of each worker group in its list, by name."""
    return {spec["groupName"]: position for position, spec in enumerate(specs)}
