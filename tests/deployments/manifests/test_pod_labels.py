"""Labels of Ray pods: KubeRay's stay as they are, and every selector finds the right pods."""

from pathlib import Path
from typing import Any

import pytest
from kuberay.recordings import recording

from deployments.manifests.kuberay_labels import kuberay_labels, merged_labels
from deployments.validation.documents import Folder, mapping
from deployments.validation.found_pods import FoundPod, all_pods, ray_pods, selects
from serving.domain.names.gke_names import GKE_CHIPS, HOST_INDEX_LABEL

from .examples import VALUES, as_folder, rendered, shipped, shipped_folder

NAME = "app.kubernetes.io/name"
# Labels of one replica of a group, and the webhook's.
_OF_REPLICAS = ("ray.io/worker-group-replica-", HOST_INDEX_LABEL, "replicaIndex")
EVERY_FILE = pytest.mark.parametrize("path", VALUES, ids=lambda path: path.name)

Json = dict[str, Any]


def kind_of(pod: FoundPod) -> str:
    """What a pod is, by what it is made of and not by our own labels."""
    if pod.manifest.kind != "RayService" and pod.manifest.kind != "RayCluster":
        return {"StatefulSet": "redis"}[pod.manifest.kind]
    if pod.group is None:
        return "head"
    limits = mapping(pod.spec, "containers", 0, "resources", "limits")
    if GKE_CHIPS in limits:
        return "engine"
    return "gateway" if pod.group["groupName"] == "gateway" else "control"


def selected(folder: Folder, selector: Json) -> set[str]:
    return {kind_of(pod) for pod in all_pods(folder) if selects(selector, pod.labels)}


RAY = {"head", "gateway", "control", "engine"}
# What each selector is to find, by kind and the end of its object's name.
WANTED = {
    ("NetworkPolicy", "pods"): RAY,
    ("NetworkPolicy", "head"): {"head"},
    ("NetworkPolicy", "gateways"): {"gateway"},
    ("NetworkPolicy", "redis"): {"redis"},
    ("PodDisruptionBudget", "head"): {"head"},
    ("PodDisruptionBudget", "gateway"): {"gateway"},
    ("PodDisruptionBudget", "control"): {"control"},
    ("PodDisruptionBudget", "redis"): {"redis"},
    ("PodMonitor", "tpu-exporter"): {"engine"},
    ("PodMonitor", "gateway"): {"gateway"},
    ("PodMonitor", "slice-provisioner"): {"head"},
    ("PodMonitor", "ray"): RAY,
    ("Service", "gateways"): {"gateway"},
    ("Service", "redis"): {"redis"},
}
_FIELDS = {"NetworkPolicy": "podSelector"}


@EVERY_FILE
def test_every_selector_takes_exactly_the_pods_it_is_for(path: Path) -> None:
    folder = shipped_folder(path.name)
    found = {}
    for each in folder.of_kind(*{kind for kind, _ in WANTED}):
        selector = mapping(each.body, "spec", _FIELDS.get(each.kind, "selector"))
        if each.kind == "Service":
            selector = {"matchLabels": selector}
        prefix = shipped(path.name)["cluster"]["name"]
        found[each.kind, each.name.removeprefix(f"{prefix}-")] = selected(folder, selector)
    assert found == {key: WANTED[key] for key in found}
    assert WANTED.keys() - found.keys() <= {key for key in WANTED if key[1] == "redis"}


@EVERY_FILE
def test_pods_off_slices_are_spread_among_their_own_kind(path: Path) -> None:
    folder = shipped_folder(path.name)
    spread = set()
    for pod in ray_pods(folder):
        for constraint in pod.spec.get("topologySpreadConstraints", ()):
            assert selected(folder, constraint["labelSelector"]) == {kind_of(pod)}
            spread.add(kind_of(pod))
    assert spread == {"gateway", "control"}


@EVERY_FILE
def test_peers_of_network_policies_are_our_pods(path: Path) -> None:
    """Ours among each other, and the head alone of Redis."""
    folder = shipped_folder(path.name)
    for policy in folder.of_kind("NetworkPolicy"):
        peers = [
            peer["podSelector"]
            for rule in policy.body["spec"]["ingress"]
            for peer in rule.get("from", ())
            if "podSelector" in peer
        ]
        wanted = {"head"} if policy.name.endswith("-redis") else RAY
        assert all(selected(folder, peer) == wanted for peer in peers)


@EVERY_FILE
def test_ray_pods_keep_the_labels_that_kuberay_gives_them(path: Path) -> None:
    for pod in ray_pods(shipped_folder(path.name)):
        assert (pod.labels[NAME], pod.labels["app.kubernetes.io/part-of"]) == (
            "kuberay",
            "slicewise",
        )
        of_template = mapping(pod.template, "metadata", "labels")
        assert not any(
            name.startswith("ray.io/") for name in of_template.keys() - {HOST_INDEX_LABEL}
        )


@EVERY_FILE
def test_hosts_of_single_host_slices_have_an_index_and_no_others(path: Path) -> None:
    folder = shipped_folder(path.name)
    found = [pod for pod in ray_pods(folder) if kind_of(pod) == "engine"]
    assert found
    for pod in ray_pods(folder):
        index = mapping(pod.template, "metadata", "labels").get(HOST_INDEX_LABEL)
        is_single = kind_of(pod) == "engine" and pod.group is not None
        is_single = is_single and pod.group["numOfHosts"] == 1
        assert index == ("0" if is_single else None)


def test_values_of_both_kinds_of_slices_are_shipped() -> None:
    """Or the tests above would show less than they say."""
    hosts = {
        spec["numOfHosts"] > 1
        for path in VALUES
        for each in shipped_folder(path.name).of_kind("RayCluster")
        for spec in each.body["spec"]["workerGroupSpecs"]
        if spec["groupName"] != "gateway"
    }
    assert hosts == {True, False}


@pytest.mark.parametrize(
    ("name", "label"), [("00-as-rendered", "slicewise"), ("12-raycluster", "kuberay")]
)
def test_labels_are_merged_as_kuberay_merged_them(name: str, label: str) -> None:
    """Also where a template had a label of KubeRay's: the webhook saw none of those pods."""
    found = recording(name)
    (cluster,) = found.rayclusters
    is_of_service = bool(cluster["metadata"]["ownerReferences"])
    groups = {spec["groupName"]: spec for spec in cluster["spec"]["workerGroupSpecs"]}
    for pod in found.pods:
        labels = pod["metadata"]["labels"]
        group = groups.get(labels["ray.io/group"])
        spec = cluster["spec"]["headGroupSpec"] if group is None else group
        merged = merged_labels(
            kuberay_labels(
                cluster["metadata"]["name"],
                None if group is None else group["groupName"],
                is_of_service=is_of_service,
            ),
            spec["template"]["metadata"]["labels"],
            spec.get("labels", {}),
        )
        kept = {key: value for key, value in labels.items() if not key.startswith(_OF_REPLICAS)}
        assert merged == kept
        assert merged[NAME] == label
    has_names = any("env" in pod["spec"]["containers"][0] for pod in found.hosts())
    assert has_names == (label == "kuberay")


def test_incremental_upgrades_have_a_service_but_no_route_of_ours() -> None:
    raw = shipped("example.yaml")
    raw["cluster"]["upgrade"] = {"kind": "incremental"}
    folder = as_folder(rendered(raw))
    assert "llm-gateways" in folder.names("Service")
    assert [each.file for each in folder.of_kind("HTTPRoute")] == ["kuberay/raycluster/route.yaml"]
