"""Importing a leaf stays light: no Ray, no vLLM, no torch. Layers are `lint-imports`' business.

Building the application takes Ray and nothing else of these.
"""

import json
import subprocess
import sys

import pytest

LEAVES = [
    "serving.domain.errors",
    "serving.config.application",
    "serving.domain.slice_records",
    "serving.artifacts.model_source",
    "serving.domain.tokens.paced",
    "serving.link.client",
    "serving.link.server",
    "serving.engine.host",
    "serving.engine.paced.engine",
    "serving.engine.spec",
    "serving.gateway.dispatch.admission",
    "serving.gateway.dispatch.dispatcher",
    "serving.gateway.reports.fleet_view",
    "serving.gateway.reports.gateway_sample",
    "serving.dashboard.pages",
    "serving.dashboard.exporter_scraper",
    "serving.gateway.dispatch.requests",
    "serving.gateway.edge.http",
    "serving.gateway.edge.auth",
    "serving.gateway.membership",
    "serving.gateway.metrics.page",
    "serving.gateway.metrics.ledger",
    "serving.gateway.telemetry.request_telemetry",
    "serving.gateway.dispatch.choice.routing",
    "serving.gateway.metrics.requests",
    "deployments.ledger.command",
    "deployments.cli",
    "deployments.simulation.control",
    "deployments.simulation.throttle",
    "serving.directory.allocator",
    "serving.slices.expiry",
    "serving.slices.host_heartbeat.server",
    "serving.slices.host_heartbeat.watcher",
    "serving.domain.slice_lifecycle",
    "serving.slices.probe",
    "serving.directory.supply_book",
    "serving.domain.topology",
    "serving.tpu.plan",
    "deployments.engine_plan",
    "serving.artifacts.model_config_file",
    "autoscaling.policy.policy",
    "autoscaling.replay",
    "loadtest.chaos.runner",
    "loadtest.client.expected_output",
]
HEAVY = ("ray", "vllm", "torch", "transformers", "jax")

# One interpreter takes them all in turn. Once a framework is loaded nobody after it can be told to
# do without, so each is asked what it has added: the first one that loads a framework is to blame.
_PROBE = """
import importlib, json, sys
heavy, leaves = json.loads(sys.stdin.read())
seen = set(heavy) & sys.modules.keys()
for leaf in leaves:
    importlib.import_module(leaf)
    added = set(heavy) & sys.modules.keys() - seen
    seen |= added
    print(json.dumps([leaf, sorted(added)]))
"""


def frameworks_added(modules: list[str]) -> dict[str, list[str]]:
    """The frameworks that the import of each module has added, one after the other."""
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE],
        input=json.dumps([HEAVY, modules]),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert probe.returncode == 0, probe.stderr
    return dict(json.loads(line) for line in probe.stdout.splitlines())


@pytest.fixture(scope="module")
def added() -> dict[str, list[str]]:
    return frameworks_added(LEAVES)


@pytest.mark.slow
@pytest.mark.parametrize("leaf", LEAVES)
def test_importing_a_leaf_loads_no_framework(leaf: str, added: dict[str, list[str]]) -> None:
    assert added[leaf] == []


@pytest.mark.slow
def test_framework_that_a_module_imports_would_be_found() -> None:
    assert frameworks_added(["serving.domain.errors", "jax"]) == {
        "serving.domain.errors": [],
        "jax": ["jax"],
    }


@pytest.mark.slow
def test_building_the_application_loads_no_engine_framework() -> None:
    """`serve deploy` builds it in a process of its own, and answers only then."""
    assert frameworks_added(["serving.app"]) == {"serving.app": ["ray"]}
