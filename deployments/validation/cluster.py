"""Checks a Ray cluster's settings that slices, tokens and state depend on. Pure."""

from collections.abc import Iterator

from deployments.manifests.platform import PROVISIONER_RULES
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
from serving.domain.gke_names import NEVER_IDLE_S

_PROVISIONER = "slice-provisioner"
_ZERO = "0"


def cluster_problems(folder: Folder) -> Iterator[Problem]:
    """Checks every Ray cluster and RayService, and the rights of the provisioner in it."""
    pods = list(ray_pods(folder))
    for manifest, path, cluster in ray_clusters(folder):
        yield from _setting_problems(manifest, path, cluster)
        for pod in pods:
            if pod.manifest is manifest:
                yield from _pod_problems(pod)
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
    granted = _granted(folder, account)
    for rule in PROVISIONER_RULES:
        for resource in rule["resources"]:
            missing = sorted(set(rule["verbs"]) - granted.get(resource, set()))
            if missing:
                complaint = f"the slice provisioner may not {texts(missing)} {resource}"
                allowed = f"required: a Role with that, bound to {account}"
                yield manifest.problem(f"{field}.serviceAccountName", complaint, allowed, account)


def _granted(folder: Folder, account: str) -> dict[str, set[str]]:
    """The verbs that a service account has, by resource."""
    roles = {manifest.name: manifest for manifest in folder.of_kind("Role")}
    granted: dict[str, set[str]] = {}
    for binding in folder.of_kind("RoleBinding"):
        subjects = [mapping(entry).get("name") for entry in sequence(binding.body, "subjects")]
        role = roles.get(str(value_at(binding.body, "roleRef", "name")))
        if account in subjects and role is not None:
            for rule in sequence(role.body, "rules"):
                for resource in sequence(rule, "resources"):
                    granted.setdefault(resource, set()).update(sequence(rule, "verbs"))
    return granted
