"""`slicewise render` and `slicewise validate`, through the front door."""

from pathlib import Path

import yaml
from click.testing import Result
from typer.testing import CliRunner

from deployments.cli import build_cli
from deployments.validation.schemas import Schemas
from serving.domain.topology import slice_shape
from tests.needs import CRDS

from .examples import ROOT, raw_values


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_cli([]), list(arguments))


def _values(folder: Path) -> Path:
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(raw_values((slice_shape("v6e", "2x2"), "spot"))))
    return path


def test_rendered_folder_is_valid_and_a_changed_one_is_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("render", str(_values(tmp_path)), "--out", str(out))
    assert result.exit_code == 0, result.output
    assert f"next: slicewise validate {out}" in result.output
    result = run("validate", str(out))
    assert result.exit_code == 0, result.output
    assert "ok, " in result.output

    path = out / "kuberay/rayservice/rayservice.yaml"
    path.write_text(
        path.read_text().replace("idleTimeoutSeconds: 10000000", "idleTimeoutSeconds: 60")
    )
    result = run("validate", str(out))
    assert result.exit_code == 1
    assert "kuberay/rayservice/rayservice.yaml: RayService/llm: " in result.output
    assert "problems" in result.output


def test_schemas_that_are_given_are_used(tmp_path: Path, crds: Schemas) -> None:
    out = tmp_path / "out"
    run("render", str(_values(tmp_path)), "--out", str(out))
    path = out / "gke/compute-classes.yaml"
    path.write_text(path.read_text().replace("nodePoolAutoCreation:", "nodePoolAutoCreate:"))
    schemas = str(CRDS / "computeclass" / "cloud.google.com_computeclasses.yaml")
    result = run("validate", str(out), "--schemas", schemas)
    assert result.exit_code == 1
    assert "'nodePoolAutoCreate' was unexpected" in result.output


def test_file_without_a_crd_is_no_schema(tmp_path: Path) -> None:
    run("render", str(_values(tmp_path)), "--out", str(tmp_path / "out"))
    result = run("validate", str(tmp_path / "out"), "--schemas", str(_values(tmp_path)))
    assert result.exit_code == 2
    assert "no CustomResourceDefinition in it" in result.output


def test_wrong_values_are_told_with_their_file(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text("cluster: {name: x}\n")
    result = run("render", str(path), "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert f"{path}: cluster.zones: missing; required: a list" in result.output
    assert not (tmp_path / "out").exists()


def test_folder_without_a_ray_cluster_is_refused(tmp_path: Path) -> None:
    result = run("validate", str(tmp_path))
    assert result.exit_code == 1
    assert "no Ray cluster in it" in result.output


def test_file_that_is_no_yaml_is_told(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("a: [")
    result = run("validate", str(tmp_path))
    assert result.exit_code == 1
    assert "broken.yaml: not readable as YAML" in result.output


def test_shipped_manifests_are_valid() -> None:
    result = run("validate", str(ROOT / "deployments"))
    assert result.exit_code == 0, result.output
