"""Checks a Ray cluster's settings that slices, tokens and state depend on. Pure."""

from collections.abc import Iterator, Sequence

from deployments.manifests.platform import (
    CLASS_RULES,
    CONDITION_RULES,
    NODE_READER_RULES,
    PROVISIONER_RULES,
)
from deployments.manifests.pods.hosts import NODE_READER_MODULE
from deployments.validation.documents import (
    Folder,
    Json,
    KubernetesManifest,
    mapping,
    named,
    ray_clusters,
    sequence,
    texts,
    value_at,
)
from deployments.validation.found_pods import FoundPod, ray_pods
from serving.config.ray_settings import RAY_SETTINGS
from serving.domain.errors import Problem
from serving.domain.names.gke_names import NEVER_IDLE_S

_PROVISIONER = "slice-provisioner"
_ZERO = "0"


def cluster_problems(folder: Folder) -> Iterator[Problem]:
    """Checks every Ray cluster and RayService, and the rights of what asks Kubernetes in it."""
    pods = list(ray_pods(folder))
    for manifest, path, cluster in ray_clusters(folder):
        yield from _setting_problems(manifest, path, cluster)
        for pod in pods:
            if pod.manifest is manifest:
                yield from _pod_problems(pod)
                yield from _node_reader_problems(pod, folder)
        yield from _provisioner_problems(manifest, path, cluster, folder)
        if manifest.kind == "RayService":
            yield from _service_problems(manifest, cluster)


def _setting_problems(manifest: KubernetesManifest, path: str, cluster: Json) -> Iterator[Problem]:
    def problem(field: str, complaint: str, allowed: str) -> Problem:
        value = value_at(cluster, *field.split("."))
        return manifest.problem(f"{path}.{field}", complaint, allowed, value)

    if value_at(cluster, "enableInTreeAutoscaling") is not True:
        complaint = "without it KubeRay deletes surplus slices at random"
        yield problem("enableInTreeAutoscaling", complaint, "allowed: true")
    if value_at(cluster, "autoscalerOptions", "version") != "v2":
        complaint = "only version 2 knows a group's idle timeout"
        yield problem("autoscalerOptions.version", complaint, "allowed: v2")
    idle_s = value_at(cluster, "autoscalerOptions", "idleTimeoutSeconds")
    if isinstance(idle_s, int) and idle_s < NEVER_IDLE_S:
        complaint = "gateways' pods would be taken away"
        allowed = f"allowed: at least {NEVER_IDLE_S}"
        yield problem("autoscalerOptions.idleTimeoutSeconds", complaint, allowed)
    if value_at(cluster, "authOptions", "mode") != "token":
        complaint = "whoever reaches Ray's ports could run code"
        yield problem("authOptions.mode", complaint, "allowed: token")
    if not value_at(cluster, "gcsFaultToleranceOptions", "redisAddress"):
        complaint = "missing: the head's death would cost every engine"
        yield problem("gcsFaultToleranceOptions.redisAddress", complaint, "required: Redis")
    if str(value_at(cluster, "headGroupSpec", "rayStartParams", "num-cpus")) != _ZERO:
        complaint = "parts of the application would be lost with the head"
        yield problem("headGroupSpec.rayStartParams.num-cpus", complaint, 'allowed: "0"')


def _pod_problems(pod: FoundPod) -> Iterator[Problem]:
    container = mapping(pod.spec, "containers", 0)
    first = f"{pod.path}.spec.containers[0]"
    for name, wanted in RAY_SETTINGS.items():
        value = named(sequence(container, "env"), name).get("value")
        if value != wanted:
            complaint = "not what Ray is started with everywhere else"
            allowed = f'allowed: "{wanted}"'
            yield pod.manifest.problem(f"{first}.env[{name}]", complaint, allowed, value)
    is_head = pod.group is None
    if not is_head and not value_at(container, "readinessProbe", "httpGet", "path"):
        complaint = "without one KubeRay's asks with wget, which no image has: never ready"
        value = value_at(container, "readinessProbe", "exec", "command", 0)
        yield pod.manifest.problem(f"{first}.readinessProbe", complaint, "required: httpGet", value)


def _service_problems(manifest: KubernetesManifest, cluster: Json) -> Iterator[Problem]:
    state = mapping(cluster, "gcsFaultToleranceOptions")
    if "externalStorageNamespace" in state:
        field = "spec.rayClusterConfig.gcsFaultToleranceOptions.externalStorageNamespace"
        complaint = "an upgrade's two clusters would share their state"
        value = state["externalStorageNamespace"]
        yield manifest.problem(field, complaint, "allowed: nothing, each gets its own", value)
    upgrade = mapping(manifest.body, "spec", "upgradeStrategy")
    if upgrade.get("type") == "NewClusterWithIncrementalUpgrade":
        options = mapping(upgrade, "clusterUpgradeOptions")
        step, surge = options.get("stepSizePercent"), options.get("maxSurgePercent", 100)
        if not isinstance(step, int) or not isinstance(surge, int) or step > surge:
            field = "spec.upgradeStrategy.clusterUpgradeOptions.stepSizePercent"
            complaint = "KubeRay refuses a step that is larger than the surge"
            yield manifest.problem(field, complaint, f"allowed: at most {surge}", step)


def _provisioner_problems(
    manifest: KubernetesManifest, path: str, cluster: Json, folder: Folder
) -> Iterator[Problem]:
    spec = mapping(cluster, "headGroupSpec", "template", "spec")
    beside = [*sequence(spec, "initContainers"), *sequence(spec, "containers")]
    field = f"{path}.headGroupSpec.template.spec"
    sidecar = named(beside, _PROVISIONER)
    if not sidecar:
        complaint = "no slice would ever be asked for"
        allowed = f"required: a container {_PROVISIONER}"
        yield manifest.problem(f"{field}.initContainers", complaint, allowed)
        return
    account = str(spec.get("serviceAccountName", "default"))
    needed = {"Role": (*PROVISIONER_RULES, *CONDITION_RULES), "ClusterRole": CLASS_RULES}
    for kind, rules in needed.items():
        for complaint in _lacks(folder, account, kind, rules):
            allowed = f"required: a {kind} with that, bound to {account}"
            what = f"the slice provisioner {complaint}"
            yield manifest.problem(f"{field}.serviceAccountName", what, allowed, account)


def _node_reader_problems(pod: FoundPod, folder: Folder) -> Iterator[Problem]:
    commands = [sequence(each, "command") for each in sequence(pod.spec, "initContainers")]
    if not any(NODE_READER_MODULE in command for command in commands):
        return
    account = str(pod.spec.get("serviceAccountName", "default"))
    for complaint in _lacks(folder, account, "ClusterRole", NODE_READER_RULES):
        allowed = f"required: a ClusterRole with that, bound to {account}"
        field = f"{pod.path}.spec.serviceAccountName"
        yield pod.manifest.problem(field, f"the node reader {complaint}", allowed, account)


def _lacks(folder: Folder, account: str, kind: str, rules: Sequence[Json]) -> Iterator[str]:
    """Yields what a service account may not do of `rules`, by roles of a kind."""
    granted = _granted(folder, account, kind)
    for rule in rules:
        for resource in rule["resources"]:
            missing = sorted(set(rule["verbs"]) - granted.get(resource, set()))
            if missing:
                yield f"may not {texts(missing)} {resource}"


def _granted(folder: Folder, account: str, kind: str) -> dict[str, set[str]]:
    """The verbs that a service account has by roles of a kind, by resource."""
    roles = {manifest.name: manifest for manifest in folder.of_kind(kind)}
    granted: dict[str, set[str]] = {}
    for binding in folder.of_kind(f"{kind}Binding"):
        subjects = [mapping(entry).get("name") for entry in sequence(binding.body, "subjects")]
        role = roles.get(str(value_at(binding.body, "roleRef", "name")))
        if account in subjects and role is not None:
            for rule in sequence(role.body, "rules"):
                for resource in sequence(rule, "resources"):
                    granted.setdefault(resource, set()).update(sequence(rule, "verbs"))
    return granted
