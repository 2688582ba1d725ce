"""Keeps the policy's plan report and its memory: one key each in Ray's own key-value store."""

from ray.experimental import internal_kv

from serving.domain.plan_report import REPORT_KEY, PlanReport, encode_report

_MEMORY_KEY = b"slicewise:policy-memory"


def write_plan_report(board: PlanReport) -> None:
    """Replaces the report. Blocks for a round trip to Ray's head: call it in a thread."""
    internal_kv._internal_kv_put(REPORT_KEY, encode_report(board), overwrite=True)


def write_memory(document: bytes) -> None:
    """Replaces the memory (`policy.memory`). Blocks as `write_plan_report` does."""
    internal_kv._internal_kv_put(_MEMORY_KEY, document, overwrite=True)


def read_memory() -> bytes | None:
    """Returns the memory; `None` before the first one. Blocks as `write_plan_report` does."""
    document: bytes | None = internal_kv._internal_kv_get(_MEMORY_KEY)
    return document
