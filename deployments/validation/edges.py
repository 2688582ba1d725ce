"""Checks that routes lead to gateways that are ready, and Google's load balancers. Pure."""

from collections.abc import Iterator

from deployments.manifests.edges import FIXED_PORT, is_googles
from deployments.manifests.names import READY_PATH, kuberay_services
from deployments.validation.documents import (
    Folder,
    Json,
    KubernetesManifest,
    mapping,
    sequence,
    texts,
    value_at,
)
from deployments.validation.found_pods import FoundPod, ray_pods, selects
from serving.domain.errors import Problem

# A user may choose a shorter timeout of answers than ours, but none below this.
_LEAST_TIMEOUT_S = 300
_CONFIG = "spec.default.config"
_HEALTH_PATH = f"{_CONFIG}.httpHealthCheck.requestPath"
_TIMEOUT = "spec.default.timeoutSec"
_POLICIES = ("HealthCheckPolicy", "GCPBackendPolicy")
# Interval and timeout, where left out. Source: rules of GKE's HealthCheckPolicy at fc40d60, read
# 2026-11-22; so is what a check may set as its port.
_DEFAULT_CHECK_S = 5
_NAMED_PORT, _SERVING_PORT = "USE_NAMED_PORT", "USE_SERVING_PORT"
_PORT_FIELDS = {FIXED_PORT: {"port"}, _NAMED_PORT: {"portName"}, _SERVING_PORT: set[str]()}


def edge_problems(folder: Folder) -> Iterator[Problem]:
    """Checks every route and policy, and what Google's load balancers need of those they serve."""
    pods = list(ray_pods(folder))
    googles = {
        manifest.name
        for manifest in folder.of_kind("Gateway")
        if is_googles(str(value_at(manifest.body, "spec", "gatewayClassName")))
    }
    for route in folder.of_kind("HTTPRoute"):
        parents = {
            mapping(entry).get("name") for entry in sequence(route.body, "spec", "parentRefs")
        }
        for service in _services(route):
            yield from _service_problems(folder, pods, route, "spec.rules.backendRefs", service)
            if parents & googles:
                yield from _health_problems(folder, route, service)
                yield from _timeout_problems(folder, route, service)
    for policy in folder.of_kind(*_POLICIES):
        service = str(value_at(policy.body, "spec", "targetRef", "name"))
        yield from _service_problems(folder, pods, policy, "spec.targetRef.name", service)
    for policy in folder.of_kind("HealthCheckPolicy"):
        yield from _check_problems(policy)
    for pod in pods:
        if pod.is_gateway:
            yield from _probe_problems(pod)


def _services(route: KubernetesManifest) -> list[str]:
    return [
        str(mapping(backend).get("name"))
        for rule in sequence(route.body, "spec", "rules")
        for backend in sequence(rule, "backendRefs")
    ]


def _service_problems(
    folder: Folder, pods: list[FoundPod], source: KubernetesManifest, field: str, service: str
) -> Iterator[Problem]:
    # A foreign route, by another name than the cluster's, may lead to what is not Ray's.
    clusters = folder.names("RayService") | folder.names("RayCluster")
    leads = {manifest.name: _leads_to(manifest, pods) for manifest in folder.of_kind("Service")}
    ours = sorted(name for name, groups in leads.items() if groups and all(groups.values()))
    allowed = f"allowed: {texts(ours)}"
    if any(service in kuberay_services(cluster) for cluster in clusters):
        complaint = (
            "KubeRay's own: it is there only once every first replica has had a slice, and leads "
            "to hosts of slices, where nothing listens"
        )
        yield source.problem(field, complaint, allowed, service)
    elif service not in leads:
        yield source.problem(field, "no such Service", allowed, service)
    else:
        astray = sorted(group for group, is_gateway in leads[service].items() if not is_gateway)
        if not leads[service] and source.name in clusters:
            astray = ["nothing of Ray's"]
        if astray:
            complaint = f"this Service leads to pods that are no gateways: {texts(astray)}"
            yield source.problem(field, complaint, allowed, service)


def _leads_to(service: KubernetesManifest, pods: list[FoundPod]) -> dict[str, bool]:
    """The groups of Ray pods that a Service leads to, and whether gateways run in each."""
    selector: Json = {"matchLabels": mapping(service.body, "spec", "selector")}
    selected = [pod for pod in pods if selects(selector, pod.labels)]
    return {pod.labels["ray.io/group"]: pod.is_gateway for pod in selected}


def _policies(folder: Folder, kind: str, service: str) -> list[KubernetesManifest]:
    return [
        manifest
        for manifest in folder.of_kind(kind)
        if value_at(manifest.body, "spec", "targetRef", "name") == service
    ]


def _check_problems(policy: KubernetesManifest) -> Iterator[Problem]:
    """Yields what the API server would refuse of a health check."""
    for name, check in sorted(mapping(policy.body, *_CONFIG.split(".")).items()):
        if not isinstance(check, dict):
            continue
        given = {"port", "portName"} & set(check)
        specification = check.get("portSpecification", _SERVING_PORT)
        if given != _PORT_FIELDS.get(specification, given):
            needed = next((key for key, fields in _PORT_FIELDS.items() if fields == given), None)
            field = f"{_CONFIG}.{name}.portSpecification"
            complaint = f"the API server refuses it together with {texts(sorted(given))}"
            allowed = f"allowed: {needed or 'one of port and portName'}"
            yield policy.problem(field, complaint, allowed, check.get("portSpecification"))
    default = mapping(policy.body, "spec", "default")
    interval_s = default.get("checkIntervalSec", _DEFAULT_CHECK_S)
    timeout_s = default.get("timeoutSec", _DEFAULT_CHECK_S)
    if isinstance(interval_s, int) and isinstance(timeout_s, int) and timeout_s > interval_s:
        complaint = "longer than checkIntervalSec, which the API server refuses"
        yield policy.problem(_TIMEOUT, complaint, f"allowed: at most {interval_s}", timeout_s)


def _probe_problems(pod: FoundPod) -> Iterator[Problem]:
    probe = mapping(pod.spec, "containers", 0, "readinessProbe")
    path = value_at(probe, "httpGet", "path")
    if path != READY_PATH:
        field = f"{pod.path}.spec.containers[0].readinessProbe.httpGet.path"
        complaint = "requests would come before the cluster has an engine"
        yield pod.manifest.problem(field, complaint, f"allowed: {READY_PATH}", path)


def _health_problems(folder: Folder, route: KubernetesManifest, service: str) -> Iterator[Problem]:
    found = _policies(folder, "HealthCheckPolicy", service)
    if not found:
        complaint = f"the load balancer would ask {service} for /, and find every gateway unhealthy"
        required = f"required: a HealthCheckPolicy of {service} with {READY_PATH}"
        yield route.problem("spec.rules.backendRefs", complaint, required, service)
    for policy in found:
        path = value_at(policy.body, *_HEALTH_PATH.split("."))
        if path != READY_PATH:
            complaint = "only one path says whether the cluster can serve, and needs no key"
            yield policy.problem(_HEALTH_PATH, complaint, f"allowed: {READY_PATH}", path)


def _timeout_problems(folder: Folder, route: KubernetesManifest, service: str) -> Iterator[Problem]:
    found = _policies(folder, "GCPBackendPolicy", service)
    if not found:
        complaint = f"the load balancer would cut every answer of {service} after 30 s"
        required = f"required: a GCPBackendPolicy of {service} with timeoutSec"
        yield route.problem("spec.rules.backendRefs", complaint, required, service)
    for policy in found:
        timeout_s = value_at(policy.body, *_TIMEOUT.split("."))
        if not isinstance(timeout_s, int) or timeout_s < _LEAST_TIMEOUT_S:
            complaint = "streams are as long as their answers"
            allowed = f"allowed: at least {_LEAST_TIMEOUT_S}"
            yield policy.problem(_TIMEOUT, complaint, allowed, timeout_s)
