"""Processes stand still and come back, whatever happens to whoever holds them back."""

import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

import psutil
import pytest

from deployments.simulation.node_processes import engines_below, processes_below
from deployments.simulation.throttle import Throttle

DEADLINE_S = 30.0
POLL_S = 0.005
FOR_EVER_S = 3600.0

# A host: its engine with a process of its own below, and something else.
_HOST = """
bash -c 'exec -a ray::EngineHostActor bash -c "sleep 1001 & wait"' &
sleep 1002 &
wait
"""


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(POLL_S)


class Echo:
    """A process that says what it is told."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.process = psutil.Process(self.popen.pid)

    def is_stopped(self) -> bool:
        return bool(self.process.status() == psutil.STATUS_STOPPED)

    def is_running(self) -> bool:
        return not self.is_stopped()

    def answers(self) -> bool:
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.write(b"?\n")
        self.popen.stdin.flush()
        return self.popen.stdout.readline() == b"?\n"

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()


@pytest.fixture
def make_echo() -> Iterator[Callable[[], Echo]]:
    with ExitStack() as stack:

        def make() -> Echo:
            echo = Echo()
            stack.callback(echo.end)
            return echo

        yield make


@pytest.fixture
def echo(make_echo: Callable[[], Echo]) -> Echo:
    return make_echo()


def test_process_stands_still_until_the_end(echo: Echo) -> None:
    with Throttle(lambda: [echo.process], None, FOR_EVER_S) as throttle:
        wait_until(echo.is_stopped)
        assert throttle.left_s is not None
    assert throttle.left_s is None
    assert echo.is_running()
    assert echo.answers()


def test_end_comes_by_itself(echo: Echo) -> None:
    with Throttle(lambda: [echo.process], None, 0.05) as throttle:
        assert throttle.wait(DEADLINE_S)
        assert echo.is_running()
        assert echo.answers()


def test_slow_process_stands_still_and_runs_by_turns(echo: Echo) -> None:
    with Throttle(lambda: [echo.process], 2.0, FOR_EVER_S):
        for _ in range(3):
            wait_until(echo.is_stopped)
            wait_until(echo.is_running)
    assert echo.answers()


def test_process_that_appears_later_is_held_back_too(make_echo: Callable[[], Echo]) -> None:
    echoes = [make_echo()]
    with Throttle(lambda: [echo.process for echo in echoes], None, FOR_EVER_S):
        wait_until(echoes[0].is_stopped)
        echoes.append(make_echo())
        wait_until(echoes[1].is_stopped)
    assert all(echo.answers() for echo in echoes)


def test_process_that_dies_meanwhile_does_not_keep_the_others(
    make_echo: Callable[[], Echo],
) -> None:
    dying, other = make_echo(), make_echo()
    with Throttle(lambda: [dying.process, other.process], None, FOR_EVER_S):
        wait_until(dying.is_stopped)
        dying.end()
        wait_until(other.is_stopped)
    assert other.answers()


def test_processes_that_cannot_be_found_any_more_are_let_go(echo: Echo) -> None:
    looks = 0

    def find() -> Iterable[psutil.Process]:
        nonlocal looks
        looks += 1
        if looks > 1:
            raise RuntimeError("no process table")
        return [echo.process]

    with Throttle(find, None, FOR_EVER_S) as throttle:
        assert throttle.wait(DEADLINE_S)
        assert echo.answers()


def test_stop_before_the_start_is_no_harm(echo: Echo) -> None:
    throttle = Throttle(lambda: [echo.process], None, FOR_EVER_S)
    throttle.stop()
    throttle.stop()
    assert echo.answers()


def test_engines_of_a_host_are_its_engine_host_and_all_below() -> None:
    with subprocess.Popen(["bash", "-c", _HOST]) as host:
        try:
            wait_until(lambda: len(arguments_of(processes_below([host.pid]))) == 2)
            assert arguments_of(processes_below([host.pid])) == {"1001", "1002"}
            wait_until(lambda: arguments_of(engines_below([host.pid])) == {"1001"})
            engines = {process.pid for process in engines_below([host.pid])}
            assert host.pid not in engines
            assert engines < {process.pid for process in processes_below([host.pid])}
        finally:
            for process in processes_below([host.pid]):
                process.kill()


def test_process_that_is_not_there_has_nothing_below(echo: Echo) -> None:
    echo.end()
    assert processes_below([echo.popen.pid]) == []
    assert processes_below([]) == []


def arguments_of(processes: Iterable[psutil.Process]) -> set[str]:
    """What the sleepers among these were told."""
    lines = [process.cmdline() for process in processes]
    return {line[1] for line in lines if line and line[0] == "sleep"}
