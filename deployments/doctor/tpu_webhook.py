"""Checks that the TPU webhook in force is asked about our TPU pods. Pure.

It gives each host its slice's name, its number and its neighbours. A webhook that does not see a
pod says nothing, and a slice of several hosts never becomes one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from deployments.doctor.findings import Finding, error, ok, warning

Json = Mapping[str, Any]
_FIX = "install or upgrade KubeRay's TPU webhook; on GKE it comes with the Ray operator add-on"


def check_tpu_webhook(
    configurations: Iterable[Json],
    pods: Mapping[str, Mapping[str, str]],
    namespace_labels: Mapping[str, str],
    *,
    has_multi_host: bool,
) -> Iterator[Finding]:
    """Checks the webhook against the labels of TPU pods, by worker group.

    `configurations` are all MutatingWebhookConfigurations of the cluster.
    """
    what = "TPU webhook"
    hooks = [
        (configuration["metadata"]["name"], hook)
        for configuration in configurations
        for hook in configuration.get("webhooks") or ()
        if "tpu" in f"{configuration['metadata']['name']} {hook['name']}".lower()
    ]
    if not hooks:
        if has_multi_host:
            yield error(what, "none", "one: slices of several hosts have no name without", _FIX)
        else:
            yield warning(what, "none", "one: hosts get TPU_NAME and TPU_WORKER_ID from it", _FIX)
        return
    problems = [list(_problems(hook, pods, namespace_labels)) for _, hook in hooks]
    names = ", ".join(name for name, _ in hooks)
    if all(problems):
        # Of several, the one that is nearest to seeing the pods.
        for found, allowed, fix in min(problems, key=len):
            make = error if has_multi_host else warning
            yield make(what, f"{names}: {found}", allowed, fix)
        return
    yield ok(what, f"{names} is asked about the pods of {len(pods)} groups")
    for name, hook in hooks:
        if (policy := hook.get("failurePolicy", "Fail")) != "Fail":
            fix = "set it to Fail: while the webhook is away, no TPU pod is made, and none is wrong"
            yield warning(f"{what} {name}", f"failurePolicy {policy}", "Fail", fix)


def _problems(
    hook: Json, pods: Mapping[str, Mapping[str, str]], namespace_labels: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yields why a webhook is not asked: found, allowed, fix."""
    if not any(map(_is_of_pods, hook.get("rules") or ())):
        yield "no rule for the creation of pods", "CREATE of v1 pods", _FIX
    if not takes(hook.get("namespaceSelector") or {}, namespace_labels):
        found = f"namespaceSelector leaves our namespace out ({_shown(namespace_labels)})"
        yield found, "one that takes it", "label the namespace, or change the selector"
    left_out = [
        name for name, labels in pods.items() if not takes(hook.get("objectSelector") or {}, labels)
    ]
    if left_out:
        selector = hook.get("objectSelector")
        found = f"objectSelector {selector} leaves out the pods of {', '.join(sorted(left_out))}"
        fix = "leave KubeRay's labels as they are: no label of your own over app.kubernetes.io/name"
        yield found, "one that takes them", fix


def takes(selector: Json, labels: Mapping[str, str]) -> bool:
    """Returns whether a Kubernetes selector takes an object with these labels."""
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(_holds(expression, labels) for expression in selector.get("matchExpressions") or ())


def _holds(expression: Json, labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case _:  # the only other one that the API server takes is DoesNotExist
            return key not in labels


def _is_of_pods(rule: Json) -> bool:
    return (
        _has(rule.get("operations"), "CREATE")
        and _has(rule.get("apiGroups"), "")
        and _has(rule.get("apiVersions"), "v1")
        and (_has(rule.get("resources"), "pods") or _has(rule.get("resources"), "*/*"))
        and rule.get("scope", "*") in ("*", "Namespaced")
    )


def _has(values: Sequence[str] | None, value: str) -> bool:
    return values is not None and (value in values or "*" in values)


def _shown(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))
