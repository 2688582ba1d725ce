"""The probe program itself, with JAX on CPU devices; one to four processes play the hosts."""

import os
import signal
import socket
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from serving.slices.probe import (
    CheckName,
    HostOutcome,
    HostProbe,
    Platform,
    ProbeOutcome,
    ProbeSpec,
    Stage,
    probe_slice,
    run_probe_on_host,
)

pytestmark = pytest.mark.slow

FAULT = "SLICEWISE_PROBE_FAULT"
# Far above what it takes (1 to 4 s), for a busy machine.
TIMEOUT_S = 90.0
# Long enough for three hosts to come to the stage at which one hangs; all of it passes.
HANG_S = 12.0
HBM_BYTES = 16 * 1024**3


# One that the program reports and one that it cannot; each starts three processes. What a report of
# any fault leads to is decided without processes, in test_probe.py.
ALWAYS_TRIED = {("wrong_matmul", 2), ("crash", 2)}


def spec(worker_id: int = 0, **changes: Any) -> ProbeSpec:
    defaults = {
        "platform": Platform.CPU,
        "num_hosts": 1,
        "process_id": worker_id,
        "devices_per_host": 8,
        "hbm_bytes_per_device": HBM_BYTES,
    }
    return ProbeSpec(**(defaults | changes))


def environment(fault: str | None = None) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name != FAULT}
    return clean if fault is None else clean | {FAULT: fault}


def free_address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def outcomes(probe: HostProbe) -> dict[CheckName, ProbeOutcome]:
    assert probe.report is not None, probe.reason
    return {check.name: check.outcome for check in probe.report.checks}


async def test_good_host_passes_and_owns_up_to_what_it_could_not_check() -> None:
    probe = await run_probe_on_host(spec(), TIMEOUT_S, environment=environment())
    assert (probe.outcome, probe.stage) == (HostOutcome.PASSED, Stage.DONE)
    assert outcomes(probe) == {
        CheckName.LOCAL_DEVICES: ProbeOutcome.PASSED,
        CheckName.GLOBAL_DEVICES: ProbeOutcome.PASSED,
        CheckName.DEVICE_KIND: ProbeOutcome.NOT_CHECKED,
        CheckName.HBM: ProbeOutcome.NOT_CHECKED,
        CheckName.MATMUL: ProbeOutcome.PASSED,
        CheckName.ALL_REDUCE: ProbeOutcome.PASSED,
    }


@pytest.mark.parametrize(
    ("fault", "failed"),
    [
        ("wrong_matmul", {CheckName.MATMUL}),
        ("missing_device", {CheckName.LOCAL_DEVICES, CheckName.GLOBAL_DEVICES}),
        ("small_hbm", {CheckName.HBM}),
    ],
)
async def test_faulty_host_fails_the_check_that_finds_it(
    fault: str, failed: set[CheckName]
) -> None:
    probe = await run_probe_on_host(spec(), TIMEOUT_S, environment=environment(fault))
    assert probe.outcome == HostOutcome.CHECK_FAILED
    assert {name for name, it in outcomes(probe).items() if it == ProbeOutcome.FAILED} == failed


async def test_device_of_another_kind_is_found() -> None:
    other = spec(devices_per_host=2, device_kind="TPU v6 lite")
    probe = await run_probe_on_host(other, TIMEOUT_S, environment=environment())
    assert probe.outcome == HostOutcome.CHECK_FAILED
    check = probe.failed(CheckName.DEVICE_KIND)
    assert check is not None
    assert [failure.detail for failure in check.failures] == ["is a 'cpu'"] * 2


async def test_host_without_tpu_fails_the_probe_of_a_tpu() -> None:
    probe = await run_probe_on_host(
        spec(platform=Platform.TPU), TIMEOUT_S, environment=environment()
    )
    assert (probe.outcome, probe.stage) == (HostOutcome.CRASHED, Stage.DEVICES)


@pytest.mark.parametrize(
    ("platform", "fault", "words"),
    [
        (Platform.TPU, "hang", "is for simulated clusters; this is a TPU"),
        (Platform.CPU, "earthquake", "allowed: wrong_matmul, hang, crash, missing_device"),
    ],
)
async def test_fault_is_refused_where_it_has_no_place(
    platform: Platform, fault: str, words: str
) -> None:
    probe = await run_probe_on_host(
        spec(platform=platform), TIMEOUT_S, environment=environment(fault)
    )
    assert probe.outcome == HostOutcome.CRASHED
    assert words in probe.reason


def test_program_ends_with_the_process_that_started_it() -> None:
    """The supervisor is killed; the program hangs on a device, and its stdout must close."""
    program = f"{sys.executable} -m serving.slices.probe_program"
    supervisor = subprocess.Popen(
        ["/bin/sh", "-c", f"{program}; true"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment("hang"),
    )
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    supervisor.stdin.write(msgspec.json.encode(spec(devices_per_host=1)) + b"\n")
    supervisor.stdin.flush()
    said = [supervisor.stdout.readline() for _ in range(3)]
    assert b'"local"' in said[-1]
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    assert supervisor.stdout.read() == b""
    supervisor.stdin.close()
    supervisor.stdout.close()


def slice_of(num_hosts: int, devices: int, faults: dict[int, str], timeout_s: float) -> Any:
    address = free_address()
    return {
        worker_id: run_probe_on_host(
            spec(
                worker_id,
                num_hosts=num_hosts,
                devices_per_host=devices,
                coordinator_address=address,
            ),
            timeout_s,
            environment=environment(faults.get(worker_id)),
        )
        for worker_id in range(num_hosts)
    }


async def test_two_good_hosts_pass_together() -> None:
    found = await probe_slice(slice_of(2, 2, {}, TIMEOUT_S))
    assert found.has_passed, found.reason


@pytest.mark.e2e
async def test_four_good_hosts_pass_together() -> None:
    found = await probe_slice(slice_of(4, 4, {}, TIMEOUT_S))
    assert found.has_passed, found.reason


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("fault", "faulty"),
    [
        pytest.param(
            fault, faulty, marks=() if (fault, faulty) in ALWAYS_TRIED else pytest.mark.long
        )
        for fault in ("wrong_matmul", "missing_device", "small_hbm", "crash")
        for faulty in (0, 2)
    ],
)
async def test_faulty_host_among_three_is_named_alone(fault: str, faulty: int) -> None:
    found = await probe_slice(slice_of(3, 2, {faulty: fault}, TIMEOUT_S))
    assert found.failing == (faulty,), found.reason
    # Nobody waited for its own deadline.
    assert "no result within" not in found.reason


@pytest.mark.e2e
async def test_host_that_hangs_is_named_though_all_hang() -> None:
    found = await probe_slice(slice_of(3, 2, {1: "hang"}, HANG_S))
    assert found.failing == (1,), found.reason
    assert "at stage local" in found.reason
