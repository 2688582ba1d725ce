"""Checks manifests against the Serve configuration in them: slices and time for replicas. Pure.

Uses the product's own functions: a group's slice fits if `match_slices`, by which replicas choose
slices, would take it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import yaml

from deployments.manifests.compute_classes import LONGEST_SPOT_SHUTDOWN_S
from deployments.manifests.pods.hosts import NODE_READER_MODULE
from deployments.validation.documents import (
    LOADER,
    SERVE_CONFIG_NAME,
    Folder,
    KubernetesManifest,
    mapping,
    ray_clusters,
    sequence,
    value_at,
)
from deployments.validation.found_pods import FoundPod, ray_pods
from deployments.validation.groups import FoundGroup, slice_groups_in
from serving.config.application import AppConfig, check_app_config
from serving.config.check import IMPORT_PATH
from serving.config.models import DeploymentConfig
from serving.config.slice_settings import replica_end_s, slice_spec
from serving.config.slice_spec import RUN_DIR_VARIABLE, SliceSpec, slice_request
from serving.domain.compute_class import Market
from serving.domain.errors import ConfigError, Problem
from serving.domain.inventory import (
    POD_TYPE_LABEL,
    SLICE_NAME_LABEL,
    TOPOLOGY_LABEL,
    WORKER_ID_LABEL,
    ObservedHost,
)
from serving.domain.names.gke_names import COMPUTE_CLASS_LABEL, GKE_CHIPS
from serving.domain.supply.found import find_slices, match_slices
from serving.slices.local.notes import END_WITHIN_VARIABLE


def serving_problems(folder: Folder) -> Iterator[Problem]:
    """Checks every Ray cluster against the application that it is to run."""
    for manifest, path, cluster in ray_clusters(folder):
        raw, where = _serve_config(folder, manifest)
        if raw is None:
            yield manifest.problem(where, "missing", "required: the Serve configuration")
            continue
        try:
            app = _application(raw)
        except (ConfigError, yaml.YAMLError) as error:
            yield manifest.problem(where, f"cannot be used: {error}", "see slicewise config check")
            continue
        if app is None:
            allowed = f"required: import_path {IMPORT_PATH}"
            yield manifest.problem(where, "no application is Slicewise's", allowed)
            continue
        groups = slice_groups_in(manifest, path, cluster)
        offers = [(group, hosts_of(group)) for group in groups]
        yield from _deployment_problems(app, offers, manifest, path)
        yield from _spot_problems(app, offers, folder)
        for pod in ray_pods(folder):
            if pod.manifest is manifest and pod.is_gateway:
                needed = "rollout.gateway_drain_s: answers would be cut"
                yield from end_problems(pod, app.rollout.gateway_drain_s, needed)


# A group, and the hosts of its first slice: made once, for slices may have a thousand.
_Offer = tuple[FoundGroup, list[ObservedHost]]


def hosts_of(group: FoundGroup) -> list[ObservedHost]:
    """The hosts of a first slice of a group as Ray would list them."""
    chips = value_at(group.pod, "containers", 0, "resources", "limits", GKE_CHIPS)
    num_chips = int(chips) if str(chips).isdigit() else 0
    num_hosts = group.spec.get("numOfHosts", 1)
    name, labels = f"{group.name}-0", group.labels
    return [
        ObservedHost(
            node_id=f"{name}-{host}",
            address="",
            slice_name=name,
            worker_id=host,
            num_chips=num_chips,
            num_free_chips=num_chips,
            is_draining=False,
            labels={**labels, SLICE_NAME_LABEL: name, WORKER_ID_LABEL: str(host)},
        )
        for host in range(num_hosts if isinstance(num_hosts, int) else 0)
    ]


def application_of(folder: Folder, manifest: KubernetesManifest) -> AppConfig | None:
    """Returns the application of a Ray cluster; `None` where it has none that can be used."""
    raw, _ = _serve_config(folder, manifest)
    try:
        return None if raw is None else _application(raw)
    except (ConfigError, yaml.YAMLError):
        return None


def _serve_config(folder: Folder, manifest: KubernetesManifest) -> tuple[str | None, str]:
    """The text, `None` if there is none, and where it stands."""
    if manifest.kind == "RayService":
        text = value_at(manifest.body, "spec", "serveConfigV2")
        return (text if isinstance(text, str) else None), "spec.serveConfigV2"
    file = f"{manifest.file.rpartition('/')[0]}/{SERVE_CONFIG_NAME}".removeprefix("/")
    return folder.serve_configs.get(file), f"({SERVE_CONFIG_NAME} beside it)"


def _application(text: str) -> AppConfig | None:
    raw = yaml.load(text, Loader=LOADER)  # a safe one
    for entry in sequence(raw, "applications"):
        if mapping(entry).get("import_path") == IMPORT_PATH:
            return check_app_config(mapping(entry, "args"), None)
    return None


def _deployment_problems(
    app: AppConfig, offers: Sequence[_Offer], manifest: KubernetesManifest, path: str
) -> Iterator[Problem]:
    wanted: dict[str, int] = {}
    groups = [group for group, _ in offers]
    by_name = {group.name: group for group in groups}
    reported: set[tuple[str, str]] = set()
    for model in app.models:
        for deployment in model.deployments:
            spec = slice_spec(app, model, deployment)
            if spec is None:
                continue
            want = slice_request(spec)
            takes = [
                group for group, hosts in offers if match_slices(find_slices(hosts), want).free
            ]
            if not takes:
                yield _no_slices(manifest, path, model.deployment_name(deployment), spec, groups)
            for group in takes:
                at_most = deployment.most_replicas * spec.num_slices
                wanted[group.name] = wanted.get(group.name, 0) + at_most
                if (group.name, spec.compute_class) not in reported:
                    reported.add((group.name, spec.compute_class))
                    yield from _grace_problems(group, spec)
                    yield from _notice_problems(group)
    for name, count in wanted.items():
        group = by_name[name]
        most = group.spec.get("maxReplicas")
        # Slices of the same labels may come from another group as well.
        has_others = any(other.name != name and other.labels == group.labels for other in groups)
        if isinstance(most, int) and most < count and not has_others:
            complaint = "fewer slices than replicas may want"
            yield group.problem("maxReplicas", complaint, f"allowed: {count} or more", most)


def _no_slices(
    manifest: KubernetesManifest, path: str, name: str, spec: SliceSpec, groups: list[FoundGroup]
) -> Problem:
    want = slice_request(spec)
    labels = {**want.labels, POD_TYPE_LABEL: want.pod_type, TOPOLOGY_LABEL: want.topology}
    complaint = f"no worker group has slices that deployment {name} would take"
    allowed = "required: a group with " + ", ".join(f"{k}={v}" for k, v in sorted(labels.items()))

    def distance(group: FoundGroup) -> tuple[bool, int]:
        is_other = group.labels.get(COMPUTE_CLASS_LABEL) != want.compute_class
        return is_other, len(_differences(labels, group))

    nearest = min(groups, key=distance, default=None)
    if nearest is None:
        return manifest.problem(f"{path}.workerGroupSpecs", complaint, allowed)
    differences = _differences(labels, nearest)
    if not differences:
        refused = match_slices(find_slices(hosts_of(nearest)), want).refused
        reason = "; ".join(refused.values()) or "its slices are not whole"
        return nearest.problem("template", f"{complaint}: {reason}", allowed)
    label, value = next(iter(differences.items()))
    return nearest.problem(f"labels[{label}]", complaint, allowed, value or "nothing")


def _differences(labels: Mapping[str, str], group: FoundGroup) -> dict[str, object]:
    return {
        name: group.labels.get(name)
        for name, value in labels.items()
        if group.labels.get(name) != value
    }


def _grace_problems(group: FoundGroup, spec: SliceSpec) -> Iterator[Problem]:
    needed_s = math.ceil(replica_end_s(spec.drain_notice_s))
    grace_s = group.pod.get("terminationGracePeriodSeconds", 30)
    field = "template.spec.terminationGracePeriodSeconds"
    if not isinstance(grace_s, int) or grace_s < needed_s:
        complaint = (
            f"shorter than a replica's end on compute class {spec.compute_class}, which drains for "
            f"{spec.drain_notice_s:g} s"
        )
        yield group.problem(field, complaint, f"allowed: at least {needed_s}", grace_s)
    told_s = _told_end_s(group)
    if told_s is not None and told_s < spec.drain_notice_s:
        complaint = (
            f"told sooner than compute class {spec.compute_class} drains, which takes "
            f"{spec.drain_notice_s:g} s of notice"
        )
        allowed = (
            f"allowed: at least {spec.drain_notice_s:g}; a shorter drain_notice_s of the class, or "
            "where a spot node's shutdown lasts longer (cluster.spot_shutdown_s)"
        )
        field = f"template.spec.containers[0].env[{END_WITHIN_VARIABLE}]"
        yield group.problem(field, complaint, allowed, f"{told_s:g}")


def _told_end_s(group: FoundGroup) -> float | None:
    """Returns what the group's hosts are told of their end; `None` without a sound number."""
    for each in sequence(mapping(group.pod, "containers", 0), "env"):
        if mapping(each).get("name") == END_WITHIN_VARIABLE:
            value = str(mapping(each).get("value"))
            return float(value) if value.isdigit() else None
    return None


def _notice_problems(group: FoundGroup) -> Iterator[Problem]:
    """Yields what would keep the agent of a host from learning of its pod's or its node's end."""
    container = mapping(group.pod, "containers", 0)
    at = "template.spec.containers[0]"
    if not value_at(container, "lifecycle", "preStop"):
        complaint = "missing: the slice would not be left before its pod ends"
        yield group.problem(f"{at}.lifecycle.preStop", complaint, "required: a command that waits")
    given = {str(mapping(each).get("name")): each for each in sequence(container, "env")}
    end_s = mapping(given.get(END_WITHIN_VARIABLE)).get("value")
    grace_s = group.pod.get("terminationGracePeriodSeconds", 30)
    if end_s is None or not str(end_s).isdigit() or not 0 < int(str(end_s)) <= _number(grace_s):
        complaint = "the hook would tell an end that is not the pod's"
        allowed = f"allowed: more than 0, up to the pod's grace of {grace_s}"
        yield group.problem(f"{at}.env[{END_WITHIN_VARIABLE}]", complaint, allowed, end_s)
    folder = mapping(given.get(RUN_DIR_VARIABLE)).get("value")
    readers = [
        mapping(each)
        for each in sequence(group.pod, "initContainers")
        if NODE_READER_MODULE in sequence(each, "command")
    ]
    if not readers:
        complaint = "no node reader: what Kubernetes announces of the node would reach nobody"
        required = f"required: a container that runs {NODE_READER_MODULE}"
        yield group.problem("template.spec.initContainers", complaint, required)
    for user in (container, *readers):
        mounts = [mapping(each) for each in sequence(user, "volumeMounts")]
        if folder is None or folder not in [mount.get("mountPath") for mount in mounts]:
            complaint = f"container {user.get('name')} does not have the run directory"
            yield group.problem(
                "template.spec.volumes",
                complaint,
                f"required: a volume at {RUN_DIR_VARIABLE}",
                folder,
            )


def end_problems(pod: FoundPod, needed_s: float, needed: str) -> Iterator[Problem]:
    """Yields what would cut short whatever is in a pod that is evicted or deleted.

    It takes up to `needed_s` seconds to leave; `needed` names them, and says what would be cut.
    """
    grace_s = pod.spec.get("terminationGracePeriodSeconds", 30)
    if not isinstance(grace_s, int) or grace_s < needed_s:
        field = f"{pod.path}.spec.terminationGracePeriodSeconds"
        allowed = f"allowed: at least {math.ceil(needed_s)}"
        yield pod.manifest.problem(field, f"shorter than {needed}", allowed, grace_s)
    if not value_at(pod.spec, "containers", 0, "lifecycle", "preStop"):
        field = f"{pod.path}.spec.containers[0].lifecycle.preStop"
        cut = needed.rpartition(": ")[2]
        complaint = f"missing: Ray ends at the first signal, and {cut}"
        yield pod.manifest.problem(field, complaint, "required: a command that drains the node")


def _spot_problems(app: AppConfig, offers: Sequence[_Offer], folder: Folder) -> Iterator[Problem]:
    classes = {manifest.name: manifest for manifest in folder.of_kind("ComputeClass")}
    for group, hosts in offers:
        used = classes.get(group.name)
        deployment = _deployment_of(app, hosts)
        if used is None or deployment is None:
            continue
        rule = mapping(used.body, "spec", "priorities", 0)
        compute_class = app.compute_class(deployment.compute_class)
        if compute_class.market != Market.SPOT or "nodepools" in rule:
            continue
        kubelet = mapping(rule, "nodeSystemConfig", "kubeletConfig")
        whole_s = kubelet.get("shutdownGracePeriodSeconds", 30)
        critical_s = kubelet.get("shutdownGracePeriodCriticalPodsSeconds", 15)
        notice_s = compute_class.drain_notice_s
        field = "spec.priorities[0].nodeSystemConfig.kubeletConfig.shutdownGracePeriodSeconds"
        if _number(whole_s) - _number(critical_s) < notice_s:
            complaint = (
                f"less the critical pods' {critical_s} shorter than the drain of {notice_s:g} s"
            )
            yield used.problem(field, complaint, f"allowed: {LONGEST_SPOT_SHUTDOWN_S}", whole_s)


def _deployment_of(app: AppConfig, hosts: Sequence[ObservedHost]) -> DeploymentConfig | None:
    for model in app.models:
        for deployment in model.deployments:
            spec = slice_spec(app, model, deployment)
            if spec is not None and match_slices(find_slices(hosts), slice_request(spec)).free:
                return deployment
    return None


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
