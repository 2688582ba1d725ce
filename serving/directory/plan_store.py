"""The store of the last plan: a key in Ray's own key-value store, which gateways read."""

from ray.exceptions import RayError
from ray.experimental import internal_kv

from serving.domain.plan_report import PlanReport, decode_report
from serving.domain.supply.keys import SupplyKeys


def read_plan_report(application: str) -> PlanReport | None:
    """Returns the report of an application; `None` when none was ever written in this cluster.

    It blocks for a round trip to Ray's head: call it in a thread.

    Raises:
        PlanReportError: another version wrote it.
        ConnectionError: Ray's head is away. Ask again later.
    """
    try:
        text: bytes | None = internal_kv._internal_kv_get(SupplyKeys(application).plan)
    except (RuntimeError, RayError) as error:
        raise ConnectionError(f"Ray's head is away: {error!r}") from error
    return None if text is None else decode_report(text)
