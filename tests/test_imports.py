"""Importing a leaf stays light: no Ray, no vLLM, no torch. Layers are `lint-imports`' business."""

import subprocess
import sys

import pytest

LEAVES = [
    "serving.domain.errors",
    "serving.config.application",
    "serving.domain.slice_records",
    "serving.artifacts.model_source",
    "serving.domain.paced_tokens",
    "serving.link.client",
    "serving.link.server",
    "serving.engine.host",
    "serving.engine.paced.engine",
    "serving.engine.spec",
    "serving.gateway.draining",
    "serving.dashboard.fleet_view",
    "serving.gateway.flights",
    "serving.gateway.http",
    "serving.gateway.auth",
    "serving.gateway.membership",
    "serving.gateway.metrics.page",
    "serving.gateway.metrics.ledger",
    "serving.gateway.telemetry.request_metrics",
    "serving.gateway.routing",
    "serving.gateway.metrics.requests",
    "deployments.ledger.command",
    "deployments.cli",
    "deployments.simulation.control",
    "deployments.simulation.throttle",
    "serving.directory.allocator",
    "serving.slices.expiry",
    "serving.slices.host_heartbeat",
    "serving.domain.slice_lifecycle",
    "serving.slices.probe",
    "serving.directory.quarantine",
    "serving.domain.topology",
    "serving.tpu.plan",
    "deployments.engine_plan",
    "serving.artifacts.model_config_file",
    "autoscaling.policy.policy",
    "autoscaling.replay",
    "loadtest.chaos.runner",
    "loadtest.known_answer",
]
HEAVY = ("ray", "vllm", "torch", "transformers", "jax")

_PROBE = """
import importlib, sys
heavy = set(sys.argv[2:])
importlib.import_module(sys.argv[1])
print(" ".join(sorted(heavy & sys.modules.keys())))
"""


@pytest.mark.slow
@pytest.mark.parametrize("leaf", LEAVES)
def test_importing_a_leaf_loads_no_framework(leaf: str) -> None:
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE, leaf, *HEAVY],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert probe.stdout.split() == []
