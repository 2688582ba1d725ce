"""Ray's own key-value store, for the policy of one application: its plan, and what it has learned.

A key for the report, and one for the memory of each model. Every call blocks for a round trip to
Ray's head: make them in a thread.
"""

from ray.experimental import internal_kv

from autoscaling.policy.memory import PolicyRecord, encode_memory
from serving.domain.plan_report import PlanReport, encode_report
from serving.domain.supply.keys import SupplyKeys


class PlanStore:
    """The keys of one application. Serve tells its name only once it calls the policy."""

    def __init__(self, application: str = "") -> None:
        self.application = application

    def write_report(self, report: PlanReport) -> None:
        """Replaces the plan report."""
        internal_kv._internal_kv_put(self._keys.plan, encode_report(report), overwrite=True)

    def write_memory(self, model: str, record: PolicyRecord) -> None:
        """Replaces the memory of one model."""
        key = self._keys.policy_memory(model)
        internal_kv._internal_kv_put(key, encode_memory(record), overwrite=True)

    def read_memory(self, model: str) -> bytes | None:
        """Returns the memory of one model, as it was written; `None` if there is none."""
        text: bytes | None = internal_kv._internal_kv_get(self._keys.policy_memory(model))
        return text

    @property
    def _keys(self) -> SupplyKeys:
        return SupplyKeys(self.application)
