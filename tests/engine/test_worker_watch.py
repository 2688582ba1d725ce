"""The end of a worker that is a Ray actor is known as soon as Ray knows it."""

import os
import queue
import signal
import threading
from collections.abc import Iterator

import pytest
import ray

from serving.engine.tpu.worker_watch import watch_workers

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray, which ends its own processes
]

DEADLINE_S = 60.0


@ray.remote(num_cpus=0, max_restarts=0)
class Worker:
    """Runs until its process ends, as a worker of an engine does."""

    def __init__(self) -> None:
        self._never = threading.Event()

    def pid(self) -> int:
        return os.getpid()

    def run(self) -> None:
        self._never.wait()


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def workers() -> tuple[list[int], dict[ray.ObjectRef, str]]:
    actors = [Worker.options(max_concurrency=2).remote() for _ in range(2)]  # type: ignore[attr-defined]
    pids = [ray.get(actor.pid.remote()) for actor in actors]
    return pids, {actor.run.remote(): f"worker {n}" for n, actor in enumerate(actors)}


def test_end_of_one_worker_is_told_once_with_its_name() -> None:
    (_, second), runs = workers()
    ended: queue.Queue[str] = queue.Queue()
    thread = watch_workers(runs, lambda: False, ended.put)
    os.kill(second, signal.SIGKILL)
    assert ended.get(timeout=DEADLINE_S) == "worker 1"
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert ended.empty()


def test_end_of_a_worker_of_an_executor_that_shuts_down_is_not_told() -> None:
    pids, runs = workers()
    ended: queue.Queue[str] = queue.Queue()
    is_over = threading.Event()
    thread = watch_workers(runs, is_over.is_set, ended.put)
    is_over.set()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert ended.empty()
