"""Runs a program on the hosts of a Ray cluster, as a separate program, and prints the answers.

    python -m deployments.first_run.ray_hosts HOST:PORT < request.json

It is separate because Ray's client may wait in native code; the caller ends it when its time is
over. Hosts with chips are meant, or all hosts where none has any.
"""

import json
import sys
from dataclasses import asdict
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.first_run.hosts import run_here


def main(address: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the fields of a `HostAnswer` for each host.

    Raises:
        ValueError: there is no such host.
    """
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    alive = [node for node in ray.nodes() if node["Alive"]]
    hosts = [node for node in alive if node["Resources"].get("TPU")] or alive
    named = {f"{node['NodeManagerAddress']}": node["NodeID"] for node in hosts}
    if request["host"] is not None:
        if request["host"] not in named:
            raise ValueError(f"no host {request['host']}; there are {', '.join(sorted(named))}")
        named = {request["host"]: named[request["host"]]}
    waiting = [
        _run.options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote(name, request["program"], request["timeout_s"], request["environment"])
        for name, node_id in sorted(named.items())
    ]
    return list(ray.get(waiting))


@ray.remote(max_retries=0)
def _run(
    name: str, program: list[str], timeout_s: float, environment: dict[str, str]
) -> dict[str, Any]:
    return asdict(run_here(name, program, timeout_s, environment))


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.load(sys.stdin))))  # noqa: T201
