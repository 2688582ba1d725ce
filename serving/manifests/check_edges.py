"""The way in: would Google's load balancers find a gateway well, and let its answers last? Pure."""

from collections.abc import Iterator

from serving.errors import Problem
from serving.manifests.documents import Folder, Manifest, look, mapping, sequence
from serving.manifests.edges import is_googles
from serving.manifests.names import PROXY_HEALTH

# Answers may be as long as this at least; shorter ones are somebody's own choice.
_LEAST_TIMEOUT_S = 300
_HEALTH_PATH = "spec.default.config.httpHealthCheck.requestPath"
_TIMEOUT = "spec.default.timeoutSec"


def edge_problems(folder: Folder) -> Iterator[Problem]:
    """Every route that comes through a load balancer of Google's."""
    googles = {
        each.name
        for each in folder.of_kind("Gateway")
        if is_googles(str(look(each.body, "spec", "gatewayClassName")))
    }
    for route in folder.of_kind("HTTPRoute"):
        parents = {mapping(each).get("name") for each in sequence(route.body, "spec", "parentRefs")}
        if parents & googles:
            for service in _services(route):
                yield from _health_problems(folder, route, service)
                yield from _timeout_problems(folder, route, service)


def _services(route: Manifest) -> list[str]:
    return [
        str(mapping(backend).get("name"))
        for rule in sequence(route.body, "spec", "rules")
        for backend in sequence(rule, "backendRefs")
    ]


def _policies(folder: Folder, kind: str, service: str) -> list[Manifest]:
    return [
        each
        for each in folder.of_kind(kind)
        if look(each.body, "spec", "targetRef", "name") == service
    ]


def _health_problems(folder: Folder, route: Manifest, service: str) -> Iterator[Problem]:
    found = _policies(folder, "HealthCheckPolicy", service)
    if not found:
        complaint = f"the load balancer would ask {service} for /, and take every gateway for ill"
        required = f"required: a HealthCheckPolicy of {service} with {PROXY_HEALTH}"
        yield route.problem("spec.rules.backendRefs", complaint, required, service)
    for each in found:
        path = look(each.body, *_HEALTH_PATH.split("."))
        if path not in (PROXY_HEALTH, "/health"):
            complaint = "a gateway answers this path only with a key"
            yield each.problem(_HEALTH_PATH, complaint, f"allowed: {PROXY_HEALTH}, /health", path)


def _timeout_problems(folder: Folder, route: Manifest, service: str) -> Iterator[Problem]:
    found = _policies(folder, "GCPBackendPolicy", service)
    if not found:
        complaint = f"the load balancer would cut every answer of {service} after 30 s"
        required = f"required: a GCPBackendPolicy of {service} with timeoutSec"
        yield route.problem("spec.rules.backendRefs", complaint, required, service)
    for each in found:
        timeout_s = look(each.body, *_TIMEOUT.split("."))
        if not isinstance(timeout_s, int) or timeout_s < _LEAST_TIMEOUT_S:
            complaint = "streams are as long as their answers"
            allowed = f"allowed: at least {_LEAST_TIMEOUT_S}"
            yield each.problem(_TIMEOUT, complaint, allowed, timeout_s)
