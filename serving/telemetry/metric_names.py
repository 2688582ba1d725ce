"""The registry of names: every series that we emit or read, with its unit, labels and meaning.

Owns the names, so that a dashboard, a rule or a test can be checked against one list. Does not own
a value or where it comes from. A group of metrics is one tuple; `ALL` joins the groups. Standard
library only, no I/O.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Kind(StrEnum):
    """The type of a metric, as Prometheus names it."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Unit(StrEnum):
    """The base units. A unit is also the end of a name, but for counts and flags."""

    RATIO = "ratio"  # 0 to 1
    BYTES = "bytes"
    SECONDS = "seconds"
    BYTES_PER_SECOND = "bytes_per_second"
    COUNT = "count"  # things: programs, chips, packets, errors
    USD = "usd"
    SCORE = "score"  # a scale that its source made up
    FLAG = "flag"  # 1 is yes, 0 is no; or always 1, where the labels are the message


class Scope(StrEnum):
    """The thing that one label set of a metric stands for."""

    DEVICE = "device"  # what JAX lists: labels `chip` and, where a chip has two devices, `core`
    CHIP = "chip"
    LINK = "link"  # one port of one chip
    HOST = "host"
    COLLECTOR = "collector"  # one collector of an exporter and the address that it asks
    CLASS = "class"  # the engines of one model on one compute class
    MODEL = "model"  # one served model
    GATEWAY = "gateway"
    SLICE = "slice"  # one slice, as long as it is held
    ENGINE = "engine"  # one linked engine; without `slice` on a class that has none (`local`)


@dataclass(frozen=True, slots=True)
class Metric:
    """The description of a metric family.

    `name` is as PromQL writes it, a counter with its `_total`. `labels` are those beside the labels
    of its scope (`labels_of`). `max_sets` is the number of sets of values of `labels` that are
    exported per device, chip, host and so on. The code that emits the metric keeps to it, so the
    number of series is known.
    """

    name: str
    kind: Kind
    unit: Unit
    help: str
    scope: Scope
    labels: tuple[str, ...] = ()
    max_sets: int = 1


# On every series of a host: what alerts and dashboards join on.
HOST_LABELS = ("slice", "worker", "node", "accelerator", "topology", "compute_class")
# On a chip's and a device's series: whose work runs there.
WORKLOAD_LABELS = ("namespace", "pod", "container", "model", "deployment", "replica")
_SCOPE_LABELS: Mapping[Scope, tuple[str, ...]] = {
    # Without `chip`, but with `device_id`, where the chip of a device is not known.
    Scope.DEVICE: ("chip", "core", "device_id", *WORKLOAD_LABELS),
    Scope.CHIP: ("chip", *WORKLOAD_LABELS),
    # Numbered as the interconnect does, which no public source maps to our chips.
    Scope.LINK: ("tray", "tray_chip", "port"),
    Scope.HOST: (),
    Scope.COLLECTOR: ("collector", "target"),
    # Without `compute_class` for what no engine has taken.
    Scope.CLASS: ("model", "compute_class"),
    # Without `model` for a request that named none that is served.
    Scope.MODEL: ("model",),
    Scope.GATEWAY: (),
    Scope.SLICE: ("slice", "model", "compute_class"),
    Scope.ENGINE: ("engine", "slice", "model", "compute_class"),
}
# The reports of gateways. Several may answer behind one address: `gateway` on each series of the
# page distinguishes them.
GATEWAY_LABEL = "gateway"
_OF_GATEWAYS = frozenset({Scope.CLASS, Scope.MODEL, Scope.GATEWAY, Scope.SLICE, Scope.ENGINE})

# Finite bounds of an exported histogram.
MAX_BUCKETS = 20
# A TensorCore and a SparseCore.
_CORE_TYPES = 2
# Sizes, kinds and transports of DCN transfers. The largest set of them in the recordings that we
# know has 2; runtimes make up the texts, so something has to bound them.
_DCN_SETS = 4
# Codes of one collector that have been counted since the exporter's start.
_ERROR_CODES = 16
# How a sequence ends: five by the engine, one by the gateway, seven errors
# (`serving.domain.errors`).
_OUTCOMES = 13
# Admitted, or refused with one of the errors that the edge raises.
_ADMISSIONS = 8
# Routes of the edge times the statuses that one is answered with.
_RESPONSES = 21 * 10
_LEDGER_STATES = 8
# Names of API keys at most, by `auth.max_tenants`; and who has none.
MAX_TENANTS = 50
_TENANTS = MAX_TENANTS + 1
# One more for what is attributed to nobody.
_LEDGER_TENANTS = _TENANTS + 1
# As vLLM reports them.
_WAITING_REASONS, _TOKEN_SOURCES = 2, 3
# Draft tokens of one step at most that are distinguished by position.
MAX_DRAFT_POSITIONS = 16
# Why a slice ends (`serving.domain.slice_lifecycle`).
_END_CAUSES = 5


def labels_of(metric: Metric) -> tuple[str, ...]:
    """Returns every label that a series of the metric may have; one without a value is left out."""
    all_of = (GATEWAY_LABEL,) if metric.scope in _OF_GATEWAYS else HOST_LABELS
    return (*all_of, *_SCOPE_LABELS[metric.scope], *metric.labels)


def _gauge(
    name: str, unit: Unit, meaning: str, scope: Scope, *labels: str, max_sets: int = 1
) -> Metric:
    return Metric(name, Kind.GAUGE, unit, meaning, scope, labels, max_sets)


def _counter(
    name: str, unit: Unit, meaning: str, scope: Scope, *labels: str, max_sets: int = 1
) -> Metric:
    return Metric(name, Kind.COUNTER, unit, meaning, scope, labels, max_sets)


def _seconds(name: str, meaning: str, scope: Scope, *labels: str, max_sets: int = 1) -> Metric:
    return Metric(name, Kind.HISTOGRAM, Unit.SECONDS, meaning, scope, labels, max_sets)


# The reports of `slicewise tpu-exporter` on the chips.
TPU_CHIPS = (
    _gauge(
        "tpu_duty_cycle_ratio",
        Unit.RATIO,
        "Share of the runtime's last sample period in which the device was busy",
        Scope.DEVICE,
    ),
    _gauge(
        "tpu_tensorcore_utilization_ratio",
        Unit.RATIO,
        "Operations of the TensorCore relative to its peak",
        Scope.DEVICE,
    ),
    _gauge("tpu_hbm_used_bytes", Unit.BYTES, "HBM that the runtime has allocated", Scope.DEVICE),
    _gauge("tpu_hbm_capacity_bytes", Unit.BYTES, "HBM that the runtime sees", Scope.DEVICE),
    _gauge(
        "tpu_hbm_bandwidth_utilization_ratio",
        Unit.RATIO,
        "HBM bandwidth in use relative to its peak",
        Scope.DEVICE,
    ),
    _gauge(
        "tpu_tensorcore_idle_seconds",
        Unit.SECONDS,
        "Time since a program last ran on the TensorCore",
        Scope.DEVICE,
    ),
    _gauge(
        "tpu_throttle_ratio",
        Unit.RATIO,
        "Part of the clock rate that the chip is throttled by",
        Scope.CHIP,
    ),
    _gauge(
        "tpu_ici_link_health_score",
        Unit.SCORE,
        "0 healthy, 1 to 5 transient, 6 to 9 persistent but minor, 10 unusable",
        Scope.LINK,
    ),
    _gauge(
        "tpu_hlo_queue_length",
        Unit.COUNT,
        "Programs that are queued or running",
        Scope.DEVICE,
        "core_type",
        max_sets=_CORE_TYPES,
    ),
    _seconds(
        "tpu_hlo_execution_seconds",
        "From a program's being queued to its end",
        Scope.DEVICE,
        "core_type",
        max_sets=_CORE_TYPES,
    ),
    _gauge(
        "tpu_chip_info",
        Unit.FLAG,
        "Always 1: a chip of the host, by every name that it has",
        Scope.DEVICE,
        "pci",
        "dev_path",
        "generation",
    ),
)
TPU_HOST = (
    _gauge(
        "tpu_runtime_uptime_seconds",
        Unit.SECONDS,
        "Age of the TPU runtime",
        Scope.COLLECTOR,
        "framework",
        "framework_version",
    ),
    _gauge(
        "tpu_megascale_error",
        Unit.FLAG,
        "1 while the runtime reports an error between slices",
        Scope.HOST,
        "error_type",
        max_sets=_DCN_SETS,
    ),
    _gauge(
        "tpu_slice_error",
        Unit.FLAG,
        "1 while the runtime reports an error of the slice",
        Scope.HOST,
    ),
    _gauge("tpu_chips_expected", Unit.COUNT, "Chips that the host should have", Scope.HOST),
    _gauge("tpu_chips_detected", Unit.COUNT, "Chips on the host's PCI bus", Scope.HOST),
    _gauge(
        "tpu_chips_reporting",
        Unit.COUNT,
        "Chips of which the source gave a value in this scrape",
        Scope.HOST,
        "source",
        max_sets=3,
    ),
    _gauge(
        "tpu_host_sample_age_seconds",
        Unit.SECONDS,
        "Age of the values that the libtpu SDK gave, which are polled rarely",
        Scope.HOST,
    ),
)
# Between slices, over the data centre's network. One slice alone has none of them.
TPU_DCN = (
    *(
        _seconds(
            f"tpu_dcn_{way}_latency_seconds",
            meaning,
            Scope.HOST,
            "buffer_size",
            "transport",
            max_sets=_DCN_SETS,
        )
        for way, meaning in (
            ("transfer", "Latency of a send between slices"),
            ("inbound_transfer", "Latency of a receive between slices"),
        )
    ),
    _seconds(
        "tpu_dcn_collective_latency_seconds",
        "A collective operation between slices from end to end",
        Scope.HOST,
        "input_size",
        "collective",
        max_sets=_DCN_SETS,
    ),
    *(
        _seconds(name, meaning, Scope.HOST, "buffer_size", max_sets=_DCN_SETS)
        for name, meaning in (
            ("tpu_host_to_device_transfer_latency_seconds", "Latency of a copy to a device"),
            ("tpu_device_to_host_transfer_latency_seconds", "Latency of a copy from a device"),
            ("tpu_host_compute_latency_seconds", "Work of the host between transfers"),
        )
    ),
    _seconds("tpu_dcn_tcp_min_rtt_seconds", "Shortest round trip of TCP", Scope.HOST),
    Metric(
        "tpu_dcn_tcp_delivery_rate_bytes_per_second",
        Kind.HISTOGRAM,
        Unit.BYTES_PER_SECOND,
        "Delivery rate of TCP",
        Scope.HOST,
    ),
    _counter("tpu_dcn_tcp_bytes_sent_total", Unit.BYTES, "Bytes sent over TCP", Scope.HOST),
    _counter(
        "tpu_dcn_tcp_bytes_retransmitted_total", Unit.BYTES, "Bytes sent once more", Scope.HOST
    ),
    _counter("tpu_dcn_tcp_packets_sent_total", Unit.COUNT, "Packets sent over TCP", Scope.HOST),
    _counter(
        "tpu_dcn_tcp_packets_retransmitted_total", Unit.COUNT, "Packets sent once more", Scope.HOST
    ),
)
TPU_EXPORTER = (
    _gauge(
        "tpu_scrape_collector_success",
        Unit.FLAG,
        "1 if the collector answered completely in this scrape",
        Scope.COLLECTOR,
    ),
    _gauge(
        "tpu_scrape_collector_duration_seconds",
        Unit.SECONDS,
        "Wall time that the collector took in this scrape",
        Scope.COLLECTOR,
    ),
    _counter(
        "tpu_scrape_collector_errors_total",
        Unit.COUNT,
        "What went wrong in the collector, by reason",
        Scope.COLLECTOR,
        "code",
        max_sets=_ERROR_CODES,
    ),
    _gauge(
        "tpu_exporter_build_info",
        Unit.FLAG,
        "Always 1: the version of the exporter",
        Scope.HOST,
        "version",
    ),
)

# Every gateway reports the requests that go through it. Each answer that a request asks for is
# a sequence; what the HTTP edge counts are requests.
SERVING_LATENCY = (
    _seconds(
        "slicewise_time_to_first_token_seconds",
        "From the arrival of a request to the first token of a sequence at the gateway",
        Scope.CLASS,
    ),
    _seconds(
        "slicewise_time_per_output_token_seconds",
        "Mean time of the tokens of a sequence after its first; none for a single token",
        Scope.CLASS,
    ),
    _seconds(
        "slicewise_inter_token_seconds",
        "Time between two outputs of a sequence, moves to another engine included",
        Scope.CLASS,
    ),
    _seconds(
        "slicewise_request_duration_seconds",
        "From the arrival of a request to the last byte of its answer, errors left out",
        Scope.CLASS,
    ),
    _seconds(
        "slicewise_queue_time_seconds",
        "How long a sequence waited for an engine of any class to take it",
        Scope.CLASS,
    ),
    _seconds(
        "slicewise_engine_time_seconds",
        "From giving a sequence to an engine to its last token: engine, link and moves",
        Scope.CLASS,
    ),
    _seconds(
        "slicewise_gateway_input_seconds",
        "From the arrival of a request to its sequence's being ready for an engine, waits left out",
        Scope.CLASS,
    ),
    _seconds(
        "slicewise_gateway_output_seconds",
        "From the arrival of an engine's output to its being handed over for writing, of one output"
        " in eight of each sequence",
        Scope.CLASS,
    ),
    _seconds(
        "slicewise_resume_stall_seconds",
        "From losing or leaving an engine to the sequence's next token elsewhere",
        Scope.CLASS,
    ),
)
SERVING_COUNTS = (
    _counter(
        "slicewise_sequences_total",
        Unit.COUNT,
        "Sequences that ended, by how: stop, length, repetition, abort, error by the engine; "
        "aborted by the gateway, its client gone or a stop string found; or the code of our error",
        Scope.CLASS,
        "outcome",
        max_sets=_OUTCOMES,
    ),
    _counter(
        "slicewise_input_tokens_total",
        Unit.COUNT,
        "Tokens of the prompts given to engines, those in a prefix cache included",
        Scope.CLASS,
        "tenant",
        max_sets=_TENANTS,
    ),
    _counter(
        "slicewise_cached_input_tokens_total",
        Unit.COUNT,
        "Tokens of prompts that an engine had in its prefix cache",
        Scope.CLASS,
        "tenant",
        max_sets=_TENANTS,
    ),
    _counter(
        "slicewise_output_tokens_total",
        Unit.COUNT,
        "Tokens from engines",
        Scope.CLASS,
        "tenant",
        max_sets=_TENANTS,
    ),
    _counter(
        "slicewise_resumes_total",
        Unit.COUNT,
        "Moves of a sequence to another engine, by the class left: the engine was lost or draining",
        Scope.CLASS,
        "cause",
        max_sets=2,
    ),
    _gauge("slicewise_sequences_in_flight", Unit.COUNT, "Sequences on engines", Scope.CLASS),
    _gauge(
        "slicewise_requests_waiting",
        Unit.COUNT,
        "Requests and sequences that wait for an engine",
        Scope.MODEL,
    ),
    _gauge(
        "slicewise_links",
        Unit.COUNT,
        "Links to engines that are up, by whether the engine takes requests (ready) or drains",
        Scope.CLASS,
        "state",
        max_sets=2,
    ),
    _counter(
        "slicewise_link_losses_total",
        Unit.COUNT,
        "Links that ended: lost without a word, or while the engine was draining",
        Scope.CLASS,
        "cause",
        max_sets=2,
    ),
    _counter(
        "slicewise_admissions_total",
        Unit.COUNT,
        "Requests that were admitted, or refused with the code of our error",
        Scope.MODEL,
        "result",
        "tenant",
        max_sets=_ADMISSIONS * _TENANTS,
    ),
    _counter(
        "slicewise_http_responses_total",
        Unit.COUNT,
        "Answers begun, by the status that they began with",
        Scope.MODEL,
        "route",
        "status",
        max_sets=_RESPONSES,
    ),
    _counter(
        "slicewise_cancellations_total",
        Unit.COUNT,
        "Requests whose client left before it had the whole answer",
        Scope.MODEL,
        "tenant",
        max_sets=_TENANTS,
    ),
)
# The report of an engine to every gateway over its link: of all its requests, whoever sent them.
ENGINES = (
    _gauge("slicewise_engine_running", Unit.COUNT, "Sequences in the engine's batch", Scope.ENGINE),
    _gauge(
        "slicewise_engine_waiting",
        Unit.COUNT,
        "Sequences that the engine has and does not run yet",
        Scope.ENGINE,
    ),
    _gauge(
        "slicewise_engine_kv_usage_ratio",
        Unit.RATIO,
        "Share of the engine's KV cache in use",
        Scope.ENGINE,
    ),
)
# vLLM's own, by its names, of each linked engine and all of its requests, as vLLM 0.32.0 derives
# them from a scheduler's steps. One gateway at a time shows those of an engine. `model_name` has
# what `model` has. Other families of vLLM are its frontend's, of the requests at one gateway, and
# not listed here.
VLLM_ENGINES = (
    *(
        Metric(f"vllm:{name}", kind, Unit.COUNT, meaning, Scope.ENGINE, ("model_name", *more), sets)
        for name, kind, meaning, more, sets in (
            ("num_requests_running", Kind.GAUGE, "Requests in the engine's batch", (), 1),
            ("num_requests_waiting", Kind.GAUGE, "Requests that wait in the engine", (), 1),
            (
                "num_requests_waiting_by_reason",
                Kind.GAUGE,
                "Those waiting for room (capacity), and for something else (deferred)",
                ("reason",),
                _WAITING_REASONS,
            ),
            ("kv_cache_usage_perc", Kind.GAUGE, "Share of the KV cache in use, 1 for all", (), 1),
            ("num_preemptions_total", Kind.COUNTER, "Requests put back for want of room", (), 1),
            ("prompt_tokens_total", Kind.COUNTER, "Prompt tokens processed", (), 1),
            (
                "prompt_tokens_by_source_total",
                Kind.COUNTER,
                "Prompt tokens by whether they were computed or found",
                ("source",),
                _TOKEN_SOURCES,
            ),
            ("prompt_tokens_cached_total", Kind.COUNTER, "Prompt tokens not computed", (), 1),
            ("generation_tokens_total", Kind.COUNTER, "Tokens generated", (), 1),
            ("prefix_cache_queries_total", Kind.COUNTER, "Tokens looked up", (), 1),
            ("prefix_cache_hits_total", Kind.COUNTER, "Tokens found in the prefix cache", (), 1),
            ("external_prefix_cache_queries_total", Kind.COUNTER, "Tokens looked up", (), 1),
            ("external_prefix_cache_hits_total", Kind.COUNTER, "Tokens found outside", (), 1),
            ("iteration_tokens_total", Kind.HISTOGRAM, "Tokens of one engine step", (), 1),
            ("spec_decode_num_drafts_total", Kind.COUNTER, "Drafts", (), 1),
            ("spec_decode_num_draft_tokens_total", Kind.COUNTER, "Tokens of drafts", (), 1),
            ("spec_decode_num_accepted_tokens_total", Kind.COUNTER, "Of those accepted", (), 1),
            (
                "spec_decode_num_accepted_tokens_per_pos_total",
                Kind.COUNTER,
                "Of those accepted, by their position in the draft",
                ("position",),
                MAX_DRAFT_POSITIONS,
            ),
        )
    ),
)
# Shown as those of vLLM are: by one gateway for each engine.
ENGINE_STEPS = (
    _counter(
        "slicewise_engine_steps_total",
        Unit.COUNT,
        "Steps of the engine that followed another at once, whose length is known",
        Scope.ENGINE,
    ),
    _counter(
        "slicewise_engine_step_seconds_total",
        Unit.SECONDS,
        "Length of those steps; divided by their number it is the mean time of one",
        Scope.ENGINE,
    ),
)
# Compiled programs of engines on TPU. See docs/operate/compile-cache.md.
PROGRAMS = (
    _counter(
        "slicewise_programs_found_total",
        Unit.COUNT,
        "Programs that the engine's processes found in JAX's cache, over all hosts",
        Scope.ENGINE,
    ),
    _counter(
        "slicewise_programs_compiled_total",
        Unit.COUNT,
        "Programs that were not there and were compiled",
        Scope.ENGINE,
    ),
    _counter(
        "slicewise_programs_late_total",
        Unit.COUNT,
        "Programs that were found or compiled only once the engine served",
        Scope.ENGINE,
    ),
    _counter(
        "slicewise_programs_moved_bytes_total",
        Unit.BYTES,
        "Bytes of programs between the store and the engine's hosts (pull, push)",
        Scope.ENGINE,
        "direction",
        max_sets=2,
    ),
    _counter(
        "slicewise_programs_move_seconds_total",
        Unit.SECONDS,
        "Time that pulls and pushes took, added up over hosts",
        Scope.ENGINE,
        "direction",
        max_sets=2,
    ),
    _counter(
        "slicewise_programs_damaged_total",
        Unit.COUNT,
        "Programs of the store or of a host's disk that were not what they should have been",
        Scope.ENGINE,
    ),
    _counter(
        "slicewise_programs_move_failures_total",
        Unit.COUNT,
        "Pulls and pushes that a store or the budget cut short",
        Scope.ENGINE,
    ),
)
# The other side of each link, as this gateway sees it.
LINKS = (
    _counter(
        "slicewise_link_bytes_total",
        Unit.BYTES,
        "Bytes over the link to this engine, as the gateway sees them (in, out)",
        Scope.ENGINE,
        "direction",
        max_sets=2,
    ),
    _counter(
        "slicewise_link_messages_total",
        Unit.COUNT,
        "Messages over the link to this engine, heartbeats included",
        Scope.ENGINE,
        "direction",
        max_sets=2,
    ),
    _gauge(
        "slicewise_link_silence_seconds",
        Unit.SECONDS,
        "Time since anything was heard of the engine host",
        Scope.ENGINE,
    ),
    _gauge(
        "slicewise_link_round_trip_seconds",
        Unit.SECONDS,
        "The latest round trip of a heartbeat, both event loops included",
        Scope.ENGINE,
    ),
)
# The slice ledger: of the whole fleet, the same at every gateway. See docs/reference/metrics.md.
LEDGER = (
    _counter(
        "slicewise_ledger_chip_seconds_total",
        Unit.SECONDS,
        "Chips times time in each state since the ledger began",
        Scope.CLASS,
        "state",
        max_sets=_LEDGER_STATES,
    ),
    _counter(
        "slicewise_ledger_cost_usd_total",
        Unit.USD,
        "Price of the chip-seconds; nothing for provisioning, absent for a class without a price",
        Scope.CLASS,
        "state",
        max_sets=_LEDGER_STATES,
    ),
    _counter(
        "slicewise_ledger_tenant_chip_seconds_total",
        Unit.SECONDS,
        "Chips times time of serving, shared among the tenants that were served",
        Scope.CLASS,
        "tenant",
        max_sets=_LEDGER_TENANTS,
    ),
    _counter(
        "slicewise_ledger_tenant_cost_usd_total",
        Unit.USD,
        "Price of those; absent for a class without a price",
        Scope.CLASS,
        "tenant",
        max_sets=_LEDGER_TENANTS,
    ),
    _counter(
        "slicewise_ledger_output_tokens_total",
        Unit.COUNT,
        "Tokens that the engines on these slices gave, for all gateways, by tenant",
        Scope.CLASS,
        "tenant",
        max_sets=_TENANTS,
    ),
    _gauge(
        "slicewise_ledger_chips",
        Unit.COUNT,
        "Chips now in each state",
        Scope.CLASS,
        "state",
        max_sets=_LEDGER_STATES,
    ),
    _counter(
        "slicewise_ledger_slice_chip_seconds_total",
        Unit.SECONDS,
        "As chip_seconds_total, of one slice; gone with it",
        Scope.SLICE,
        "state",
        max_sets=_LEDGER_STATES,
    ),
    _gauge(
        "slicewise_ledger_start_time_seconds",
        Unit.SECONDS,
        "When this gateway's ledger began, since the epoch",
        Scope.GATEWAY,
    ),
)
# Of the directory's records: of the whole fleet, the same at every gateway.
SLICES = (
    _gauge(
        "slicewise_slice_state_seconds",
        Unit.SECONDS,
        "Time since the slice entered its state; of replicas that have none yet the longest",
        Scope.SLICE,
        # One at a time. Replicas without a slice add a few per class, one for each state.
        "state",
    ),
    _counter(
        "slicewise_slices_ended_total",
        Unit.COUNT,
        "Slices that a replica no longer has, by why, since this gateway began",
        Scope.CLASS,
        "cause",
        max_sets=_END_CAUSES,
    ),
    _gauge(
        "slicewise_slice_patience_seconds",
        Unit.SECONDS,
        "How long a replica waits for a slice of the class before that is called too long; absent "
        "where the configuration does not say",
        Scope.CLASS,
    ),
)
# The autoscaler's last plans (`serving.domain.plan_report`), the same at every gateway; absent
# where nothing scales.
PLANS = (
    _gauge(
        "slicewise_plan_written_time_seconds",
        Unit.SECONDS,
        "When the policy last wrote its plans, since the epoch",
        Scope.GATEWAY,
    ),
    _gauge(
        "slicewise_plan_demand_slices",
        Unit.COUNT,
        "Slices that the load requires, before asking what exists; absent while it is not known",
        Scope.MODEL,
    ),
    _gauge("slicewise_plan_target_slices", Unit.COUNT, "Slices that are planned", Scope.CLASS),
    _gauge(
        "slicewise_plan_refused_slices",
        Unit.COUNT,
        "Slices that are wanted and not planned; without a class: of all of them",
        Scope.CLASS,
    ),
    _gauge(
        "slicewise_plan_changed_time_seconds",
        Unit.SECONDS,
        "When the targets last changed, since the epoch; absent before the first change",
        Scope.MODEL,
    ),
    _gauge(
        "slicewise_plan_next_slice_time_seconds",
        Unit.SECONDS,
        "When one more slice is expected to be ready, since the epoch; absent: none is on its way",
        Scope.MODEL,
    ),
    _gauge(
        "slicewise_plan_alerts",
        Unit.COUNT,
        "What the policy finds wrong; without a model: with the policy as a whole",
        Scope.MODEL,
    ),
    _counter(
        "slicewise_plan_failures_total",
        Unit.COUNT,
        "Decisions that failed since the policy started; the plan before stood",
        Scope.MODEL,
    ),
)

TRACES = (
    _counter(
        "slicewise_trace_spans_total",
        Unit.COUNT,
        "Spans of traces by outcome: sent, or dropped because the collector was away or too slow",
        Scope.GATEWAY,
        "outcome",
        max_sets=2,
    ),
)

ALL: Mapping[str, Metric] = MappingProxyType(
    {
        metric.name: metric
        for metric in (
            *(*TPU_CHIPS, *TPU_HOST, *TPU_DCN, *TPU_EXPORTER),
            *TRACES,
            *(*SERVING_LATENCY, *SERVING_COUNTS, *LEDGER, *SLICES, *PLANS),
            *(*ENGINES, *VLLM_ENGINES, *ENGINE_STEPS, *PROGRAMS, *LINKS),
        )
    }
)
