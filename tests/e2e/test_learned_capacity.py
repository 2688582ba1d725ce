"""A profile that is twice too good, on a simulated cluster: what slices carry is seen, and kept.

Paced engines on real Ray nodes, clients that ask again as soon as they are answered, and the policy
in Serve's own controller. The law of the engines is an input, so how many slices it takes is known.
"""

import asyncio
import contextlib
import copy
import json
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from autoscaling.replay import replay_log

from .application import PROJECT_ROOT, Role, RunningApplication, wait_until

# Minutes: what is learned counts by and by.
pytestmark = [pytest.mark.e2e, pytest.mark.long]

SHIPPED = PROJECT_ROOT / "deployments" / "sim" / "autoscaling.yaml"
MODEL, CLASS = "slicewise-demo", "flex-start"
LATER_S = 300.0
NUM_SLICES, NUM_CLIENTS = 8, 24
# Steps of 20 ms and 5 ms for each sequence: within nine tenths of the objective of 50 ms five run.
# Its profile has half of the 5 ms, so by it there may be ten.
NUM_NEEDED, NUM_BY_PROFILE = 5, 3
BODY = {"model": MODEL, "prompt": "Go", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
CLUSTER = {
    "slices": [
        {
            "name": "flex",
            "compute_class": CLASS,
            "generation": "v6e",
            "topology": "2x2",
            "count": NUM_SLICES,
        }
    ]
}


class TooGoodProfile(RunningApplication):
    """The shipped model on one class, with a profile that says twice what a slice carries."""

    def __init__(self) -> None:
        self._file = yaml.safe_load(SHIPPED.read_text())
        args = copy.deepcopy(self._file["applications"][0]["args"])
        (model,) = args["models"]
        (deployment,) = (each for each in model["deployments"] if each["compute_class"] == CLASS)
        model["deployments"] = [deployment | {"max_replicas": NUM_SLICES}]
        super().__init__(args, through="sim", plan=CLUSTER)
        self.decision_log = self.folder / "decisions.jsonl"

    def write_config(self, args: Any) -> Path:
        (application,) = self._file["applications"]
        application["args"] = dict(args)
        policy = application["autoscaling_policy"]["policy_kwargs"]
        policy["decision_log"] = str(self.decision_log)
        (model,) = policy["models"].values()
        model["profile"]["per_sequence_s"] /= 2
        model["classes"] = {CLASS: model["classes"][CLASS]}
        self._file["http_options"]["port"] = self.port
        self.config_path.write_text(yaml.safe_dump(self._file))
        return self.config_path

    def _is_ready(self) -> bool:
        return "Try it:" in self.log_text()

    async def until_ready(self, least: int) -> dict[str, Any]:
        """Waits until so many slices are ready."""

        def is_so(fleet: dict[str, Any]) -> bool:
            return [row["state"] for row in fleet["slices"]].count("ready") >= least

        found: dict[str, Any] = await asyncio.to_thread(self.wait_fleet, is_so, LATER_S)
        return found

    def plans(self) -> list[dict[str, Any]]:
        """The plans so far, oldest first."""
        entries = map(json.loads, self.decision_log.read_text().splitlines())
        return [entry["plan"] for entry in entries if entry["kind"] == "decision"]

    async def plans_from(self, number: int) -> list[dict[str, Any]]:
        """Waits until there are so many plans, and returns all."""
        await asyncio.to_thread(wait_until, lambda: len(self.plans()) >= number, LATER_S)
        return self.plans()


@contextlib.asynccontextmanager
async def clients(base_url: str) -> AsyncIterator[list[int]]:
    """As many clients as there are, without a break; yields the statuses of the answers so far."""
    statuses: list[int] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base_url, timeout=LATER_S, limits=limits) as http:

        async def ask() -> None:
            while not is_over.is_set():
                statuses.append((await http.post("/v1/completions", json=BODY)).status_code)

        is_over = asyncio.Event()
        asking = [asyncio.create_task(ask()) for _ in range(NUM_CLIENTS)]
        try:
            yield statuses
        finally:
            is_over.set()
            await asyncio.gather(*asking)


@pytest.fixture(scope="module")
def application() -> Iterator[TooGoodProfile]:
    with TooGoodProfile() as running:
        yield running


async def test_need_is_reached_though_the_profile_says_half_and_a_new_controller_knows(
    application: TooGoodProfile,
) -> None:
    async with clients(application.base_url) as statuses:
        fleet = await application.until_ready(NUM_NEEDED)
        (plan,) = fleet["autoscaling"]["models"]
        assert "slices were seen to carry 0." in plan["arithmetic"]
        (controller,) = application.processes(Role.CONTROLLER)
        num_before = len(application.plans())
        controller.kill()

        plans = await application.plans_from(num_before + 30)
    assert set(statuses) == {200}

    targets = [each["targets"][CLASS] for each in plans]
    # What is more than is needed may go.
    assert min((new for old, new in pairwise(targets) if new < old), default=9) >= NUM_NEEDED
    # The new one first has to hear of the load.
    planned = [each["arithmetic"] for each in plans[num_before:] if each["demand_slices"]]
    assert planned
    assert [words for words in planned if "slices were seen to carry 0." not in words] == []
    assert replay_log(application.decision_log).differences == ()
