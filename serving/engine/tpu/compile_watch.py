"""Counts the programs that JAX finds in its cache or compiles, and logs those that come late.

A late one comes once the engine is warm: every such program made users wait. The engine host is
told of its begin and its end, so that it does not take the wait for a hang. Owns the counts of
this process. Does not own warm-up, nor the remedy: a shape that is compiled while serving belongs
into the warm-up (`docs/guide/tpu.md`).
"""

import logging
from dataclasses import dataclass
from typing import Any, Final

import jax

from serving.engine.worker_reports import report_compiled, report_compiling

logger = logging.getLogger(__name__)

# JAX's own name of the event. It comes for programs read from the compile cache as well: they too
# were not there when a request needed them. A scalar of that name comes at the begin, a duration at
# the end, also of one that failed. Source: jax 0.10.2 `dispatch.py`, read 2026-11-26.
COMPILE_EVENT: Final = "/jax/core/compile/backend_compile_duration"
# A program was requested from the cache, and was there. JAX's own event for one that was not comes
# when it is written, which only the first process of several does. Source: jax 0.10.2
# `compiler.py`, read 2026-11-22.
LOOKUP_EVENT: Final = "/jax/compilation_cache/compile_requests_use_cache"
HIT_EVENT: Final = "/jax/compilation_cache/cache_hits"


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a step, before it is padded; formatted only when a program is compiled for it.

    `num_tokens` are those of all its requests.
    """

    num_requests: int
    num_tokens: int

    def __str__(self) -> str:
        return f"num_requests={self.num_requests} num_tokens={self.num_tokens}"


class CompileWatch:
    """Counts hits and lookups from the start, and late programs from `begin` on."""

    def __init__(self) -> None:
        self.num_compilations = 0
        self.num_lookups = 0
        self.num_hits = 0
        # JAX keeps its listeners for as long as the process lives, and so does a worker.
        jax.monitoring.register_event_listener(self._on_lookup)
        self.step: StepShape | None = None  # the worker's present work; `None` before its first
        self._has_begun = False

    def begin(self) -> None:
        """Starts to count late programs. Idempotent."""
        if self._has_begun:
            return
        self._has_begun = True
        jax.monitoring.register_scalar_listener(self._on_begin)
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_lookup(self, event: str, **_details: Any) -> None:
        self.num_lookups += event == LOOKUP_EVENT
        self.num_hits += event == HIT_EVENT

    def _on_begin(self, event: str, value: float, **details: Any) -> None:  # noqa: ARG002
        if event == COMPILE_EVENT:
            report_compiling(_name(details))

    def _on_event(self, event: str, duration_secs: float, **details: Any) -> None:
        if event != COMPILE_EVENT:
            return
        report_compiled(_name(details))
        self.num_compilations += 1
        logger.warning(
            "compiled_after_warm_up count=%d duration_ms=%d program=%s %s",
            self.num_compilations,
            duration_secs * 1000,
            _name(details),
            "step=none" if self.step is None else self.step,
        )


def _name(details: dict[str, Any]) -> str:
    return str(details.get("fun_name", "unknown"))
