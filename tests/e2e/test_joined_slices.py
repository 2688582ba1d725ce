"""Replicas that own two joined slices each, on a simulated TPU cluster: together or not at all.

Two spot replicas want two of three spot slices of two hosts each, and one reserved replica has two
slices of one host beside them. Ray's nodes, placement groups and processes are real; engines are
paced, so nothing here shows that libtpu joins anything.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serving.tpu.multislice import own_environment

from .answers import ANSWER_TIMEOUT_S
from .application import (
    Role,
    RunningApplication,
    application_args,
    linked_engines,
    paced_model,
    serve_config,
)

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]

READY_S = 400.0
V6E_2X4 = {"generation": "v6e", "topology": "2x4", "chips_per_host": 4}
V6E_2X2 = {"generation": "v6e", "topology": "2x2"}
TWO = {"num_slices": 2}
PLAN = {
    "slices": [
        {"name": "spot", "compute_class": "spot", "count": 3, "returns_after_s": 1, **V6E_2X4},
        {"name": "kept", "compute_class": "reserved", "count": 2, "returns_after_s": 1, **V6E_2X2},
    ]
}
DEPLOYMENTS = [
    {"compute_class": "spot", "replicas": 1, "num_cpus": 0.01, "slice": V6E_2X4 | TWO},
    {"compute_class": "reserved", "replicas": 1, "num_cpus": 0.01, "slice": V6E_2X2 | TWO},
]


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApplication]:
    args = application_args(paced_model(deployments=DEPLOYMENTS))
    running = RunningApplication(args, through="sim", plan=PLAN)
    try:
        running.launch()
        # Nine Ray nodes on what may be a busy machine.
        running.wait_ready(READY_S)
        address = running.simulation("describe")["ray_address"]
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        add_replica(running, tmp_path_factory.mktemp("more"))
        yield running
    finally:
        ray.shutdown()
        running.stop()


def add_replica(running: RunningApplication, folder: Path) -> None:
    """A second spot replica. It waits for ever: there are no two slices for it."""
    config = serve_config(running.args, running.port)
    override = {"name": "engine-paced-spot", "num_replicas": 2}
    config["applications"][0]["deployments"] = [override]
    path = folder / "two.yaml"
    path.write_text(yaml.safe_dump(config))
    done = running.serve("deploy", str(path))
    assert done.returncode == 0, done.stderr


def rows(fleet: dict[str, Any], compute_class: str, state: str) -> list[dict[str, Any]]:
    found = [
        row
        for row in fleet["slices"]
        if row["compute_class"] == compute_class and row["state"] == state
    ]
    return sorted(found, key=lambda row: row["part"])


def is_contended(fleet: dict[str, Any]) -> bool:
    """One spot replica serves, the other one waits, and the reserved one serves."""
    return (
        linked_engines(fleet) == {"paced": 2}
        and len(rows(fleet, "spot", "ready")) == 2
        and len(rows(fleet, "spot", "provisioning")) == 2
        and len(rows(fleet, "reserved", "ready")) == 2
    )


def standing_groups() -> dict[str, list[str]]:
    """The node of each bundle of every placement group that stands or is wanted, in order."""
    table: dict[str, dict[str, Any]] = placement_group_table()
    return {
        group: [nodes for _, nodes in sorted(entry["bundles_to_node_id"].items())]
        for group, entry in table.items()
        if entry["state"] != "REMOVED"
    }


def places() -> dict[str, tuple[str, int]]:
    """Slice and worker id of each live simulated host, by node id."""
    return {
        node["NodeID"]: (
            node["Labels"]["ray.io/tpu-slice-name"],
            int(node["Labels"]["ray.io/tpu-worker-id"]),
        )
        for node in ray.nodes()
        if node["Alive"] and node["Labels"].get("ray.io/tpu-slice-name")
    }


def engine_environments(application: RunningApplication) -> dict[str, dict[str, str]]:
    """What the engine hosts were started with, by the slices that they name."""
    where, found = places(), {}
    for process in application.processes(Role.ENGINE_HOST):
        environment = process.environ()
        ids = json.loads(environment["SLICEWISE_SLICE_IDS"])
        names = "+".join(sorted({where[node_id][0] for node_id in ids}))
        found[names] = environment
    return found


def worker_of(told: dict[str, str]) -> Any:
    """What runs in a bundle, as a worker does: its node, and what it is told of its slice.

    Made in here, because a worker finds no module of these tests.
    """

    def seen() -> tuple[str, dict[str, str]]:
        assert all(os.environ[name] == value for name, value in told.items())
        node_id = ray.get_runtime_context().get_node_id()
        return node_id, own_environment(os.environ, node_id)

    return ray.remote(seen)


def test_two_replicas_that_want_two_of_three_slices_do_not_share_them_out(
    application: RunningApplication,
) -> None:
    fleet = application.wait_fleet(is_contended, READY_S)
    where = places()
    serving = [row["name"] for row in rows(fleet, "spot", "ready")]
    (free,) = {"spot-0", "spot-1", "spot-2"} - set(serving)
    waiting = rows(fleet, "spot", "provisioning")
    assert [row["name"] for row in waiting] == [None, None]
    assert all(f"1 of 2 slices are free: {free}" in row["reason"] for row in waiting)
    # Nothing is held in part: two groups, and none on the free slice.
    held = sorted([where[node] for node in nodes] for nodes in standing_groups().values())
    assert held == [
        [("kept-0", 0), ("kept-1", 0)],
        [(serving[0], 0), (serving[0], 1), (serving[1], 0), (serving[1], 1)],
    ]


def test_each_worker_is_on_its_host_and_knows_its_slice(application: RunningApplication) -> None:
    fleet = application.wait_fleet(is_contended, READY_S)
    where = places()
    environments = engine_environments(application)
    names = [row["name"] for row in rows(fleet, "spot", "ready")]
    assert set(environments) == {"+".join(names), "kept-0+kept-1"}
    for group, nodes in standing_groups().items():
        environment = environments["+".join(sorted({where[node][0] for node in nodes}))]
        told = {
            name: value
            for name, value in environment.items()
            if name.startswith(("MEGASCALE_", "SLICEWISE_SLICE"))
        }
        assert told["MEGASCALE_NUM_SLICES"] == "2"
        assert "MEGASCALE_SLICE_ID" not in told
        pinned = PlacementGroup(PlacementGroupID.from_hex(group))
        seen = ray.get(
            [
                worker_of(told)
                .options(
                    num_cpus=0,
                    resources={"TPU": 4},
                    runtime_env={"env_vars": told},
                    scheduling_strategy=PlacementGroupSchedulingStrategy(pinned, bundle),
                )
                .remote()
                for bundle in range(len(nodes))
            ],
            timeout=ANSWER_TIMEOUT_S,
        )
        slices = sorted({where[node][0] for node in nodes})
        hosts_each = len(nodes) // len(slices)
        assert [(where[node], env["MEGASCALE_SLICE_ID"]) for node, env in seen] == [
            ((name, worker_id), str(part))
            for part, name in enumerate(slices)
            for worker_id in range(hosts_each)
        ]


def test_lost_slice_takes_its_engine_and_gives_the_whole_one_back(
    application: RunningApplication,
) -> None:
    fleet = application.wait_fleet(is_contended, READY_S)
    whole, lost = (row["name"] for row in rows(fleet, "spot", "ready"))
    life = rows(fleet, "spot", "ready")[0]["replica_id"]
    kept = [row["replica_id"] for row in rows(fleet, "reserved", "ready")]
    application.simulation("kill", name=lost, worker_id=1)

    def has_ended(fleet: dict[str, Any]) -> bool:
        return {f"{life}", f"{life}+1"} <= {row["replica_id"] for row in fleet["ended"]}

    fleet = application.wait_fleet(has_ended, READY_S)
    ends = {row["name"]: row for row in fleet["ended"] if row["replica_id"].startswith(life)}
    assert ends[lost]["cause"] == "preempted"
    assert ends[whole]["cause"] == "released"
    assert ends[whole]["history"][-1]["reason"].startswith(f"it was joined with {lost}: host 1:")
    # The whole one serves again at once, with the one that was free; no quarantine is on it.
    fleet = application.wait_fleet(is_contended, READY_S)
    assert whole in [row["name"] for row in rows(fleet, "spot", "ready")]
    assert [row["replica_id"] for row in rows(fleet, "reserved", "ready")] == kept


def test_chips_of_all_slices_are_counted(application: RunningApplication) -> None:
    fleet = application.wait_fleet(is_contended, READY_S)
    held = [row for row in fleet["slices"] if row["name"]]
    assert sorted(row["num_chips"] for row in held) == [4, 4, 8, 8]
    assert len(fleet["models"][0]["engines"]) == 3
