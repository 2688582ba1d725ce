"""The memory of the processes of an application that hold requests."""

from collections.abc import Sequence

import psutil

from .application import Role, RunningApplication

MIB = 1024 * 1024


def serving_processes(application: RunningApplication) -> list[psutil.Process]:
    """Those that hold requests. Not vLLM's workers: their KV cache is reserved at the start and
    becomes resident block by block, as requests first touch it."""
    roles = (Role.GATEWAY, Role.ENGINE_HOST, Role.ENGINE_CORE)
    return [process for role in roles for process in application.processes(role)]


def own_bytes(processes: Sequence[psutil.Process]) -> dict[int, int]:
    """Memory that is each process's own, by process id."""
    return {process.pid: process.memory_full_info().uss for process in processes}
