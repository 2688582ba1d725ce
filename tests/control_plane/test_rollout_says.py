"""`slicewise rollout` with the real kubectl at a real API server, on a values file of ours."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from deployments.cli import build_cli
from serving.domain.topology import slice_shape
from tests.deployments.manifests.examples import in_memory, raw_values

from .api import Api
from .installation import Installation, installed
from .kubectl import Kubectl, kubectl_binary
from .server import ControlPlane

pytestmark = pytest.mark.process

Json = dict[str, Any]
SHAPE = slice_shape("v6e", "2x2")
CLASSES = [
    {"compute_class": "reserved", "reservation": "ours", "min_slices": 1, "max_slices": 2},
    {"compute_class": "spot", "max_slices": 4},
]


def values() -> Json:
    raw = raw_values((SHAPE, "reserved"), (SHAPE, "spot"), classes=copy.deepcopy(CLASSES))
    return copy.deepcopy(raw)


@pytest.fixture
def running(
    control_plane: ControlPlane, api: Api, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Installation]:
    """Installed from `values`, with a slice of the reserved class and three of spot."""
    monkeypatch.setenv("PATH", f"{kubectl_binary().parent}", prepend=":")
    kubectl = Kubectl(control_plane.kubeconfig)
    with installed(api, kubectl, in_memory(values()), v6e_2x2_reserved=1, v6e_2x2_spot=3) as made:
        yield made


def rollout(control_plane: ControlPlane, folder: Path, raw: Json, *options: str) -> Result:
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(raw))
    arguments = ["rollout", f"{file}", f"--kubeconfig={control_plane.kubeconfig}", *options]
    return CliRunner().invoke(build_cli([]), arguments)


def test_same_values_change_nothing(
    running: Installation, control_plane: ControlPlane, tmp_path: Path
) -> None:
    said = rollout(control_plane, tmp_path, values())
    assert (said.exit_code, said.output) == (0, "nothing would change\n")
    assert running.cluster["spec"]["workerGroupSpecs"][-1]["replicas"] == 3


def test_higher_maximum_is_in_place(
    running: Installation, control_plane: ControlPlane, tmp_path: Path
) -> None:
    raw = values()
    raw["cluster"]["classes"][1]["max_slices"] = 6
    said = rollout(control_plane, tmp_path, raw)
    assert said.exit_code == 4, said.output
    assert said.output.splitlines() == [
        "v6e-2x2-spot: maxReplicas: 4 to 6",
        "  takes effect: at once",
        "in place: no pod is replaced",
    ]


def test_new_image_of_hosts_rolls_slice_by_slice(
    running: Installation, control_plane: ControlPlane, tmp_path: Path
) -> None:
    raw = values()
    raw["cluster"]["images"]["tpu"] = "registry/tpu:2"
    said = rollout(control_plane, tmp_path, raw)
    assert said.exit_code == 5, said.output
    assert "  takes effect: slice by slice: 3 slices, 1 at a time" in said.output
    assert "registry/tpu:1 to registry/tpu:2" in said.output


def test_second_cluster_that_the_quota_has_no_room_for_is_said_before_it_is_begun(
    running: Installation, control_plane: ControlPlane, tmp_path: Path
) -> None:
    raw = values()
    raw["cluster"]["images"]["tpu"] = "registry/tpu:2"
    raw["cluster"]["upgrade"] = {"kind": "new_cluster"}
    # Rendered for two clusters: 2 x (2 + 4) slices of 4 chips.
    said = rollout(control_plane, tmp_path, raw, "--json")
    report = json.loads(said.output)
    assert (said.exit_code, report["outcome"]) == (6, "second_cluster")
    assert (report["chips"]["num_used"], report["chips"]["num_allowed"]) == (16, 48)
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "ours", "namespace": running.service["metadata"]["namespace"]},
        "spec": {"hard": {"requests.google.com/tpu": "20"}},
    }
    running.kubectl.apply(quota)
    try:
        said = rollout(control_plane, tmp_path, raw)
    finally:
        running.api.delete(quota)
    assert said.exit_code == 7
    assert "the quota allows 20: 12 of them would be refused" in said.output
    assert "what works: set cluster.upgrade.kind: in_place" in said.output


def test_object_that_the_server_would_refuse_is_said_in_its_words(
    running: Installation, control_plane: ControlPlane, tmp_path: Path
) -> None:
    rendered = tmp_path / "rendered"
    rendered.mkdir()
    service = copy.deepcopy(running.service)
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplicas"] = "many"
    (rendered / "rayservice.yaml").write_text(yaml.safe_dump(service))
    arguments = ["rollout", f"{rendered}", f"--kubeconfig={control_plane.kubeconfig}"]
    said = CliRunner().invoke(build_cli([]), arguments)
    assert said.exit_code == 1
    assert "maxReplicas" in said.output


def test_first_installation_is_said_where_nothing_of_the_name_runs(
    control_plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{kubectl_binary().parent}", prepend=":")
    raw = values()
    raw["cluster"]["name"] = "other"
    said = rollout(control_plane, tmp_path, raw)
    assert said.exit_code == 3
    assert "a first installation" in said.output


def test_cluster_that_does_not_answer_is_an_error_with_kubectls_words(
    control_plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{kubectl_binary().parent}", prepend=":")
    said = rollout(control_plane, tmp_path, values(), "--context=nowhere")
    assert said.exit_code == 1
    assert "slicewise rollout: kubectl get rayservices.ray.io" in said.output
    assert "nowhere" in said.output
