"""The one table from the metrics of libtpu's runtime service to ours.

Owns names, scales and the attributes that may become labels. Does not own the decoding. Names that
are not here are ignored; none is required, because they drift from release to release.

Source: `metrics.py` and `cli_helper.py` of tpu-info 0.14.2, `pkg/metrics/metrics.go` of the GKE TPU
device plugin at 4626a9f; read 2026-11-21.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

# Units of libtpu's in one of ours. Values are divided: 100 / 1e6 is 0.0001, 100 * 1e-6 is not.
_MICROSECONDS = 1e6
_PERCENT = 100.0
_MEGABITS_PER_S = 8e-6


class Form(StrEnum):
    """The form of a libtpu metric on the wire."""

    DEVICE_GAUGE = "device_gauge"  # the attribute is the device's id within the slice
    ORDINAL_GAUGE = "ordinal_gauge"  # the device is among several attributes
    ORDINAL_HISTOGRAM = "ordinal_histogram"
    RUNTIME_GAUGE = "runtime_gauge"  # one for the process
    FLAG = "flag"  # present or not zero while something is wrong
    HOST_HISTOGRAM = "host_histogram"
    HOST_COUNTER = "host_counter"  # summed over devices; cumulative where it comes from


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule from one metric of libtpu to one of ours.

    A value divided by `divisor` is in our unit. `labels` maps the attributes that become labels:
    their names, with underscores, to ours.
    """

    metric: str
    form: Form
    divisor: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)


_CORE = {"core_type": "core_type"}
_TRANSFER = {"buffer_size": "buffer_size", "type": "transport"}
_COPY = {"buffer_size": "buffer_size"}
_COLLECTIVE = {"input_size": "input_size", "collective_type": "collective"}


def _latency(stem: str, metric: str, labels: Mapping[str, str]) -> tuple[str, Rule]:
    return (
        f"megascale.{stem}.microsecond.cumulative.distribution",
        Rule(metric, Form.HOST_HISTOGRAM, _MICROSECONDS, labels),
    )


def _count(stem: str, metric: str) -> tuple[str, Rule]:
    return f"megascale.{stem}.cumulative.count", Rule(metric, Form.HOST_COUNTER)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "tpu.runtime.hbm.memory.total.bytes": Rule("tpu_hbm_capacity_bytes", Form.DEVICE_GAUGE),
        "tpu.runtime.hbm.memory.usage.bytes": Rule("tpu_hbm_used_bytes", Form.DEVICE_GAUGE),
        "tpu.runtime.tensorcore.dutycycle.percent": Rule(
            "tpu_duty_cycle_ratio", Form.DEVICE_GAUGE, _PERCENT
        ),
        "tpu.runtime.hbm.utilization.percent": Rule(
            "tpu_hbm_bandwidth_utilization_ratio", Form.DEVICE_GAUGE, _PERCENT
        ),
        "tpu.runtime.tensorcore.idle_duration.seconds": Rule(
            "tpu_tensorcore_idle_seconds", Form.DEVICE_GAUGE
        ),
        "hlo.queue.size.gauge": Rule("tpu_hlo_queue_length", Form.ORDINAL_GAUGE, labels=_CORE),
        "hlo.execution.timing.distribution.microseconds": Rule(
            "tpu_hlo_execution_seconds", Form.ORDINAL_HISTOGRAM, _MICROSECONDS, _CORE
        ),
        "tpu.runtime.uptime.seconds.gauge": Rule(
            "tpu_runtime_uptime_seconds",
            Form.RUNTIME_GAUGE,
            labels={
                "ml_framework_name": "framework",
                "ml_framework_version": "framework_version",
            },
        ),
        # Host, launch and time of an error are attributes too: as labels they would never end.
        "megascale.error.detected.gauge": Rule(
            "tpu_megascale_error", Form.FLAG, labels={"error_type": "error_type"}
        ),
        "slice.error.detected.gauge": Rule("tpu_slice_error", Form.FLAG),
        **dict(
            (
                _latency("dcn_transfer_latencies", "tpu_dcn_transfer_latency_seconds", _TRANSFER),
                _latency(
                    "dcn_inbound_transfer_latencies",
                    "tpu_dcn_inbound_transfer_latency_seconds",
                    _TRANSFER,
                ),
                _latency(
                    "collective_end_to_end_latencies",
                    "tpu_dcn_collective_latency_seconds",
                    _COLLECTIVE,
                ),
                _latency(
                    "host_to_device_transfer_latencies",
                    "tpu_host_to_device_transfer_latency_seconds",
                    _COPY,
                ),
                _latency(
                    "device_to_host_transfer_latencies",
                    "tpu_device_to_host_transfer_latency_seconds",
                    _COPY,
                ),
                _latency("mxla_compute_latencies", "tpu_host_compute_latency_seconds", _COPY),
                _latency("grpc_tcp_min_rtt", "tpu_dcn_tcp_min_rtt_seconds", {}),
                _count("grpc_tcp_bytes_sent", "tpu_dcn_tcp_bytes_sent_total"),
                _count("grpc_tcp_bytes_retransmitted", "tpu_dcn_tcp_bytes_retransmitted_total"),
                _count("grpc_tcp_packets_sent", "tpu_dcn_tcp_packets_sent_total"),
                _count("grpc_tcp_packets_retransmitted", "tpu_dcn_tcp_packets_retransmitted_total"),
            )
        ),
        "megascale.grpc_tcp_delivery_rate.Mbps.cumulative.distribution": Rule(
            "tpu_dcn_tcp_delivery_rate_bytes_per_second", Form.HOST_HISTOGRAM, _MEGABITS_PER_S
        ),
    }
)
