"""Extends tpu-inference's platform by one thing: where the hosts of a slice find each other."""

import os
import socket
from typing import Any

from tpu_inference.platforms.tpu_platform import TpuPlatform

from serving.engine.tpu_sim.plugin import COORDINATOR_VARIABLE, NUM_HOSTS_VARIABLE


class SimulatedTpuPlatform(TpuPlatform):
    """The platform with the real checks and the real choice of executor and worker."""

    @classmethod
    # The configuration's own module imports the platform, and so cannot be imported here.
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Checks as the real platform does; on several hosts, also sets the workers' address."""
        super().check_and_update_config(vllm_config)
        parallel = vllm_config.parallel_config
        group = parallel.placement_group
        # With pipeline parallelism every host is a JAX process by itself.
        if group is None or parallel.pipeline_parallel_size > 1 or len(group.bundle_specs) == 1:
            return
        # Here, because only an engine over several hosts runs on Ray.
        from serving.directory.ray_hosts import own_address  # noqa: PLC0415

        # The first JAX process, which the others dial, is the worker on this host.
        address = own_address()
        os.environ[COORDINATOR_VARIABLE] = f"{address}:{_free_port(address)}"
        os.environ[NUM_HOSTS_VARIABLE] = str(len(group.bundle_specs))


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
