"""Runs a program on the hosts of a Ray cluster, as a separate program, and prints the answers.

    python -m deployments.first_run.hosts.ray_tasks HOST:PORT < request.json

It is separate because Ray's client may wait in native code; the caller ends it when its time is
over. Hosts with chips are meant, or all hosts where none has any.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.first_run.hosts.reach import FIRST_HOST_VARIABLE, WORKER_VARIABLE, run_here
from serving.domain.inventory import SLICE_NAME_LABEL, WORKER_ID_LABEL


def main(address: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the fields of a `HostAnswer` for each host.

    Raises:
        ValueError: there is no such host.
    """
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    alive = [node for node in ray.nodes() if node["Alive"]]
    hosts = [node for node in alive if node["Resources"].get("TPU")] or alive
    named = {str(node["NodeManagerAddress"]): node for node in hosts}
    if request["host"] is not None:
        if request["host"] not in named:
            raise ValueError(f"no host {request['host']}; there are {', '.join(sorted(named))}")
        named = {request["host"]: named[request["host"]]}
    firsts = first_hosts(hosts)
    waiting = [
        _run.options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote(
            name,
            request["program"],
            request["timeout_s"],
            request["environment"] | place_of(node, firsts),
        )
        for name, node in sorted(named.items())
    ]
    return list(ray.get(waiting))


def first_hosts(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the address of host 0 of each slice, by the slice's name. Pure."""
    return {
        node["Labels"].get(SLICE_NAME_LABEL, ""): str(node["NodeManagerAddress"])
        for node in nodes
        if node["Labels"].get(WORKER_ID_LABEL) == "0"
    }


def place_of(node: Mapping[str, Any], firsts: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that tell a program which host of which slice it is on. Pure."""
    labels = node["Labels"]
    return {
        WORKER_VARIABLE: labels.get(WORKER_ID_LABEL, "0"),
        FIRST_HOST_VARIABLE: firsts.get(labels.get(SLICE_NAME_LABEL, ""), ""),
    }


@ray.remote(max_retries=0)
def _run(
    name: str, program: list[str], timeout_s: float, environment: dict[str, str]
) -> dict[str, Any]:
    return asdict(run_here(name, program, timeout_s, environment))


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.load(sys.stdin))))  # noqa: T201
