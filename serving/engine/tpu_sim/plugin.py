"""Plugs the simulation into vLLM: two plug-ins (entry points in `pyproject.toml`).

Both do nothing unless `SLICEWISE_TPU_SIM` is `1`. It has to be set where a process begins: the
platform is chosen when vLLM is imported.
"""

import logging
import os

from serving.engine.tpu_sim.replacements import (
    ATTENTION,
    DEVICE_MEMORY,
    ENABLED_VARIABLE,
    replace,
)
from serving.tpu.chips import VISIBLE_CHIPS
from serving.tpu.multislice import SLICE_ID, own_environment
from serving.tpu.rules import SLICE_IDS_VARIABLE

logger = logging.getLogger(__name__)

# Set by the platform in the engine host; travels to the workers with the rest of its environment.
COORDINATOR_VARIABLE = "SLICEWISE_TPU_SIM_COORDINATOR"
NUM_HOSTS_VARIABLE = "SLICEWISE_TPU_SIM_NUM_HOSTS"

_PLATFORM = "serving.engine.tpu_sim.platform.SimulatedTpuPlatform"
_DEVICE_MEMORY_BYTES = 64 * 1024 * 1024
# XLA reads it once, when the first device is asked for.
_DEVICE_COUNT = "--xla_force_host_platform_device_count"
_done: set[str] = set()


def platform() -> str | None:
    """Returns the platform's import path, or `None` for vLLM's own choice."""
    if os.environ.get(ENABLED_VARIABLE) != "1":
        return None
    try:
        _before_import()
    except Exception:
        # vLLM takes a failure for "not this platform" and does not report it.
        logger.exception("tpu_sim_not_prepared")
        raise
    return _PLATFORM


def prepare_process() -> None:
    """Replaces in this process the parts of a TPU host that it lacks. Idempotent."""
    if os.environ.get(ENABLED_VARIABLE) != "1" or "process" in _done:
        return
    _done.add("process")
    _before_import()
    # Here, because all of it takes JAX and tpu-inference with it.
    from tpu_inference import utils  # noqa: PLC0415
    from tpu_inference.distributed import kv_transfer  # noqa: PLC0415
    from tpu_inference.layers.common import attention_interface  # noqa: PLC0415

    from serving.engine.tpu_sim import attention, jax_on_cpu  # noqa: PLC0415

    replace(DEVICE_MEMORY, utils, "get_device_hbm_limit", lambda: _DEVICE_MEMORY_BYTES)
    jax_on_cpu.give_coordinates()
    jax_on_cpu.give_chip_facts()
    jax_on_cpu.copy_blocks_without_kernel(kv_transfer)
    _join_slice()
    stand_in = attention.ragged_paged_attention
    replace(ATTENTION, attention_interface, "ragged_paged_attention", stand_in)


def _before_import() -> None:
    """Replaces what tpu-inference uses at import, in decorators and as names of operators."""
    if "import" in _done:
        return
    _done.add("import")
    _see_own_chips()
    from serving.engine.tpu_sim import jax_on_cpu, torch_on_cpu  # noqa: PLC0415

    torch_on_cpu.name_missing_operators()
    torch_on_cpu.keep_storage()
    torch_on_cpu.leave_out_vision()
    torch_on_cpu.stand_in_for_tokamax()
    jax_on_cpu.drop_tpu_options()
    jax_on_cpu.copy_on_transfer()


def _see_own_chips() -> None:
    """Gives a process that was told its chips as many devices, as libtpu does."""
    if chips := os.environ.get(VISIBLE_CHIPS):
        flags = os.environ.get("XLA_FLAGS", "").split()
        kept = [flag for flag in flags if not flag.startswith(_DEVICE_COUNT)]
        count = f"{_DEVICE_COUNT}={len(chips.split(','))}"
        os.environ["XLA_FLAGS"] = " ".join([*kept, count])


def _join_slice() -> None:
    """Joins the engine's other hosts, in a worker of an engine whose hosts form one JAX system."""
    coordinator = os.environ.get(COORDINATOR_VARIABLE)
    if coordinator is None or not _is_worker():
        return
    from serving.directory.ray_hosts import own_node_id  # noqa: PLC0415
    from serving.engine.tpu_sim import jax_on_cpu  # noqa: PLC0415

    num_hosts = int(os.environ[NUM_HOSTS_VARIABLE])
    host = int(os.environ["TPU_WORKER_ID"])
    if SLICE_IDS_VARIABLE in os.environ:
        # What libtpu would make of it: slice after slice, and in each by worker id.
        own = own_environment(os.environ, own_node_id())
        hosts_per_slice = num_hosts // int(os.environ["MEGASCALE_NUM_SLICES"])
        host += int(own[SLICE_ID]) * hosts_per_slice
        jax_on_cpu.give_slices(hosts_per_slice)
    jax_on_cpu.join_hosts(coordinator, num_hosts, host)


def _is_worker() -> bool:
    """Returns whether this is a worker of the executor on Ray, which has the chips of its host."""
    import ray  # noqa: PLC0415

    if not ray.is_initialized():
        return False
    return bool(ray.get_runtime_context().get_assigned_resources().get("TPU"))
