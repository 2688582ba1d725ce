"""A whole compute class is lost at once, under load; then every slice there is.

The statement that is held here, by row, stands in docs/results/disasters.md. Real Ray nodes die;
the policy runs in Serve's controller; engines are paced.
"""

import asyncio
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.disasters.lasting import (
    MODEL,
    SHAPE,
    START_TIMEOUT_S,
    args_of,
    model_on,
    on,
    report,
    resumes,
    shipped_policy,
)
from tests.disasters.load import Asked, ConstantLoad
from tests.e2e.application import RunningApplication, linked_engines, serve_config

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

# Alone a stream takes 1.5 s. One slice carries six at once at the objective, and runs sixteen.
PACE = {"ttft_ms": 50, "tpot_ms": 20, "tpot_per_seq_ms": 5, "max_num_seqs": 16}
NUM_TOKENS = 60
PER_S = 5.0
DEADLINE_S = 120.0
SOON_S, LATER_S = 90.0, 420.0
CLASSES = {
    "reserved": {"provisioning_s": 5.0},
    "spot": {"usd_per_slice_hour": 4.0, "provisioning_s": 5.0, "patience_s": 8.0},
    "on-demand": {"usd_per_slice_hour": 12.0, "provisioning_s": 5.0},
}
# The load takes five slices: four, and what the policy has beside the need.
COUNTS = {"reserved": 1, "spot": 4, "on-demand": 3}


class ScaledApplication(RunningApplication):
    """Three classes under the shipped policy."""

    def __init__(self) -> None:
        deployments = [
            {"compute_class": name, "min_replicas": 0, "max_replicas": count}
            for name, count in COUNTS.items()
        ]
        # The first one serves from the start, so that the application is ready with an engine.
        deployments[0]["min_replicas"] = 1
        slices = [
            {
                "name": name,
                "compute_class": name,
                "count": count,
                "returns_after_s": 2,
                "generation": SHAPE["generation"],
                "topology": SHAPE["topology"],
            }
            for name, count in COUNTS.items()
        ]
        super().__init__(
            args_of(model_on(*deployments, pace=PACE), request_deadline_s=DEADLINE_S),
            through="sim",
            plan={"slices": slices},
        )

    def write_config(self, args: Any) -> Path:
        config = serve_config(args, self.port)
        (application,) = config["applications"]
        application["autoscaling_policy"] = shipped_policy(CLASSES, min_slices=1)
        self.config_path.write_text(yaml.safe_dump(config))
        return self.config_path

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        super().wait_ready(timeout_s)

    def _is_ready(self) -> bool:
        # How many engines there are is the policy's business from the start.
        return "Try it:" in self.log_text()

    async def until(self, is_so: Any, timeout_s: float = LATER_S) -> dict[str, Any]:
        return await asyncio.to_thread(self.wait_fleet, is_so, timeout_s)

    async def lose(self, names: list[str]) -> float:
        """Kills these slices at once; the seconds between the first command and the last death."""
        since_s = time.monotonic()
        await asyncio.gather(*(on(self, "kill", name=name) for name in names))
        return time.monotonic() - since_s


@pytest.fixture(scope="module")
def application() -> Iterator[ScaledApplication]:
    with ScaledApplication() as running:
        yield running


def ready(fleet: dict[str, Any], compute_class: str | None = None) -> list[str]:
    return [
        row["name"]
        for row in fleet["slices"]
        if row["state"] == "ready" and compute_class in (None, row["compute_class"])
    ]


def plan(fleet: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = fleet["autoscaling"]["models"][0]
    return found


def under_way(load: ConstantLoad, at_s: float) -> list[Asked]:
    """Those that had begun to answer and had not ended then."""
    return [
        each
        for each in load.asked
        if each.answer.chunk_times_s
        and each.answer.chunk_times_s[0] < at_s < each.answer.chunk_times_s[-1]
    ]


def ttft_words(asked: list[Asked]) -> str:
    times_s = sorted(each.ttft_s for each in asked if each.ttft_s is not None)
    if not times_s:
        return "none"
    return f"{statistics.median(times_s):.2f} s (median), {times_s[-1]:.2f} s (slowest)"


async def test_loss_of_all_spot_is_bridged_and_costs_no_stream(
    application: ScaledApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    async with ConstantLoad(application.base_url, MODEL, PER_S, NUM_TOKENS) as load:
        fleet = await application.until(
            lambda fleet: len(ready(fleet, "spot")) >= 2 and len(ready(fleet, "reserved")) == 1
        )
        await load.more_answers(20, SOON_S)
        fleet = await asyncio.to_thread(application.fleet)
        lost = ready(fleet, "spot")
        resumes_before = await asyncio.to_thread(resumes, application)
        await on(application, "stock_out", compute_class="spot")
        lost_s = time.monotonic()
        took_s = await application.lose(sorted(f"spot-{at}" for at in range(COUNTS["spot"])))

        fleet = await application.until(lambda fleet: plan(fleet)["targets"]["on-demand"] > 0)
        asked_s = time.monotonic() - lost_s
        assert plan(fleet)["targets"]["spot"] > 0, "its wishes stay open"
        assert plan(fleet)["targets"]["reserved"] == 1
        fleet = await application.until(lambda fleet: bool(ready(fleet, "on-demand")))
        bridged_s = time.monotonic()
        assert ready(fleet, "spot") == []
        refusals = [each for each in plan(fleet)["refusals"] if each["compute_class"] == "spot"]
        assert refusals
        assert all("backing off" in each["reason"] for each in refusals), refusals
        await load.more_answers(40, SOON_S)

        await on(application, "stock_out", compute_class="spot", is_dry=False)
        back_s = time.monotonic()
        await application.until(lambda fleet: len(ready(fleet, "spot")) >= len(lost))
        returned_s = time.monotonic() - back_s
        await application.until(
            lambda fleet: plan(fleet)["targets"]["on-demand"] == 0 and not ready(fleet, "on-demand")
        )
        left_s = time.monotonic() - back_s
        await load.more_answers(20, SOON_S)
    num_resumed = resumes(application) - resumes_before
    moved = under_way(load, lost_s)
    refused = [each for each in load.asked if each.is_refused]
    assert load.wrong() == [], application.bad_ends()
    assert moved
    assert [each for each in moved if each.is_refused] == []
    gap_s = max(each.answer.longest_gap_s(lost_s) for each in moved)
    report(
        capsys,
        f"all spot ({len(lost)} of {len(lost) + 1} slices) lost within {took_s:.1f} s under "
        f"{PER_S:g} streams/s: {len(load.asked)} asked, {len(refused)} refused with Retry-After, "
        f"0 failed; {len(moved)} under way, longest gap {gap_s:.1f} s, "
        f"{num_resumed} resumed in all; on-demand asked after {asked_s:.1f} s, "
        f"serving after {bridged_s - lost_s:.0f} s; TTFT before "
        f"{ttft_words(load.sent_since(0, lost_s))}, until bridged "
        f"{ttft_words(load.sent_since(lost_s, bridged_s))}; spot serves again "
        f"{returned_s:.0f} s after it is there, on-demand is left after {left_s:.0f} s",
    )


async def test_loss_of_every_slice_holds_requests_until_one_is_back(
    application: ScaledApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    async with ConstantLoad(application.base_url, MODEL, PER_S, NUM_TOKENS) as load:
        await application.until(lambda fleet: len(ready(fleet)) >= 2)
        await load.more_answers(20, SOON_S)
        for compute_class in COUNTS:
            await on(application, "stock_out", compute_class=compute_class)
        every = await asyncio.to_thread(application.simulation, "describe")
        lost_s = time.monotonic()
        await application.lose([each["name"] for each in every["slices"]])
        # By links: the directory lists a dead engine until its lease is over. Long enough that some
        # who had begun, and some who had not, do wait.
        await application.until(
            lambda fleet: (
                linked_engines(fleet) == {MODEL: 0} and fleet["models"][0]["waiting"] >= 2 * PER_S
            )
        )
        for compute_class in COUNTS:
            await on(application, "stock_out", compute_class=compute_class, is_dry=False)
        await application.until(lambda fleet: linked_engines(fleet)[MODEL] > 0)
        back_s = time.monotonic()
        await load.more_answers(20, LATER_S)
    moved = under_way(load, lost_s)
    refused = [each for each in load.asked if each.is_refused]
    assert load.wrong() == [], application.bad_ends()
    assert moved
    assert [each for each in moved if each.is_refused] == []
    report(
        capsys,
        f"every slice lost for {back_s - lost_s:.0f} s: {len(load.asked)} asked, {len(refused)} "
        f"refused with Retry-After, 0 failed; {len(moved)} under way were resumed, longest gap "
        f"{max(each.answer.longest_gap_s(lost_s) for each in moved):.1f} s",
    )
