"""The end of a host is heard on the host itself: by the hook of its pod, without Ray and its head.

Simulated slices and paced engines. The hook is the rendered command, run as the kubelet would run
it; nothing else announces the end.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from serving.domain.tokens.paced import LETTERS, paced_tokens
from serving.domain.topology import slice_shape
from tests.deployments.manifests.examples import in_memory, one, raw_values

from .application import Role, RunningApplication, application_args, linked_engines, paced_model
from .streams import Request, begin_all

pytestmark = [pytest.mark.e2e, pytest.mark.long]

MODEL = "paced"
READY_S = 300.0
GRACE_S = 25
HOST_KINDS = ("--net", "--pid", "--mount", "--uts", "--ipc")
NUM_STREAMS = 64
V6E_2X2 = {"generation": "v6e", "topology": "2x2"}
PLAN = {
    "slices": [
        {
            "name": "spot",
            "compute_class": "spot",
            "count": 2,
            "returns_after_s": 1,
            **V6E_2X2,
        }
    ]
}


@pytest.fixture(scope="module")
def application() -> Iterator[RunningApplication]:
    model = paced_model(
        pace={"ttft_ms": 50.0, "tpot_ms": 100.0, "max_num_seqs": 512},
        deployments=[{"compute_class": "spot", "replicas": 2, "num_cpus": 0.01, "slice": V6E_2X2}],
    )
    with RunningApplication(application_args(model), through="sim", plan=PLAN) as running:
        yield running


def rows(fleet: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in fleet["slices"] if row["state"] == "ready"}


def agent_of(application: RunningApplication, slice_name: str) -> psutil.Process:
    """The agent that listens on a slice's host.

    Raises:
        ValueError: there is none, or it does not listen yet.
    """
    agents = application.processes(Role.HOST_AGENT)
    (agent,) = [each for each in agents if is_listening(each, slice_name)]
    return agent


def is_listening(agent: psutil.Process, slice_name: str) -> bool:
    try:
        environment = agent.environ()
        status = Path(f"/proc/{agent.pid}/status").read_text()
    except (psutil.Error, OSError):
        return False
    # Its number where it runs, as it has named its socket there.
    (number,) = [line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:")]
    run_dir = environment["SLICEWISE_RUN_DIR"]
    socket = Path(f"/proc/{agent.pid}/root{run_dir}/agents/{number}.sock")
    return environment["TPU_NAME"] == slice_name and socket.exists()


async def start_hook(agent: psutil.Process, within_s: int) -> asyncio.subprocess.Process:
    """Runs the rendered hook on the agent's host, as the kubelet runs it in the container."""
    enter = ["nsenter", "--target", f"{agent.pid}", *HOST_KINDS, "--"]
    # The image's Python is the first one on its path.
    hook = [sys.executable if word == "python" else word for word in rendered_hook()]
    run_dir = agent.environ()["SLICEWISE_RUN_DIR"]
    environment = {"SLICEWISE_RUN_DIR": run_dir, "SLICEWISE_END_WITHIN_S": f"{within_s}"}
    path = os.environ["PATH"]
    return await asyncio.create_subprocess_exec(*enter, *hook, env=environment | {"PATH": path})


def rendered_hook() -> list[str]:
    """The preStop command of a host's pod."""
    folder = in_memory(raw_values((slice_shape("v6e", "2x2"), "spot")))
    groups = one(folder, "RayService").body["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (group,) = [each for each in groups if each["groupName"] == "v6e-2x2-spot"]
    (container,) = group["template"]["spec"]["containers"]
    command: list[str] = container["lifecycle"]["preStop"]["exec"]["command"]
    return command


def length_of(number: int) -> int:
    """Half of the streams could finish within the grace; the others have to move."""
    return 100 if number % 2 else 400


def streams() -> list[Request]:
    return [
        Request(
            "/v1/completions",
            {
                "model": MODEL,
                "prompt": list(f"Stream {number}".encode()),
                "max_tokens": length_of(number),
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        for number in range(NUM_STREAMS)
    ]


def undisturbed(request: Request) -> list[int]:
    found: list[int] = paced_tokens(request.body["prompt"], request.body["max_tokens"], LETTERS)
    return found


async def whole_fleet(application: RunningApplication) -> dict[str, dict[str, Any]]:
    fleet = await asyncio.to_thread(
        application.wait_fleet, lambda fleet: linked_engines(fleet) == {MODEL: 2}, READY_S
    )
    return rows(fleet)


def ended(application: RunningApplication, slice_name: str, since_s: float) -> dict[str, Any]:
    """The life that ended on this slice after a moment (wall clock)."""

    def found(fleet: dict[str, Any]) -> list[dict[str, Any]]:
        lives: list[dict[str, Any]] = fleet["ended"]
        return [
            row
            for row in lives
            if row["name"] == slice_name and row["history"][-1]["at_s"] > since_s
        ]

    return found(application.wait_fleet(lambda fleet: bool(found(fleet)), 60.0))[0]


def entered_at_s(row: dict[str, Any], state: str) -> float:
    (at_s, *_) = [each["at_s"] for each in row["history"] if each["state"] == state]
    return float(at_s)


async def test_pod_deleted_with_25_s_of_grace_fails_no_stream(
    application: RunningApplication,
) -> None:
    await whole_fleet(application)
    agent = await asyncio.to_thread(agent_of, application, "spot-0")
    requests = streams()
    answering = await begin_all(application.base_url, requests, READY_S)
    at_s = time.time()
    hook = await start_hook(agent, GRACE_S)
    # As the kubelet: the container ends after the hook, and with the grace at the latest.
    try:
        async with asyncio.timeout(GRACE_S):
            assert await hook.wait() == 0
    finally:
        held_s = time.time() - at_s
        await asyncio.to_thread(application.simulation, "kill", name="spot-0")
    answers = await answering
    assert [answer.error for answer in answers if answer.error] == []
    assert [answer.choices[0].token_ids for answer in answers] == [
        undisturbed(each) for each in requests
    ]
    row = await asyncio.to_thread(ended, application, "spot-0", at_s)
    assert (row["cause"], "its pod ends within 25 s" in row["reason"]) == ("preempted", True)
    assert entered_at_s(row, "gone") < at_s + GRACE_S
    # The hook was told that the slice was left, and did not wait for the end of the grace.
    assert held_s < GRACE_S
    longest_s = max(answer.longest_gap_s() for answer in answers)
    sys.stdout.write(
        f"\n    pod deleted under {NUM_STREAMS} streams: draining after "
        f"{entered_at_s(row, 'draining') - at_s:.2f} s, slice gone after "
        f"{entered_at_s(row, 'gone') - at_s:.1f} s, hook back after {held_s:.1f} s of {GRACE_S}; "
        f"longest gap {longest_s * 1000:.0f} ms; 0 failed\n"
    )


async def test_agent_that_dies_alone_costs_no_slice_and_its_successor_hears_the_end(
    application: RunningApplication,
) -> None:
    was = await whole_fleet(application)
    engines = {each.pid for each in application.processes(Role.ENGINE_HOST)}
    agent = await asyncio.to_thread(agent_of, application, "spot-1")
    agent.send_signal(signal.SIGKILL)

    async def successor() -> psutil.Process:
        while True:
            try:
                found = await asyncio.to_thread(agent_of, application, "spot-1")
            except ValueError:
                continue
            if found.pid != agent.pid:
                return found

    async with asyncio.timeout(READY_S):
        next_agent = await successor()
    now = await whole_fleet(application)
    assert {name: row["engine_id"] for name, row in now.items()} == {
        name: row["engine_id"] for name, row in was.items()
    }
    assert {each.pid for each in application.processes(Role.ENGINE_HOST)} == engines
    at_s = time.time()
    hook = await start_hook(next_agent, 60)
    row = await asyncio.to_thread(ended, application, "spot-1", at_s)
    assert "its pod ends within 60 s" in row["reason"]
    async with asyncio.timeout(60):
        assert await hook.wait() == 0
