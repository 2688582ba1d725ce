"""A first installation with one class out of stock: served from the first engine on, and then on.

Two deployments of one model on a simulated cluster without slices; one of them never gets one.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .application import (
    START_TIMEOUT_S,
    RunningApplication,
    application_args,
    linked_engines,
    paced_model,
)

pytestmark = [pytest.mark.e2e, pytest.mark.long]

V6E_2X4 = {"generation": "v6e", "topology": "2x4", "chips_per_host": 8}
PLAN = {
    "slices": [
        {"name": name, "compute_class": name, "count": 0, **V6E_2X4}
        for name in ("spot", "flex-start")
    ]
}
SOON_S = 60.0


def installation() -> RunningApplication:
    deployments = [
        {"compute_class": name, "replicas": 1, "num_cpus": 0.01, "slice": V6E_2X4}
        for name in ("spot", "flex-start")
    ]
    args = application_args(paced_model(deployments=deployments))
    return RunningApplication(args, through="sim", plan=PLAN)


@pytest.fixture
def application() -> Iterator[RunningApplication]:
    """Launched, and no more: it never is as ready as others wait for."""
    running = installation()
    try:
        running.launch()
        yield running
    finally:
        running.stop()


def wait_ready(application: RunningApplication, status: int, words: str, timeout_s: float) -> None:
    """Waits until `/ready` answers with `status` and these words in its text."""
    deadline_s = time.monotonic() + timeout_s
    said: httpx.Response | None = None
    while said is None or said.status_code != status or words not in said.text:
        assert time.monotonic() < deadline_s, f"{said and said.text!r}\n{application.log_tail()}"
        time.sleep(0.2)
        with contextlib.suppress(httpx.HTTPError):
            said = httpx.get(f"{application.base_url}/ready", timeout=5, verify=False)


def is_waiting(fleet: dict[str, Any]) -> bool:
    return any(row["state"] == "provisioning" for row in fleet["slices"])


def test_gateways_serve_from_the_first_engine_on_whatever_another_class_waits_for(
    application: RunningApplication,
) -> None:
    nobody = "no engine has been ready yet: 2 wanted at least; slice replicas: 2 provisioning"
    wait_ready(application, 503, nobody, START_TIMEOUT_S)
    application.simulation("add", kind_name="spot")
    wait_ready(application, 200, "engines take requests", SOON_S)
    fleet = application.wait_fleet(is_waiting)
    assert linked_engines(fleet) == {"paced": 1}
    body = {"model": "paced", "prompt": "Now?", "max_tokens": 4}
    answer = httpx.post(f"{application.base_url}/v1/completions", json=body, verify=False)
    assert answer.status_code == 200
    # What a readiness that followed Serve's would still wait for.
    assert "status: DEPLOYING" in application.serve("status").stdout
    application.simulation("kill", name="spot-0")
    application.wait_fleet(lambda fleet: not linked_engines(fleet).get("paced"), SOON_S)
    wait_ready(application, 200, "has served before", SOON_S)
