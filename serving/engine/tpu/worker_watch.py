"""Watches the workers of an engine over several hosts, from its engine core.

A worker is a Ray actor. The Ray node of its host sees the end of its process at once, and Ray ends
the call by which the worker runs. vLLM's own watch then shuts its executor down before it tells the
engine core, and that does not return while a step waits for the worker: 57 s later the hang check
noticed (run 2026-11-22). Owns the watch. Does not own what follows.
"""

import threading
from collections.abc import Callable, Mapping

import ray
from ray import ObjectRef

# A call that is inside of Ray when Ray is shut down would crash the process, so it looks up now and
# then. An end is known at once nevertheless.
_LOOK_UP_S = 1.0


def watch_workers(
    runs: Mapping["ObjectRef[object]", str],
    is_over: Callable[[], bool],
    on_end: Callable[[str], None],
) -> threading.Thread:
    """Starts the watch; returns its thread.

    `runs` are the calls by which workers run, with the name of each; they end when the worker does.
    `on_end` is called once, in that thread, with the name of the first that has ended. Once
    `is_over`, nobody minds the end of a worker.
    """
    waited_for = list(runs)

    def watch() -> None:
        while not is_over() and ray.is_initialized():
            ended, _ = ray.wait(waited_for, num_returns=1, timeout=_LOOK_UP_S)
            if ended and not is_over():
                on_end(runs[ended[0]])
                return

    thread = threading.Thread(target=watch, name="slicewise-worker-watch", daemon=True)
    thread.start()
    return thread
