"""Reservation: one whole slice each, no more and no less, whoever dies at whichever moment.

Two spot replicas on three simulated spot slices, the first of which fails its probe.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import yaml
from ray._private import state as ray_state
from ray.util.placement_group import placement_group_table

from serving.config.slice_spec import RUN_DIR_VARIABLE
from serving.tpu.host.chip_use import LOCK_FILE
from tests.hosts.chip_holders import Held, holding

from .application import (
    Role,
    RunningApplication,
    application_args,
    linked_engines,
    paced_model,
    serve_config,
    wait_until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.long]

READY_S = 300.0
V6E_2X4 = {"generation": "v6e", "topology": "2x4", "chips_per_host": 4}
PLAN = {
    "slices": [
        {"name": "spot", "compute_class": "spot", "count": 3, "returns_after_s": 1, **V6E_2X4}
    ],
    "faulty_hosts": [{"slice": "spot-0", "worker_id": 1, "fault": "wrong_matmul"}],
}
NUM_KILLS = 6


@pytest.fixture(scope="module")
def application() -> Iterator[RunningApplication]:
    deployment = {"compute_class": "spot", "replicas": 2, "num_cpus": 0.01, "slice": V6E_2X4}
    args = application_args(paced_model(deployments=[deployment]))
    with RunningApplication(args, through="sim", plan=PLAN) as running:
        address = running.simulation("describe")["ray_address"]
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        yield running
        ray.shutdown()


def slices(application: RunningApplication) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = application.fleet()["slices"]
    return rows


def is_ready(fleet: dict[str, Any]) -> bool:
    return linked_engines(fleet) == {"paced": 2} and len(fleet["slices"]) == 2


def standing_groups() -> list[dict[int, str]]:
    """The nodes of every placement group that stands or is wanted, head reservations included."""
    table: dict[str, dict[str, Any]] = placement_group_table()
    entries = [entry for entry in table.values() if entry["state"] != "REMOVED"]
    return [dict(entry["bundles_to_node_id"]) for entry in entries]


def free_chips() -> dict[str, int]:
    """Free chips by slice name, over its live hosts."""
    available = ray_state.available_resources_per_node()
    chips: dict[str, int] = {}
    for node in ray.nodes():
        name = node["Labels"].get("ray.io/tpu-slice-name")
        if node["Alive"] and name:
            chips[name] = chips.get(name, 0) + int(available.get(node["NodeID"], {}).get("TPU", 0))
    return chips


def scale(application: RunningApplication, folder: Path, num_replicas: int) -> None:
    config = serve_config(application.args, application.port)
    override = {"name": "engine-paced-spot", "num_replicas": num_replicas}
    config["applications"][0]["deployments"] = [override]
    path = folder / f"{num_replicas}.yaml"
    path.write_text(yaml.safe_dump(config))
    done = application.serve("deploy", str(path))
    assert done.returncode == 0, done.stderr


def test_slice_that_fails_its_probe_is_named_and_another_one_taken(
    application: RunningApplication,
) -> None:
    fleet = application.wait_fleet(is_ready, READY_S)
    assert sorted(row["name"] for row in fleet["slices"]) == ["spot-1", "spot-2"]
    failed = [row for row in fleet["ended"] if row["name"] == "spot-0"]
    assert {row["cause"] for row in failed} == {"boot_failed"}
    assert "the probe failed: host 1: matmul" in failed[0]["history"][-1]["reason"]
    assert free_chips() == {"spot-0": 8, "spot-1": 0, "spot-2": 0}


def test_more_replicas_than_slices_wait_and_are_cancelled_within_five_seconds(
    application: RunningApplication, tmp_path: Path
) -> None:
    application.wait_fleet(is_ready, READY_S)
    groups_before = standing_groups()
    held = {row["replica_id"] for row in slices(application)}
    scale(application, tmp_path, 4)
    fleet = application.wait_fleet(
        lambda fleet: sum(row["state"] == "provisioning" for row in fleet["slices"]) == 2, READY_S
    )
    assert {row["replica_id"] for row in fleet["slices"] if row["name"]} == held
    reasons = [row["reason"] for row in fleet["slices"] if row["state"] == "provisioning"]
    assert all(
        "spot-0: in quarantine" in each and "spot-1: it is taken" in each for each in reasons
    )
    assert sorted(map(str, standing_groups())) == sorted(map(str, groups_before))
    scale(application, tmp_path, 2)
    # The waiting replicas' processes are what could still reserve something.
    replicas = application.processes(Role.SLICE_REPLICA)
    _, alive = psutil.wait_procs(replicas, timeout=5)
    assert len(alive) == 2
    # One may have begun to take a slice out of its quarantine; the directory finds what it left.
    wait_until(lambda: sorted(map(str, standing_groups())) == sorted(map(str, groups_before)), 60.0)
    application.wait_fleet(is_ready, READY_S)
    assert {row["replica_id"] for row in slices(application)} == held


def is_of(process: psutil.Process, slice_name: str, worker_id: int) -> bool:
    environment = process.environ()
    place = environment.get("TPU_NAME"), environment.get("TPU_WORKER_ID")
    return place == (slice_name, f"{worker_id}")


def test_engine_waits_for_chips_that_a_process_still_has(
    application: RunningApplication,
) -> None:
    application.wait_fleet(is_ready, READY_S)
    engine, agent = (
        next(each for each in application.processes(role) if is_of(each, "spot-1", worker_id))
        for role, worker_id in ((Role.ENGINE_HOST, 0), (Role.HOST_AGENT, 1))
    )
    # As that host sees it: hosts have mounts and process ids of their own.
    run_dir = Path(f"/proc/{agent.pid}/root{agent.environ()[RUN_DIR_VARIABLE]}")
    with holding(Held.LOCKED, run_dir / LOCK_FILE.name):
        engine.kill()
        reason = "waits for chips: host 1: libtpu's lock is held by a process of another container"
        application.wait_fleet(
            lambda fleet: any(reason in row["reason"] for row in fleet["slices"]), READY_S
        )
        assert linked_engines(application.fleet()) == {"paced": 1}
    application.wait_fleet(is_ready, READY_S)


def test_nothing_leaks_whoever_is_killed(application: RunningApplication) -> None:
    """Replicas, engine hosts, agents and the directory die, some while a slice is being taken."""
    chance = random.Random(3)
    application.wait_fleet(is_ready, READY_S)
    num_groups = len(standing_groups())
    roles = [Role.SLICE_REPLICA, Role.ENGINE_HOST, Role.HOST_AGENT, Role.DIRECTORY]
    for number in range(NUM_KILLS):
        role = roles[number % len(roles)]
        victims = application.processes(role)
        if not victims:
            continue  # the one before has just taken the last of them with it
        chance.choice(victims).kill()
        # Not until all is well again: the next one dies in the middle of the recovery.
        time.sleep(chance.uniform(0.0, 6.0))
    application.wait_fleet(is_ready, READY_S)
    names = sorted(row["name"] for row in slices(application))
    assert len(set(names)) == 2
    wait_until(lambda: len(standing_groups()) == num_groups, 60.0)
    held = {frozenset(host["node_id"] for host in row["hosts"]) for row in slices(application)}
    assert {frozenset(group.values()) for group in standing_groups()} == held
    free = free_chips()
    assert [free[name] for name in names] == [0, 0]
    assert sum(free.values()) == 8
