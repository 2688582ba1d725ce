"""An engine that never becomes ready: the start of the application fails in time, and says why."""

from collections.abc import Iterator

import pytest

from .application import Role, RunningApplication, application_args, paced_model

pytestmark = [pytest.mark.e2e, pytest.mark.long]

TIMEOUT_S = 4.0
V6E_2X4 = {"generation": "v6e", "topology": "2x4", "chips_per_host": 4}
PLAN = {"slices": [{"name": "spot", "compute_class": "spot", "count": 1, **V6E_2X4}]}
SOON_S = 180.0


@pytest.fixture
def application() -> Iterator[RunningApplication]:
    """Launched, and no more: it never is ready."""
    deployment = {"compute_class": "spot", "replicas": 1, "num_cpus": 0.01, "slice": V6E_2X4}
    model = paced_model(deployments=[deployment])
    model["paced"] = model.get("paced", {}) | {"load_ms": 3_600_000.0}
    args = application_args(model, health={"start_timeout_s": TIMEOUT_S})
    running = RunningApplication(args, through="sim", plan=PLAN)
    try:
        running.launch()
        yield running
    finally:
        running.stop()


def test_engine_that_never_becomes_ready_fails_the_start_with_its_reason(
    application: RunningApplication,
) -> None:
    """Of the first engine. Serve tries it again a few times, and `serve run` waits for that."""
    assert application.wait_exit(SOON_S) != 0
    said = application.log_text()
    words = f"not ready {TIMEOUT_S:g} s after its start (health.start_timeout_s): it was getting"
    assert words in said
    assert "Traceback" not in said
    assert application.processes(Role.ENGINE_HOST) == []
