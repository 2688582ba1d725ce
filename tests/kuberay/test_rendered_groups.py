"""Nodes started from rendered manifests, and deployments of the same values file on them.

The RayCluster is what `slicewise render` writes, the gateway's group aside, which makes no slices.
Its worker groups become raylets with the resources and labels that they name; replicas look for
exactly what the values file's deployments select, by the application's own functions.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from control_plane.server import ControlPlane
from ray._raylet import GcsClient

from autoscaling.provisioning.kubernetes import KubernetesApi
from autoscaling.provisioning.plan import ProvisioningRules
from autoscaling.provisioning.reconcile import Reconciler
from autoscaling.provisioning.sidecar.fence import RayFence
from deployments.manifests.render import render
from deployments.manifests.values import Values, parse_values
from serving.config.slice_settings import slice_spec
from serving.config.slice_spec import slice_request
from serving.domain.slice_records import LEASE_S, SliceRecord

from .book_keeper import BookKeeper
from .cluster import EmulatedCluster
from .listed import listing
from .objects import RAYCLUSTER
from .replicas import Replicas, replicas, until
from .webhook_server import Webhook

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore::ResourceWarning")]

EXAMPLE = Path(__file__).parents[2] / "deployments" / "values" / "example.yaml"
SLICE = {"generation": "v6e", "topology": "2x4", "chips_per_host": 4}
CLASSES = ("reserved", "spot")


def values() -> Values:
    """The example on slices of two hosts, under the name that the emulation has."""
    raw = yaml.safe_load(EXAMPLE.read_text())
    raw["cluster"]["name"] = RAYCLUSTER
    raw["cluster"]["classes"][0] = {"compute_class": "reserved", "reservation": "ours"}
    (model,) = raw["applications"][0]["args"]["models"]
    model["deployments"] = [{"compute_class": name, "slice": SLICE} for name in CLASSES]
    return parse_values(raw, None)


def rendered_cluster() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The cluster, and the accounts and priorities that its pods name."""
    files = render(values(), "values.yaml")
    body: dict[str, Any] = yaml.safe_load(files["kuberay/raycluster/raycluster.yaml"])
    others = [
        each
        for name, text in files.items()
        if name.endswith(".yaml")
        for each in yaml.safe_load_all(text)
        if each is not None and each.get("kind") in ("ServiceAccount", "PriorityClass")
    ]
    spec = body["spec"]
    spec["workerGroupSpecs"] = [
        # Go writes the empty struct, and Ray's provider counts on it.
        group | {"scaleStrategy": {}}
        for group in spec["workerGroupSpecs"]
        if group["groupName"] != "gateway"
    ]
    return body, others


@pytest.fixture(scope="module")
def cluster(control_plane: ControlPlane, webhook: Webhook) -> Iterator[EmulatedCluster]:
    made, needed = rendered_cluster()
    delays: dict[str, float | None] = {
        group["groupName"]: 0.5 for group in made["spec"]["workerGroupSpecs"]
    }
    with EmulatedCluster(control_plane, made, delays, needed=needed) as running:
        yield running


def of_class(name: str) -> Any:
    """Replicas of the deployment on this class, as the application would start them."""
    config = values().app
    (model,) = config.models
    deployment = next(each for each in model.deployments if each.compute_class == name)
    spec = slice_spec(config, model, deployment)
    assert spec is not None
    return replicas(name, spec.shape, slice_request(spec))


@pytest.mark.long
async def test_deployments_hold_slices_of_the_rendered_groups(cluster: EmulatedCluster) -> None:
    async with of_class("reserved") as reserved, of_class("spot") as spot:
        fleets: list[Replicas] = [reserved, spot]
        api = KubernetesApi(cluster.access)

        async def records() -> list[SliceRecord]:
            return [record for fleet in fleets for record in await fleet.records()]

        keeper = BookKeeper(records)
        reconciler = Reconciler(
            keeper.read_supply,
            listing(api, RAYCLUSTER),
            ProvisioningRules(idle_s=LEASE_S, min_change_interval_s=1.0),
            fence=RayFence(GcsClient(address=cluster.address)),
            report_pods=keeper.report_pods,
            interval_s=0.5,
        )
        try:
            one, other = reserved.start(), spot.start()

            async def both_hold() -> bool:
                await reconciler.attempt()
                return bool(one.slice_name and other.slice_name)

            await until(both_hold, "each class has given a slice")
        finally:
            await api.aclose()
        held = {one.slice_name: "reserved", other.slice_name: "spot"}
        assert held == {
            "v6e-2x4-4t-reserved-0": "reserved",
            "v6e-2x4-4t-spot-0": "spot",
        }
        for node in ray.nodes():
            name = node["Labels"].get("ray.io/tpu-slice-name")
            if node["Alive"] and name in held:
                assert node["Labels"]["ray.io/market-type"] == held[name]
                assert node["Labels"]["slicewise.io/compute-class"] == held[name]
                assert node["Labels"]["ray.io/availability-zone"] == "us-east5-b"
                assert node["Resources"]["TPU"] == 4
        assert len(one.node_ids) == len(other.node_ids) == 2
        assert not one.node_ids & other.node_ids
