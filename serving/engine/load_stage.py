"""Reports an engine's loading stages from its worker to its host over a named pipe.

The worker is a process below the engine host, on the same machine; the pipe's path is in the
environment that it inherits. A worker on another host of the slice has no such pipe and reports
nothing: then all of it counts as loading. Owns both ends. Does not own the use of the reports.
"""

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from serving.domain.slice_lifecycle import LoadStage

logger = logging.getLogger(__name__)

PIPE_VARIABLE = "SLICEWISE_LOAD_STAGE_PIPE"
# Far more than every stage once from every worker of a host.
_READ_BYTES = 4096

OnStage = Callable[[LoadStage], None]


@contextmanager
def stages_reported_to(on_stage: OnStage) -> Iterator[None]:
    """Calls `on_stage`, in the event loop, with the reports of processes started meanwhile."""
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(prefix="slicewise-stage-") as folder:
        path = Path(folder) / "pipe"
        os.mkfifo(path, 0o600)
        # Opened for both ways, it does not end when the last writer closes it.
        pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        os.environ[PIPE_VARIABLE] = f"{path}"

        def read() -> None:
            with suppress(BlockingIOError):
                for line in os.read(pipe, _READ_BYTES).decode("ascii", "replace").splitlines():
                    if line in set(LoadStage):
                        on_stage(LoadStage(line))

        loop.add_reader(pipe, read)
        try:
            yield
        finally:
            loop.remove_reader(pipe)
            # What was written while the loop was busy, or just before the end.
            read()
            os.environ.pop(PIPE_VARIABLE, None)
            os.close(pipe)


def report_stage(stage: LoadStage) -> None:
    """Reports to the engine host; does nothing if none listens: no start may fail because of it."""
    path = os.environ.get(PIPE_VARIABLE)
    if path is None:
        return
    with suppress(OSError):
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, f"{stage}\n".encode())
        finally:
            os.close(pipe)


class ReportsStages:
    """The mixin of a vLLM worker class that reports when the weights are loaded.

    From then on vLLM runs the model on made-up input to find how much memory is left for the cache,
    which compiles it, and then warms it up.
    """

    def determine_available_memory(self, *args: Any, **kwargs: Any) -> Any:
        """Reports that the weights are there, then does as the worker does."""
        report_stage(LoadStage.COMPILING)
        worker: Any = super()
        return worker.determine_available_memory(*args, **kwargs)
