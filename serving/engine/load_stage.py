"""Reports an engine's loading stages from its worker to its host, over a `ReportPipe`.

A worker on another host of the slice reports nothing: then all of it counts as loading. Owns what
is said. Does not own the use of the reports.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from serving.domain.slice_lifecycle import LoadStage
from serving.engine.report_pipe import ReportPipe, report_line

PIPE_VARIABLE = "SLICEWISE_LOAD_STAGE_PIPE"

OnStage = Callable[[LoadStage], None]


@contextmanager
def stages_reported_to(on_stage: OnStage) -> Iterator[None]:
    """Calls `on_stage`, in the event loop, with the reports of processes started meanwhile."""

    def hand_on(line: str) -> None:
        if line in set(LoadStage):
            on_stage(LoadStage(line))

    pipe = ReportPipe(PIPE_VARIABLE, hand_on)
    try:
        yield
    finally:
        pipe.close()


def report_stage(stage: LoadStage) -> None:
    """Reports to the engine host; does nothing if none listens: no start may fail because of it."""
    report_line(PIPE_VARIABLE, str(stage))


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
