"""The registry of names: every series that we emit or read, with its unit, labels and meaning.

Owns the names, so that a dashboard, a rule or a test can be checked against one list. Does not own
a value or where it comes from. A group of metrics is one tuple; `ALL` joins the groups. Standard
library only, no I/O.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from types import MappingProxyType


class Kind(StrEnum):
    """The type of a metric, as Prometheus names it."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Unit(StrEnum):
    """The base units. The unit is also a word of the name, except for counts and flags."""

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
    SUPPLY = "supply"  # all slices of one compute class, whoever has them
    SLICE = "slice"  # one slice, as long as it is held
    PROVISIONER = "provisioner"  # the slice provisioner of one cluster, and what it sees there
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
    # Empty for slices whose hosts name no class.
    Scope.SUPPLY: ("compute_class",),
    Scope.PROVISIONER: (),
    Scope.SLICE: ("slice", "model", "compute_class"),
    Scope.ENGINE: ("engine", "slice", "model", "compute_class"),
}
# The reports of gateways. Several may answer behind one address: `gateway` on each series of the
# page distinguishes them.
GATEWAY_LABEL = "gateway"
_OF_GATEWAYS = frozenset(
    {Scope.CLASS, Scope.MODEL, Scope.GATEWAY, Scope.SUPPLY, Scope.SLICE, Scope.ENGINE}
)

# Finite bounds of an exported histogram.
MAX_BUCKETS = 20
# A TensorCore and a SparseCore.
_CORE_TYPES = 2
# Sizes, kinds and transports of DCN transfers. The largest set of them in the recordings that we
# know has 2; runtimes make up the texts, so something has to bound them.
_DCN_SETS = 4
# Codes of one collector that have been counted since the exporter's start.
_ERROR_CODES = 16
# How a sequence ends: five by the engine, one by the gateway, thirteen errors
# (`serving.domain.errors`).
_OUTCOMES = 19
# Admitted, or refused with one of the errors that the edge raises.
_ADMISSIONS = 13
# Of an incarnation of a slice (`serving.domain.supply.records`).
_SUPPLY_STATES = 7
# Routes of the edge, and the statuses that one is answered with.
_ROUTES, _STATUSES = 29, 13
# Of a slice that a replica has or waits for; and of any, those that nobody has included.
_HELD_STATES, _LEDGER_STATES = 8, 13
# The most names that API keys may have (`auth.max_tenants`); then one more for keys without.
MAX_TENANTS = 50
_TENANTS = MAX_TENANTS + 1
# One more for what is attributed to nobody.
_LEDGER_TENANTS = _TENANTS + 1
# Quotas of tenants that are shown, by gateways and on `/fleet`; how many there are, nothing bounds.
MAX_TENANT_QUOTAS = 100
# What a quota counts (`serving.domain.usage.quotas`), and the errors of one that is used up.
_QUOTA_KINDS, _QUOTA_REASONS = 5, 2
# Worker groups of a cluster, kinds of failures of a round (`autoscaling.provisioning.errors`),
# words of the kubelet that are told apart, components of a control plane, and what is watched.
_GROUPS, _FAILURE_KINDS, _KUBELET_REASONS, _CONTROL, _WATCHED = 40, 9, 8, 4, 5
# Of all quotas of a namespace, and of all compute classes of a cluster; more are not shown.
MAX_QUOTAS, MAX_CLASSES = 32, 64
# As vLLM reports them.
_WAITING_REASONS, _TOKEN_SOURCES = 2, 3
# Draft tokens of one step at most that are distinguished by position.
MAX_DRAFT_POSITIONS = 16
# Why a slice ends (`serving.domain.slice_lifecycle`).
_END_CAUSES = 7


# The units that a name says.
_UNITS = frozenset(Unit) - {Unit.COUNT, Unit.FLAG, Unit.BYTES_PER_SECOND}


def labels_of(metric: Metric) -> tuple[str, ...]:
    """Returns every label that a series of the metric may have; one without a value is left out."""
    all_of: tuple[str, ...] = (GATEWAY_LABEL,) if metric.scope in _OF_GATEWAYS else HOST_LABELS
    if metric.scope == Scope.PROVISIONER:
        all_of = ()
    return (*all_of, *_SCOPE_LABELS[metric.scope], *metric.labels)


def _metric(kind: Kind, scope: Scope, name: str, meaning: str, labels: Mapping[str, int]) -> Metric:
    """Returns the metric; its unit is in `name`, and `labels` bounds the values of each label."""
    words = reversed(name.split("_"))
    unit = next((Unit(word) for word in words if word in _UNITS), Unit.COUNT)
    return Metric(name, kind, unit, meaning, scope, tuple(labels), prod(labels.values()))


def _gauge(scope: Scope, name: str, meaning: str, **labels: int) -> Metric:
    return _metric(Kind.GAUGE, scope, name, meaning, labels)


def _counter(scope: Scope, name: str, meaning: str, **labels: int) -> Metric:
    return _metric(Kind.COUNTER, scope, name, meaning, labels)


def _histogram(scope: Scope, name: str, meaning: str, **labels: int) -> Metric:
    return _metric(Kind.HISTOGRAM, scope, name, meaning, labels)


def _flag(scope: Scope, name: str, meaning: str, **labels: int) -> Metric:
    return replace(_gauge(scope, name, meaning, **labels), unit=Unit.FLAG)


# The reports of `slicewise tpu-exporter` on the chips.
TPU_CHIPS = (
    _gauge(
        Scope.DEVICE,
        "tpu_duty_cycle_ratio",
        "Share of the runtime's last sample period in which the device was busy",
    ),
    _gauge(
        Scope.DEVICE,
        "tpu_tensorcore_utilization_ratio",
        "Operations of the TensorCore relative to its peak",
    ),
    _gauge(Scope.DEVICE, "tpu_hbm_used_bytes", "HBM that the runtime has allocated"),
    _gauge(Scope.DEVICE, "tpu_hbm_capacity_bytes", "HBM that the runtime sees"),
    _gauge(
        Scope.DEVICE,
        "tpu_hbm_bandwidth_utilization_ratio",
        "HBM bandwidth in use relative to its peak",
    ),
    _gauge(
        Scope.DEVICE,
        "tpu_tensorcore_idle_seconds",
        "Time since a program last ran on the TensorCore",
    ),
    _gauge(
        Scope.CHIP, "tpu_throttle_ratio", "Part of the clock rate that the chip is throttled by"
    ),
    _gauge(
        Scope.LINK,
        "tpu_ici_link_health_score",
        "0 healthy, 1 to 5 transient, 6 to 9 persistent but minor, 10 unusable",
    ),
    _gauge(
        Scope.DEVICE,
        "tpu_hlo_queue_length",
        "Programs that are queued or running",
        core_type=_CORE_TYPES,
    ),
    _histogram(
        Scope.DEVICE,
        "tpu_hlo_execution_seconds",
        "From a program's being queued to its end",
        core_type=_CORE_TYPES,
    ),
    _flag(
        Scope.DEVICE,
        "tpu_chip_info",
        "Always 1: a chip of the host, by every name that it has",
        pci=1,
        dev_path=1,
        generation=1,
    ),
)
TPU_HOST = (
    _gauge(
        Scope.COLLECTOR,
        "tpu_runtime_uptime_seconds",
        "Age of the TPU runtime",
        framework=1,
        framework_version=1,
    ),
    _flag(
        Scope.HOST,
        "tpu_megascale_error",
        "1 while the runtime reports an error between slices",
        error_type=_DCN_SETS,
    ),
    _flag(Scope.HOST, "tpu_slice_error", "1 while the runtime reports an error of the slice"),
    _gauge(Scope.HOST, "tpu_chips_expected", "Chips that the host should have"),
    _gauge(Scope.HOST, "tpu_chips_detected", "Chips on the host's PCI bus"),
    _gauge(
        Scope.HOST,
        "tpu_chips_reporting",
        "Chips of which the source gave a value in this scrape",
        source=3,
    ),
    _gauge(
        Scope.HOST,
        "tpu_host_sample_age_seconds",
        "Age of the values that the libtpu SDK gave, which are polled rarely",
    ),
)
# Between slices, over the data centre's network. One slice alone has none of them.
TPU_DCN = (
    *(
        _histogram(Scope.HOST, name, meaning, buffer_size=_DCN_SETS, transport=1)
        for name, meaning in (
            ("tpu_dcn_transfer_latency_seconds", "Latency of a send between slices"),
            ("tpu_dcn_inbound_transfer_latency_seconds", "Latency of a receive between slices"),
        )
    ),
    _histogram(
        Scope.HOST,
        "tpu_dcn_collective_latency_seconds",
        "A collective operation between slices from end to end",
        input_size=_DCN_SETS,
        collective=1,
    ),
    *(
        _histogram(Scope.HOST, name, meaning, buffer_size=_DCN_SETS)
        for name, meaning in (
            ("tpu_host_to_device_transfer_latency_seconds", "Latency of a copy to a device"),
            ("tpu_device_to_host_transfer_latency_seconds", "Latency of a copy from a device"),
            ("tpu_host_compute_latency_seconds", "Work of the host between transfers"),
        )
    ),
    _histogram(Scope.HOST, "tpu_dcn_tcp_min_rtt_seconds", "Shortest round trip of TCP"),
    Metric(
        "tpu_dcn_tcp_delivery_rate_bytes_per_second",
        Kind.HISTOGRAM,
        Unit.BYTES_PER_SECOND,
        "Delivery rate of TCP",
        Scope.HOST,
    ),
    _counter(Scope.HOST, "tpu_dcn_tcp_bytes_sent_total", "Bytes sent over TCP"),
    _counter(Scope.HOST, "tpu_dcn_tcp_bytes_retransmitted_total", "Bytes sent once more"),
    _counter(Scope.HOST, "tpu_dcn_tcp_packets_sent_total", "Packets sent over TCP"),
    _counter(Scope.HOST, "tpu_dcn_tcp_packets_retransmitted_total", "Packets sent once more"),
)
TPU_EXPORTER = (
    _flag(
        Scope.COLLECTOR,
        "tpu_scrape_collector_success",
        "1 if the collector answered completely in this scrape",
    ),
    _gauge(
        Scope.COLLECTOR,
        "tpu_scrape_collector_duration_seconds",
        "Wall time that the collector took in this scrape",
    ),
    _counter(
        Scope.COLLECTOR,
        "tpu_scrape_collector_errors_total",
        "What went wrong in the collector, by reason",
        code=_ERROR_CODES,
    ),
    _flag(
        Scope.HOST, "tpu_exporter_build_info", "Always 1: the version of the exporter", version=1
    ),
)

# Every gateway reports the requests that go through it. Each answer that a request asks for is a
# sequence; what the HTTP edge counts are requests.
SERVING_LATENCY = (
    _histogram(
        Scope.CLASS,
        "slicewise_time_to_first_token_seconds",
        "From the arrival of a request to the first token of a sequence at the gateway",
    ),
    _histogram(
        Scope.CLASS,
        "slicewise_time_per_output_token_seconds",
        "Mean time of the tokens of a sequence after its first; none for a single token",
    ),
    _histogram(
        Scope.CLASS,
        "slicewise_inter_token_seconds",
        "Time between two outputs of a sequence, moves to another engine included",
    ),
    _histogram(
        Scope.CLASS,
        "slicewise_request_duration_seconds",
        "From the arrival of a request to the last byte of its answer, errors left out",
    ),
    _histogram(
        Scope.CLASS,
        "slicewise_queue_time_seconds",
        "How long a sequence waited for an engine of any class to take it, by class of service",
        service_class=3,
    ),
    _histogram(
        Scope.CLASS,
        "slicewise_engine_time_seconds",
        "From giving a sequence to an engine to its last token: engine, link and moves",
    ),
    _histogram(
        Scope.CLASS,
        "slicewise_gateway_input_seconds",
        "From the arrival of a request to its sequence's being ready for an engine, waits left out",
    ),
    _histogram(
        Scope.CLASS,
        "slicewise_gateway_output_seconds",
        "From the arrival of an engine's output to its being handed over for writing, of one output"
        " in eight of each sequence; without the time for which it was held",
    ),
    _histogram(
        Scope.CLASS,
        "slicewise_gateway_hold_seconds",
        "For how long tokens were held to be sent with later ones, of one output in eight of each"
        " sequence that was held",
    ),
    _histogram(
        Scope.CLASS,
        "slicewise_resume_stall_seconds",
        "From losing or leaving an engine to the sequence's next token elsewhere",
    ),
)
SERVING_COUNTS = (
    _counter(
        Scope.CLASS,
        "slicewise_sequences_total",
        "Sequences that ended, by how: stop, length, repetition, abort, error by the engine; "
        "aborted by the gateway, its client gone or a stop string found; or the code of our error",
        outcome=_OUTCOMES,
    ),
    _counter(
        Scope.CLASS,
        "slicewise_objective_sequences_total",
        "Sequences that met or missed an objective of the model, batch work left out: the first "
        "token (ttft) when it came, by the length of its prompt, and the mean time of those after "
        "it (tpot) at their end",
        objective=2,
        result=2,
    ),
    _counter(
        Scope.CLASS,
        "slicewise_input_tokens_total",
        "Tokens of the prompts given to engines, those in a prefix cache included",
        tenant=_TENANTS,
    ),
    _counter(
        Scope.CLASS,
        "slicewise_cached_input_tokens_total",
        "Tokens of prompts that an engine had in its prefix cache",
        tenant=_TENANTS,
    ),
    _counter(
        Scope.CLASS,
        "slicewise_cache_forecast_tokens_total",
        "Tokens of prompts that the gateway expected in the engine's prefix cache and that were "
        "there (found) or not (missing), and those that were there unexpected (unforeseen)",
        outcome=3,
    ),
    _counter(
        Scope.CLASS,
        "slicewise_named_blocks_total",
        "Blocks of prompts that the gateway named, to know what of them engines have cached",
    ),
    _counter(Scope.CLASS, "slicewise_output_tokens_total", "Tokens from engines", tenant=_TENANTS),
    _counter(
        Scope.CLASS,
        "slicewise_output_chunks_total",
        "Pieces in which those tokens went on to clients: fewer than tokens where a gateway joins",
    ),
    _counter(
        Scope.CLASS,
        "slicewise_dispatches_total",
        "Sequences given to an engine, moved ones again, by what decided that it was this one",
        reason=7,
    ),
    _counter(
        Scope.CLASS,
        "slicewise_resumes_total",
        "Moves of a sequence to another engine, by the class left: the engine was lost or "
        "draining, the sequence yielded to others, or was not begun in time by a slow one",
        cause=4,
    ),
    _gauge(Scope.CLASS, "slicewise_sequences_in_flight", "Sequences on engines"),
    _gauge(
        Scope.MODEL, "slicewise_requests_waiting", "Requests and sequences that wait for an engine"
    ),
    _gauge(
        Scope.MODEL,
        "slicewise_line_sequences",
        "Admitted sequences that wait for room in an engine, by class of service",
        service_class=3,
    ),
    _gauge(
        Scope.MODEL,
        "slicewise_line_tenant_sequences",
        "Admitted sequences in the line of a tenant that has some there, by class of service",
        service_class=3,
        tenant=_TENANTS,
    ),
    _gauge(
        Scope.MODEL,
        "slicewise_promised_sequences",
        "Refused sequences that were told when to come back, and have not come yet",
    ),
    _gauge(
        Scope.CLASS,
        "slicewise_links",
        "Links to engines that are up, by whether the engine takes requests (ready) or drains",
        state=2,
    ),
    _counter(
        Scope.CLASS,
        "slicewise_link_losses_total",
        "Links that ended: lost without a word, or while the engine was draining",
        cause=2,
    ),
    _counter(
        Scope.MODEL,
        "slicewise_admissions_total",
        "Requests that were admitted, or refused with the code of our error",
        result=_ADMISSIONS,
        tenant=_TENANTS,
    ),
    _counter(
        Scope.MODEL,
        "slicewise_http_responses_total",
        "Answers begun, by the status that they began with",
        route=_ROUTES,
        status=_STATUSES,
    ),
    _counter(
        Scope.MODEL,
        "slicewise_cancellations_total",
        "Requests whose client left before it had the whole answer",
        tenant=_TENANTS,
    ),
    _counter(
        Scope.MODEL,
        "slicewise_unread_answers_total",
        "Cancellations of clients that had left too much of the answer unread, and were ended",
        tenant=_TENANTS,
    ),
)
# Of tenants' quotas: uses and limits over all gateways, the same at every gateway but for half a
# second; refusals are each gateway's own.
QUOTAS = (
    *(
        _gauge(
            Scope.GATEWAY,
            f"slicewise_tenant_quota_{name}",
            meaning,
            tenant=MAX_TENANT_QUOTAS,
            kind=1,
            period=1,
            models=1,
        )
        for name, meaning in (
            ("used", "What a tenant has used of a quota in its period, in the unit of its kind"),
            ("limit", "What a quota allows its tenant in its period, in the unit of its kind"),
        )
    ),
    _gauge(
        Scope.GATEWAY,
        "slicewise_tenant_quotas_left_out",
        "Quotas that are not shown, because others are nearer to their limits",
    ),
    _counter(
        Scope.GATEWAY,
        "slicewise_tenant_quota_refusals_total",
        "Requests that were refused because of a tenant's quota",
        tenant=_TENANTS,
        kind=_QUOTA_KINDS,
        reason=_QUOTA_REASONS,
    ),
    _gauge(
        Scope.GATEWAY,
        "slicewise_tenant_quota_answer_age_seconds",
        "Time since the directory last told what other gateways have counted",
    ),
)
# The report of an engine to every gateway over its link: of all its requests, whoever sent them.
ENGINES = (
    _gauge(Scope.ENGINE, "slicewise_engine_running", "Sequences in the engine's batch"),
    _gauge(
        Scope.ENGINE,
        "slicewise_engine_waiting",
        "Sequences that the engine has and does not run yet",
    ),
    _gauge(
        Scope.ENGINE, "slicewise_engine_kv_usage_ratio", "Share of the engine's KV cache in use"
    ),
)
# vLLM's own, by its names, of each linked engine and all of its requests, as vLLM 0.32.0 derives
# them from a scheduler's steps. One gateway at a time shows those of an engine. `model_name` has
# what `model` has. Other families of vLLM are its frontend's, of the requests at one gateway, and
# not listed here.
VLLM_ENGINES = (
    *(
        _gauge(Scope.ENGINE, f"vllm:{name}", meaning, model_name=1)
        for name, meaning in (
            ("num_requests_running", "Requests in the engine's batch"),
            ("num_requests_waiting", "Requests that wait in the engine"),
            ("kv_cache_usage_perc", "Share of the KV cache in use, 1 for all"),
        )
    ),
    *(
        _counter(Scope.ENGINE, f"vllm:{name}", meaning, model_name=1)
        for name, meaning in (
            ("num_preemptions_total", "Requests put back for want of room"),
            ("prompt_tokens_total", "Prompt tokens processed"),
            ("prompt_tokens_cached_total", "Prompt tokens not computed"),
            ("generation_tokens_total", "Tokens generated"),
            ("prefix_cache_queries_total", "Tokens looked up"),
            ("prefix_cache_hits_total", "Tokens found in the prefix cache"),
            ("external_prefix_cache_queries_total", "Tokens looked up"),
            ("external_prefix_cache_hits_total", "Tokens found outside"),
            ("spec_decode_num_drafts_total", "Drafts"),
            ("spec_decode_num_draft_tokens_total", "Tokens of drafts"),
            ("spec_decode_num_accepted_tokens_total", "Of those accepted"),
        )
    ),
    _gauge(
        Scope.ENGINE,
        "vllm:num_requests_waiting_by_reason",
        "Those waiting for room (capacity), and for something else (deferred)",
        model_name=1,
        reason=_WAITING_REASONS,
    ),
    _counter(
        Scope.ENGINE,
        "vllm:prompt_tokens_by_source_total",
        "Prompt tokens by whether they were computed or found",
        model_name=1,
        source=_TOKEN_SOURCES,
    ),
    _counter(
        Scope.ENGINE,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "Of those accepted, by their position in the draft",
        model_name=1,
        position=MAX_DRAFT_POSITIONS,
    ),
    _histogram(
        Scope.ENGINE, "vllm:iteration_tokens_total", "Tokens of one engine step", model_name=1
    ),
)
# Shown as those of vLLM are: by one gateway for each engine.
ENGINE_STEPS = (
    _counter(
        Scope.ENGINE,
        "slicewise_engine_steps_total",
        "Steps of the engine that followed another at once, whose length is known",
    ),
    _counter(
        Scope.ENGINE,
        "slicewise_engine_step_seconds_total",
        "Length of those steps; divided by their number it is the mean time of one",
    ),
    _gauge(
        Scope.ENGINE,
        "slicewise_engine_places",
        "Sequences that the engine may have now: as many as keep the model's objective for later "
        "tokens, all that its scheduler may have without one",
    ),
    _gauge(
        Scope.ENGINE,
        "slicewise_engine_host_longest_turn_seconds",
        "The longest time within the last half minute to minute for which the engine host's event "
        "loop stood still; 0 below 10 ms",
    ),
)
# Compiled programs of engines on TPU. See docs/operate/compile-cache.md.
PROGRAMS = (
    _counter(
        Scope.ENGINE,
        "slicewise_programs_found_total",
        "Programs that the engine's processes found in JAX's cache, over all hosts",
    ),
    _counter(
        Scope.ENGINE,
        "slicewise_programs_compiled_total",
        "Programs that were not there and were compiled",
    ),
    _counter(
        Scope.ENGINE,
        "slicewise_programs_late_total",
        "Programs that were found or compiled only once the engine served",
    ),
    _counter(
        Scope.ENGINE,
        "slicewise_programs_moved_bytes_total",
        "Bytes of programs between the store and the engine's hosts (pull, push)",
        direction=2,
    ),
    _counter(
        Scope.ENGINE,
        "slicewise_programs_move_seconds_total",
        "Time that pulls and pushes took, added up over hosts",
        direction=2,
    ),
    _counter(
        Scope.ENGINE,
        "slicewise_programs_damaged_total",
        "Programs of the store or of a host's disk that were not what they should have been",
    ),
    _counter(
        Scope.ENGINE,
        "slicewise_programs_move_failures_total",
        "Pulls and pushes that a store or the budget cut short",
    ),
)
# The other side of each link, as this gateway sees it.
LINKS = (
    _counter(
        Scope.ENGINE,
        "slicewise_link_bytes_total",
        "Bytes over the link to this engine, as the gateway sees them (in, out)",
        direction=2,
    ),
    _counter(
        Scope.ENGINE,
        "slicewise_link_messages_total",
        "Messages over the link to this engine, heartbeats included",
        direction=2,
    ),
    _gauge(
        Scope.ENGINE,
        "slicewise_link_silence_seconds",
        "Time since anything was heard of the engine host",
    ),
    _gauge(
        Scope.ENGINE,
        "slicewise_link_round_trip_seconds",
        "The latest round trip of a heartbeat, both event loops included",
    ),
)
# The slice ledger: of the whole fleet, the same at every gateway. See docs/reference/metrics.md.
LEDGER = (
    _counter(
        Scope.CLASS,
        "slicewise_ledger_chip_seconds_total",
        "Chips times time in each state since the ledger began",
        state=_LEDGER_STATES,
    ),
    _counter(
        Scope.CLASS,
        "slicewise_ledger_cost_usd_total",
        "Price of the chip-seconds; nothing for provisioning, absent for a class without a price",
        state=_LEDGER_STATES,
    ),
    _counter(
        Scope.CLASS,
        "slicewise_ledger_tenant_chip_seconds_total",
        "Chips times time of serving, shared among the tenants that were served",
        tenant=_LEDGER_TENANTS,
    ),
    _counter(
        Scope.CLASS,
        "slicewise_ledger_tenant_cost_usd_total",
        "Price of those; absent for a class without a price",
        tenant=_LEDGER_TENANTS,
    ),
    _counter(
        Scope.CLASS,
        "slicewise_ledger_output_tokens_total",
        "Tokens that the engines on these slices gave, for all gateways, by tenant",
        tenant=_TENANTS,
    ),
    _gauge(Scope.CLASS, "slicewise_ledger_chips", "Chips now in each state", state=_LEDGER_STATES),
    _counter(
        Scope.SLICE,
        "slicewise_ledger_slice_chip_seconds_total",
        "As chip_seconds_total, of one slice; gone with it",
        state=_HELD_STATES,
    ),
    _gauge(
        Scope.GATEWAY,
        "slicewise_ledger_start_time_seconds",
        "When this gateway's ledger began, since the epoch",
    ),
)
# Of the directory's records: of the whole fleet, the same at every gateway.
SLICES = (
    _gauge(
        Scope.SLICE,
        "slicewise_slice_state_seconds",
        "Time since the slice entered its state; of replicas that have none yet the longest",
        state=1,
    ),
    _gauge(
        Scope.SUPPLY,
        "slicewise_supply_slices",
        "Slices that exist or were asked for, held or not, by their state as supply",
        state=_SUPPLY_STATES,
    ),
    _counter(
        Scope.CLASS,
        "slicewise_slices_ended_total",
        "Slices that a replica no longer has, by why, since this gateway began",
        cause=_END_CAUSES,
    ),
    _gauge(
        Scope.CLASS,
        "slicewise_slice_patience_seconds",
        "How long a replica waits for a slice of the class before that is called too long; absent "
        "where the configuration does not say",
    ),
)
# The autoscaler's last plans (`serving.domain.plan_report`), the same at every gateway; absent
# where nothing scales.
PLANS = (
    _gauge(
        Scope.GATEWAY,
        "slicewise_plan_written_time_seconds",
        "When the policy last wrote its plans, since the epoch",
    ),
    _gauge(
        Scope.MODEL,
        "slicewise_plan_demand_slices",
        "Slices that the load requires, before asking what exists; absent while it is not known",
    ),
    _gauge(Scope.CLASS, "slicewise_plan_target_slices", "Slices that are planned"),
    _gauge(
        Scope.CLASS,
        "slicewise_plan_refused_slices",
        "Slices that are wanted and not planned; without a class: of all of them",
    ),
    _gauge(
        Scope.MODEL,
        "slicewise_plan_changed_time_seconds",
        "When the targets last changed, since the epoch; absent before the first change",
    ),
    _gauge(
        Scope.MODEL,
        "slicewise_plan_next_slice_time_seconds",
        "When one more slice is expected to be ready, since the epoch; absent: none is on its way",
    ),
    _gauge(
        Scope.MODEL,
        "slicewise_plan_alerts",
        "What the policy finds wrong; without a model: with the policy as a whole",
    ),
    _counter(
        Scope.MODEL,
        "slicewise_plan_failures_total",
        "Decisions that failed since the policy started; the plan before stood",
    ),
)

# What `slicewise provision` tells of its rounds and of the slices that it sees; nothing per pod.
PROVISIONING = (
    _counter(
        Scope.PROVISIONER,
        "slicewise_provisioning_rounds_total",
        "Rounds that ended, well or not",
    ),
    _counter(
        Scope.PROVISIONER,
        "slicewise_provisioning_failures_total",
        "Rounds that failed, by the kind of failure",
        kind=_FAILURE_KINDS,
    ),
    _gauge(
        Scope.PROVISIONER,
        "slicewise_provisioning_start_time_seconds",
        "When the process began, since the epoch",
    ),
    _gauge(
        Scope.PROVISIONER,
        "slicewise_provisioning_success_time_seconds",
        "When a round last went well, since the epoch; absent before the first",
    ),
    _gauge(
        Scope.PROVISIONER,
        "slicewise_provisioning_report_age_seconds",
        "Time since the directory was last heard of, at the last look; absent before it ever was",
    ),
    _counter(
        Scope.PROVISIONER,
        "slicewise_provisioning_changed_slices_total",
        "Slices that a worker group was made to gain (add) or to give up (drop)",
        group=_GROUPS,
        direction=2,
    ),
    _gauge(
        Scope.PROVISIONER,
        "slicewise_provisioning_refusals",
        "Changes that the last round refused, by worker group, or by kind where no group makes it",
        group=2 * _GROUPS,
    ),
    _gauge(
        Scope.PROVISIONER,
        "slicewise_provisioning_notes",
        "Remarks on worker groups that cannot be used and on what is not carried over",
    ),
    _flag(
        Scope.PROVISIONER,
        "slicewise_provisioning_frozen",
        "1 while an operator has frozen scaling down",
    ),
    _gauge(
        Scope.PROVISIONER,
        "slicewise_provisioning_slices",
        "Slices by compute class, worker group and state as supply, as the directory reports them",
        compute_class=1,
        group=_GROUPS,
        state=_SUPPLY_STATES,
    ),
    _gauge(
        Scope.PROVISIONER,
        "slicewise_provisioning_unheld_chips",
        "Chips whose machines are there, and are paid for, on slices that no replica has",
        compute_class=1,
        group=_GROUPS,
    ),
    _gauge(
        Scope.PROVISIONER,
        "slicewise_provisioning_oldest_unheld_seconds",
        "Time for which the slice with such chips has had them that has had them longest",
        compute_class=1,
        group=_GROUPS,
    ),
    _gauge(
        Scope.PROVISIONER,
        "slicewise_provisioning_oldest_held_back_seconds",
        "Time for which the slice that is held back longest has been quarantined or condemned",
        compute_class=1,
        group=_GROUPS,
        state=2,
    ),
    _gauge(
        Scope.PROVISIONER,
        "slicewise_provisioning_missing_slices",
        "Slices that a worker group is asked for and that do not have all of their pods",
        group=_GROUPS,
    ),
    _gauge(
        Scope.PROVISIONER,
        "slicewise_provisioning_machineless_pods",
        "Pods of slices that have no machine",
        group=_GROUPS,
    ),
    _gauge(
        Scope.PROVISIONER,
        "slicewise_provisioning_oldest_machineless_seconds",
        "How long the oldest slice with such a pod has had one, since this process began at most",
        group=_GROUPS,
    ),
    _gauge(
        Scope.PROVISIONER,
        "slicewise_provisioning_hindered_pods",
        "Pods of slices with a container that the kubelet cannot start, by its word",
        group=_GROUPS,
        reason=_KUBELET_REASONS,
    ),
)
# What it watches around the slices, of one installation.
CONDITIONS = (
    _flag(
        Scope.PROVISIONER,
        "slicewise_condition_readable",
        "1 if it is watched; else 0 and the kind of failure",
        resource=_WATCHED,
        kind=1,
    ),
    _gauge(
        Scope.PROVISIONER,
        "slicewise_control_pods",
        "Pods of the control plane that stay, ready or not",
        component=_CONTROL,
        state=2,
    ),
    _gauge(
        Scope.PROVISIONER,
        "slicewise_control_pods_wanted",
        "Pods of the control plane that the RayCluster asks for",
        component=_CONTROL,
    ),
    _gauge(
        Scope.PROVISIONER,
        "slicewise_quota_used",
        "What of a resource is counted by a ResourceQuota, in the resource's unit",
        quota=1,
        resource=MAX_QUOTAS,
    ),
    _gauge(
        Scope.PROVISIONER,
        "slicewise_quota_hard",
        "What a ResourceQuota allows of a resource, in the resource's unit",
        quota=1,
        resource=MAX_QUOTAS,
    ),
    _gauge(
        Scope.PROVISIONER,
        "slicewise_class_priorities",
        "Rules of a ComputeClass in its status; 0: GKE says nothing of it",
        class_name=MAX_CLASSES,
    ),
    _gauge(
        Scope.PROVISIONER,
        "slicewise_class_suspended_priorities",
        "Rules of a ComputeClass by which GKE makes no machines for now",
        class_name=MAX_CLASSES,
    ),
)

GATEWAY_LOOP = (
    _gauge(
        Scope.GATEWAY,
        "slicewise_gateway_longest_turn_seconds",
        "The longest time within the last half minute to minute for which the gateway's event loop "
        "stood still; 0 below 10 ms",
    ),
    _gauge(
        Scope.GATEWAY,
        "slicewise_gateway_longest_turn_cpu_seconds",
        "The most CPU time that one such turn took, with the 10 ms before it; far less than the "
        "turn itself, the loop waited for a core",
    ),
)

# Without batches there are none.
BATCHES = (
    _counter(
        Scope.GATEWAY,
        "slicewise_batch_lines_total",
        "Lines of batches by outcome: completed with status 200, failed with another, or refused "
        "for now and asked again",
        outcome=3,
    ),
    _gauge(
        Scope.GATEWAY,
        "slicewise_batches_leased",
        "Batches that the gateway works on",
    ),
)

TRACES = (
    _counter(
        Scope.GATEWAY,
        "slicewise_trace_spans_total",
        "Spans of traces by outcome: sent, or dropped because the collector was away or too slow",
        outcome=2,
    ),
)

ALL: Mapping[str, Metric] = MappingProxyType(
    {
        metric.name: metric
        for metric in (
            *(*TPU_CHIPS, *TPU_HOST, *TPU_DCN, *TPU_EXPORTER),
            *(*GATEWAY_LOOP, *TRACES, *BATCHES),
            *(*SERVING_LATENCY, *SERVING_COUNTS, *QUOTAS, *LEDGER, *SLICES, *PLANS),
            *(*PROVISIONING, *CONDITIONS),
            *(*ENGINES, *VLLM_ENGINES, *ENGINE_STEPS, *PROGRAMS, *LINKS),
        )
    }
)
