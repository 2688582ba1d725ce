"""The store of the last plan: one key in Ray's own key-value store, which gateways read."""

from ray.exceptions import RayError
from ray.experimental import internal_kv

from serving.domain.plan_report import REPORT_KEY, PlanReport, decode_report


def read_plan_report() -> PlanReport | None:
    """Returns the report; `None` when none was ever written in this cluster.

    It blocks for a round trip to Ray's head: call it in a thread.

    Raises:
        PlanReportError: another version wrote it.
        ConnectionError: Ray's head is away. Ask again later.
    """
    try:
        text: bytes | None = internal_kv._internal_kv_get(REPORT_KEY)
    except (RuntimeError, RayError) as error:
        raise ConnectionError(f"Ray's head is away: {error!r}") from error
    return None if text is None else decode_report(text)
