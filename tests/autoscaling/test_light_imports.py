"""Whoever plans or types a command does not wait for Ray. Layers are `lint-imports`' business."""

import subprocess
import sys

import pytest

_PROBE = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(" ".join({"ray", "vllm", "torch", "jax"} & sys.modules.keys()))
"""


@pytest.mark.parametrize(
    "module", ["sidecar.command", "kuberay", "objects.cluster", "plan", "reconcile"]
)
def test_importing_loads_no_framework(module: str) -> None:
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE, f"autoscaling.provisioning.{module}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert probe.stdout.split() == []


def test_running_provisioner_loads_neither_serve_nor_vllm() -> None:
    """It shares the head's pod, and needs a client of Ray's control store only."""
    code = "import sys, autoscaling.provisioning.sidecar.process; print(*sys.modules)"
    probe = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(probe.stdout.split())
    assert "ray._raylet" in loaded
    assert loaded.isdisjoint({"ray.serve", "vllm", "torch", "jax"})
