"""What a pod says of the Ray node in it: its `ray start`, and its variables. Pure."""

import json
import re
from typing import Any

Json = dict[str, Any]

_LABEL = re.compile(r"metadata\.labels\['([^']+)'\]")


def start_parameters(pod: Json) -> tuple[dict[str, str], dict[str, float]]:
    """The labels and resources that `ray start` is told in a pod.

    Raises:
        ValueError: it is not the command that KubeRay writes.
    """
    command = pod["spec"]["containers"][0].get("args", [""])[0]
    if " ray start " not in command:
        raise ValueError(f"args={command!r} of {pod['metadata']['name']}: no `ray start`")
    labels = re.search(r" --labels=(\S+)", command)
    resources = re.search(r" --resources='([^']*)'", command)
    pairs = labels[1].split(",") if labels else ()
    return (
        dict(pair.split("=", 1) for pair in pairs),
        dict(json.loads(resources[1])) if resources else {},
    )


def variables_of(pod: Json) -> dict[str, str]:
    """The environment of Ray's container, as a kubelet fills it in from the pod."""
    values: dict[str, str] = {}
    for each in pod["spec"]["containers"][0].get("env", ()):
        if "value" in each:
            values[each["name"]] = each["value"]
        elif "fieldRef" in each.get("valueFrom", {}):
            path = each["valueFrom"]["fieldRef"]["fieldPath"]
            values[each["name"]] = _field(pod, path)
    return values


def _field(pod: Json, path: str) -> str:
    if found := _LABEL.fullmatch(path):
        return str(pod["metadata"]["labels"][found[1]])
    value: Any = pod
    for part in path.split("."):
        value = value[part]
    return str(value)
