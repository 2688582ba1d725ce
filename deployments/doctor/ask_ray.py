"""Asks one Ray cluster for its nodes, as a separate program, and prints them as JSON.

It is separate because Ray's client waits 40 s for a server that does not answer, in native code
that cannot be interrupted. The caller ends this program when its time is over.

    python -m deployments.doctor.ask_ray HOST:PORT SECONDS
"""

import json
import platform
import sys
from typing import Any

import ray
from ray._common.usage.usage_lib import get_cluster_metadata
from ray._raylet import GcsClient  # type: ignore[attr-defined] # compiled
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.exceptions import AuthenticationError


def main(address: str, timeout_s: float) -> dict[str, Any]:
    """The fields of `cluster.RayAnswer`, but for the address."""
    try:
        client = GcsClient(address=address)
        nodes = client.get_all_node_info(timeout=timeout_s)
        started_with = _started_with(client)
    except AuthenticationError as error:
        return {"reach": "refused", "detail": _first_line(error)}
    except (ray.exceptions.RayError, RuntimeError, ValueError) as error:
        is_token = "auth" in f"{error}".lower()
        return {"reach": "refused" if is_token else "broken", "detail": _first_line(error)}
    return {
        "reach": "answered",
        "detail": "",
        "nodes": list(map(_node, nodes.values())),
        "cluster": _versions(started_with.get("ray_version"), started_with.get("python_version")),
        "here": _versions(ray.__version__, platform.python_version()),
    }


def _started_with(client: Any) -> dict[str, Any]:
    try:
        metadata: dict[str, Any] = get_cluster_metadata(client)
    except AttributeError:  # of `None`: the head has not written it yet
        return {}
    return metadata


def _versions(of_ray: str | None, of_python: str | None) -> str:
    return f"Ray {of_ray}, Python {of_python}" if of_ray and of_python else ""


def _node(info: Any) -> dict[str, Any]:
    """Returns a node as `ray.nodes()` writes it, in part."""
    return {
        "NodeID": info.node_id.hex(),
        "Alive": info.state == GcsNodeInfo.ALIVE,
        "NodeManagerAddress": info.node_manager_address,
        "Resources": dict(info.resources_total),
        "Labels": dict(info.labels),
    }


def _first_line(error: Exception) -> str:
    lines = f"{error}".strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], float(sys.argv[2]))))  # noqa: T201
