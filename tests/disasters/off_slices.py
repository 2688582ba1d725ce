"""Applications on hosts without chips, as our manifests have them, and what is on which of them."""

import asyncio
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from ray._raylet import GcsClient  # type: ignore[attr-defined] # compiled
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from deployments.manifests.names import CONTROL_GROUP, GATEWAY_GROUP
from serving.domain.topology import slice_shape
from tests.deployments.manifests.examples import in_memory, one, raw_values
from tests.e2e.application import RunningApplication

_TOLD_WITHIN_S = 120.0
_GROUPS = {"gateway": GATEWAY_GROUP, "control": CONTROL_GROUP}


def rendered_words(role: str, rollout: Mapping[str, Any]) -> list[str]:
    """The command of a pod of that role that is to end, but for its repetition and its wait."""
    raw = raw_values((slice_shape("v6e", "2x2"), "spot"))
    raw["applications"][0]["args"]["rollout"] = dict(rollout)
    cluster = one(in_memory(raw), "RayService").body["spec"]["rayClusterConfig"]
    (group,) = [each for each in cluster["workerGroupSpecs"] if each["groupName"] == _GROUPS[role]]
    container = group["template"]["spec"]["containers"][0]
    text: str = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    return shlex.split(text.removeprefix("until ").partition(";")[0])


async def tell_to_leave(
    application: RunningApplication, node_id: str, role: str, rollout: Mapping[str, Any]
) -> None:
    """Tells Ray that a node ends, as its pod would."""
    address = (await asyncio.to_thread(application.simulation, "describe"))["ray_address"]
    ray, *words = rendered_words(role, rollout)
    program = Path(sys.executable).with_name(ray)
    # In a pod there is one Ray node, and no need to say which.
    command = [str(program), *words, f"--address={address}", f"--node-id={node_id}"]
    await asyncio.to_thread(subprocess.run, command, check=True, timeout=_TOLD_WITHIN_S)


def replica_nodes(application: RunningApplication) -> dict[str, list[str]]:
    """The nodes of the replicas that run, by deployment, by Serve's own word."""
    answer = httpx.get(f"{application.dashboard_url}/api/serve/applications/", timeout=60)
    deployments: dict[str, Any] = answer.json()["applications"]["slicewise"]["deployments"]
    return {
        name: sorted(
            each["node_id"] for each in deployment["replicas"] if each["state"] == "RUNNING"
        )
        for name, deployment in deployments.items()
    }


async def until_on(
    application: RunningApplication, deployment: str, nodes: list[str], within_s: float
) -> None:
    """Waits until these, and no others, are the nodes of a deployment."""
    deadline_s = time.monotonic() + within_s
    while (found := (await asyncio.to_thread(replica_nodes, application))[deployment]) != nodes:
        assert time.monotonic() < deadline_s, f"{deployment} is on {found}, not on {nodes}"
        await asyncio.sleep(0.5)


async def until_dead(application: RunningApplication, node_id: str, within_s: float) -> None:
    """Waits until a node has ended, by Ray's word."""
    address = (await asyncio.to_thread(application.simulation, "describe"))["ray_address"]
    gcs = GcsClient(address=address)
    deadline_s = time.monotonic() + within_s
    while True:
        nodes = {key.hex(): each.state for key, each in gcs.get_all_node_info().items()}
        if nodes[node_id] == GcsNodeInfo.DEAD:
            return
        assert time.monotonic() < deadline_s, "the node has not ended"
        await asyncio.sleep(1.0)
