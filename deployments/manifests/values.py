"""Reads a values file: `serve_config.yaml` with a part `cluster`. Reports every problem at once.

Owns the reading and the rules between both parts. Pure.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from deployments.manifests.cluster_config import ClusterConfig, Provisioning, RedisConfig
from deployments.manifests.control_pool import control_pool_problems
from deployments.manifests.hosts.check import host_problems
from deployments.manifests.kuberay_labels import why_not_in_group
from deployments.manifests.names import DATA_FOLDER
from deployments.manifests.slice_groups import MAX_GROUP_NAME, slice_groups
from serving.config.application import AppConfig, ControlPlacement, ListenOn
from serving.config.check import IMPORT_PATH, check_serve_config
from serving.config.models import DeploymentConfig
from serving.config.rules import is_loopback, repeats
from serving.config.schema import name_hint, problems_of, shown
from serving.config.vllm.vllm_args import VllmArgs
from serving.domain.compute_class import Market
from serving.domain.errors import ConfigError, Problem
from serving.domain.models.engine_kind import EngineKind
from serving.domain.topology import Generation

CLUSTER = "cluster"
_ARGS = "applications[0].args"


@dataclass(frozen=True, slots=True)
class Values:
    """The parsed values file. `serve` is its other part as it was written, never changed."""

    cluster: ClusterConfig
    app: AppConfig
    application: str
    serve: Mapping[str, Any]


def parse_values(raw: object, vllm_args: VllmArgs | None) -> Values:
    """The values in `raw`; `vllm_args` of `None` leaves the names of engine arguments unchecked.

    Raises:
        ConfigError: lists every problem found. Correct them all.
    """
    if not isinstance(raw, dict):
        raise ConfigError([Problem("(file)", "not a mapping", "allowed: serve_config.yaml's keys")])
    problems: list[Problem] = []
    cluster: ClusterConfig | None = None
    if CLUSTER not in raw:
        problems.append(
            Problem(CLUSTER, "missing", "required: a mapping, see docs/operate/deploy-gke.md")
        )
    else:
        try:
            cluster = ClusterConfig.model_validate(raw[CLUSTER])
        except ValidationError as error:
            schema = ClusterConfig.model_json_schema()
            problems += [_in_cluster(problem) for problem in problems_of(error, schema)]
        else:
            problems += _bound_problems(cluster)
    serve = copy.deepcopy({key: value for key, value in raw.items() if key != CLUSTER})
    report = check_serve_config(serve, vllm_args)
    problems += report.problems
    if len(report.applications) > 1:
        applications = "the slice provisioner follows one application"
        problems.append(
            Problem("applications", "more than one", f"allowed: one, because {applications}")
        )
    if problems or cluster is None:
        raise ConfigError(problems)
    ((name, app),) = report.applications.items()
    values = Values(cluster, app, name, serve)
    problems += _broken_rules(values)
    if problems:
        raise ConfigError(problems)
    return values


def _in_cluster(problem: Problem) -> Problem:
    path = CLUSTER if problem.path == "args" else f"{CLUSTER}.{problem.path}"
    return Problem(path, problem.complaint, problem.allowed, problem.value)


def _bound_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    for at, entry in enumerate(cluster.classes):
        if entry.max_slices is not None and entry.min_slices > entry.max_slices:
            yield Problem(
                f"cluster.classes[{at}].min_slices",
                "more than max_slices",
                f"allowed: 0 to {entry.max_slices}",
                f"{entry.min_slices}",
            )


def _broken_rules(values: Values) -> Iterator[Problem]:
    yield from _application_problems(values)
    yield from _deployment_problems(values)
    yield from _class_problems(values)
    yield from _node_label_problems(values)
    yield from _secret_problems(values)
    yield from _batch_problems(values)
    yield from _redis_problems(values.cluster.redis)
    yield from _bucket_problems(values)
    yield from _gateway_pod_problems(values)
    yield from control_pool_problems(values.cluster, values.app)
    yield from host_problems(values.cluster, slice_groups(values.cluster, values.app))
    upgrade = values.cluster.upgrade
    if upgrade.step_percent > upgrade.max_surge_percent:
        yield Problem(
            "cluster.upgrade.step_percent",
            "larger than the surge, which KubeRay refuses",
            f"allowed: at most max_surge_percent, {upgrade.max_surge_percent}",
            f"{upgrade.step_percent}",
        )


def _application_problems(values: Values) -> Iterator[Problem]:
    """Yields what is right on one machine and wrong in a cluster."""
    serve, app = values.serve, values.app
    if len(serve["applications"]) > 1:
        yield Problem("applications", "more than one", f"allowed: {IMPORT_PATH} alone")
    host = (serve.get("http_options") or {}).get("host", "127.0.0.1")
    if is_loopback(host):
        complaint = "in a pod nobody would reach it"
        yield Problem("http_options.host", complaint, "allowed: 0.0.0.0", shown("host", host))
    location = serve.get("proxy_location", "EveryNode")
    if location != "EveryNode":
        complaint = "the head serves no requests, gateways' pods do"
        yield Problem("proxy_location", complaint, "allowed: EveryNode", shown("", location))
    if app.link.listen_on != ListenOn.NODE:
        complaint = "gateways and engines are on different hosts"
        yield Problem(f"{_ARGS}.link.listen_on", complaint, "allowed: node", app.link.listen_on)
    if app.control_placement != ControlPlacement.OFF_TPU_HOSTS:
        yield Problem(
            f"{_ARGS}.control_placement",
            "a lost slice would take gateways with it",
            "allowed: off_tpu_hosts",
            app.control_placement,
        )


def _gateway_pod_problems(values: Values) -> Iterator[Problem]:
    """Yields pods without room for two gateways, as there are in each while they are replaced."""
    cpus, asked = values.cluster.gateway_pod.cpus, values.app.gateway.num_cpus
    if 2 * asked > cpus:
        yield Problem(
            "cluster.gateway_pod.cpus",
            f"no room for the next gateway beside one of {asked:g} CPUs, so none is ever replaced",
            f"allowed: at least {math.ceil(2 * asked)}, twice {_ARGS}.gateway.num_cpus",
            f"{cpus}",
        )


def _deployment_problems(values: Values) -> Iterator[Problem]:
    for at, model in enumerate(values.app.models):
        if model.engine == EngineKind.VLLM:
            path = f"{_ARGS}.models[{at}].engine"
            complaint = "it computes on the CPUs of hosts whose chips would idle"
            yield Problem(path, complaint, f"allowed: {EngineKind.VLLM_TPU}", model.engine)
        for number, deployment in enumerate(model.deployments):
            if deployment.slice is None:
                path = f"{_ARGS}.models[{at}].deployments[{number}].slice"
                yield Problem(path, "missing", "required: generation and topology of its slices")
                continue
            path = f"{_ARGS}.models[{at}].deployments[{number}].slice"
            yield from _joined_problems(values, path, deployment)
            market = values.app.compute_class(deployment.compute_class).market
            # Source: GKE's page on flex-start, read 2026-11-20.
            if deployment.slice.generation == Generation.V4 and market == Market.FLEX_START:
                path = f"{_ARGS}.models[{at}].deployments[{number}].compute_class"
                complaint = "GKE has no flex-start slices of v4"
                allowed = "allowed: a class of another market"
                yield Problem(path, complaint, allowed, deployment.compute_class)
    for group in slice_groups(values.cluster, values.app):
        if len(group.name) > MAX_GROUP_NAME:
            allowed = f"allowed: up to {MAX_GROUP_NAME} characters, so a shorter compute class"
            complaint = "the name of its worker group is too long"
            yield Problem(f"{_ARGS}.compute_classes", complaint, allowed, group.name)


def _joined_problems(values: Values, path: str, deployment: DeploymentConfig) -> Iterator[Problem]:
    """Yields problems of multislices: slices that could not be obtained together."""
    wanted = deployment.slice
    if wanted is None or wanted.num_slices == 1:
        return
    entry = values.cluster.class_config(deployment.compute_class)
    zones = entry.zones or values.cluster.zones
    if wanted.zone is None and len(zones) > 1:
        yield Problem(
            f"{path}.zone",
            "missing: joined slices are of one zone, and these may come in several",
            f"allowed: one of {', '.join(zones)}",
        )
    if entry.max_slices is not None and entry.max_slices < wanted.num_slices:
        yield Problem(
            f"{path}.num_slices",
            f"more than max_slices of compute class {deployment.compute_class}",
            f"allowed: at most {entry.max_slices}",
            f"{wanted.num_slices}",
        )


def _class_problems(values: Values) -> Iterator[Problem]:
    used = {
        deployment.compute_class for model in values.app.models for deployment in model.deployments
    }
    names: list[tuple[str, object]] = [
        (f"cluster.classes[{at}].compute_class", entry.compute_class)
        for at, entry in enumerate(values.cluster.classes)
    ]
    for path, repeated, first in repeats(names):
        yield Problem(path, f"already at {first}", "allowed: once each", shown("name", repeated))
    for path, name in names:
        if name not in used:
            complaint = "no deployment uses this class"
            yield Problem(path, complaint, name_hint(str(name), used), shown("name", name))
    for name in sorted(used):
        yield from _market_problems(values, name)


def _node_label_problems(values: Values) -> Iterator[Problem]:
    for at, declared in enumerate(values.app.compute_classes):
        for name, value in declared.node_labels.items():
            complaint = why_not_in_group(name)
            if complaint is not None:
                path = f"{_ARGS}.compute_classes[{at}].node_labels[{name}]"
                yield Problem(path, complaint, "allowed: another label", shown("", value))


def _market_problems(values: Values, name: str) -> Iterator[Problem]:
    try:
        market = values.app.compute_class(name).market
    except KeyError:
        # Of a deployment without a slice, which is a problem of its own.
        return
    entry = values.cluster.class_config(name)
    path = f"cluster.classes[compute_class={name}].reservation"
    is_auto = values.cluster.provisioning == Provisioning.AUTO
    if market == Market.RESERVED and entry.reservation is None and is_auto:
        yield Problem(
            path,
            "missing, and GKE takes reserved slices from a named one only",
            "required: the reservation's name",
        )
    if market != Market.RESERVED and entry.reservation is not None:
        complaint = f"slices of the market {market} come from no reservation"
        yield Problem(path, complaint, "allowed: nothing", entry.reservation)


def _redis_problems(redis: RedisConfig) -> Iterator[Problem]:
    if (redis.address is None) == (redis.own is None):
        complaint = "neither there" if redis.own is None else "given twice"
        allowed = "allowed: address of one that there is, or own for a new one"
        yield Problem("cluster.redis", complaint, allowed, redis.address)


def _bucket_problems(values: Values) -> Iterator[Problem]:
    if values.cluster.bucket is not None:
        return
    for at, model in enumerate(values.app.models):
        sources = {"source": model.source}
        for number, adapter in enumerate(model.lora_adapters):
            sources[f"lora_adapters[{number}].path"] = adapter.path
        for name, source in sources.items():
            if source.startswith(f"{DATA_FOLDER}/"):
                complaint = f"no bucket is mounted at {DATA_FOLDER}"
                needed = "needed: cluster.bucket"
                yield Problem(f"{_ARGS}.models[{at}].{name}", complaint, needed, source)


def _batch_problems(values: Values) -> Iterator[Problem]:
    if (folder := values.app.batches.folder) is not None:
        complaint = "gateways have pods of their own, which share no folder and keep none"
        allowed = "allowed: batches.store, a bucket, instead"
        yield Problem(f"{_ARGS}.batches.folder", complaint, allowed, folder)


def _secret_problems(values: Values) -> Iterator[Problem]:
    auth, link, secrets = values.app.auth, values.app.link, values.cluster.secrets
    has_link = link.secret_env is not None or link.secret_file is not None
    pairs = [
        ("api_keys", secrets.api_keys, auth.has_keys, "auth.keys_env or auth.keys_file"),
        ("link", secrets.link, has_link, "link.secret_env or link.secret_file"),
    ]
    for name, secret, is_read, reader in pairs:
        if is_read and secret is None:
            complaint = f"missing, and {reader} reads one"
            yield Problem(f"cluster.secrets.{name}", complaint, "required: the name of a Secret")
        if secret is not None and not is_read:
            complaint = "nobody reads it"
            allowed = f"needed: {_ARGS}.{reader}"
            yield Problem(f"cluster.secrets.{name}", complaint, allowed, secret)
    for path, file in (
        (f"{_ARGS}.auth.keys_file", auth.keys_file),
        (f"{_ARGS}.link.secret_file", link.secret_file),
    ):
        if file is not None and (not file.startswith("/") or file.count("/") < 2):
            complaint = "a Secret is mounted as a folder"
            yield Problem(path, complaint, "allowed: an absolute path in a folder of its own", file)
    files = [file for file in (auth.keys_file, link.secret_file) if file is not None]
    folders = [file.rpartition("/")[0] for file in files]
    if len(set(folders)) < len(folders):
        path = f"{_ARGS}.link.secret_file"
        complaint = "in the folder of auth.keys_file, and each Secret is mounted as a folder"
        yield Problem(path, complaint, "allowed: another folder", files[-1])
