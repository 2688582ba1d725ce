"""What may stand in a query besides the names of the registry."""

from collections.abc import Mapping
from itertools import chain

from autoscaling.provisioning.sidecar.readings import CONTROL, GATEWAY, HEAD, REDIS
from autoscaling.provisioning.sidecar.rounds import ADDED, DROPPED, FAILURE_KINDS, FAULT
from serving.domain.errors import RequestError
from serving.domain.models.request_fields.service_class import ServiceClass
from serving.domain.slice_lifecycle import EndCause, SliceState
from serving.domain.supply.records import SupplyState
from serving.domain.usage.quotas import Period, QuotaKind
from serving.exporters.collector import Code
from serving.gateway.quotas.book import REASONS_OF_KIND
from serving.gateway.telemetry.request_metrics import FORECAST_OUTCOMES, OBJECTIVE_RESULTS
from serving.gateway.telemetry.request_story import Because
from serving.ledger.states import LedgerState

# What Prometheus and its client libraries give of every target.
PROMETHEUS_OWN = frozenset(
    {"up", "scrape_duration_seconds", "scrape_samples_scraped", "process_cpu_seconds_total"}
)
TARGET_LABELS = frozenset({"job", "instance", "installation", "host", "node_type"})
JOBS = frozenset({"gateway", "tpu-exporter", "ray", "slice-provisioner"})


def error_codes() -> set[str]:
    """Codes of all errors that a request can end with."""
    kinds = RequestError.__subclasses__()
    return {kind.code for kind in kinds if kind.code is not None} | {"malformed"}


# Values of labels that are a closed set.
_MOVES = {"lost", "draining"}
_SERVICE_CLASS = {"service_class": {each.label for each in ServiceClass}}
_QUOTA = {"kind": set(QuotaKind), "period": set(Period)}
_COLLECTORS = {"libtpu", "device_plugin", "sdk", "pci", "pod_resources", "workloads"}
CLOSED: Mapping[str, Mapping[str, set[str]]] = {
    "slicewise_sequences_total": {
        "outcome": {"stop", "length", "repetition", "abort", "error", "aborted", *error_codes()}
    },
    "slicewise_admissions_total": {"result": {"admitted", *error_codes()}},
    "slicewise_tenant_quota_used": _QUOTA,
    "slicewise_tenant_quota_limit": _QUOTA,
    "slicewise_tenant_quota_refusals_total": {
        "kind": set(QuotaKind),
        "reason": set(chain.from_iterable(REASONS_OF_KIND.values())),
    },
    "slicewise_batch_lines_total": {"outcome": {"completed", "failed", "refused"}},
    "slicewise_cache_forecast_tokens_total": {"outcome": set(FORECAST_OUTCOMES)},
    "slicewise_objective_sequences_total": {
        "objective": {"ttft", "tpot"},
        "result": set(OBJECTIVE_RESULTS),
    },
    "slicewise_dispatches_total": {"reason": set(Because)},
    "slicewise_line_sequences": _SERVICE_CLASS,
    "slicewise_line_tenant_sequences": _SERVICE_CLASS,
    "slicewise_queue_time_seconds": _SERVICE_CLASS,
    "slicewise_resumes_total": {"cause": {*_MOVES, "slow", "yielded"}},
    "slicewise_link_losses_total": {"cause": _MOVES},
    "slicewise_links": {"state": {"ready", "draining"}},
    "slicewise_slices_ended_total": {"cause": set(EndCause)},
    "class:slices_ended:increase30m": {"cause": set(EndCause)},
    "slicewise_slice_state_seconds": {"state": set(SliceState)},
    "slicewise_supply_slices": {"state": set(SupplyState)},
    "slicewise_provisioning_slices": {"state": set(SupplyState)},
    "slicewise_provisioning_oldest_held_back_seconds": {
        "state": {SupplyState.QUARANTINED, SupplyState.CONDEMNED}
    },
    "slicewise_provisioning_failures_total": {"kind": {*FAILURE_KINDS.values(), FAULT}},
    "slicewise_provisioning_changed_slices_total": {"direction": {ADDED, DROPPED}},
    "slicewise_condition_readable": {
        "kind": {*FAILURE_KINDS.values(), FAULT},
        "resource": {"pods", "redis", "rayclusters", "resourcequotas", "computeclasses"},
    },
    "slicewise_control_pods": {
        "component": {HEAD, GATEWAY, CONTROL, REDIS},
        "state": {"ready", "unready"},
    },
    "slicewise_control_pods_wanted": {"component": {HEAD, GATEWAY, CONTROL}},
    "slice:in_state:seconds": {"state": set(SliceState)},
    "slicewise_ledger_chips": {"state": set(LedgerState)},
    "class:ledger_chips:max": {"state": set(LedgerState)},
    "slicewise_ledger_chip_seconds_total": {"state": set(LedgerState)},
    "slicewise_ledger_cost_usd_total": {"state": set(LedgerState)},
    "tpu_scrape_collector_errors_total": {"code": set(Code), "collector": _COLLECTORS},
    "tpu_scrape_collector_success": {"collector": _COLLECTORS},
    "tpu_scrape_collector_duration_seconds": {"collector": _COLLECTORS},
    "tpu_chips_reporting": {"source": {"libtpu", "device_plugin", "sdk"}},
    "up": {"job": set(JOBS)},
}
