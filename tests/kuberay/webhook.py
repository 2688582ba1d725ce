"""The TPU webhook, as far as names of slices go: what it tells a new host. Pure.

Followed from what kuberay-tpu-webhook 1.3.5 did to pods (`tests/data/kuberay`). Where a pod has
KubeRay's index of its slice and an index of its own, it goes by them. Otherwise it counts the names
that the group's other slices have, and takes the number for the new one's index, whether there is a
slice of that name or not.
"""

from collections.abc import Iterable

from autoscaling.provisioning.raycluster import (
    GROUP_LABEL,
    REPLICA_INDEX_LABEL,
    WEBHOOK_SLICE_LABEL,
)
from serving.domain.gke_names import HOST_INDEX_LABEL

from .store import Json

NAME, WORKER_ID = "TPU_NAME", "TPU_WORKER_ID"


def admit(pod: Json, others: Iterable[Json]) -> None:
    """Writes into a new pod what its host is told. `others` are those of its group that stay."""
    labels = pod["metadata"]["labels"]
    group = labels[GROUP_LABEL]
    if HOST_INDEX_LABEL in labels and REPLICA_INDEX_LABEL in labels:
        name = f"{group}-{labels[REPLICA_INDEX_LABEL]}"
        worker_id = labels[HOST_INDEX_LABEL]
    else:
        told = [told_to(other) for other in others]
        name = f"{group}-{len({each[NAME] for each in told})}"
        used = {int(each[WORKER_ID]) for each in told if each[NAME] == name}
        worker_id = str(min(set(range(len(used) + 1)) - used))
        labels[WEBHOOK_SLICE_LABEL] = name
    environment = pod["spec"]["containers"][0].setdefault("env", [])
    environment += [{"name": NAME, "value": name}, {"name": WORKER_ID, "value": worker_id}]


def told_to(pod: Json) -> dict[str, str]:
    """The variables of a host."""
    return {each["name"]: each["value"] for each in pod["spec"]["containers"][0].get("env", ())}
