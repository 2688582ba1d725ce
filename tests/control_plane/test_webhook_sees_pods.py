"""The TPU webhook's own object selector, at a real API server, on pods made from our manifests.

The webhook itself is not there: somebody else answers in its place, and writes down which pods it
was asked about.
"""

import base64
import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kuberay.recordings import FOLDER

from deployments.validation.documents import Folder, mapping
from deployments.validation.found_pods import FoundPod, ray_pods
from serving.domain.names.gke_names import GKE_CHIPS, HOST_INDEX_LABEL
from tests.deployments.manifests.examples import VALUES, shipped_folder

from .api import Api
from .recorder import Recorder
from .server import ControlPlane
from .test_manifests_are_taken import applied, variant

pytestmark = pytest.mark.process

Json = dict[str, Any]
_EFFECTIVE_WITHIN_S = 60.0
OURS_OF_OLD = {"app.kubernetes.io/name": "slicewise"}


@pytest.fixture(scope="module")
def webhook(control_plane: ControlPlane) -> Iterator[Recorder]:
    """Asked as the recorded configuration says, but for its address."""
    authority = control_plane.authority
    with Recorder(*authority.server()) as recorder:
        text = (FOLDER / "webhook-configuration.yaml").read_text()
        mutating = next(
            each
            for each in yaml.safe_load_all(text)
            if each["kind"] == "MutatingWebhookConfiguration"
        )
        bundle = base64.b64encode(authority.ca_file.read_bytes()).decode()
        # Beside the emulated webhook, which may be registered by the recorded name.
        mutating["metadata"]["name"] = "recorder"
        for each in mutating["webhooks"]:
            each["clientConfig"] = {"url": recorder.url, "caBundle": bundle}
        control_plane.api.apply(mutating)
        _wait_asked(control_plane.api, recorder)
        yield recorder
        control_plane.api.delete(mutating)


def _wait_asked(api: Api, recorder: Recorder) -> None:
    """The server goes by a new configuration only after a moment."""
    account: Json = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "probe", "namespace": "default"},
    }
    api.apply(account)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "probe-",
            "namespace": "default",
            "labels": {"app.kubernetes.io/name": "kuberay"},
        },
        "spec": {
            "automountServiceAccountToken": False,
            "containers": [{"name": "probe", "image": "none"}],
            "serviceAccountName": "probe",
        },
    }
    deadline_s = time.monotonic() + _EFFECTIVE_WITHIN_S
    while not recorder.asked:
        assert time.monotonic() < deadline_s, "the webhook is never asked"
        api.delete(api.create(pod))
    api.delete(account)


def pod_of(found: FoundPod, **labels: str) -> Json:
    """A pod as KubeRay would make it of a template. KubeRay's index tells replicas apart."""
    # A made-up name is no label's value.
    of_pod = {name: value.replace("-(made up)", "-abcde") for name, value in found.labels.items()}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "worker-",
            "namespace": found.manifest.namespace,
            "labels": of_pod | labels,
        },
        "spec": copy.deepcopy(found.spec),
    }


def has_chips(pod: Json) -> bool:
    return GKE_CHIPS in mapping(pod, "spec", "containers", 0, "resources", "limits")


def group_names(pods: list[Json]) -> list[str]:
    return sorted(pod["metadata"]["labels"]["ray.io/group"] for pod in pods)


def create(api: Api, folder: Folder, name: str, pods: list[Json]) -> list[Json]:
    """The pods as the server has made them; what they need is there meanwhile."""
    needed = [
        body
        for body in variant(folder, name)
        if body["kind"] in ("Namespace", "ServiceAccount", "PriorityClass")
    ]
    with applied(api, needed):
        made = [api.create(pod) for pod in pods]
        for pod in made:
            api.delete(pod)
    return made


@pytest.mark.parametrize("name", ["rayservice", "raycluster"])
@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.name)
def test_webhook_is_asked_about_every_pod_with_chips(
    path: Path, name: str, api: Api, webhook: Recorder
) -> None:
    folder = shipped_folder(path.name)
    kind = {"rayservice": "RayService", "raycluster": "RayCluster"}[name]
    pods = [pod_of(each) for each in ray_pods(folder) if each.manifest.kind == kind]
    hosts = [pod for pod in pods if has_chips(pod)]
    assert hosts
    webhook.asked.clear()
    create(api, folder, name, pods)
    asked = [pod for pod in webhook.asked if has_chips(pod)]
    assert group_names(asked) == group_names(hosts)
    # What it goes by on single hosts is there when it is asked.
    numbered = [pod for pod in asked if HOST_INDEX_LABEL in pod["metadata"]["labels"]]
    groups = [spec for each in folder.of_kind(kind) for spec in _group_specs(each.body)]
    single = sorted(spec["groupName"] for spec in groups if spec["numOfHosts"] == 1)
    without_chips = {"gateway", "control"}
    assert group_names(numbered) == [each for each in single if each not in without_chips]


def test_webhook_is_not_asked_about_pods_with_a_name_of_their_own(
    api: Api, webhook: Recorder
) -> None:
    """As our pods were: the test above would say so."""
    folder = shipped_folder("example.yaml")
    pods = [
        pod_of(each, **OURS_OF_OLD)
        for each in ray_pods(folder)
        if each.manifest.kind == "RayCluster"
    ]
    webhook.asked.clear()
    create(api, folder, "raycluster", pods)
    assert webhook.asked == []


def _group_specs(body: Json) -> list[Json]:
    spec = body["spec"].get("rayClusterConfig", body["spec"])
    return list(spec["workerGroupSpecs"])
