"""Renders the first run of an engine on a cluster's chips: a Job, or a RayJob over several hosts.

It is apart from the rest: applied before the platform serves, and deleted after. Fields of RayJob:
KubeRay 1.7.0's CRDs, read 2026-11-20. A real API server takes it; never applied to a cluster with
chips. Pure.
"""

import copy
import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from deployments.manifests.names import Json, namespaced_object
from deployments.manifests.pods.hosts import host_template
from deployments.manifests.slice_groups import SliceGroup
from deployments.manifests.values import Values
from deployments.start.tpu_host import ray_options
from serving.domain.inventory import SLICE_NAME_LABEL, WORKER_ID_LABEL

_FOLDER, _FILE = "/etc/slicewise-first-run", "serve_config.yaml"
# Twice the deadlines of all stages: a Job is ended by its own deadlines, and this is for when not.
_MOST_S = 3600
_SLICE = "first-run-0"
_ANYWHERE = "anywhere"


def first_run_objects(values: Values, groups: Sequence[SliceGroup]) -> list[Json]:
    """Returns the objects of a first run; none where `cluster.first_run_out` is left out.

    It serves one model on one slice: of those with the fewest hosts, the first by name.
    """
    out = values.cluster.first_run_out
    if out is None or not groups:
        return []
    group = min(groups, key=lambda each: each.shape.num_hosts)
    config = yaml.safe_dump(first_run_config(values, group), sort_keys=False, width=100)
    if group.shape.num_hosts > 1:
        return [_ray_job(values, config, out)]
    name = _name(values)
    config_map = namespaced_object(values.cluster, "v1", "ConfigMap", name)
    return [config_map | {"data": {_FILE: config}}, _job(values, group, out)]


def first_run_config(values: Values, group: SliceGroup) -> Json:
    """Returns the configuration of a first run: one model with one engine, open to nobody."""
    config: Json = copy.deepcopy(dict(values.serve))
    application = config["applications"][0]
    application.pop("autoscaling_policy", None)
    args = application["args"]
    # Only the pod in which the run is reaches it.
    args.pop("auth", None)
    config["proxy_location"] = "HeadOnly"
    config["http_options"] = {**(config.get("http_options") or {}), "host": "127.0.0.1"}
    model, deployment = next(_served(values, args["models"], group))
    for field in ("min_replicas", "max_replicas"):
        deployment.pop(field, None)
    args["models"] = [model | {"deployments": [deployment | {"replicas": 1}]}]
    if group.shape.num_hosts == 1:
        # There is no other host.
        args["control_placement"] = _ANYWHERE
    return config


def _served(
    values: Values, models: Sequence[Json], group: SliceGroup
) -> Iterator[tuple[Json, Json]]:
    """Yields what of `models`, as the file has them, has slices of the group."""
    for model, known in zip(models, values.app.models, strict=True):
        for deployment, parsed in zip(model["deployments"], known.deployments, strict=True):
            is_of_class = parsed.compute_class == group.terms.name
            if is_of_class and parsed.slice is not None and parsed.slice.shape == group.shape:
                yield model, dict(deployment)


def _job(values: Values, group: SliceGroup, out: str) -> Json:
    template = copy.deepcopy(host_template(values, group))
    spec = template["spec"]
    container = spec["containers"][0]
    container["name"] = "first-run"
    container["command"] = ["sh", "-c", _script(group, out)]
    container["volumeMounts"].append({"name": "config", "mountPath": _FOLDER, "readOnly": True})
    # Nobody sends requests to it, and its notice is a stage of the run.
    container.pop("readinessProbe")
    container.pop("lifecycle")
    spec["restartPolicy"] = "Never"
    spec["volumes"].append({"name": "config", "configMap": {"name": _name(values)}})
    job = namespaced_object(values.cluster, "batch/v1", "Job", _name(values))
    # A second attempt would write over what the first has found.
    return job | {
        "spec": {"activeDeadlineSeconds": _MOST_S, "backoffLimit": 0, "template": template}
    }


def _script(group: SliceGroup, out: str) -> str:
    resources, _ = ray_options(group.shape, _SLICE, 0, group.market)
    labels = group.labels | {SLICE_NAME_LABEL: _SLICE, WORKER_ID_LABEL: "0"}
    given = ",".join(f"{label}={value}" for label, value in sorted(labels.items()))
    lines = [
        "set -e",
        'eval "$(slicewise ray-environment)"',
        f"ray start --head --port=6379 {shlex.quote(resources)} {shlex.quote(f'--labels={given}')}",
        _command(f"{_FOLDER}/{_FILE}", "127.0.0.1:6379", out),
    ]
    return "\n".join(lines) + "\n"


def _ray_job(values: Values, config: str, out: str) -> Json:
    """Returns the job on the RayCluster that is rendered beside it, which has to run already."""
    # The head has no file of it, so it comes with the environment of the job.
    program = f'printf %s "$FIRST_RUN_CONFIG" > /tmp/{_FILE} && ' + _command(
        f"/tmp/{_FILE}", '"$RAY_ADDRESS"', out
    )
    job = namespaced_object(values.cluster, "ray.io/v1", "RayJob", _name(values))
    runtime: dict[str, Any] = {"env_vars": {"FIRST_RUN_CONFIG": config}}
    return job | {
        "spec": {
            "activeDeadlineSeconds": _MOST_S,
            "backoffLimit": 0,
            "clusterSelector": {"ray.io/cluster": values.cluster.name},
            "entrypoint": f"sh -c {shlex.quote(program)}",
            # No pod beside the cluster's: the operator itself hands the job to the head.
            "submissionMode": "HTTPMode",
            "runtimeEnvYAML": json.dumps(runtime),
        }
    }


def _command(file: str, address: str, out: str) -> str:
    return f"exec slicewise first-run {file} --address {address} --out {shlex.quote(out)}"


def _name(values: Values) -> str:
    return f"{values.cluster.name}-first-run"
