"""Below an engine host, vLLM's queue readers nap instead of spinning, and miss no message."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serving.engine.vllm.parent_death_watch import HOST_VARIABLE, HostProcess

pytestmark = [pytest.mark.imports_vllm, pytest.mark.long]

DEADLINE_S = 120.0
NUM_MESSAGES = 3000

# Writer and reader in two processes, as engine core and worker are. Bursts of two, because of two
# messages close together the second may be written without being announced; and now and then a
# pause longer than the naps, so that the reader blocks.
_PROGRAM = f"""
import multiprocessing, random, time
from serving.engine.vllm.shm_backoff import nap_while_waiting
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

def read(handle, results):
    nap_while_waiting()
    nap_while_waiting()
    queue = MessageQueue.create_from_handle(handle, rank=0)
    queue.wait_until_ready()
    started_s, cpu_s = time.monotonic(), time.process_time()
    numbers = [queue.dequeue(timeout=60) for _ in range({NUM_MESSAGES})]
    share = (time.process_time() - cpu_s) / (time.monotonic() - started_s)
    slack_ns = open("/proc/self/timerslack_ns").read().strip()
    arrived = numbers == list(range({NUM_MESSAGES}))
    results.put((arrived, SpinCondition.wait.__module__, slack_ns, share))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = MessageQueue(n_reader=1, n_local_reader=1)
    results = context.Queue()
    reader = context.Process(target=read, args=(queue.export_handle(), results))
    reader.start()
    queue.wait_until_ready()
    chance = random.Random(1)
    for number in range({NUM_MESSAGES}):
        queue.enqueue(number)
        if number % 2:
            time.sleep(chance.choice([0, 1e-4, 1e-3]) if number % 100 != 1 else 0.08)
    print(*results.get(timeout=60), flush=True)
    reader.join(10)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    # A file, because the reader's process imports it again.
    path = tmp_path / "queue_program.py"
    path.write_text(_PROGRAM)
    return path


def run(program: Path, **environment: str) -> tuple[str, str, int, float]:
    inherited = {name: value for name, value in os.environ.items() if name != HOST_VARIABLE}
    done = subprocess.run(
        [sys.executable, str(program)],
        env=inherited | environment | {"VLLM_CONFIGURE_LOGGING": "0"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    arrived, module, slack_ns, share = done.stdout.split()[-4:]
    return arrived, module, int(slack_ns), float(share)


def test_reader_below_a_host_naps_and_misses_nothing(program: Path) -> None:
    arrived, module, slack_ns, cpu_share = run(program, **{HOST_VARIABLE: str(HostProcess.own())})
    assert (arrived, module) == ("True", "serving.engine.vllm.shm_backoff")
    assert slack_ns == 1  # naps end when they should
    # A spinning reader takes all that it is given; this one waits for most of its life.
    assert cpu_share < 0.6


def test_reader_elsewhere_waits_as_vllm_has_it(program: Path) -> None:
    arrived, module, slack_ns, _ = run(program)
    assert arrived == "True"
    assert module.startswith("vllm.")
    assert slack_ns > 1
