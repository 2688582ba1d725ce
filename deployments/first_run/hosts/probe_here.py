"""Probes this host once: `python -m deployments.first_run.hosts.probe_here SPEC SECONDS PORT`.

SPEC is a `ProbeSpec` as JSON, as of host 0; which host this is stands in the environment. On a
slice of several hosts the program of host 0 coordinates the others on PORT. The result is printed
as JSON.
"""

import asyncio
import os
import sys

import msgspec

from deployments.first_run.hosts.reach import FIRST_HOST_VARIABLE, WORKER_VARIABLE
from serving.slices.probe import SIMULATED_VARIABLE, Platform, ProbeSpec, run_probe_on_host
from serving.tpu.host.locked_memory import raise_locked_memory


def main(text: str, limit_s: float, port: int) -> str:
    """Returns the result of the probe as JSON."""
    spec = msgspec.json.decode(text, type=ProbeSpec)
    if spec.num_hosts > 1:
        spec = msgspec.structs.replace(
            spec,
            process_id=int(os.environ[WORKER_VARIABLE]),
            coordinator_address=f"{os.environ[FIRST_HOST_VARIABLE]}:{port}",
        )
    if SIMULATED_VARIABLE in os.environ:
        spec = msgspec.structs.replace(spec, platform=Platform.CPU)
    else:
        # As a host's agent does, for the program that it starts.
        raise_locked_memory(os.environ)
    return msgspec.json.encode(asyncio.run(run_probe_on_host(spec, limit_s))).decode()


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])) + "\n")
