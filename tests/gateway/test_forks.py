"""A fork server ends what takes too much, and nothing else; it ends with who started it."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from serving.domain.errors import GatewayFaultError, NoTimeForRequestError
from serving.gateway.forks.messages import ForkLimits, ForkOrder, ForkOutcome, framed, taken
from serving.gateway.forks.server import ForkEndedError, ForkServer
from tests.gateway.fork_tasks import HANGING

pytestmark = pytest.mark.process

DEADLINE_S = 30.0
TASKS = "tests.gateway.fork_tasks:tasks"
LIMITS = ForkLimits(cpu_s=1, wall_s=20.0, memory_bytes=64 * 1024 * 1024)
SECRET = "what a client sent"


@pytest.fixture
async def server() -> AsyncIterator[ForkServer]:
    server = ForkServer("test", TASKS, lambda: b"spec+")
    yield server
    await server.wait_closed()


async def echoes(server: ForkServer) -> bool:
    async with asyncio.timeout(DEADLINE_S):
        return await server.run("echo", b"a", LIMITS) == b"spec+a"


def _pid_in(path: Path) -> int | None:
    return int(path.read_text() or 0) or None if path.exists() else None


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def pid_in(path: Path) -> int:
    async with asyncio.timeout(DEADLINE_S):
        while (pid := _pid_in(path)) is None:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    return pid


async def gone(pid: int) -> bool:
    async with asyncio.timeout(DEADLINE_S):
        while _runs(pid):  # noqa: ASYNC110 - a process that is not our child tells nobody
            await asyncio.sleep(0.01)
    return True


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("size", [0, 1, 70_000, 8 * 1024 * 1024])
async def test_payloads_of_any_size_go_there_and_back(server: ForkServer, size: int) -> None:
    payload = os.urandom(size)
    async with asyncio.timeout(DEADLINE_S):
        assert await server.run("echo", payload, LIMITS) == b"spec+" + payload


@pytest.mark.parametrize("task", ["spin", "grow", "die"])
async def test_what_takes_too_much_or_dies_is_ended_alone(server: ForkServer, task: str) -> None:
    assert await echoes(server)
    pid = server.pid
    with pytest.raises(ForkEndedError, match="1 s of processor time and 64 MiB"):
        async with asyncio.timeout(DEADLINE_S):
            await server.run(task, b"", LIMITS)
    assert await echoes(server)
    assert server.pid == pid


async def test_what_waits_too_long_is_ended_and_is_not_its_clients_fault(
    server: ForkServer, tmp_path: Path
) -> None:
    file = tmp_path / "pid"
    with pytest.raises(NoTimeForRequestError):
        await server.run("wait", str(file).encode(), ForkLimits(1, 0.5, 1024 * 1024 * 1024))
    assert await gone(await pid_in(file))


async def test_order_whose_caller_left_is_ended(server: ForkServer, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    asked = asyncio.create_task(server.run("wait", str(file).encode(), LIMITS))
    pid = await pid_in(file)
    asked.cancel()
    assert await gone(pid)
    assert await echoes(server)


async def test_fault_is_logged_by_its_type_and_place_and_without_words(
    server: ForkServer, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(GatewayFaultError):
        await server.run("fail", SECRET.encode(), LIMITS)
    assert "cause=ValueError in _fail (fork_tasks.py:" in caplog.text
    assert SECRET not in caplog.text


async def test_what_is_printed_is_not_taken_for_an_outcome(
    server: ForkServer, capfd: pytest.CaptureFixture[str]
) -> None:
    assert await server.run("print", SECRET.encode(), LIMITS) == b"printed"
    assert await echoes(server)
    assert SECRET not in "".join(capfd.readouterr())


async def test_server_that_ended_is_started_again_under_the_order(
    server: ForkServer, tmp_path: Path
) -> None:
    file = tmp_path / "pid"
    asked = asyncio.create_task(server.run("wait", str(file).encode(), LIMITS))
    fork = await pid_in(file)
    assert server.pid is not None
    before = server.pid
    file.unlink()
    os.kill(before, signal.SIGKILL)
    assert await gone(fork)
    assert await pid_in(file) != fork
    assert server.pid != before
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(GatewayFaultError):  # it ended twice
        await asked


async def test_server_that_cannot_start_is_a_fault_of_ours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = ForkServer("test", TASKS, lambda: b"broken")
    with pytest.raises(GatewayFaultError):
        await server.run("echo", b"", LIMITS)
    assert "broken on purpose" in caplog.text
    await server.wait_closed()


async def test_start_that_hangs_is_given_up_for_all_who_wait_and_then_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "pid"
    specs = [HANGING + str(file).encode(), b"spec+"]
    server = ForkServer("test", TASKS, lambda: specs.pop(0), start_s=10.0)
    # Two of them have a place, and the others wait for one.
    asked = [asyncio.create_task(server.run("echo", b"", LIMITS)) for _ in range(5)]
    pid = await pid_in(file)
    async with asyncio.timeout(DEADLINE_S):
        told = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(each) for each in told] == [NoTimeForRequestError] * 5
    assert caplog.text.count("fork_server_not_started_in_time name=test limit_s=10") == 1
    assert await gone(pid)
    assert await echoes(server)
    await server.wait_closed()


async def test_no_more_than_two_at_once_and_a_bounded_number_waits(
    server: ForkServer, tmp_path: Path
) -> None:
    files = [tmp_path / str(number) for number in range(32)]
    asked = [asyncio.create_task(server.run("wait", str(file).encode(), LIMITS)) for file in files]
    await pid_in(files[0])
    await pid_in(files[1])
    with pytest.raises(NoTimeForRequestError) as refused:
        await server.run("echo", b"", LIMITS)
    assert refused.value.retry_after_s
    assert sum(file.exists() for file in files) == 2
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert await echoes(server)


async def test_server_and_its_forks_end_with_who_started_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    gateway = textwrap.dedent(
        f"""
        import asyncio
        from serving.gateway.forks.messages import ForkLimits
        from serving.gateway.forks.server import ForkServer
        limits = ForkLimits(1, 20.0, 2**26)
        server = ForkServer("test", "tests.gateway.fork_tasks:tasks", bytes)
        asyncio.run(server.run("wait", {str(file)!r}.encode(), limits))
        """
    )
    started = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", gateway])
    try:
        pid = await pid_in(file)
        parent = _parent_of(pid)
        assert parent != started.pid
    finally:
        started.kill()
        await asyncio.to_thread(started.wait)
    assert await gone(pid)
    assert await gone(parent)


def test_frames_are_taken_whole_whatever_the_pieces() -> None:
    records = [ForkOutcome(1, b"a" * 300), ForkOutcome(2, fault="no"), ForkOutcome(3)]
    stream = b"".join(framed(record) for record in records)
    for size in (1, 3, 7, len(stream)):
        buffer, found = bytearray(), []
        for at in range(0, len(stream), size):
            buffer += stream[at : at + size]
            while (record := taken(buffer, ForkOutcome)) is not None:
                found.append(record)
        assert found == records
        assert not buffer


def test_order_without_a_task_is_one_that_is_withdrawn() -> None:
    order = taken(bytearray(framed(ForkOrder(7))), ForkOrder)
    assert order is not None
    assert (order.number, order.task) == (7, None)
    with pytest.raises(msgspec.ValidationError):
        taken(bytearray(framed(ForkOutcome(1, fault="no"))), ForkOrder)
