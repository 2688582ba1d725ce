"""The shipped scaling application on its simulated cluster: reserved first, spot, zero and back.

Paced engines on real Ray nodes; the policy runs in Serve's own controller. Nothing here depends on
how long a step takes, only on that it comes about.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from autoscaling.replay import replay_log

from .application import PROJECT_ROOT, RunningApplication
from .open_loop import open_loop

# Minutes: they wait for forecasts and patience. `make test` has the same parts without a cluster.
pytestmark = [pytest.mark.e2e, pytest.mark.long]

MODEL = "slicewise-demo"
SHIPPED = PROJECT_ROOT / "deployments" / "sim"
# The policy looks at the load of some minutes: a step is believed, and forgotten, within two.
SOON_S, LATER_S = 60.0, 240.0
# One slice carries not quite six of them per second.
BODY = {"model": MODEL, "prompt": "Scale", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
STEP_PER_S = 10.0
NUM_SPOT = 3


class ScalingApplication(RunningApplication):
    """The shipped files, on a port of its own and with a decision log."""

    def __init__(self) -> None:
        self._file = yaml.safe_load((SHIPPED / "autoscaling.yaml").read_text())
        plan = yaml.safe_load((SHIPPED / "autoscaling_cluster.yaml").read_text())
        super().__init__(self._file["applications"][0]["args"], through="sim", plan=plan)
        self.decision_log = self.folder / "decisions.jsonl"

    def write_config(self, args: Any) -> Path:
        (application,) = self._file["applications"]
        application["args"] = dict(args)
        policy = application["autoscaling_policy"]["policy_kwargs"]
        policy["decision_log"] = str(self.decision_log)
        self._file["http_options"]["port"] = self.port
        self.config_path.write_text(yaml.safe_dump(self._file))
        return self.config_path

    def _is_ready(self) -> bool:
        # How many engines there are is the policy's business from the start.
        return "Try it:" in self.log_text()

    async def until(self, is_so: Callable[[dict[str, Any]], bool], timeout_s: float) -> Any:
        return await asyncio.to_thread(self.wait_fleet, is_so, timeout_s)


def num_ready(fleet: dict[str, Any], compute_class: str) -> int:
    return sum(
        row["state"] == "ready" for row in fleet["slices"] if row["compute_class"] == compute_class
    )


def targets(fleet: dict[str, Any]) -> dict[str, int]:
    models = (fleet["autoscaling"] or {"models": []})["models"]
    found: dict[str, int] = models[0]["targets"] if models else {}
    return found


def is_at_zero(fleet: dict[str, Any]) -> bool:
    return not fleet["slices"] and bool(targets(fleet)) and not any(targets(fleet).values())


def first_added(log: Path, compute_class: str, since_s: float) -> float:
    """When the policy first wanted more slices of a class, by its own log."""
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    return min(
        entry["plan"]["at_s"]
        for entry in entries
        if entry["kind"] == "decision" and entry["plan"]["at_s"] >= since_s
        for decision in entry["plan"]["decisions"]
        if decision["compute_class"] == compute_class and decision["delta"] > 0
    )


def loaded(application: RunningApplication) -> AbstractAsyncContextManager[list[int]]:
    """Requests at the rate of the step; see `open_loop`."""
    return open_loop(application.base_url, BODY, STEP_PER_S, timeout_s=120.0)


@pytest.fixture(scope="module")
def application() -> Iterator[ScalingApplication]:
    with ScalingApplication() as running:
        yield running


async def test_first_request_brings_back_an_idle_model_and_a_step_takes_reserved_then_spot(
    application: ScalingApplication,
) -> None:
    await application.until(is_at_zero, SOON_S)
    async with httpx.AsyncClient(base_url=application.base_url, timeout=SOON_S) as client:
        answer = await client.post("/v1/completions", json=BODY)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == BODY["max_tokens"]

    async with loaded(application) as statuses:
        fleet = await application.until(lambda fleet: num_ready(fleet, "spot") > 0, LATER_S)
    assert num_ready(fleet, "reserved") == 1, "spot came before what is paid for"
    assert targets(fleet)["flex-start"] == 0
    assert set(statuses) == {200}
    (plan,) = fleet["autoscaling"]["models"]
    assert plan["model"] == MODEL
    assert any(change["compute_class"] == "spot" and change["reason"] for change in plan["changes"])
    assert fleet["autoscaling"]["alerts"] == plan["alerts"] == []

    replay = replay_log(application.decision_log)
    assert replay.num_decisions > 20
    assert replay.differences == ()


async def test_spot_stock_out_is_bridged_by_flex_start_and_load_returns_to_spot(
    application: ScalingApplication,
) -> None:
    await application.until(is_at_zero, LATER_S)
    since_s = time.time()
    await asyncio.to_thread(application.simulation, "stock_out", compute_class="spot")
    for number in range(NUM_SPOT):
        await asyncio.to_thread(application.simulation, "kill", name=f"spot-{number}")
    async with loaded(application) as statuses:
        fleet = await application.until(lambda fleet: num_ready(fleet, "flex-start") > 0, LATER_S)
        assert num_ready(fleet, "spot") == 0
        assert targets(fleet)["spot"] > 0, "the wish stays open"
        assert first_added(application.decision_log, "spot", since_s) < first_added(
            application.decision_log, "flex-start", since_s
        )
        await asyncio.to_thread(
            application.simulation, "stock_out", compute_class="spot", is_dry=False
        )
        await application.until(
            lambda fleet: (
                num_ready(fleet, "spot") > 0
                and targets(fleet)["flex-start"] == 0
                and num_ready(fleet, "flex-start") == 0
            ),
            LATER_S,
        )
    await application.until(is_at_zero, LATER_S)
    assert set(statuses) == {200}
    assert replay_log(application.decision_log).differences == ()
