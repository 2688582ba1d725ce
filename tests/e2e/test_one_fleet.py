"""Two models under one quota, and a model with slices of two shapes, on a simulated cluster.

Paced engines on real Ray nodes; the policy runs in Serve's own controller.
"""

import asyncio
import copy
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from autoscaling.replay import replay_log

from .application import PROJECT_ROOT, Role, RunningApplication
from .open_loop import open_loop

# Minutes: models wait for forecasts, and for slices of others.
pytestmark = [pytest.mark.e2e, pytest.mark.long]

SHIPPED = PROJECT_ROOT / "deployments" / "sim" / "autoscaling.yaml"
CHAT, CODE, EITHER = "chat", "code", "either"
SOON_S, LATER_S = 60.0, 240.0
# One slice carries not quite six of them per second; two slices have eight chips.
PER_S, NUM_CHIPS = 10.0, 8
CLUSTER = {
    "slices": [
        {
            "name": name,
            "compute_class": of,
            "market": market,
            "generation": "v6e",
            "topology": shape,
            "count": count,
        }
        for name, of, market, shape, count in (
            ("kept", "reserved", "reserved", "2x2", 2),
            ("small", "spot", "spot", "2x2", 3),
            ("large", "spot-2x4", "spot", "2x4", 2),
        )
    ]
}


class OneFleet(RunningApplication):
    """The shipped model three times: two share what is reserved, the third has two shapes."""

    def __init__(self) -> None:
        self._file = yaml.safe_load(SHIPPED.read_text())
        super().__init__(self._args(), through="sim", plan=CLUSTER)
        self.decision_log = self.folder / "decisions.jsonl"

    def _args(self) -> dict[str, Any]:
        args = copy.deepcopy(self._file["applications"][0]["args"])
        (shipped,) = args["models"]

        def model(name: str, *classes: tuple[str, str, int]) -> dict[str, Any]:
            deployments = [
                {
                    "compute_class": compute_class,
                    "min_replicas": 0,
                    "max_replicas": most,
                    "num_cpus": 0.01,
                    "slice": {"generation": "v6e", "topology": topology},
                }
                for compute_class, topology, most in classes
            ]
            return shipped | {"name": name, "deployments": deployments}

        reserved = ("reserved", "2x2", 2)
        either = model(EITHER, ("spot", "2x2", 3), ("spot-2x4", "2x4", 2))
        args["models"] = [model(CHAT, reserved), model(CODE, reserved), either]
        args["compute_classes"] = [{"name": "spot-2x4", "market": "spot"}]
        return dict(args)

    def write_config(self, args: Any) -> Path:
        (application,) = self._file["applications"]
        application["args"] = dict(args)
        policy = application["autoscaling_policy"]["policy_kwargs"]
        policy["decision_log"] = str(self.decision_log)
        (shipped,) = policy["models"].values()
        # Twice the chips carry a little more than twice.
        large = shipped["profile"] | {"topology": "2x4", "per_sequence_s": 0.0022}
        large |= {"max_num_seqs": 40}
        of_shapes = {
            "spot": {"usd_per_slice_hour": 4.0, "provisioning_s": 5.0},
            "spot-2x4": {"usd_per_slice_hour": 8.0, "provisioning_s": 5.0, "profile": large},
        }
        kept = shipped | {"classes": {"reserved": {"provisioning_s": 5.0}}}
        policy["models"] = {
            CHAT: kept | {"priority": 1},
            CODE: kept,
            EITHER: shipped | {"classes": of_shapes},
        }
        policy["quotas"] = [{"compute_class": "reserved", "max_chips": NUM_CHIPS}]
        self._file["http_options"]["port"] = self.port
        self.config_path.write_text(yaml.safe_dump(self._file))
        return self.config_path

    def _is_ready(self) -> bool:
        return "Try it:" in self.log_text()

    async def until_ready(self, timeout_s: float, **wanted: dict[str, int]) -> Any:
        """Waits until each model has so many ready slices of the classes that are named."""

        def is_so(fleet: dict[str, Any]) -> bool:
            reserved = [row for row in fleet["slices"] if row["compute_class"] == "reserved"]
            # A slice that changes hands is for a moment in the list of both: whoever gives it back
            # tells of its end after that.
            waiting = ("requested", "provisioning")
            held = {row["name"] for row in reserved if row["state"] not in waiting}
            assert 4 * len(held) <= NUM_CHIPS
            return all(
                num_ready(fleet, model, name) == count
                for model, classes in wanted.items()
                for name, count in classes.items()
            )

        return await asyncio.to_thread(self.wait_fleet, is_so, timeout_s)


def num_ready(fleet: dict[str, Any], model: str, compute_class: str) -> int:
    return sum(
        (row["model"], row["compute_class"], row["state"]) == (model, compute_class, "ready")
        for row in fleet["slices"]
    )


def plan_of(fleet: dict[str, Any], model: str) -> dict[str, Any]:
    found: dict[str, Any] = next(
        each for each in fleet["autoscaling"]["models"] if each["model"] == model
    )
    return found


def loaded(application: OneFleet, model: str) -> AbstractAsyncContextManager[list[int]]:
    """Requests to one model; see `open_loop`."""
    body = {"model": model, "prompt": "Go", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    # Who has no slice waits until the gateway's own deadline.
    return open_loop(application.base_url, body, PER_S, timeout_s=180.0)


@pytest.fixture(scope="module")
def application() -> Iterator[OneFleet]:
    with OneFleet() as running:
        yield running


async def test_who_comes_first_has_the_slices_of_a_quota_and_gives_them_back(
    application: OneFleet,
) -> None:
    async with loaded(application, CODE):
        await application.until_ready(LATER_S, code={"reserved": 2})
        async with loaded(application, CHAT) as statuses:
            fleet = await application.until_ready(LATER_S, chat={"reserved": 2})
            assert "of the 8 chips of reserved" in plan_of(fleet, CODE)["arithmetic"]
        assert 200 in statuses
        await application.until_ready(LATER_S, code={"reserved": 2}, chat={"reserved": 0})
    assert replay_log(application.decision_log).differences == ()


async def test_controller_that_is_killed_gives_nothing_of_a_quota_twice(
    application: OneFleet,
) -> None:
    """In the middle of a change of hands; what the policy after it finds is what there is."""
    async with loaded(application, CODE):
        await application.until_ready(LATER_S, code={"reserved": 2})
        async with loaded(application, CHAT) as statuses:
            await asyncio.to_thread(
                application.wait_fleet,
                lambda fleet: num_ready(fleet, CODE, "reserved") < 2,
                LATER_S,
            )
            (controller,) = application.processes(Role.CONTROLLER)
            controller.kill()
            # On the way there, too, no more than the quota is held: `until_ready` looks.
            await application.until_ready(LATER_S, chat={"reserved": 2})
        assert 200 in statuses
        await application.until_ready(LATER_S, code={"reserved": 2}, chat={"reserved": 0})
    (anew,) = application.processes(Role.CONTROLLER)
    assert anew.pid != controller.pid


async def test_model_gets_the_shape_that_its_load_is_cheapest_on(application: OneFleet) -> None:
    async with httpx.AsyncClient(base_url=application.base_url, timeout=SOON_S) as client:
        body = {"model": EITHER, "prompt": "Go", "max_tokens": 20}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    await application.until_ready(SOON_S, either={"spot": 1, "spot-2x4": 0})
    async with loaded(application, EITHER) as statuses:
        fleet = await asyncio.to_thread(
            application.wait_fleet, lambda fleet: num_ready(fleet, EITHER, "spot-2x4") > 0, LATER_S
        )
        large = [row for row in fleet["slices"] if row["compute_class"] == "spot-2x4"]
        assert {(row["topology"], row["num_chips"]) for row in large} == {("2x4", 8)}
        assert "a slice of spot-2x4 counts as 2.27" in plan_of(fleet, EITHER)["arithmetic"]
    assert set(statuses) == {200}
    assert replay_log(application.decision_log).differences == ()
