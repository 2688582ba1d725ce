"""Rendering: the same bytes each time, from the same configuration, written with care."""

import json
from pathlib import Path

import pytest
import ray
import yaml

from autoscaling.provisioning.groups import SliceKind
from autoscaling.provisioning.raycluster import read_groups
from deployments.manifests.cluster_config import UpgradeKind
from deployments.manifests.command import format_source, write_files
from deployments.manifests.names import GATEWAY_GROUP
from deployments.manifests.ray_objects import RAY_VERSION
from deployments.manifests.render import MARK, render
from deployments.start.serve import child_environment
from deployments.validation.schemas import Schemas
from serving.config.application import AppConfig
from serving.config.ray_settings import RAY_SETTINGS
from serving.config.slice_settings import drain_s
from serving.config.slices import built_in_classes
from serving.domain.topology import slice_shape
from serving.gateway.batches.bucket.store import BucketBatchStore
from serving.gateway.batches.lane import open_batch_store

from .examples import (
    ROOT,
    VALUES,
    Raw,
    as_folder,
    found,
    groups_of,
    in_memory,
    one,
    parsed,
    raw_values,
    rendered,
    shipped,
    shipped_folder,
    shipped_text,
)

SHAPE = slice_shape("v6e", "4x4")
SPOT = (SHAPE, "spot")


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.name)
def test_shipped_values_give_the_same_bytes_twice(path: Path) -> None:
    first, second = rendered(shipped(path.name)), rendered(shipped(path.name))
    assert list(first.items()) == list(second.items())


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.name)
def test_shipped_values_give_manifests_without_a_problem(path: Path) -> None:
    assert found(shipped_folder(path.name)) == []


@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.name)
def test_schemas_take_what_shipped_values_give(path: Path, crds: Schemas) -> None:
    folder = shipped_folder(path.name)
    held = [each for each in folder.manifests if crds.has(each)]
    assert {each.kind for each in held} == {"ComputeClass", "RayCluster", "RayService"}
    assert [str(problem) for each in held for problem in crds.problems(each)] == []


def test_shipped_manifests_are_the_rendering_of_the_example() -> None:
    text = shipped_text("example.yaml")
    values = parsed(shipped("example.yaml"))
    files = render(values, format_source("example.yaml", text))
    stands = {
        path.relative_to(ROOT / "deployments").as_posix(): path.read_text()
        for folder in ("gke", "kuberay")
        for path in (ROOT / "deployments" / folder).rglob("*")
        if path.is_file()
    }
    stands["kustomization.yaml"] = (ROOT / "deployments" / "kustomization.yaml").read_text()
    hint = "slicewise render deployments/values/example.yaml --out deployments"
    assert stands == files, f"render it again: {hint}"


def test_deployments_in_another_order_give_the_same_manifests() -> None:
    one_way = raw_values(SPOT, (SHAPE, "reserved"))
    other_way = raw_values((SHAPE, "reserved"), SPOT)
    first, second = rendered(one_way), rendered(other_way)
    # The application's own order is its own.
    of_serve = {"kuberay/rayservice/rayservice.yaml", "kuberay/raycluster/serve_config.yaml"}
    assert {path for path in first if first[path] != second[path]} == of_serve


def test_serve_configuration_is_the_values_file_without_its_cluster() -> None:
    service = one(shipped_folder("example.yaml"), "RayService")
    expected = {k: v for k, v in shipped("example.yaml").items() if k != "cluster"}
    assert yaml.safe_load(service.body["spec"]["serveConfigV2"]) == expected


def test_provisioner_takes_every_rendered_group_as_it_stands() -> None:
    folder = in_memory(shipped("v6e.yaml"))
    groups, notes = read_groups(one(folder, "RayCluster").body, [])
    assert notes == []
    asked = {group.name: (group.kind, group.num_hosts) for group in groups}
    assert asked["v6e-4x8-spot"] == (SliceKind("spot", "v6e", "4x8"), 8)
    assert asked["v6e-2x4-reserved"] == (SliceKind("reserved", "v6e", "2x4"), 1)
    assert len(asked) == 8


def test_ray_in_manifests_is_the_installed_one() -> None:
    assert ray.__version__ == RAY_VERSION


@pytest.mark.parametrize("market", built_in_classes())
def test_grace_covers_the_drain_of_every_market(market: str) -> None:
    (group,) = groups_of(raw_values((SHAPE, market)))
    assert group.grace_s > drain_s(built_in_classes()[market]) + 10


def test_more_slices_than_replicas_so_that_a_draining_one_is_replaced() -> None:
    raw = raw_values(SPOT)
    raw["applications"][0]["args"]["models"][0]["deployments"][0]["replicas"] = 3
    (group,) = groups_of(raw)
    assert (group.wanted_slices, group.terms.max_slices) == (3, 6)


def gateway_counts(args: Raw) -> tuple[list[int], int]:
    """How many gateways' pods are rendered with these arguments, and how many the budget keeps."""
    raw = raw_values((SHAPE, "spot"))
    raw["applications"][0]["args"].update(args)
    raw["applications"][0]["args"]["models"][0]["deployments"][0]["replicas"] = 4
    folder = in_memory(raw)
    (group,) = (
        each
        for each in one(folder, "RayCluster").body["spec"]["workerGroupSpecs"]
        if each["groupName"] == GATEWAY_GROUP
    )
    budget = one(folder, "PodDisruptionBudget", "llm-gateway").body["spec"]
    assert found(folder) == []
    return [group[key] for key in ("minReplicas", "replicas", "maxReplicas")], budget[
        "minAvailable"
    ]


def test_there_are_as_many_gateways_pods_as_the_rule_says() -> None:
    assert gateway_counts({"gateway": {"replicas": 5}}) == ([5, 5, 5], 4)
    # 4 engines of 256 sequences at 200 tokens/s: 204,800 tokens/s.
    assert gateway_counts({"gateway": {"replicas": "auto"}}) == ([18, 18, 18], 17)
    few = {"replicas": "auto", "expected_tokens_per_s": 1000}
    assert gateway_counts({"gateway": few}) == ([2, 2, 2], 1)


def test_joined_slices_are_counted_for_each_replica() -> None:
    raw = raw_values((SHAPE, "spot"))
    deployment = raw["applications"][0]["args"]["models"][0]["deployments"][0]
    deployment["replicas"] = 2
    (alone,) = groups_of(raw)
    deployment["slice"] |= {"num_slices": 2, "zone": "us-east5-b"}
    (joined,) = groups_of(raw)
    assert (joined.wanted_slices, joined.terms.max_slices) == (2 * alone.wanted_slices, 2 * 4)


def test_models_share_the_slices_of_one_kind() -> None:
    raw = raw_values(SPOT)
    models = raw["applications"][0]["args"]["models"]
    models.append(models[0] | {"name": "other"})
    (group,) = groups_of(raw)
    assert group.wanted_slices == 2


def test_deployment_with_a_zone_has_a_group_with_that_label() -> None:
    raw = raw_values(SPOT)
    deployment = raw["applications"][0]["args"]["models"][0]["deployments"][0]
    deployment["slice"]["zone"] = "us-east5-a"
    (group,) = groups_of(raw)
    assert group.name == "v6e-4x4-spot-us-east5-a"
    assert group.labels["ray.io/availability-zone"] == "us-east5-a"
    assert found(in_memory(raw)) == []


def test_hosts_of_a_declared_class_have_the_labels_that_it_selects() -> None:
    raw = raw_values((SHAPE, "calendar"))
    raw["applications"][0]["args"]["compute_classes"] = [
        {"name": "calendar", "market": "reserved", "node_labels": {"team": "search"}}
    ]
    raw["cluster"]["classes"] = [{"compute_class": "calendar", "reservation": "ours"}]
    (group,) = groups_of(raw)
    assert group.labels["team"] == "search"
    assert group.labels["ray.io/market-type"] == "reserved"
    assert found(in_memory(raw)) == []


def test_secrets_are_named_and_never_there() -> None:
    raw = raw_values(SPOT)
    args = raw["applications"][0]["args"]
    args["auth"] = {"keys_file": "/etc/slicewise/keys/keys.txt"}
    folder = in_memory(raw)
    assert folder.of_kind("Secret") == []
    groups = one(folder, "RayCluster").body["spec"]["workerGroupSpecs"]
    pods = {group["groupName"]: group["template"]["spec"] for group in groups}
    mounts = {
        name: [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
        for name, pod in pods.items()
    }
    assert "/etc/slicewise/keys" in mounts["gateway"]
    assert "/etc/slicewise/keys" not in mounts["v6e-4x4-spot"]
    link = {
        name: [each["name"] for each in pod["containers"][0]["env"] if "valueFrom" in each]
        for name, pod in pods.items()
    }
    assert "LINK" in link["gateway"]
    assert "LINK" in link["v6e-4x4-spot"]


@pytest.mark.parametrize("user", [0, 1000])
def test_no_pod_of_ray_gets_more_rights_and_none_but_a_tpu_host_is_root(user: int) -> None:
    raw = raw_values(SPOT, host={"rights": {"user": user}})
    spec = one(in_memory(raw), "RayCluster").body["spec"]
    templates = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for pod in (each["template"]["spec"] for each in templates):
        is_host = "gke-tpu-topology" in str(pod.get("nodeSelector"))
        assert pod["securityContext"]["runAsNonRoot"] is (not is_host or user != 0)
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize(
    ("kind", "strategy", "chips"),
    [
        (UpgradeKind.IN_PLACE, "None", 32),
        (UpgradeKind.NEW_CLUSTER, "NewCluster", 64),
        (UpgradeKind.INCREMENTAL, "NewClusterWithIncrementalUpgrade", 40),
    ],
)
def test_upgrade_has_its_strategy_and_the_chips_for_it(
    kind: UpgradeKind, strategy: str, chips: int
) -> None:
    folder = in_memory(raw_values(SPOT, upgrade={"kind": kind.value}))
    assert one(folder, "RayService").body["spec"]["upgradeStrategy"]["type"] == strategy
    quota = one(folder, "ResourceQuota").body["spec"]["hard"]
    assert quota == {"requests.google.com/tpu": str(chips)}
    # KubeRay makes Gateway and route of its own for an incremental one.
    routes = [each.file for each in folder.of_kind("HTTPRoute")]
    has_route = "kuberay/rayservice/route.yaml" in routes
    assert has_route == (kind != UpgradeKind.INCREMENTAL)
    assert found(folder) == []


def test_node_pools_of_your_own_are_one_for_each_slice_of_several_hosts(crds: Schemas) -> None:
    raw = raw_values(SPOT, (slice_shape("v6e", "2x4"), "spot"), provisioning="node-pools")
    files = rendered(raw)
    folder = as_folder(files)
    assert found(folder) == []
    several = one(folder, "ComputeClass", "v6e-4x4-spot")
    assert several.body["spec"]["priorities"] == [
        {"nodepools": ["v6e-4x4-spot-0", "v6e-4x4-spot-1"]}
    ]
    assert list(crds.problems(several)) == []
    script = files["gke/node-pools.sh"]
    assert script.count("gcloud container node-pools create") == 3
    assert "create v6e-4x4-spot-1 " in script
    assert "--tpu-topology=4x4" in script
    assert "--spot" in script


def test_claims_have_the_networks_that_they_ask_for(crds: Schemas) -> None:
    made = one(in_memory(raw_values(SPOT, dranet=True)), "ComputeClass", "v6e-4x4-spot")
    assert made.body["spec"]["nodePoolConfig"]["dra"] == {"networking": {"enabled": True}}
    assert made.body["spec"]["priorities"][0]["acceleratorNetworkProfile"] == "auto"
    assert list(crds.problems(made)) == []
    script = rendered(raw_values(SPOT, dranet=True, provisioning="node-pools"))["gke/node-pools.sh"]
    assert "--accelerator-network-profile=auto" in script
    assert "cloud.google.com/gke-networking-dra-driver=true" in script
    without = rendered(raw_values(SPOT, provisioning="node-pools"))["gke/node-pools.sh"]
    assert "network" not in without


def test_pods_are_ready_when_what_they_are_for_answers() -> None:
    groups = one(in_memory(raw_values(SPOT)), "RayCluster").body["spec"]["workerGroupSpecs"]
    asked = {
        group["groupName"]: group["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]
        for group in groups
    }
    # Through its proxy a gateway; on a host of a slice there is none, and Ray's agent answers.
    assert asked["gateway"] == {"path": "/ready", "port": 8000}
    assert asked["v6e-4x4-spot"] == {"path": "/api/healthz", "port": 52365}


def test_every_pod_of_ray_is_started_as_on_a_laptop(tmp_path: Path) -> None:
    spec = one(in_memory(raw_values(SPOT)), "RayCluster").body["spec"]
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        variables = group["template"]["spec"]["containers"][0]["env"]
        stands = {each["name"]: each.get("value") for each in variables}
        assert RAY_SETTINGS.items() <= stands.items()
    assert RAY_SETTINGS.items() <= child_environment({}, str(tmp_path)).items()


def test_network_claims_reach_hosts_of_slices_only() -> None:
    folder = in_memory(raw_values(SPOT, dranet=True))
    groups = one(folder, "RayCluster").body["spec"]["workerGroupSpecs"]
    pods = {group["groupName"]: group["template"]["spec"] for group in groups}
    assert pods["v6e-4x4-spot"]["resourceClaims"] == [
        {"name": "netdev", "resourceClaimTemplateName": "all-netdev"}
    ]
    assert "resourceClaims" not in pods["gateway"]
    assert found(folder) == []


def test_bucket_of_weights_reaches_engines_and_gateways() -> None:
    """A gateway reads the model's configuration and tokenizer from the path of the weights."""
    raw = raw_values(SPOT, bucket="weights")
    raw["applications"][0]["args"]["models"][0]["source"] = "/data/llama"
    folder = in_memory(raw)
    spec = one(folder, "RayCluster").body["spec"]
    templates = {each["groupName"]: each["template"] for each in spec["workerGroupSpecs"]}
    # Control processes read no weights.
    of_control = templates.pop("control")["spec"]
    assert not any("csi" in each for each in of_control["volumes"])
    for template in templates.values():
        pod = template["spec"]
        (volume,) = [each for each in pod["volumes"] if "csi" in each]
        assert volume["csi"]["driver"] == "gcsfuse.csi.storage.gke.io"
        assert volume["csi"]["volumeAttributes"]["bucketName"] == "weights"
        mount = {"name": volume["name"], "mountPath": "/data", "readOnly": True}
        assert mount in pod["containers"][0]["volumeMounts"]
        assert template["metadata"]["annotations"]["gke-gcsfuse/volumes"] == "true"
        assert pod["automountServiceAccountToken"] is True
    head = spec["headGroupSpec"]["template"]["spec"]
    assert not any("csi" in each for each in head["volumes"])
    assert found(folder) == []


@pytest.mark.parametrize("store", ["gs://team-batches/chat", "s3://team-batches"])
def test_bucket_of_batches_is_what_every_gateway_opens(store: str) -> None:
    account = "batches@project.iam.gserviceaccount.com"
    raw = raw_values(SPOT, google_service_account=account)
    raw["applications"][0]["args"]["batches"] = {"store": store}
    folder = in_memory(raw)
    assert found(folder) == []
    application = yaml.safe_load(one(folder, "RayService").body["spec"]["serveConfigV2"])
    (args,) = [each["args"] for each in application["applications"]]
    opened = open_batch_store(AppConfig.model_validate_json(json.dumps(args)).batches)
    assert isinstance(opened, BucketBatchStore)
    opened.close()
    # Nothing is mounted: the account of the gateways' pods is let in.
    groups = one(folder, "RayCluster").body["spec"]["workerGroupSpecs"]
    (pod,) = [each["template"]["spec"] for each in groups if each["groupName"] == GATEWAY_GROUP]
    assert not any("csi" in each or "hostPath" in each for each in pod["volumes"])
    known = one(folder, "ServiceAccount", pod["serviceAccountName"]).body
    assert known["metadata"]["annotations"] == {"iam.gke.io/gcp-service-account": account}


def test_written_files_say_what_they_are_from_and_old_ones_go(tmp_path: Path) -> None:
    files = rendered(raw_values(SPOT, dranet=True))
    assert write_files(files, tmp_path) == (len(files), 0)
    assert (tmp_path / "kustomization.yaml").read_text().startswith(f"{MARK} from values.yaml.")
    assert write_files(files, tmp_path) == (0, 0)
    fewer = rendered(raw_values(SPOT))
    (tmp_path / "gke" / "mine.yaml").write_text("kind: Mine\n")
    changed, removed = write_files(fewer, tmp_path)
    assert removed == 1
    assert changed > 0
    assert not (tmp_path / "gke" / "network-claims.yaml").exists()
    assert (tmp_path / "gke" / "mine.yaml").exists()


def test_file_of_somebody_else_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("kind: Kustomization\n")
    with pytest.raises(FileExistsError, match="not written by slicewise render"):
        write_files(rendered(raw_values(SPOT)), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kustomization.yaml"]
