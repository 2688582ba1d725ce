"""The supervisor against programs that misbehave, and the verdict. JAX: `test_probe_program`."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from serving.slices.probe import (
    Check,
    CheckName,
    DeviceFailure,
    HostOutcome,
    HostProbe,
    Platform,
    ProbeOutcome,
    ProbeReport,
    ProbeSpec,
    Stage,
    probe_slice,
    run_probe_on_host,
    verdict,
)

SPEC = ProbeSpec(platform=Platform.CPU, num_hosts=1, process_id=0, devices_per_host=2)
GOOD = (Check(CheckName.MATMUL, ProbeOutcome.PASSED, "2 devices multiply exactly"),)
# What a program of these tests can use.
_PRELUDE = """
import os, signal, sys, time
request = sys.stdin.readline()
def say(line): print(line, flush=True)
"""


def report_line(checks: tuple[Check, ...] = GOOD) -> str:
    return msgspec.json.encode(ProbeReport(0, ("cpu",), checks, 0.1)).decode()


async def run(code: str, timeout_s: float = 20.0) -> HostProbe:
    program = (sys.executable, "-S", "-c", _PRELUDE + code)
    return await run_probe_on_host(SPEC, timeout_s, program=program)


async def test_program_that_reports_success_has_passed() -> None:
    result = await run(f"say('''{report_line()}''')")
    assert (result.outcome, result.reason, result.worker_id) == (HostOutcome.PASSED, "passed", 0)
    assert result.report is not None
    assert result.report.checks == GOOD


async def test_program_gets_the_specification() -> None:
    line = report_line((Check(CheckName.HBM, ProbeOutcome.FAILED, "%s"),)).replace("%s", "'+seen+'")
    result = await run(f"seen = request.strip().replace(chr(34), '~')\nsay('{line}')")
    assert "~devices_per_host~:2" in result.reason


async def test_program_whose_check_failed_says_which() -> None:
    checks = (*GOOD, Check(CheckName.HBM, ProbeOutcome.FAILED, "1 of 2 devices failed"))
    result = await run(f"say('''{report_line(checks)}''')")
    assert result.outcome == HostOutcome.CHECK_FAILED
    assert result.reason == "hbm: 1 of 2 devices failed"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "print('no TPU', file=sys.stderr); sys.exit(3)",
            "with status 3 at stage starting: no TPU",
        ),
        ('say(\'{"type":"stage","stage":"local"}\'); os.abort()', "SIGABRT at stage local"),
        ("sys.stderr.write('x' * 10**6); os._exit(1)", "with status 1 at stage starting: xxx"),
        (
            "sys.stderr.write('F1121 08:48:14.1 client.h:80] it burns\\n*** stack:\\n  @ 0x7f\\n')"
            "; os.abort()",
            "it burns",
        ),
        ("pass", "with status 0"),
    ],
)
async def test_program_that_ends_without_a_report_has_crashed(code: str, words: str) -> None:
    result = await run(code)
    assert result.outcome == HostOutcome.CRASHED
    assert words in result.reason
    assert len(result.reason) < 700


@pytest.mark.parametrize(
    "code",
    [
        "say('hello')",
        'say(\'{"type":"stage","stage":"lunch"}\')',
        "say('x' * 10**6)",
        "os.write(1, b'\\xff\\n')",
        "say('[' * 100000)",
    ],
)
async def test_program_that_talks_nonsense_is_ended(code: str) -> None:
    result = await run(code + "\ntime.sleep(100)")
    assert result.outcome == HostOutcome.GARBAGE
    assert result.report is None


@pytest.fixture
def alive(tmp_path: Path) -> Path:
    """A pipe that programs hold open for as long as they live."""
    path = tmp_path / "alive"
    os.mkfifo(path)
    return path


_HOLD = """
holds = open({path!r}, 'wb', buffering=0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
is_parent = os.fork()
if is_parent:
    say('{{"type":"stage","stage":"local"}}')
    holds.write(b'1')
while True: time.sleep(100)
"""


async def test_program_that_hangs_is_ended_at_the_deadline_with_all_below_it(alive: Path) -> None:
    running = asyncio.create_task(run(_HOLD.format(path=str(alive)), timeout_s=1.0))
    with await asyncio.to_thread(alive.open, "rb", buffering=0) as reader:
        result = await running
        assert await asyncio.to_thread(reader.readall) == b"1"
    assert (result.outcome, result.stage) == (HostOutcome.HUNG, Stage.LOCAL)
    assert result.reason == "no result within 1 s, at stage local"


async def test_cancelled_run_leaves_no_process(alive: Path) -> None:
    running = asyncio.create_task(run(_HOLD.format(path=str(alive))))
    with await asyncio.to_thread(alive.open, "rb", buffering=0) as reader:
        assert await asyncio.to_thread(reader.read, 1) == b"1"
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await asyncio.to_thread(reader.readall) == b""


async def test_program_that_cannot_be_started_has_crashed() -> None:
    result = await run_probe_on_host(SPEC, 1.0, program=("/nonexistent/probe",))
    assert result.outcome == HostOutcome.CRASHED
    assert "could not be started" in result.reason


async def test_program_that_jax_ended_for_another_is_abandoned() -> None:
    words = (
        "F1121 08:48:14.1 7 client.h:80] Terminating process because the JAX distributed service "
    )
    words += "detected fatal errors. This most likely indicates that another task died"
    result = await run(f"print({words!r}, file=sys.stderr, flush=True); os.abort()")
    assert result.outcome == HostOutcome.ABANDONED


@pytest.mark.parametrize(
    "changes",
    [
        {"process_id": 4},
        {"coordinator_address": None},
    ],
)
def test_specification_that_makes_no_sense_is_refused(changes: dict[str, object]) -> None:
    good = {
        "platform": Platform.CPU,
        "num_hosts": 4,
        "process_id": 3,
        "devices_per_host": 4,
        "coordinator_address": "127.0.0.1:1",
    }
    assert ProbeSpec(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"process_id|coordinator_address"):
        ProbeSpec(**good | changes)  # type: ignore[arg-type]


# One host's result, as a word.
def host(worker_id: int, word: str) -> HostProbe:
    outcome, _, where = word.partition("@")
    if outcome == "passed":
        return HostProbe(worker_id, HostOutcome.PASSED, Stage.DONE, "passed", 1.0, _report())
    if outcome == "wrong":  # a check failed, `where` is its name
        check = Check(CheckName(where), ProbeOutcome.FAILED, "failed")
        return HostProbe(
            worker_id, HostOutcome.CHECK_FAILED, Stage.DONE, where, 1.0, _report(check)
        )
    if outcome == "sum":  # the all-reduce came out wrong in the part of these hosts
        failures = tuple(DeviceFailure(9, int(each), "wrong") for each in where)
        check = Check(CheckName.ALL_REDUCE, ProbeOutcome.FAILED, f"part of {where}", 0.1, failures)
        return HostProbe(
            worker_id, HostOutcome.CHECK_FAILED, Stage.DONE, where, 1.0, _report(check)
        )
    return HostProbe(worker_id, HostOutcome(outcome), Stage(where or "starting"), word)


def _report(*checks: Check) -> ProbeReport:
    return ProbeReport(0, ("cpu",), checks, 1.0)


@pytest.mark.parametrize(
    ("words", "failing"),
    [
        ("passed passed passed passed", []),
        # A host that fails by itself, and hosts that only see it.
        ("passed wrong@matmul passed passed", [1]),
        ("wrong@hbm passed passed wrong@device_kind", [0, 3]),
        ("wrong@global_devices wrong@global_devices wrong@local_devices wrong@global_devices", [2]),
        ("hung@all_reduce hung@all_reduce hung@local hung@all_reduce", [2]),
        ("hung@joining hung@joining hung@starting hung@joining", [2]),
        ("hung@all_reduce crashed@local hung@all_reduce hung@all_reduce", [1]),
        ("garbage@starting hung@joining hung@joining hung@joining", [0]),
        ("lost hung@all_reduce hung@all_reduce hung@all_reduce", [0]),
        ("cancelled wrong@matmul cancelled passed", [1]),
        # Host 0 coordinates: without it the others are ended.
        ("crashed@local abandoned@all_reduce abandoned@local abandoned@all_reduce", [0]),
        ("abandoned@devices crashed@devices abandoned@devices abandoned@devices", [1]),
        # A host whose chips do not come up, which the others wait for.
        ("hung@devices hung@devices hung@devices crashed@devices", [3]),
        ("wrong@all_reduce hung@all_reduce crashed@all_reduce wrong@all_reduce", [2]),
        ("wrong@all_reduce hung@all_reduce wrong@all_reduce wrong@all_reduce", [1]),
        # Nobody can be singled out.
        ("hung@all_reduce hung@all_reduce hung@all_reduce hung@all_reduce", [0, 1, 2, 3]),
        ("hung@all_reduce abandoned@all_reduce hung@all_reduce hung@all_reduce", [0, 1, 2, 3]),
        ("wrong@all_reduce wrong@all_reduce wrong@all_reduce wrong@all_reduce", [0, 1, 2, 3]),
        # A wrong sum is wrong in somebody's part, or with somebody who sees it.
        ("sum@2 sum@2 sum@2 sum@2", [2]),
        ("sum@23 sum@2 sum@23 sum@3", [2, 3]),
        ("passed sum@3 passed passed", [3]),
        ("passed sum@0123 passed passed", [1]),
        ("sum@0123 sum@0123 sum@0123 sum@0123", [0, 1, 2, 3]),
    ],
)
def test_verdict_names_the_hosts_at_fault(words: str, failing: list[int]) -> None:
    probes = [host(worker_id, word) for worker_id, word in enumerate(words.split())]
    found = verdict(reversed(probes), 4)
    assert list(found.failing) == failing
    assert found.has_passed == (not failing)
    if failing:
        assert found.reason.startswith(f"host {failing[0]}")


def test_host_without_a_result_is_at_fault() -> None:
    probes = [host(worker_id, "hung@all_reduce") for worker_id in (0, 1, 3)]
    found = verdict(probes, 4)
    assert found.failing == (2,)
    assert found.reason == "host 2: it never reported"


def test_verdict_says_what_the_failing_host_forbids() -> None:
    """libtpu's own words for it are an error code; the cause is in the host's limits."""
    fault = "fail locked memory: 8 MiB; allowed: unlimited"
    failed = HostProbe(
        1, HostOutcome.CRASHED, Stage.DEVICES, "TPU initialization failed", host_faults=(fault,)
    )
    sound = HostProbe(0, HostOutcome.PASSED, Stage.DONE, "passed", host_faults=("warn one",))
    reason = verdict([sound, failed], 2).reason
    assert reason == f"host 1: TPU initialization failed; this host: {fault}"


def test_what_was_not_checked_is_no_failure() -> None:
    checks = (Check(CheckName.HBM, ProbeOutcome.NOT_CHECKED, "unknown"), *GOOD)
    probe = HostProbe(0, HostOutcome.PASSED, Stage.DONE, "passed", 1.0, _report(*checks))
    assert verdict([probe], 1).has_passed


async def test_verdict_on_a_slice_does_not_wait_for_those_who_wait_in_vain() -> None:
    async def hang() -> HostProbe:
        await asyncio.Event().wait()
        raise AssertionError

    async def come(worker_id: int, word: str) -> HostProbe:
        return host(worker_id, word)

    async with asyncio.timeout(10):
        found = await probe_slice({0: hang(), 1: come(1, "crashed@local"), 2: come(2, "passed")})
    assert found.failing == (1,)


async def test_verdict_on_a_slice_waits_for_all_that_may_be_at_fault() -> None:
    first = asyncio.Event()

    async def come(worker_id: int, word: str, after: asyncio.Event | None = None) -> HostProbe:
        if after is not None:
            await after.wait()
        first.set()
        return host(worker_id, word)

    runs = {0: come(0, "hung@all_reduce"), 1: come(1, "hung@local", first)}
    assert (await probe_slice(runs)).failing == (1,)


async def test_failing_run_is_raised_and_ends_the_others() -> None:
    ended = []

    async def hang() -> HostProbe:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(0)
        raise AssertionError

    async def fail() -> HostProbe:
        raise OSError("no actor")

    with pytest.raises(OSError, match="no actor"):
        await probe_slice({0: hang(), 1: fail()})
    assert ended == [0]


def test_supervisor_loads_no_jax() -> None:
    code = "import sys, serving.slices.probe; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_process_that_outlives_the_program_is_ended_with_it(alive: Path) -> None:
    code = """
if os.fork():
    os._exit(7)
holds = open({path!r}, 'wb', buffering=0)
time.sleep(100)
"""
    running = asyncio.create_task(run(code.format(path=str(alive)), timeout_s=2.0))
    with await asyncio.to_thread(alive.open, "rb", buffering=0) as reader:
        result = await running
        assert await asyncio.to_thread(reader.readall) == b""
    assert result.outcome == HostOutcome.CRASHED
    assert "status 7" in result.reason
