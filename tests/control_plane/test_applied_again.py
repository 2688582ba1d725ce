"""What `kubectl apply` of the same manifests does to counts that the slice provisioner has set.

Worker groups are one list to the API server, which is replaced as a whole, and a count that is left
out is 0. So no form of our manifests keeps a count that stands in the object they are applied to.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from autoscaling.provisioning.demand import SliceKind
from autoscaling.provisioning.groups import WorkerGroup
from autoscaling.provisioning.objects.patches import positions, scaling_patch
from autoscaling.provisioning.plan import Change
from deployments.manifests.names import GATEWAY_GROUP
from tests.deployments.manifests.examples import shipped_folder

from .api import Api
from .kubectl import Kubectl, RefusedByKubectlError
from .server import ControlPlane
from .test_manifests_are_taken import applied

pytestmark = pytest.mark.process

Json = dict[str, Any]
GROUP = "v6e-2x2-spot"
# Where the cluster's spec lies in each kind.
SPEC = {"RayService": ("spec", "rayClusterConfig"), "RayCluster": ("spec",)}
BOTH = pytest.mark.parametrize("kind", list(SPEC))


@pytest.fixture
def kubectl(control_plane: ControlPlane) -> Kubectl:
    return Kubectl(control_plane.kubeconfig)


@pytest.fixture
def rendered(api: Api) -> Iterator[dict[str, Json]]:
    """The shipped example's clusters by kind, as rendered; they are gone afterwards."""
    folder = shipped_folder("example.yaml")
    bodies = {kind: copy.deepcopy(one.body) for kind in SPEC for one in folder.of_kind(kind)}
    namespace = folder.of_kind("Namespace")[0].body
    with applied(api, [namespace]):
        yield bodies
    for body in bodies.values():
        if api.exists(body):
            api.delete(body)


def groups_of(body: Json) -> list[Json]:
    found = body
    for key in SPEC[body["kind"]]:
        found = found[key]
    groups: list[Json] = found["workerGroupSpecs"]
    return groups


def count(kubectl: Kubectl, body: Json, group: str = GROUP) -> int:
    groups = groups_of(live(kubectl, body))
    return int(groups[positions(groups)[group]]["replicas"])


def live(kubectl: Kubectl, body: Json) -> Json:
    metadata = body["metadata"]
    return kubectl.get(body["kind"], metadata["name"], metadata["namespace"])


def scaled(api: Api, kubectl: Kubectl, body: Json, replicas: int) -> None:
    """The count as the provisioner sets it: its own patch, of a plan for this group."""
    groups = groups_of(live(kubectl, body))
    position = positions(groups)[GROUP]
    spec = groups[position]
    group = WorkerGroup(
        name=GROUP,
        kind=SliceKind("spot", "v6e", "2x2"),
        replicas=spec["replicas"],
        min_replicas=spec["minReplicas"],
        max_replicas=spec["maxReplicas"],
        num_hosts=spec["numOfHosts"],
    )
    prefix = "/" + "/".join(SPEC[body["kind"]])
    patch = scaling_patch(Change(group, replicas, (), "the test says so"), position, None)
    moved = [step | {"path": step["path"].replace("/spec", prefix, 1)} for step in patch]
    api.patch(body, moved)


@BOTH
def test_applying_what_nobody_changed_changes_nothing(
    kind: str, rendered: dict[str, Json], kubectl: Kubectl
) -> None:
    body = rendered[kind]
    kubectl.apply(body)
    before = live(kubectl, body)
    kubectl.apply(body)
    after = live(kubectl, body)
    assert after["spec"] == before["spec"]
    assert after["metadata"]["generation"] == before["metadata"]["generation"]


@BOTH
@pytest.mark.parametrize("is_left_out", [False, True], ids=["rendered", "count left out"])
def test_count_that_stands_in_the_object_falls_back_whether_it_is_rendered_or_not(
    kind: str, rendered: dict[str, Json], api: Api, kubectl: Kubectl, *, is_left_out: bool
) -> None:
    body = rendered[kind]
    if is_left_out:
        for group in groups_of(body):
            if group["groupName"] != GATEWAY_GROUP:
                del group["replicas"]
    kubectl.apply(body)
    scaled(api, kubectl, body, 3)
    assert count(kubectl, body) == 3
    kubectl.apply(body)
    assert count(kubectl, body) == 0


def test_counts_of_a_rayservices_cluster_are_out_of_reach_of_apply(
    rendered: dict[str, Json], api: Api, kubectl: Kubectl
) -> None:
    service, cluster = rendered["RayService"], rendered["RayCluster"]
    # As KubeRay makes it: another object, with a name of its own.
    cluster["metadata"]["name"] = "llm-abcde"
    api.create(cluster)
    kubectl.apply(service)
    scaled(api, kubectl, cluster, 3)
    kubectl.apply(service)
    assert count(kubectl, cluster) == 3
    assert live(kubectl, service)["metadata"]["generation"] == 1


@BOTH
def test_applying_on_the_servers_side_is_refused_once_the_provisioner_has_scaled(
    kind: str, rendered: dict[str, Json], api: Api, kubectl: Kubectl
) -> None:
    body = rendered[kind]
    kubectl.apply(body, "--server-side")
    scaled(api, kubectl, body, 3)
    with pytest.raises(RefusedByKubectlError, match=r"conflict with .*workerGroupSpecs"):
        kubectl.apply(body, "--server-side")
    assert count(kubectl, body) == 3
