"""Checks the Redis of Ray's head: that it exists and lasts, and who may reach it. Pure."""

from collections.abc import Iterator

from deployments.validation.documents import (
    Folder,
    Json,
    KubernetesManifest,
    mapping,
    ray_clusters,
    sequence,
    texts,
    value_at,
)
from serving.domain.errors import Problem

_OPTIONS = "gcsFaultToleranceOptions"
_DURABLE = "--appendonly yes"


def redis_problems(folder: Folder) -> Iterator[Problem]:
    """Checks every Ray cluster's Redis, and every Redis in the folder."""
    for manifest, path, cluster in ray_clusters(folder):
        options = mapping(cluster, _OPTIONS)
        address = options.get("redisAddress")
        # That there is one at all is checked with the cluster's other settings.
        if address:
            yield from _address_problems(manifest, f"{path}.{_OPTIONS}", str(address), folder)
            yield from _password_problems(manifest, f"{path}.{_OPTIONS}", options)
    for stateful_set in folder.of_kind("StatefulSet"):
        if _start_of(stateful_set) is not None:
            yield from _pod_problems(stateful_set, folder)


def _address_problems(
    manifest: KubernetesManifest, path: str, address: str, folder: Folder
) -> Iterator[Problem]:
    """Checks that an address in the namespace of the folder's Redis is that Redis."""
    host, _, port = address.removeprefix("redis://").rpartition(":")
    name, _, domain = host.partition(".")
    is_here = domain == f"{manifest.namespace}.svc" or domain.startswith(
        f"{manifest.namespace}.svc."
    )
    if domain and not is_here:
        return
    own = [
        stateful_set
        for stateful_set in folder.of_kind("StatefulSet")
        if _start_of(stateful_set) is not None
    ]
    known = {
        f"{service.name}.{service.namespace}.svc:{mapping(entry).get('port')}"
        for service in folder.of_kind("Service")
        if any(_selects(service, redis) for redis in own)
        for entry in sequence(service.body, "spec", "ports")
    }
    if own and f"{name}.{manifest.namespace}.svc:{port}" not in known:
        complaint = "there is no Redis with a Service at this address"
        allowed = f"allowed: {texts(sorted(known))}, or an address outside the namespace"
        yield manifest.problem(f"{path}.redisAddress", complaint, allowed, address)


def _password_problems(manifest: KubernetesManifest, path: str, options: Json) -> Iterator[Problem]:
    field = f"{path}.redisPassword"
    if value_at(options, "redisPassword", "value") is not None:
        complaint = "a password stands in the manifest"
        yield manifest.problem(field, complaint, "allowed: valueFrom.secretKeyRef", "(hidden)")
    elif not value_at(options, "redisPassword", "valueFrom", "secretKeyRef", "name"):
        complaint = "missing: whoever reaches Redis could change what Ray runs"
        yield manifest.problem(field, complaint, "required: valueFrom.secretKeyRef")


def _pod_problems(each: KubernetesManifest, folder: Folder) -> Iterator[Problem]:
    start = _start_of(each) or ""
    if not sequence(each.body, "spec", "volumeClaimTemplates"):
        complaint = "missing: with the pod everything that Ray's head knows would be lost"
        yield each.problem("spec.volumeClaimTemplates", complaint, "required: a disk at /data")
    field = "spec.template.spec.containers[0].command"
    if _DURABLE not in start:
        complaint = "what was written last would be lost with the pod"
        yield each.problem(field, complaint, f"required: {_DURABLE}", start)
    if "requirepass" not in start:
        complaint = "Redis would ask nobody for a password"
        yield each.problem(field, complaint, "required: requirepass", start)
    replicas = value_at(each.body, "spec", "replicas")
    if replicas != 1:
        complaint = "several would each have a state of their own"
        yield each.problem("spec.replicas", complaint, "allowed: 1", replicas)
    labels = mapping(each.body, "spec", "template", "metadata", "labels")
    policies = [
        mapping(policy.body, "spec", "podSelector", "matchLabels")
        for policy in folder.of_kind("NetworkPolicy")
    ]
    if not any(policy.items() <= labels.items() for policy in policies):
        complaint = "no NetworkPolicy selects it: every pod of the cluster could reach it"
        value = texts([f"{k}={v}" for k, v in sorted(labels.items())])
        field = "spec.template.metadata.labels"
        yield each.problem(field, complaint, "required: a NetworkPolicy for the head alone", value)


def _start_of(each: KubernetesManifest) -> str | None:
    """Returns the command that starts Redis; `None` if it starts no Redis."""
    command = sequence(each.body, "spec", "template", "spec", "containers", 0, "command")
    args = sequence(each.body, "spec", "template", "spec", "containers", 0, "args")
    words = " ".join(map(str, [*command, *args]))
    return words if "redis-server" in words else None


def _selects(service: KubernetesManifest, redis: KubernetesManifest) -> bool:
    labels = mapping(redis.body, "spec", "template", "metadata", "labels")
    selector = mapping(service.body, "spec", "selector")
    return bool(selector) and selector.items() <= labels.items()
