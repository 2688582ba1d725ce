"""Decodes the answers of a host's other sources into values and owners.

The sources are device plugin, SDK and kubelet. Owns the meaning of their pages and texts. Does not
own how they are read. Pure.

Source: `pkg/metrics/prom_metrics.go` of the GKE TPU device plugin at 4626a9f, the documented calls
of `libtpu.sdk.tpumonitoring` 0.0.51; read 2026-11-21.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from google.protobuf.message import DecodeError
from prometheus_client.parser import text_string_to_metric_families

from serving.exporters.chips import HostChip, index_of
from serving.exporters.collector import Code, PluginPage, PodList, SdkValues
from serving.exporters.series import BadValueError, Decoded, MetricPoint, checked_number
from serving.exporters.wire import POD_RESOURCES, MessageClass

_PERCENT = 100.0
# Kept by the plugin for a minute after a workload has gone, and numbered within the slice.
_OF_THE_RUNTIME = {
    "duty_cycle_node": ("tpu_duty_cycle_ratio", _PERCENT),
    "memory_used_node": ("tpu_hbm_used_bytes", 1.0),
    "memory_total_node": ("tpu_hbm_capacity_bytes", 1.0),
}
# Measured by the node itself, and numbered within the host.
_OF_THE_NODE = {
    "tensorcore_utilization_node": ("tpu_tensorcore_utilization_ratio", _PERCENT),
    "memory_bandwidth_utilization_node": ("tpu_hbm_bandwidth_utilization_ratio", _PERCENT),
}
# The page has thousands of other lines, and a parser in Python takes its time over each.
_WANTED_LINE = re.compile(rf"^(?:{'|'.join({**_OF_THE_RUNTIME, **_OF_THE_NODE})})[{{ ].*$", re.M)

_MAX_SCORE = 10
# Such as `1-3`: device 1 is throttled by 30 %.
_THROTTLE_FORM = re.compile(r"(\d+)-(\d+)")
# Such as `tray1.chip3.ici0.int: 0`.
_LINK_FORM = re.compile(r"tray(\d+)\.chip(\d+)\.(ici\d+)(?:\.\w+)?:\s*(\d+)")

_TPU_RESOURCE = "google.com/tpu"


@dataclass(frozen=True, slots=True)
class Pod:
    """The container that Kubernetes gave a chip to."""

    namespace: str
    name: str
    container: str


def decode_plugin_page(page: PluginPage, *, is_only_source: bool) -> Decoded:
    """Returns the values of the page's series by node.

    The plugin's copies of libtpu's values count only where it `is_only_source` of them. They
    outlive the workload by a minute, and a value of a runtime that is gone would be worse than
    none.
    """
    decoded = Decoded()
    try:
        families = list(text_string_to_metric_families("\n".join(_WANTED_LINE.findall(page.text))))
    except ValueError:
        decoded.problems[Code.UNREADABLE] += 1
        return decoded
    for sample in (sample for family in families for sample in family.samples):
        is_of_node = sample.name in _OF_THE_NODE
        if not is_of_node and not is_only_source:
            continue
        metric, divisor = (_OF_THE_NODE if is_of_node else _OF_THE_RUNTIME)[sample.name]
        # An instance and a number.
        number = sample.labels.get("accelerator_id", "").rpartition("-")[2]
        if not (number.isascii() and number.isdigit()):
            decoded.problems[Code.BAD_ATTRIBUTE] += 1
            continue
        try:
            point = MetricPoint(metric, checked_number(metric, sample.value / divisor), int(number))
        except BadValueError:
            decoded.problems[Code.BAD_VALUE] += 1
            continue
        (decoded.host_points if is_of_node else decoded.points).append(point)
    return decoded


def decode_sdk_values(sdk: SdkValues) -> Decoded:
    """Returns the values of the SDK's texts. An empty list means nothing: it may be any fault."""
    decoded = Decoded()
    for name, read in _SDK_FORMS.items():
        for position, text in enumerate(sdk.values.get(name, ())):
            try:
                point = read(position, text)
            except BadValueError:
                decoded.problems[Code.BAD_VALUE] += 1
                continue
            (decoded.points if point.device is None else decoded.host_points).append(point)
    if decoded.points or decoded.host_points:
        decoded.points.append(MetricPoint("tpu_host_sample_age_seconds", sdk.age_s))
    return decoded


def _percentage(metric: str, position: int, text: str) -> MetricPoint:
    try:
        percentage = float(text.strip().removesuffix("%"))
    except ValueError:
        raise BadValueError(text) from None
    return MetricPoint(metric, checked_number(metric, percentage / _PERCENT), position)


def _throttle(_position: int, text: str) -> MetricPoint:
    found = _THROTTLE_FORM.fullmatch(text.strip())
    if found is None or int(found[2]) > _MAX_SCORE:
        raise BadValueError(text)
    return MetricPoint("tpu_throttle_ratio", int(found[2]) / _MAX_SCORE, int(found[1]))


def _link_health(_position: int, text: str) -> MetricPoint:
    found = _LINK_FORM.fullmatch(text.strip())
    if found is None or int(found[4]) > _MAX_SCORE:
        raise BadValueError(text)
    labels = (("tray", found[1]), ("tray_chip", found[2]), ("port", found[3]))
    return MetricPoint("tpu_ici_link_health_score", float(found[4]), None, labels)


# By the SDK's name, of which older releases have another. These alone are worth a child process:
# libtpu's own service has the rest.
_SDK_FORMS: Mapping[str, Callable[[int, str], MetricPoint]] = {
    "tensorcore_util": partial(_percentage, "tpu_tensorcore_utilization_ratio"),
    "tensorcore_utilization": partial(_percentage, "tpu_tensorcore_utilization_ratio"),
    "hbm_util": partial(_percentage, "tpu_hbm_bandwidth_utilization_ratio"),
    "tpu_throttle_score": _throttle,
    "ici_link_health": _link_health,
}
SDK_METRICS = tuple(_SDK_FORMS)


def decode_pods(pods: PodList, chips: tuple[HostChip, ...]) -> tuple[dict[int, Pod], Counter[str]]:
    """Returns the owner of each chip of the host, by its index, and the count of each problem."""
    problems: Counter[str] = Counter()
    try:
        answer = POD_RESOURCES["ListPodResourcesResponse"].FromString(pods.answer)
    except DecodeError:
        return {}, Counter({Code.UNREADABLE: 1})
    owners = {}
    for pod, container, device_id in _given_chips(answer):
        index = index_of(device_id, chips)
        if index is None:
            problems[Code.BAD_ATTRIBUTE] += 1
        else:
            owners[index] = Pod(pod.namespace, pod.name, container.name)
    return owners, problems


def _given_chips(answer: MessageClass) -> Iterator[tuple[MessageClass, MessageClass, str]]:
    for pod in answer.pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                if devices.resource_name == _TPU_RESOURCE:
                    for device_id in devices.device_ids:
                        yield pod, container, device_id
