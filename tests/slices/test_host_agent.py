"""What a host forbids is found by its agent, which first asks for the limits that it may have."""

import json
import os
import subprocess
import sys
from typing import Any

from serving.slices.probe import SIMULATED_VARIABLE
from serving.tpu.host.locked_memory import MEMLOCK_VARIABLE
from tests.hosts.unprivileged import without_rights

SOON_S = 60.0
WANTED_BYTES = 96 * 1024
LITTLE_BYTES = 64 * 1024
# A host of which nothing is simulated but the chips, which JAX has on this machine's CPUs. In a
# process of its own: it lowers the limit for itself, and the agent raises it.
AGENT = """
import asyncio, json, resource, sys
from serving.config.slice_spec import SliceSpec
from serving.domain.topology import slice_shape
from serving.slices.host_agent import HostAgent
from serving.slices.probe import Platform, ProbeSpec

little, most = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (little, most))
spec = SliceSpec("spot", slice_shape("v6e", "1x1"), listens_on_loopback=True)
agent = HostAgent(0, spec, b"a cluster secret of these tests")
wanted = ProbeSpec(platform=Platform.CPU, num_hosts=1, process_id=0, devices_per_host=1)
probed = asyncio.run(agent.probe(wanted, 50.0))
print(json.dumps({
    "outcome": probed.outcome,
    "faults": probed.host_faults,
    "limit": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
}))
"""


def probe(little: int, most: int, **environment: str) -> dict[str, Any]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SLICEWISE_")}
    done = subprocess.run(
        [*without_rights(), sys.executable, "-c", AGENT, str(little), str(most)],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_limit_is_raised_for_the_probe_and_what_is_wrong_is_reported() -> None:
    # Every process may raise its limit up to its hard one.
    found = probe(LITTLE_BYTES, WANTED_BYTES, **{MEMLOCK_VARIABLE: str(WANTED_BYTES)})
    assert found["limit"] == WANTED_BYTES
    # Enough was asked for and had, and is little all the same; the probe's outcome is its own.
    assert found["outcome"] == "passed"
    assert any(fault.startswith("fail locked memory: 0 MiB") for fault in found["faults"])


def test_simulated_host_is_not_judged() -> None:
    found = probe(LITTLE_BYTES, LITTLE_BYTES, **{SIMULATED_VARIABLE: "1"})
    assert found == {"outcome": "passed", "faults": [], "limit": LITTLE_BYTES}
