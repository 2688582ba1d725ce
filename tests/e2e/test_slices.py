"""Whole slices on a simulated TPU cluster: taken, tried out, drained, lost and replaced.

Real Ray nodes carry the chips and labels, a real metadata server announces what a cloud announces,
and hosts die by SIGKILL. Engines are paced.
"""

import asyncio
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray._raylet import GcsClient
from ray.util.placement_group import placement_group_table

from autoscaling.provisioning.errors import RecordsUnavailableError
from autoscaling.provisioning.sidecar.directory import DirectoryRoad
from serving.domain.tokens.paced import LETTERS, paced_tokens

from .answers import ANSWER_TIMEOUT_S
from .application import (
    RunningApplication,
    application_args,
    linked_engines,
    paced_model,
    wait_until,
)
from .streams import Answer, Request, begin_all

pytestmark = [pytest.mark.e2e]

MODEL = "paced"
READY_S = 300.0
NOTICE_S = 15.0
NUM_STREAMS = 256
V6E_2X4 = {"generation": "v6e", "topology": "2x4", "chips_per_host": 4}
PLAN = {
    "slices": [
        {"name": "spot", "compute_class": "spot", "count": 2, "returns_after_s": 1, **V6E_2X4},
        {"name": "kept", "compute_class": "reserved", "count": 1, "returns_after_s": 1, **V6E_2X4},
    ]
}
DEPLOYMENTS = [
    {"compute_class": "spot", "replicas": 2, "num_cpus": 0.01, "slice": V6E_2X4},
    {"compute_class": "reserved", "replicas": 1, "num_cpus": 0.01, "slice": V6E_2X4},
]


@pytest.fixture(scope="module")
def application() -> Iterator[RunningApplication]:
    model = paced_model(
        pace={"ttft_ms": 50.0, "tpot_ms": 100.0, "max_num_seqs": 512}, deployments=DEPLOYMENTS
    )
    args = application_args(model, gateway={"request_deadline_s": 120.0})
    with RunningApplication(args, through="sim", plan=PLAN) as running:
        yield running


@pytest.fixture(autouse=True)
def whole_fleet(application: RunningApplication) -> None:
    """Every test begins with three ready slices."""
    application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 3}, READY_S)
    application.wait_idle()


@pytest.fixture(scope="module")
def cluster(application: RunningApplication) -> Iterator[None]:
    """This process as a driver of the simulated cluster, to see what Ray sees."""
    address = application.simulation("describe")["ray_address"]
    # Handles of Serve are looked up in its namespace.
    ray.init(address=address, namespace="serve", log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def slices(application: RunningApplication) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = application.fleet()["slices"]
    return rows


def groups() -> dict[str, dict[int, str]]:
    """The node of each bundle of every placement group that stands or is wanted."""
    table: dict[str, dict[str, Any]] = placement_group_table()
    return {
        group: dict(entry["bundles_to_node_id"])
        for group, entry in table.items()
        if entry["state"] != "REMOVED"
    }


def lengths() -> list[int]:
    """Output tokens of each stream: 4 to 30 s at the pace of this file.

    Half of them last longer than the notice, though a busy machine takes seconds to begin them all:
    what ends in time is not moved.
    """
    return [40 + 260 * number // NUM_STREAMS for number in range(NUM_STREAMS)]


def prompt_of(number: int) -> list[int]:
    return list(f"Stream {number}".encode())


def streams() -> list[Request]:
    return [
        Request(
            "/v1/completions",
            {
                "model": MODEL,
                "prompt": prompt_of(number),
                "max_tokens": length,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        for number, length in enumerate(lengths())
    ]


async def disturbed(
    application: RunningApplication, command: str, **arguments: Any
) -> tuple[list[Answer], float]:
    """All streams, and a command to the cluster once all have begun; when that was."""
    task = await begin_all(application.base_url, streams(), READY_S)
    at_s = time.time()
    await asyncio.to_thread(application.simulation, command, **arguments)
    return await task, at_s


def wait_left(application: RunningApplication, slice_name: str) -> float:
    """When the gateway knew that it must send this slice nothing more (wall clock)."""
    application.wait_fleet(
        lambda fleet: (
            not any(
                row["name"] == slice_name and row["state"] == "ready" for row in fleet["slices"]
            )
        ),
        READY_S,
    )
    return time.time()


def wait_successor(application: RunningApplication, replica_id: str) -> dict[str, Any]:
    """The life that a replica began after this one."""
    tag, _, number = replica_id.partition("~")
    wanted = f"{tag}~{int(number or 1) + 1}"
    fleet = application.wait_fleet(
        lambda fleet: any(row["replica_id"] == wanted for row in fleet["slices"]), READY_S
    )
    return next(row for row in fleet["slices"] if row["replica_id"] == wanted)


def num_resumes(application: RunningApplication, compute_class: str, cause: str) -> int:
    """How many sequences have left engines of this class for this reason, says the gateway."""
    page = httpx.get(f"{application.base_url}/metrics", timeout=ANSWER_TIMEOUT_S, verify=False)
    labels = {"compute_class": compute_class, "cause": cause}
    return sum(
        int(sample.value)
        for family in text_string_to_metric_families(page.raise_for_status().text)
        for sample in family.samples
        if sample.name == "slicewise_resumes_total" and labels.items() <= sample.labels.items()
    )


def check_answers(answers: list[Answer]) -> None:
    """Every stream has every token of its answer, which is known beforehand, and no other one."""
    assert [answer.error for answer in answers if answer.error] == []
    assert [answer.num_tokens for answer in answers] == lengths()
    assert all(answer.is_done for answer in answers)
    wrong = [
        number
        for number, (answer, length) in enumerate(zip(answers, lengths(), strict=True))
        if answer.choices[0].token_ids != paced_tokens(prompt_of(number), length, LETTERS)
        or answer.choices[0].finish_reason != "length"
    ]
    assert wrong == []


def report(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n    {line}\n")


def ended(application: RunningApplication, slice_name: str, since_s: float) -> dict[str, Any]:
    """The life that ended on this slice after a moment (wall clock)."""
    fleet = application.wait_fleet(
        lambda fleet: any(
            row["name"] == slice_name and row["history"][-1]["at_s"] > since_s
            for row in fleet["ended"]
        ),
        READY_S,
    )
    return next(
        row
        for row in fleet["ended"]
        if row["name"] == slice_name and row["history"][-1]["at_s"] > since_s
    )


def entered_at_s(row: dict[str, Any], state: str) -> float:
    at_s = [transition["at_s"] for transition in row["history"] if transition["state"] == state]
    assert at_s, f"never {state}: {row['history']}"
    return float(at_s[0])


def test_each_replica_owns_one_whole_slice_bundle_by_host(
    application: RunningApplication, cluster: None
) -> None:
    rows = slices(application)
    assert sorted((row["name"], row["compute_class"], row["state"]) for row in rows) == [
        ("kept-0", "reserved", "ready"),
        ("spot-0", "spot", "ready"),
        ("spot-1", "spot", "ready"),
    ]
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    by_bundle = list(groups().values())
    assert len(by_bundle) == 3
    for row in rows:
        hosts = {host["worker_id"]: host["node_id"] for host in row["hosts"]}
        assert sorted(hosts) == [0, 1]
        assert hosts in by_bundle
        labels = [nodes[node_id]["Labels"] for node_id in hosts.values()]
        assert {each["ray.io/tpu-slice-name"] for each in labels} == {row["name"]}
        assert [each["ray.io/tpu-worker-id"] for each in labels] == ["0", "1"]


async def test_provisioner_reads_this_directory_and_knows_one_that_is_not_there(
    cluster: None,
) -> None:
    gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
    report = await DirectoryRoad(gcs, "slicewise").read_supply()
    assert {record.name: str(record.state) for record in report.slices} == dict.fromkeys(
        ("kept-0", "spot-0", "spot-1"), "held"
    )
    assert {record.compute_class for record in report.slices} == {"reserved", "spot"}
    assert all(record.holder is not None for record in report.slices)
    assert report.waiting == ()
    # Not the same as a directory without records.
    with pytest.raises(RecordsUnavailableError, match="no directory of another has reported"):
        await DirectoryRoad(gcs, "another").read_supply()


def test_states_of_every_slice_sum_to_its_lifetime(application: RunningApplication) -> None:
    rows = slices(application)
    assert len(rows) == 3
    for row in rows:
        history = row["history"]
        assert [transition["state"] for transition in history][-4:] == [
            "reserved",
            "probing",
            "loading",
            "ready",
        ]
        lifetime_s = history[-1]["at_s"] + row["since_s"] - history[0]["at_s"]
        assert sum(row["seconds_by_state"].values()) == pytest.approx(lifetime_s, abs=0.5)


def test_preempted_host_drains_its_whole_slice_in_time(
    application: RunningApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    num_moved = -num_resumes(application, "spot", "draining")
    with ThreadPoolExecutor(1) as watch:
        left = watch.submit(wait_left, application, "spot-0")
        answers, at_s = asyncio.run(
            disturbed(application, "preempt", name="spot-0", notice_s=NOTICE_S, worker_id=1)
        )
    check_answers(answers)
    num_moved += num_resumes(application, "spot", "draining")
    assert num_moved > 0, "nothing was on the slice: its end has shown nothing"
    row = ended(application, "spot-0", at_s)
    assert row["cause"] == "preempted"
    gone_s = entered_at_s(row, "gone")
    drained_s = gone_s - at_s
    requested_s = wait_successor(application, row["replica_id"])["history"][0]["at_s"]
    assert requested_s < gone_s, "the next slice was asked for only after this one's end"
    assert drained_s < NOTICE_S, "the slice was not released before the deadline"
    report(
        capsys,
        f"preemption of a host under {NUM_STREAMS} streams: draining after "
        f"{entered_at_s(row, 'draining') - at_s:.2f} s, at the gateway after "
        f"{left.result() - at_s:.2f} s, slice released after {drained_s:.1f} s of "
        f"{NOTICE_S:.0f} s; {num_moved} moved, 0 failed, 0 tokens lost or repeated",
    )


def test_host_that_dies_without_notice_costs_no_token(
    application: RunningApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {cause: num_resumes(application, "spot", cause) for cause in ("lost", "draining")}
    answers, at_s = asyncio.run(disturbed(application, "kill", name="spot-1", worker_id=0))
    check_answers(answers)
    # The slice's other host may be heard of first: then the engine is left as one that drains.
    moved = {cause: num_resumes(application, "spot", cause) - num for cause, num in before.items()}
    num_moved = sum(moved.values())
    assert num_moved > 0, "nothing was on the slice: its end has shown nothing"
    row = ended(application, "spot-1", at_s)
    assert row["cause"] == "preempted"
    longest_s = max(answer.longest_gap_s() for answer in answers)
    report(
        capsys,
        f"death of host 0 under {NUM_STREAMS} streams: longest stall {longest_s * 1000:.0f} ms "
        f"at a pace of 100 ms; slice given up after {entered_at_s(row, 'gone') - at_s:.2f} s; "
        f"{num_moved} moved {moved}, 0 failed, 0 tokens lost or repeated",
    )


@pytest.mark.long
def test_stock_out_leaves_the_application_healthy(
    application: RunningApplication, cluster: None
) -> None:
    application.simulation("stock_out", compute_class="spot")
    try:
        application.simulation("kill", name="spot-0")
        waiting = application.wait_fleet(
            lambda fleet: any(row["state"] == "provisioning" for row in fleet["slices"]), READY_S
        )
        row = next(row for row in waiting["slices"] if row["state"] == "provisioning")
        assert (row["name"], row["compute_class"]) == (None, "spot")
        assert row["reason"]
        # The next replica may be on its way before the lost slice is given back.
        wait_until(lambda: len(groups()) == 2, READY_S)
        answer = httpx.post(
            f"{application.base_url}/v1/completions",
            json={"model": MODEL, "prompt": "Still there?", "max_tokens": 4},
            timeout=ANSWER_TIMEOUT_S,
            verify=False,
        )
        assert answer.status_code == 200
        assert httpx.get(f"{application.base_url}/health", verify=False).status_code == 200
        status = application.serve("status").stdout
        assert "status: RUNNING" in status
        assert "UNHEALTHY" not in status
    finally:
        application.simulation("stock_out", compute_class="spot", is_dry=False)
    application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 3}, READY_S)


@pytest.mark.long
@pytest.mark.parametrize("command", ["drain", "maintain"])
def test_slice_is_left_before_an_announced_end(
    application: RunningApplication, command: str
) -> None:
    at_s = time.time()
    application.simulation(command, name="spot-1", notice_s=8.0, worker_id=1)
    row = ended(application, "spot-1", at_s)
    assert row["cause"] == "preempted"
    assert entered_at_s(row, "draining") < entered_at_s(row, "gone") < at_s + 8.0
    assert "host 1" in row["reason"]


@pytest.mark.long
def test_slice_whose_run_is_over_expires_and_is_replaced() -> None:
    shape = {"generation": "v6e", "topology": "1x1"}
    kind = {"name": "flex", "compute_class": "flex-start", "returns_after_s": 1, **shape}
    # Longer than a start takes on a busy machine, and no longer than a test may.
    run_s = 180
    plan = {"slices": [kind | {"max_run_duration_s": run_s}]}
    flex_start = {
        "name": "flex-start",
        "market": "flex-start",
        "max_run_duration_s": run_s,
        "drain_notice_s": 10,
    }
    deployment = {"compute_class": "flex-start", "num_cpus": 0.01, "slice": shape}
    args = application_args(paced_model(deployments=[deployment]), compute_classes=[flex_start])
    with RunningApplication(args, through="sim", plan=plan) as running:
        since_s = running.fleet()["slices"][0]["history"][0]["at_s"]
        # Counted from the start of the host, which was before its replica had it.
        (supply,) = running.fleet()["supply"]
        assert 0 < supply["run_ends_in_s"] < since_s + run_s - time.time()
        fleet = running.wait_fleet(lambda fleet: bool(fleet["ended"]), run_s + 30.0)
        row = fleet["ended"][0]
        assert (row["name"], row["cause"]) == ("flex-0", "expired")
        assert f"its run of {run_s} s is over" in row["reason"]
        assert entered_at_s(row, "gone") > since_s
        running.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 1}, READY_S)
