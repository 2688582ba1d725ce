"""What `slicewise rollout` has said of a second cluster, and what then really comes of it.

Real: the API server with its quota, scheduler, kubectl, `slicewise rollout`. KubeRay is emulated.
"""

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from kuberay.listed import listing
from typer.testing import CliRunner

from autoscaling.provisioning.groups import WorkerGroup
from autoscaling.provisioning.kuberay import KubeRayProvisioner
from autoscaling.provisioning.kubernetes import KubernetesAccess, KubernetesApi
from autoscaling.provisioning.plan import Change, Drop, ProvisioningPlan
from autoscaling.provisioning.raycluster import CLUSTER_LABEL, GROUP_LABEL
from deployments.cli import build_cli
from deployments.manifests.names import Component
from serving.domain.names.gke_names import GKE_CHIPS
from serving.domain.supply.pods import ObservedSlice
from serving.domain.topology import slice_shape
from tests.deployments.manifests.examples import as_folder, raw_values, rendered

from .api import Api, Json, reference, wait
from .kubectl import Kubectl, kubectl_binary
from .operated import Operated, operated
from .server import ControlPlane

pytestmark = pytest.mark.process

SHAPE = slice_shape("v6e", "2x2")
SPOT, RESERVED = "v6e-2x2-spot", "v6e-2x2-reserved"
# Beside the reserved slice that every cluster begins with. All are of 4 chips.
NUM_SPOT = 3
CHIPS = f"requests.{GKE_CHIPS}"


def values(namespace: str | None = None, **cluster: Any) -> Json:
    classes = [
        {"compute_class": "reserved", "reservation": "ours", "min_slices": 1, "max_slices": 2},
        {"compute_class": "spot", "max_slices": 4},
    ]
    raw = raw_values((SHAPE, "reserved"), (SHAPE, "spot"), name="two", classes=classes, **cluster)
    if namespace is not None:
        raw["cluster"]["namespace"] = namespace
    return copy.deepcopy(raw)


def changed(made: Operated, kind: str) -> Json:
    """The values with another image of the hosts, to be upgraded in this way."""
    raw = values(made.namespace, upgrade={"kind": kind})
    raw["cluster"]["images"]["tpu"] = "registry/tpu:2"
    return raw


@pytest.fixture
def installation(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operated]:
    """With a slice of the reserved class and three of spot, which somebody has asked for."""
    monkeypatch.setenv("PATH", f"{kubectl_binary().parent}", prepend=":")
    with operated(api, values(), num_nodes=1) as made:
        (cluster,) = clusters(made)
        scale(made, cluster, NUM_SPOT)
        yield made


def clusters(made: Operated) -> list[Json]:
    """The RayClusters, the oldest first."""
    found = made.api.list("RayCluster", made.namespace)
    return sorted(found, key=lambda each: str(each["metadata"]["creationTimestamp"]))


def scale(made: Operated, cluster: Json, count: int) -> None:
    """Asks for slices of spot, and waits for those that come."""
    names = [group["groupName"] for group in cluster["spec"]["workerGroupSpecs"]]
    path = f"/spec/workerGroupSpecs/{names.index(SPOT)}/replicas"
    made.api.patch(cluster, [{"op": "replace", "path": path, "value": count}])
    made.settle()


def slices(made: Operated, cluster: Json) -> dict[str, int]:
    """How many pods of slices a cluster has, by group."""
    found: dict[str, int] = {}
    for pod in made.pods(Component.ENGINE):
        labels = pod["metadata"]["labels"]
        if labels[CLUSTER_LABEL] == cluster["metadata"]["name"]:
            found[labels[GROUP_LABEL]] = found.get(labels[GROUP_LABEL], 0) + 1
    return found


def used_chips(made: Operated, name: str = "two-chips") -> int | None:
    """The chips that a quota has counted; `None` before it has."""
    used = made.api.get("ResourceQuota", made.namespace, name).get("status", {}).get("used", {})
    return int(used[CHIPS]) if CHIPS in used else None


def rollout(plane: ControlPlane, folder: Path, raw: Json) -> tuple[int, str]:
    """What is said before: exit status and text."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(raw))
    arguments = ["rollout", f"{file}", f"--kubeconfig={plane.kubeconfig}"]
    said = CliRunner().invoke(build_cli([]), arguments)
    return said.exit_code, said.output


def upgrade(made: Operated, plane: ControlPlane, raw: Json) -> None:
    """Applies what is rendered; everybody has acted on it, and the application deploys."""
    kubectl = Kubectl(plane.kubeconfig)
    made.hand.dashboard.statuses[""] = {"slicewise": {"status": "DEPLOYING"}}
    for manifest in as_folder(rendered(raw)).of_kind("ResourceQuota", "RayService"):
        kubectl.apply(manifest.body)
    made.settle()


def refusals(made: Operated) -> list[str]:
    """What KubeRay was told where it could make no pod."""
    return [
        each["message"]
        for each in made.api.list("Event", made.namespace)
        if each["reason"] == "FailedToCreateWorkerPod"
    ]


def test_second_cluster_within_the_quota_comes_whole_as_was_said(
    installation: Operated, control_plane: ControlPlane, tmp_path: Path
) -> None:
    made, raw = installation, changed(installation, "new_cluster")
    code, said = rollout(control_plane, tmp_path, raw)
    assert code == 6, said
    assert "needs 16 chips beside the 16 that run, 32 in all; the quota allows 48" in said
    upgrade(made, control_plane, raw)
    first, second = clusters(made)
    # It begins with the least; its own provisioner asks for what replicas want.
    scale(made, second, NUM_SPOT)
    assert slices(made, first) == slices(made, second) == {RESERVED: 1, SPOT: NUM_SPOT}
    assert (refusals(made), used_chips(made)) == ([], 32)


def limit(made: Operated, num_chips: int) -> None:
    """A quota beside the rendered one, as for chips that Google lets nobody have."""
    quota = reference("ResourceQuota", made.namespace, "less")
    quota["spec"] = {"hard": {CHIPS: str(num_chips)}}
    made.api.create(quota)
    wait(lambda: used_chips(made, "less") == 16, "it has counted what there is")


def test_second_cluster_beyond_the_quota_is_refused_the_chips_that_were_said(
    installation: Operated, control_plane: ControlPlane, tmp_path: Path
) -> None:
    made, raw = installation, changed(installation, "new_cluster")
    limit(made, 24)
    code, said = rollout(control_plane, tmp_path, raw)
    assert code == 7, said
    assert "32 in all; the quota allows 24: 8 of them would be refused" in said
    assert "and the first cluster would never go" in said
    upgrade(made, control_plane, raw)
    first, second = clusters(made)
    scale(made, second, NUM_SPOT)
    assert slices(made, first) == {RESERVED: 1, SPOT: NUM_SPOT}
    # Of four slices two, which are the 8 chips.
    assert slices(made, second) == {RESERVED: 1, SPOT: 1}
    assert used_chips(made, "less") == 24
    assert f"exceeded quota: less, requested: {CHIPS}=4, used: {CHIPS}=24" in refusals(made)[0]
    status = made.api.get("RayService", made.namespace, "two")["status"]
    assert status["activeServiceStatus"]["rayClusterName"] == first["metadata"]["name"]


async def test_way_that_works_needs_no_chip_more(
    installation: Operated, control_plane: ControlPlane, tmp_path: Path
) -> None:
    made = installation
    limit(made, 16)
    code, said = rollout(control_plane, tmp_path, changed(made, "new_cluster"))
    assert code == 7, said
    assert "what works: set cluster.upgrade.kind: in_place, render and apply" in said
    raw = changed(made, "in_place")
    code, said = rollout(control_plane, tmp_path, raw)
    assert code == 5, said
    assert "takes effect: slice by slice: 3 slices, 1 at a time" in said
    upgrade(made, control_plane, raw)
    (cluster,) = clusters(made)

    def is_whole() -> bool:
        return made.all_run() and len(made.pods(Component.ENGINE)) == NUM_SPOT + 1

    async with provisioner(made, control_plane, tmp_path) as acting:
        await acting.catch_up()
        while old := await outdated(acting):
            group, gone = old[0]
            drop = Drop(gone, is_condemned=False, reason="its template is older")
            change = Change(group, group.replicas, (drop,), "because")
            await acting.apply(ProvisioningPlan((change,)))
            # In a thread, since the loop has connections to look after.
            await asyncio.to_thread(made.hand.settle, is_done=is_whole)
    assert slices(made, cluster) == {RESERVED: 1, SPOT: NUM_SPOT}
    images = {pod["spec"]["containers"][0]["image"] for pod in made.pods(Component.ENGINE)}
    assert images == {"registry/tpu:2"}
    assert len(clusters(made)) == 1


async def outdated(acting: KubeRayProvisioner) -> list[tuple[WorkerGroup, ObservedSlice]]:
    """The slices that are of an older template than their group."""
    groups = (await acting.observe()).groups
    return [(group, each) for group in groups for each in group.slices if each.is_outdated]


@asynccontextmanager
async def provisioner(
    made: Operated, plane: ControlPlane, folder: Path
) -> AsyncIterator[KubeRayProvisioner]:
    """An administrator's, of the one cluster that there is."""
    token = folder / "admin-token"
    token.write_text((plane.folder / "tokens.csv").read_text().split(",")[0])
    (cluster,) = clusters(made)
    api = KubernetesApi(KubernetesAccess(plane.url, made.namespace, token, plane.ca_file))
    try:
        yield listing(api, cluster["metadata"]["name"])
    finally:
        await api.aclose()
