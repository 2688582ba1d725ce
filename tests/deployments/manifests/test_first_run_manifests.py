"""The Job of a first run: on one host as a pod of its own, on several on the cluster's hosts."""

import shlex
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deployments.cli import build_cli
from deployments.manifests.values import parse_values
from deployments.start.tpu_host import ray_options
from deployments.validation.schemas import Schemas
from serving.config.check import check_serve_config
from serving.domain.compute_class import Market
from serving.domain.errors import ConfigError
from serving.domain.topology import slice_shape

from .examples import as_folder, found, groups_of, one, raw_values, rendered

FILE = "kuberay/first-run/first-run.yaml"
OUT = "gs://bucket/first-run"
ONE_HOST, TWO_HOSTS = slice_shape("v6e", "2x2"), slice_shape("v6e", "2x4", 4)


def folder_of(*slices: tuple[Any, str]) -> Any:
    return as_folder(rendered(raw_values(*slices, first_run_out=OUT)))


def test_without_a_place_for_its_results_none_is_rendered() -> None:
    assert FILE not in rendered(raw_values((ONE_HOST, "spot")))


def test_rest_of_the_manifests_does_not_change_with_it() -> None:
    without = rendered(raw_values((ONE_HOST, "spot")))
    beside = rendered(raw_values((ONE_HOST, "spot"), first_run_out=OUT))
    assert {path: beside[path] for path in without} == without
    assert beside.keys() - without.keys() == {FILE, "kuberay/first-run/kustomization.yaml"}


def test_one_host_gets_a_job_whose_pod_is_that_of_the_host() -> None:
    folder = folder_of((TWO_HOSTS, "spot"), (ONE_HOST, "reserved"))
    assert found(folder) == []
    job = one(folder, "Job").body["spec"]
    assert job["backoffLimit"] == 0
    spec = job["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["restartPolicy"] == "Never"
    assert container["resources"]["limits"]["google.com/tpu"] == "4"
    assert spec["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x2"
    # Kubernetes takes no probe of readiness amiss, but this pod takes no requests.
    assert "readinessProbe" not in container


def test_job_starts_ray_as_a_host_of_the_slice_and_runs_the_command() -> None:
    folder = folder_of((ONE_HOST, "spot"))
    script = one(folder, "Job").body["spec"]["template"]["spec"]["containers"][0]["command"][2]
    lines = script.splitlines()
    words = shlex.split(lines[2])
    resources, labels = ray_options(ONE_HOST, "first-run-0", 0, Market.SPOT)
    assert words[:4] == ["ray", "start", "--head", "--port=6379"]
    assert resources in words
    given = dict(each.split("=") for each in words[-1].removeprefix("--labels=").split(","))
    wanted = dict(each.split("=") for each in labels.removeprefix("--labels=").split(","))
    (group,) = groups_of(raw_values((ONE_HOST, "spot")))
    assert given == wanted | group.labels
    file = "/etc/slicewise-first-run/serve_config.yaml"
    assert lines[3] == f"exec slicewise first-run {file} --address 127.0.0.1:6379 --out {OUT}"


def test_command_of_the_job_is_one_that_there_is() -> None:
    cli = build_cli([])
    arguments = ["first-run", "FILE", "--address", "127.0.0.1:6379", "--out", OUT, "--help"]
    assert CliRunner().invoke(cli, arguments).exit_code == 0


def test_job_serves_one_model_with_one_engine_on_its_own_host() -> None:
    folder = folder_of((ONE_HOST, "spot"), (ONE_HOST, "reserved"), (TWO_HOSTS, "spot"))
    text = one(folder, "ConfigMap", "llm-first-run").body["data"]["serve_config.yaml"]
    config = yaml.safe_load(text)
    assert list(map(str, check_serve_config(config, None).problems)) == []
    args = config["applications"][0]["args"]
    assert args["control_placement"] == "anywhere"
    assert "auth" not in args
    (model,) = args["models"]
    (deployment,) = model["deployments"]
    assert deployment["replicas"] == 1
    assert (deployment["slice"]["topology"], deployment["compute_class"]) == (
        "2x2",
        "reserved",
    )


def test_slice_of_several_hosts_is_not_taken_for_the_one_of_the_same_topology() -> None:
    one_host = slice_shape("v6e", "2x4", 8)
    text = one(folder_of((TWO_HOSTS, "spot"), (one_host, "spot")), "ConfigMap", "llm-first-run")
    config = yaml.safe_load(text.body["data"]["serve_config.yaml"])
    (model,) = config["applications"][0]["args"]["models"]
    assert model["deployments"][0]["slice"]["chips_per_host"] == 8


def test_schema_takes_the_ray_job(crds: Schemas) -> None:
    job = one(folder_of((TWO_HOSTS, "spot")), "RayJob")
    assert crds.has(job)
    assert list(map(str, crds.problems(job))) == []


def test_several_hosts_get_a_ray_job_on_the_cluster_beside_it() -> None:
    folder = folder_of((TWO_HOSTS, "spot"))
    assert found(folder) == []
    job = one(folder, "RayJob")
    cluster = one(folder, "RayCluster")
    assert job.body["spec"]["clusterSelector"] == {"ray.io/cluster": cluster.name}
    program = shlex.split(job.body["spec"]["entrypoint"])
    assert program[:2] == ["sh", "-c"]
    assert f'--address "$RAY_ADDRESS" --out {OUT}' in program[2]
    runtime = yaml.safe_load(job.body["spec"]["runtimeEnvYAML"])
    config = yaml.safe_load(runtime["env_vars"]["FIRST_RUN_CONFIG"])
    assert list(map(str, check_serve_config(config, None).problems)) == []
    assert "control_placement" not in config["applications"][0]["args"]


@pytest.mark.parametrize("out", ["results", "/data/first-run", "gs://b; rm -rf /"])
def test_place_that_does_not_outlive_the_pod_is_refused(out: str) -> None:
    with pytest.raises(ConfigError, match="first_run_out"):
        parse_values(raw_values((ONE_HOST, "spot"), first_run_out=out), None)
