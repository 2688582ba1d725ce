"""Keeps the plan report and what the policy has learned: keys in Ray's own key-value store."""

from ray.experimental import internal_kv

from serving.domain.plan_report import REPORT_KEY, PlanReport, encode_report

_LEARNED_KEY = b"slicewise:learned-capacity"


def write_plan_report(board: PlanReport) -> None:
    """Replaces the report. Blocks for a round trip to Ray's head: call it in a thread."""
    internal_kv._internal_kv_put(REPORT_KEY, encode_report(board), overwrite=True)


def write_learned(document: bytes) -> None:
    """Replaces what was learned (`policy.learned_document`). Blocks as `write_plan_report` does."""
    internal_kv._internal_kv_put(_LEARNED_KEY, document, overwrite=True)


def read_learned() -> bytes | None:
    """Returns what was learned; `None` before anything was. Blocks as `write_plan_report` does."""
    document: bytes | None = internal_kv._internal_kv_get(_LEARNED_KEY)
    return document
