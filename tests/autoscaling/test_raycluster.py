"""Reading worker groups out of RayClusters and pods."""

import copy
import json
from typing import Any

import pytest
from kuberay.objects import raycluster, replica_pods, worker_group
from provisioning_builders import SPOT

from autoscaling.provisioning.errors import UnusableError
from autoscaling.provisioning.groups import SliceKind, WorkerGroup
from autoscaling.provisioning.raycluster import (
    WorkerPod,
    decode_worker_pod,
    owning_service,
    read_groups,
)
from serving.domain.supply.pods import PodPhase
from serving.domain.topology import slice_shape

SHAPE = slice_shape("v6e", "2x4", 4)


def spec(**fields: Any) -> dict:
    return worker_group("v6e-spot", SHAPE, "spot", max_replicas=3) | fields


def decoded(pods: list[dict]) -> list[WorkerPod]:
    return [decode_worker_pod(json.dumps(pod).encode()) for pod in pods]


def read(made: dict, pods: list[dict] | None = None) -> WorkerGroup:
    (group,), notes = read_groups(raycluster(made), decoded(pods or []))
    assert notes == []
    return group


def note_on(made: dict) -> str:
    groups, (note,) = read_groups(raycluster(made), [])
    assert groups == []
    return note


def without_label(made: dict) -> dict:
    made = copy.deepcopy(made)
    del made["labels"]["slicewise.io/compute-class"]
    return made


def with_selector(made: dict, **changes: str | None) -> dict:
    made = copy.deepcopy(made)
    selector = made["template"]["spec"]["nodeSelector"]
    for name, value in changes.items():
        key = f"cloud.google.com/{name.replace('_', '-')}"
        if value is None:
            del selector[key]
        else:
            selector[key] = value
    return made


def test_group_is_read_with_kind_count_and_bounds() -> None:
    group = read(spec(replicas=2, minReplicas=1))
    assert group.kind == SPOT
    assert (group.replicas, group.min_replicas, group.max_replicas) == (2, 1, 3)
    assert group.num_hosts == 2


def test_group_without_our_label_has_gkes_compute_class() -> None:
    assert read(without_label(spec())).kind == SliceKind("v6e-spot", "v6e", "2x4")


@pytest.mark.parametrize(
    ("generation", "topology", "chips_per_host"),
    [("v5e", "4x4", 4), ("v5p", "2x2x2", 4), ("v6e", "2x4", 8), ("tpu7x", "2x2x4", 4)],
)
def test_group_of_any_generation_has_its_kind(
    generation: str, topology: str, chips_per_host: int
) -> None:
    shape = slice_shape(generation, topology, chips_per_host)
    group = read(worker_group("some", shape, "reserved", max_replicas=1))
    assert group.kind == SliceKind("reserved", generation, topology)
    assert group.num_hosts == shape.num_hosts


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (without_label(with_selector(spec(), compute_class=None)), "it has neither a label"),
        (with_selector(spec(), gke_tpu_accelerator="tpu-v9"), "names no slice: tpu-v9 2x4"),
        (with_selector(spec(), gke_tpu_topology=None), "names no slice"),
        (with_selector(spec(), gke_tpu_topology="3x5"), "3x5"),
        (spec(numOfHosts=4), "numOfHosts is 4, a v6e 2x4 has 2 hosts"),
        (spec(suspend=True), "it is suspended"),
    ],
)
def test_group_that_cannot_be_used_is_noted(made: dict, expected: str) -> None:
    assert expected in note_on(made)


def test_group_without_tpus_is_none_of_ours() -> None:
    made = spec()
    made["template"]["spec"]["containers"][0]["resources"]["limits"] = {"cpu": "8"}
    assert read_groups(raycluster(made), []) == ([], [])


def test_pods_become_slices_by_name_with_hosts_in_order() -> None:
    made = spec(replicas=2)
    pods = replica_pods(made, 1) + replica_pods(made, 0)[::-1]
    pods[0]["status"] = {"phase": "Running", "podIP": "10.0.0.5"}
    group = read(made, pods)
    assert [each.name for each in group.slices] == ["v6e-spot-0", "v6e-spot-1"]
    first, second = group.slices
    assert [pod.name for pod in first.pods] == [pod["metadata"]["name"] for pod in pods[:1:-1]]
    assert [pod.phase for pod in second.pods] == [PodPhase.RUNNING, PodPhase.PENDING]
    assert second.addresses == {"10.0.0.5"}


def test_pods_being_deleted_count_neither_as_slices_nor_as_doomed() -> None:
    made = spec(replicas=1)
    pods = replica_pods(made, 0) + replica_pods(made, 1)
    doomed = [pods[0]["metadata"]["name"], pods[2]["metadata"]["name"], "long-gone"]
    made["scaleStrategy"] = {"workersToDelete": doomed}
    for pod in pods[:2]:
        pod["metadata"]["deletionTimestamp"] = "2026-11-20T00:00:00Z"
    group = read(made, pods)
    assert [each.name for each in group.slices] == ["v6e-spot-1"]
    assert group.pods_pending_deletion == {doomed[1]}


def test_single_host_pod_without_kuberays_index_is_called_by_its_own_name() -> None:
    shape = slice_shape("v6e", "2x4", 8)
    made = worker_group("v6e-one", shape, "spot", max_replicas=3, has_host_index=False)
    labelled, bare = replica_pods(made, 0)[0], replica_pods(made, 1)[0]
    for pod, dropped in ((labelled, ()), (bare, ("replicaIndex",))):
        for label in (
            "ray.io/worker-group-replica-index",
            *dropped,
        ):
            del pod["metadata"]["labels"][label]
    names = {each.name for each in read(made, [labelled, bare]).slices}
    # What the webhook calls it may be the name of another one.
    assert names == {labelled["metadata"]["name"], bare["metadata"]["name"]}


@pytest.mark.parametrize(
    "broken",
    [
        {"groupName": "x"},
        spec(replicas="many"),
        {key: value for key, value in spec().items() if key != "maxReplicas"},
    ],
)
def test_object_of_another_form_is_unusable(broken: dict) -> None:
    with pytest.raises(UnusableError, match="not a RayCluster as KubeRay"):
        read_groups(raycluster(broken), [])


def test_pod_of_another_form_is_unusable() -> None:
    pod = replica_pods(spec(), 0)[0]
    pod["status"]["phase"] = "Evaporated"
    with pytest.raises(UnusableError, match="not a pod as KubeRay"):
        decoded([pod])


def test_owner_is_the_rayservice_and_nobody_else() -> None:
    assert owning_service(raycluster(spec(), is_of_service=True)) == "llm-tpu"
    assert owning_service(raycluster(spec())) is None


def test_zone_of_a_group_is_its_label() -> None:
    made = spec()
    assert read(made).zone is None
    made["labels"] = {**made["labels"], "ray.io/availability-zone": "us-east5-a"}
    assert read(made).zone == "us-east5-a"


def test_machine_is_the_node_that_the_pod_was_given() -> None:
    pods = replica_pods(spec(replicas=1), 0)
    pods[0]["spec"]["nodeName"] = "gke-tpu-7"
    (found,) = read(spec(replicas=1), pods).slices
    assert [pod.machine for pod in found.pods] == ["gke-tpu-7", None]


PULL = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x"'}}
CRASH = {"waiting": {"reason": "CrashLoopBackOff"}}


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ({}, None),
        ({"containerStatuses": [{"state": {"running": {}}}]}, None),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}, None),
        (
            {"containerStatuses": [{"state": {"running": {}}}, {"state": PULL}]},
            'ImagePullBackOff: Back-off pulling image "x"',
        ),
        (
            {
                "initContainerStatuses": [{"state": {"terminated": {}}}, {"state": CRASH}],
                "containerStatuses": [{"state": {"waiting": {"reason": "PodInitializing"}}}],
            },
            "CrashLoopBackOff",
        ),
    ],
)
def test_pod_says_what_keeps_it_from_starting(statuses: dict, expected: str | None) -> None:
    pod = replica_pods(spec(), 0)[0]
    pod["status"] = {"phase": "Pending", **statuses}
    assert decoded([pod])[0].observed.waiting == expected


def test_pods_of_an_earlier_cluster_of_that_name_are_none_of_its_slices() -> None:
    made = raycluster(spec(replicas=2))
    made["metadata"]["uid"] = "later"
    pods = replica_pods(spec(replicas=2), 0) + replica_pods(spec(replicas=2), 1)
    for pod, uid in zip(pods, ("earlier", "earlier", "later", "later"), strict=True):
        pod["metadata"]["ownerReferences"] = [{"uid": uid, "controller": True}]
    (group,), _ = read_groups(made, decoded(pods))
    assert [each.name for each in group.slices] == ["v6e-spot-1"]
