"""Counts and logs what XLA compiles once an engine is warm: every such program made users wait.

Owns the count of this process. Does not own warm-up, nor what is done about it: a shape that is
compiled while serving belongs into the warm-up (`docs/tpu.md`).
"""

import logging
from typing import Any, Final

import jax

logger = logging.getLogger(__name__)

# JAX's own name of the event. It comes for programs read from the compile cache as well: they too
# were not there when a request needed them.
COMPILE_EVENT: Final = "/jax/core/compile/backend_compile_duration"


class CompileWatch:
    """Counts from `begin` on. `step` says what the worker does now; it is logged by its `str`."""

    def __init__(self) -> None:
        self.num_compilations = 0
        self.step: object = "none"
        self._has_begun = False

    def begin(self) -> None:
        """Starts to count, once."""
        if self._has_begun:
            return
        self._has_begun = True
        # JAX keeps its listeners for as long as the process lives, and so does a worker.
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **details: Any) -> None:
        if event != COMPILE_EVENT:
            return
        self.num_compilations += 1
        logger.warning(
            "compiled_after_warm_up count=%d duration_ms=%d program=%s %s",
            self.num_compilations,
            duration_secs * 1000,
            details.get("fun_name", "unknown"),
            self.step,
        )
