"""The emulated operator and webhook name single hosts as the real ones did. No Ray."""

from pathlib import Path
from typing import Any

import pytest

from autoscaling.provisioning.raycluster import REPLICA_INDEX_LABEL
from serving.domain.gke_names import HOST_INDEX_LABEL
from serving.domain.topology import slice_shape

from .by_hand import ClusterByHand
from .objects import raycluster, worker_group
from .recordings import recording
from .webhook import NAME, WORKER_ID, told_to

GROUP = "v6e-2x2-spot"
SHAPE = slice_shape("v6e", "2x2")


def told(pods: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
    """KubeRay's index of each slice, and what its host was told."""
    hosts = [
        (int(pod["metadata"]["labels"][REPLICA_INDEX_LABEL]), told_to(pod))
        for pod in pods
        if pod["metadata"]["labels"]["ray.io/group"] == GROUP
    ]
    return sorted((index, words[NAME], words[WORKER_ID]) for index, words in hosts)


def lose(cluster: ClusterByHand, index: int) -> None:
    """The host of a slice, and its pod with it."""
    (pod,) = [
        pod
        for pod in cluster.pods(GROUP)
        if pod["metadata"]["labels"][REPLICA_INDEX_LABEL] == str(index)
    ]
    cluster.store.delete("pods", pod["metadata"]["name"])
    cluster.settle()


@pytest.mark.parametrize(
    ("name", "count", "losses"),
    [
        ("02-host-of-slice-0-lost", 3, [0]),
        ("02-after-termination", 3, [0, 1, 2, 1]),
        ("09-ten-slices-four-lost", 10, [0, 4, 7, 2]),
        ("10-with-host-index", 3, [0, 2, 1, 0, 2]),
    ],
)
def test_hosts_are_told_what_they_were_told_on_record(
    name: str, count: int, losses: list[int], tmp_path: Path
) -> None:
    found = recording(name)
    has_index = any(HOST_INDEX_LABEL in pod["metadata"]["labels"] for pod in found.hosts())
    made = worker_group(
        GROUP, SHAPE, "spot", max_replicas=count, min_replicas=count, has_host_index=has_index
    )
    with ClusterByHand(raycluster(made), tmp_path) as cluster:
        cluster.settle()
        for index in losses:
            lose(cluster, index)
        assert told(cluster.pods(GROUP)) == told(found.hosts())
        labels = {key for pod in cluster.pods(GROUP) for key in pod["metadata"]["labels"]}
        recorded = {key for pod in found.hosts() for key in pod["metadata"]["labels"]}
        assert labels <= recorded
