"""`slicewise doctor` and what `status` shows, with the real kubectl at a real API server."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from kuberay.recordings import FOLDER
from typer.testing import CliRunner

from deployments.applied import describe_applied, read_running
from deployments.cli import build_cli
from deployments.kubectl import Kubectl as OperatorsKubectl
from tests.deployments.manifests.examples import VALUES, shipped_folder

from .api import Api
from .installation import Installation, installed
from .kubectl import Kubectl, kubectl_binary
from .server import ControlPlane
from .test_manifests_are_taken import applied

pytestmark = pytest.mark.process

Json = dict[str, Any]
EXAMPLE = next(path for path in VALUES if path.name == "example.yaml")


def operator(image: str) -> list[Json]:
    """A Deployment as KubeRay's chart makes it, as far as it is read, in a namespace of its own."""
    labels = {"app.kubernetes.io/name": "kuberay-operator"}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "kuberay-operator", "image": image}]},
    }
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kuberay-operator"}},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "kuberay-operator", "namespace": "kuberay-operator"},
            "spec": {"selector": {"matchLabels": labels}, "template": template},
        },
    ]


def webhook(selector: Json) -> Json:
    """The recorded configuration; nothing answers it, and no other test makes pods meanwhile."""
    documents = yaml.safe_load_all((FOLDER / "webhook-configuration.yaml").read_text())
    configuration: Json = next(
        one for one in documents if one["kind"] == "MutatingWebhookConfiguration"
    )
    for hook in configuration["webhooks"]:
        hook["objectSelector"] = selector
        del hook["clientConfig"]["caBundle"]
    return configuration


@pytest.fixture
def running(
    control_plane: ControlPlane, api: Api, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Installation]:
    monkeypatch.setenv("PATH", f"{kubectl_binary().parent}", prepend=":")
    kubectl = Kubectl(control_plane.kubeconfig)
    with installed(api, kubectl, shipped_folder("example.yaml"), v6e_2x2_spot=2) as made:
        yield made


def examined(control_plane: ControlPlane) -> dict[str, list[Json]]:
    """The findings of a run of the command, by what they are about."""
    arguments = ["doctor", f"--manifests={EXAMPLE}", f"--kubeconfig={control_plane.kubeconfig}"]
    said = CliRunner().invoke(build_cli([]), [*arguments, "--json"])
    found: dict[str, list[Json]] = {}
    for finding in json.loads(said.output)["findings"]:
        found.setdefault(finding["what"], []).append(finding)
    return found


def levels(findings: list[Json]) -> list[str]:
    return [finding["level"] for finding in findings]


def test_doctor_finds_operator_webhook_schemas_and_nothing_missing(
    running: Installation, control_plane: ControlPlane
) -> None:
    asked_for = {"matchLabels": {"app.kubernetes.io/name": "kuberay"}}
    objects = [*operator("quay.io/kuberay/operator:v1.7.0"), webhook(asked_for)]
    with applied(running.api, objects):
        found = examined(control_plane)
    assert found["KubeRay operator"][0]["found"] == (
        "kuberay-operator/kuberay-operator: quay.io/kuberay/operator:v1.7.0"
    )
    assert levels(found["TPU webhook"]) == ["ok"]
    assert levels(found["CRDs"]) == ["ok"]
    assert levels(found["RayService and what runs of it"]) == ["ok"]
    assert not [one for findings in found.values() for one in findings if one["level"] == "error"]


def test_doctor_says_an_old_operator_and_a_webhook_that_sees_no_pod_of_ours(
    running: Installation, control_plane: ControlPlane
) -> None:
    asked_for = {"matchLabels": {"app.kubernetes.io/name": "other"}}
    objects = [*operator("quay.io/kuberay/operator:v1.4.0"), webhook(asked_for)]
    with applied(running.api, objects):
        found = examined(control_plane)
    assert levels(found["KubeRay operator"]) == ["error"]
    # The example has slices of one host only, which find their way without.
    assert levels(found["TPU webhook"]) == ["warning"]
    assert "leaves out the pods of v6e-2x2-flex-start" in found["TPU webhook"][0]["found"]


def test_field_that_the_clusters_crd_does_not_know_is_an_error(
    running: Installation, control_plane: ControlPlane
) -> None:
    crd = running.kubectl.get_of_cluster("crd", "rayservices.ray.io")
    changed = copy.deepcopy(crd)
    for version in changed["spec"]["versions"]:
        if version["name"] == "v1":
            spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
            groups = spec["rayClusterConfig"]["properties"]["workerGroupSpecs"]["items"]
            del groups["properties"]["priority"]
    place = {"op": "replace", "path": "/spec/versions", "value": changed["spec"]["versions"]}
    running.api.patch(crd, [place])
    try:
        found = examined(control_plane)
    finally:
        running.api.patch(crd, [place | {"value": crd["spec"]["versions"]}])
    wrong = [one for what, ones in found.items() if "RayService/llm" in what for one in ones]
    assert wrong
    assert all(one["level"] == "error" and "priority" in one["found"] for one in wrong)


def applied_lines(kubectl: OperatorsKubectl, name: str) -> list[str]:
    running = read_running(kubectl, "RayService", name, "serving")
    return list(describe_applied(running, name, "serving"))


def test_what_was_applied_and_does_not_run_is_shown(
    running: Installation, control_plane: ControlPlane
) -> None:
    kubectl = OperatorsKubectl(kubeconfig=f"{control_plane.kubeconfig}")
    assert applied_lines(kubectl, "llm") == [
        "RayService serving/llm: cluster llm-abcde has all that was applied"
    ]
    service = copy.deepcopy(running.service)
    spot = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][-1]
    spot["maxReplicas"] = 9
    running.kubectl.apply(service)
    assert applied_lines(kubectl, "llm") == [
        "RayService serving/llm: cluster llm-abcde has not all that was applied:",
        "  v6e-2x2-spot: maxReplicas: 4 to 9: not carried over yet",
    ]
    assert applied_lines(kubectl, "other") == ["RayService serving/other: there is none"]
