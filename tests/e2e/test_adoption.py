"""Engines outlive the replicas that command them: a successor takes over what runs.

Simulated slices and paced engines: processes of their own, whose ids tell whether one was reloaded.
"""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray._raylet import GcsClient  # type: ignore[attr-defined] # Cython has no stubs

from serving.domain.supply.keys import SupplyKeys
from serving.domain.tokens.paced import LETTERS, paced_tokens
from tests.supply_builders import plan_that_drains

from .application import (
    Role,
    RunningApplication,
    application_args,
    linked_engines,
    paced_model,
    wait_until,
)
from .streams import Answer, Request, begin_all, token_stream

# The gate has a replica killed beside vLLM's engines (`test_kills.py`), and owners and successors
# without Ray (`tests/ownership`).
pytestmark = [pytest.mark.e2e, pytest.mark.long]

MODEL = "paced"
READY_S = 300.0
NUM_STREAMS = 64
NUM_TOKENS = 120
V6E_2X2 = {"generation": "v6e", "topology": "2x2"}
PLAN = {"slices": [{"name": "spot", "compute_class": "spot", "count": 3, **V6E_2X2}]}


@pytest.fixture(scope="module")
def application() -> Iterator[RunningApplication]:
    model = paced_model(
        pace={"ttft_ms": 50.0, "tpot_ms": 100.0, "max_num_seqs": 512},
        deployments=[{"compute_class": "spot", "replicas": 2, "num_cpus": 0.01, "slice": V6E_2X2}],
    )
    with RunningApplication(application_args(model), through="sim", plan=PLAN) as running:
        yield running


def engines(application: RunningApplication) -> set[int]:
    return {each.pid for each in application.processes(Role.ENGINE_HOST)}


def replicas(application: RunningApplication) -> set[int]:
    return {each.pid for each in application.processes(Role.SLICE_REPLICA)}


def rows(fleet: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in fleet["slices"] if row["state"] == "ready"}


def streams() -> list[Request]:
    prompts = (list(f"Stream {number}".encode()) for number in range(NUM_STREAMS))
    return [token_stream(MODEL, prompt, NUM_TOKENS) for prompt in prompts]


def undisturbed(request: Request) -> list[int]:
    prompt: list[int] = request.body["prompt"]
    found: list[int] = paced_tokens(prompt, NUM_TOKENS, LETTERS)
    return found


@pytest.fixture(scope="module")
def head(application: RunningApplication) -> str:
    """The address of Ray's head."""
    return str(application.simulation("describe")["ray_address"])


def order(head: str, *arguments: str) -> str:
    """What `slicewise order` says at that head."""
    command = [Path(sys.executable).with_name("slicewise"), "order", *arguments]
    done = subprocess.run(
        [*command, "--ray-address", head], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def supply_of(fleet: dict[str, Any], name: str) -> dict[str, Any]:
    (row,) = [row for row in fleet["supply"] if row["name"] == name]
    return dict(row)


async def answered(
    application: RunningApplication, disturb: Callable[[], None]
) -> tuple[list[Answer], list[Request]]:
    """All streams, with `disturb` once each has begun."""
    requests = streams()
    answering = await begin_all(application.base_url, requests, READY_S)
    await asyncio.to_thread(disturb)
    return await answering, requests


async def test_condemned_slice_is_left_in_order_and_its_replica_serves_on_another(
    application: RunningApplication, head: str
) -> None:
    was = rows(application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 2}, READY_S))
    name, stays = sorted(was)

    def condemn() -> None:
        order(head, "condemn", name, "--reason", "it runs hot")

    answers, requests = await answered(application, condemn)
    assert [answer.choices[0].token_ids for answer in answers] == [
        undisturbed(each) for each in requests
    ]
    fleet = application.wait_fleet(
        lambda fleet: linked_engines(fleet) == {MODEL: 2} and name not in rows(fleet), READY_S
    )
    assert rows(fleet)[stays]["engine_id"] == was[stays]["engine_id"]
    assert supply_of(fleet, name)["state"] == "condemned"
    assert "condemn ordered by" in supply_of(fleet, name)["reason"]
    assert "it runs hot" in order(head, "list")
    order(head, "release", name)
    application.wait_fleet(lambda fleet: supply_of(fleet, name)["state"] == "free", READY_S)


async def test_killed_replica_is_succeeded_by_one_that_takes_its_engine_over(
    application: RunningApplication,
) -> None:
    application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 2}, READY_S)
    before, had, was = engines(application), replicas(application), rows(application.fleet())

    def is_adopted(fleet: dict[str, Any]) -> bool:
        now = rows(fleet)
        return now.keys() == was.keys() and all(
            now[name]["replica_id"] != row["replica_id"] for name, row in was.items()
        )

    def kill() -> None:
        for process in application.processes(Role.SLICE_REPLICA):
            process.send_signal(signal.SIGKILL)
        at_s = time.monotonic()
        application.wait_fleet(is_adopted, READY_S)
        sys.stdout.write(f"\n    replicas killed: adopted after {time.monotonic() - at_s:.1f} s\n")

    answers, requests = await answered(application, kill)
    assert engines(application) == before
    assert not replicas(application) & had
    assert [answer.choices[0].token_ids for answer in answers] == [
        undisturbed(each) for each in requests
    ]
    now = rows(application.fleet())
    assert {row["engine_id"] for row in now.values()} == {row["engine_id"] for row in was.values()}


@pytest.mark.long
def test_engines_go_on_while_serve_is_shut_down_and_deployed_again(
    application: RunningApplication,
) -> None:
    application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 2}, READY_S)
    before, had, was = engines(application), replicas(application), rows(application.fleet())
    assert application.serve("shutdown", "-y").returncode == 0
    deadline_s = time.monotonic() + READY_S
    while replicas(application):
        assert time.monotonic() < deadline_s, "replicas are still there"
        time.sleep(0.2)
    assert engines(application) == before
    deployed = application.serve("deploy", str(application.write_config(application.args)))
    assert deployed.returncode == 0, deployed.stderr
    at_s = time.monotonic()
    application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 2}, READY_S)
    sys.stdout.write(f"\n    deployed again: ready after {time.monotonic() - at_s:.1f} s\n")
    assert engines(application) == before
    assert not replicas(application) & had
    now = rows(application.wait_fleet(lambda fleet: rows(fleet).keys() == was.keys(), READY_S))
    assert {row["engine_id"] for row in now.values()} == {row["engine_id"] for row in was.values()}


def test_replica_that_is_wanted_no_more_gives_its_slice_back(
    application: RunningApplication,
) -> None:
    was = rows(application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 2}, READY_S))
    (model,) = application.args["models"]
    (deployment,) = model["deployments"]
    fewer = model | {"deployments": [deployment | {"replicas": 1}]}
    args = dict(application.args) | {"models": [fewer]}
    assert application.serve("deploy", str(application.write_config(args))).returncode == 0
    application.wait_fleet(
        lambda fleet: "released" in [row["cause"] for row in fleet["ended"]], READY_S
    )
    (left,) = rows(application.wait_fleet(lambda fleet: len(rows(fleet)) == 1, READY_S))
    assert left in was
    application.wait_fleet(
        lambda fleet: sorted(row["state"] for row in fleet["supply"]) == ["free", "free", "held"],
        READY_S,
    )
    # Ray gives the bundles back as it kills what runs in them: the process may end a moment later.
    deadline_s = time.monotonic() + READY_S
    while len(engines(application)) != 1:
        assert time.monotonic() < deadline_s, "its engine still runs"
        time.sleep(0.2)


def plan_drains(head: str, *replica_ids: str) -> None:
    """Stores a plan that gives up the slices of these replicas first, as the policy does."""
    report = plan_that_drains(MODEL, replica_ids, time.time())
    GcsClient(address=head).internal_kv_put(SupplyKeys("slicewise").plan, report, overwrite=True)


def deploy(application: RunningApplication, num_replicas: int) -> dict[str, dict[str, Any]]:
    """So many replicas; their slices by name, once they serve."""
    (model,) = application.args["models"]
    (deployment,) = model["deployments"]
    changed = model | {"deployments": [deployment | {"replicas": num_replicas}]}
    args = dict(application.args) | {"models": [changed]}
    assert application.serve("deploy", str(application.write_config(args))).returncode == 0
    return rows(
        application.wait_fleet(
            lambda fleet: (
                len(rows(fleet)) == num_replicas and linked_engines(fleet) == {MODEL: num_replicas}
            ),
            READY_S,
        )
    )


async def test_slice_that_the_plan_gives_up_first_goes_though_serve_ends_another_replica(
    application: RunningApplication, head: str
) -> None:
    (old,) = await asyncio.to_thread(deploy, application, 1)
    was = await asyncio.to_thread(deploy, application, 2)
    (new,) = was.keys() - {old}
    before, had = engines(application), replicas(application)
    plan_drains(head, was[old]["replica_id"], was[new]["replica_id"])

    def fewer() -> None:
        assert deploy(application, 1).keys() == {new}

    answers, requests = await answered(application, fewer)
    assert [answer.choices[0].token_ids for answer in answers] == [
        undisturbed(each) for each in requests
    ]
    now = rows(application.fleet())[new]
    # Serve ended the newer replica. The older one has its engine, and gave its own slice back.
    assert now["engine_id"] == was[new]["engine_id"]
    assert now["replica_id"].startswith(was[old]["replica_id"].partition("~")[0])
    fleet = application.wait_fleet(
        lambda fleet: sorted(row["state"] for row in fleet["supply"]) == ["free", "free", "held"],
        READY_S,
    )
    causes = {row["replica_id"]: row["cause"] for row in fleet["ended"]}
    assert causes[was[old]["replica_id"]] == "released"
    assert causes[was[new]["replica_id"]] == "adopted"
    await asyncio.to_thread(wait_until, lambda: len(replicas(application)) == 1, READY_S)
    await asyncio.to_thread(wait_until, lambda: len(engines(application)) == 1, READY_S)
    assert engines(application) < before
    assert replicas(application) < had
