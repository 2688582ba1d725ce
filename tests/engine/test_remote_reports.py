"""What a worker on another host compiles reaches the engine host, over a real connection."""

import asyncio
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio

from serving.engine.remote_reports import RelayAddress, ReportRelay, report_to
from serving.engine.worker_reports import (
    REPORTS_VARIABLE,
    WorkerReports,
    report_compiled,
    report_compiling,
)

HOST = "127.0.0.1"
# A process of another host: it has no pipe, and does one thing for each line that it reads.
WORKER = textwrap.dedent(
    """
    import os, sys
    os.environ.pop(sys.argv[1], None)
    from serving.engine.remote_reports import RelayAddress, report_to
    from serving.engine.worker_reports import report_compiled, report_compiling
    assert report_to(RelayAddress(sys.argv[2], int(sys.argv[3]), sys.argv[4])) is not None
    print("connected", flush=True)
    for line in sys.stdin:
        word, _, program = line.strip().partition(" ")
        (report_compiling if word == "begin" else report_compiled)(program)
    """
)


class Worker:
    """A worker in a process of its own."""

    def __init__(self, address: RelayAddress) -> None:
        command = [sys.executable, "-c", WORKER, REPORTS_VARIABLE, *map(str, address)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "connected\n"

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest_asyncio.fixture
async def reports() -> AsyncIterator[WorkerReports]:
    reports = WorkerReports(asyncio.get_running_loop().time)
    yield reports
    reports.close()


@pytest.fixture
def relay(reports: WorkerReports) -> Iterator[ReportRelay]:
    relay = ReportRelay(HOST)
    yield relay
    relay.close()


@pytest.fixture
def workers(relay: ReportRelay) -> Iterator[list[Worker]]:
    made = [Worker(relay.address), Worker(relay.address)]
    yield made
    for worker in made:
        worker.kill()


async def test_program_of_another_host_is_compiled_until_it_is_done(
    reports: WorkerReports, workers: list[Worker]
) -> None:
    first, second = workers

    first.say("begin jit(step fn)")
    second.say("begin jit(step fn)")
    await wait_until(lambda: reports.compiling(_later()) == "jit(step fn)")
    # The same program on two hosts is two.
    first.say("done jit(step fn)")
    second.say("begin jit(sample)")
    second.say("done jit(step fn)")
    await wait_until(lambda: reports.compiling(_later()) == "jit(sample)")
    second.say("done jit(sample)")
    await wait_until(lambda: reports.compiling(_later()) is None)


async def test_worker_that_ends_compiles_nothing_any_more(
    reports: WorkerReports, workers: list[Worker]
) -> None:
    workers[0].say("begin jit(step fn)")
    await wait_until(lambda: reports.compiling(_later()) == "jit(step fn)")

    workers[0].kill()

    await wait_until(lambda: reports.compiling(_later()) is None)


@pytest.mark.parametrize(
    "said",
    [
        b"wrong\ncompiling 1 jit(step fn)\n",
        b"\ncompiling 1 jit(step fn)\n",
        b"x" * 4000 + b"\ncompiling 1 jit(step fn)\n",
    ],
)
async def test_stranger_reports_nothing(
    reports: WorkerReports, relay: ReportRelay, workers: list[Worker], said: bytes
) -> None:
    def speak() -> bytes:
        with socket.create_connection(relay.address[:2], 10) as stranger:
            stranger.sendall(said)
            try:
                return stranger.recv(1)
            except ConnectionResetError:  # not all of it was read
                return b""

    assert await asyncio.to_thread(speak) == b""
    # Others are heard all the same.
    workers[0].say("begin jit(sample)")
    await wait_until(lambda: reports.compiling(_later()) is not None)
    assert reports.compiling(_later()) == "jit(sample)"


async def test_words_that_are_none_of_a_workers_are_left_out(
    reports: WorkerReports, relay: ReportRelay
) -> None:
    ended: list[str] = []
    reports.on_worker_ended = ended.append

    def speak() -> None:
        with socket.create_connection(relay.address[:2], 10) as worker:
            said = ["ended worker 1", "", "\xff" * 900, "compiling 7 jit(a)", "compiled 7 jit(b)"]
            lines = [relay.address.token, *said]
            worker.sendall("".join(f"{line}\n" for line in lines).encode())
            worker.shutdown(socket.SHUT_WR)
            assert worker.recv(1) == b""

    await asyncio.to_thread(speak)
    # The connection is over, and soon what was open is too; that it was open shows in what is last.
    await wait_until(lambda: reports.compiling(0.0) == "jit(a)")
    await wait_until(lambda: reports.compiling(_later()) is None)
    assert reports.compiling(0.0) == "jit(a)"
    assert ended == []


def test_nobody_who_listens_is_no_error_and_reports_go_to_the_pipe_as_before() -> None:
    relay = ReportRelay(HOST)
    relay.close()

    assert report_to(relay.address) is None
    report_compiling("jit(a)")


async def test_connection_that_is_gone_is_no_error(reports: WorkerReports) -> None:
    with socket.create_server((HOST, 0)) as server:
        end = report_to(RelayAddress(HOST, server.getsockname()[1], "token"))
        accepted, _ = server.accept()
        accepted.close()
    assert end is not None
    try:
        for _ in range(20):
            report_compiling("jit(step fn)")
            report_compiled("jit(step fn)")
    finally:
        end()
    # Of this process they go to the pipe again.
    report_compiling("jit(sample)")
    await wait_until(lambda: reports.compiling(_later()) == "jit(sample)")


def test_address_that_is_not_this_hosts_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        ReportRelay("192.0.2.1")


async def wait_until(is_so: Callable[[], bool]) -> None:
    """Waits until it is so."""
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110 - threads of the relay tell nobody
            await asyncio.sleep(0.01)


def _later() -> float:
    """An instant after all that was reported up to now."""
    return asyncio.get_running_loop().time() + 3600.0
