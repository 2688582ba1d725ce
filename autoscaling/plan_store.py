"""Keeps the policy's plan report: one key in Ray's own key-value store."""

from ray.experimental import internal_kv

from serving.domain.plan_report import REPORT_KEY, PlanReport, encode_report


def write_plan_report(board: PlanReport) -> None:
    """Replaces the report. Blocks for a round trip to Ray's head: call it in a thread."""
    internal_kv._internal_kv_put(REPORT_KEY, encode_report(board), overwrite=True)
