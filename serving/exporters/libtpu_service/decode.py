"""Decodes the answers of libtpu's runtime metric service into values of ours.

Owns what makes a message believable. A sample that is not believable is dropped and counted, never
mended. Does not own the names (`metric_table`), nor which chip a device is on (`chips`). Pure.
"""

from collections import defaultdict
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from serving.exporters.collector import Code, LibtpuAnswers
from serving.exporters.libtpu_service.metric_table import RULES, Form, Rule
from serving.exporters.series import (
    BadDistributionError,
    BadValueError,
    Decoded,
    HistogramValue,
    MetricPoint,
    checked_number,
    histogram,
)
from serving.exporters.wire import LIBTPU, MessageClass

# A bound on what one message can make us compute; fewer than 100 were observed from libtpu.
_MAX_SOURCE_BUCKETS = 1000


class _BadAttributeError(ValueError):
    """The attribute is not what the metric's family has."""


def decode_libtpu(answers: LibtpuAnswers) -> Decoded:
    """Returns every value of ours in the answers of one runtime process."""
    decoded = Decoded()
    for name, data in answers.answers.items():
        rule = RULES.get(name)
        if rule is None:
            continue
        try:
            message = LIBTPU["MetricResponse"].FromString(data)
        except DecodeError:
            decoded.problems[Code.UNREADABLE] += 1
            continue
        _decode_family(rule, message.metric.metrics, decoded)
    return decoded


def _decode_family(rule: Rule, metrics: Iterable[MessageClass], decoded: Decoded) -> None:
    points = []
    for metric in metrics:
        try:
            points.append(_point(rule, metric))
        except _BadAttributeError:
            decoded.problems[Code.BAD_ATTRIBUTE] += 1
        except BadValueError:
            decoded.problems[Code.BAD_VALUE] += 1
        except BadDistributionError:
            decoded.problems[Code.BAD_DISTRIBUTION] += 1
    match rule.form:
        case Form.ORDINAL_GAUGE | Form.ORDINAL_HISTOGRAM:
            decoded.ordinals += points
        case Form.FLAG | Form.HOST_COUNTER:
            decoded.points += _merged(rule, points)
        case Form.DEVICE_GAUGE | Form.RUNTIME_GAUGE | Form.HOST_HISTOGRAM:
            decoded.points += points


def _merged(rule: Rule, points: Iterable[MetricPoint]) -> list[MetricPoint]:
    """Returns one point for each set of labels: any of several flags, the sum of counters."""
    merged: defaultdict[tuple[tuple[str, str], ...], float] = defaultdict(float)
    for point in points:
        assert not isinstance(point.value, HistogramValue)
        if rule.form == Form.FLAG:
            merged[point.labels] = max(merged[point.labels], float(point.value != 0))
        else:
            merged[point.labels] += point.value
    return [MetricPoint(rule.metric, value, None, labels) for labels, value in merged.items()]


def _point(rule: Rule, metric: MessageClass) -> MetricPoint:
    attributes = _attributes(metric)
    labels = tuple((ours, attributes.get(theirs, "")) for theirs, ours in rule.labels.items())
    match rule.form:
        case Form.DEVICE_GAUGE:
            return MetricPoint(rule.metric, _gauge(rule, metric), _device_id(metric), labels)
        case Form.ORDINAL_GAUGE:
            return MetricPoint(rule.metric, _gauge(rule, metric), _ordinal(attributes), labels)
        case Form.ORDINAL_HISTOGRAM:
            return MetricPoint(rule.metric, _histogram(rule, metric), _ordinal(attributes), labels)
        case Form.RUNTIME_GAUGE | Form.FLAG:
            return MetricPoint(rule.metric, _gauge(rule, metric), None, labels)
        case Form.HOST_HISTOGRAM:
            return MetricPoint(rule.metric, _histogram(rule, metric), None, labels)
        case Form.HOST_COUNTER:
            return MetricPoint(rule.metric, _counter(rule, metric), None, labels)


def _device_id(metric: MessageClass) -> int:
    value = metric.attribute.value
    if value.WhichOneof("attr") != "int_attr" or value.int_attr < 0:
        raise _BadAttributeError("no device id")
    return int(value.int_attr)


def _ordinal(attributes: dict[str, str]) -> int:
    """Returns the device among several attributes: text in new libtpu, a number in old ones."""
    text = attributes.get("device_ordinal", "")
    if not (text.isascii() and text.isdigit()):
        raise _BadAttributeError("no device ordinal")
    return int(text)


def _attributes(metric: MessageClass) -> dict[str, str]:
    """Returns the attributes of a metric that has several, by name; releases differ in dashes."""
    attributes = {}
    for item in metric.attribute.value.kvlist_attr.attributes:
        kind = item.value.WhichOneof("attr")
        if kind not in (None, "kvlist_attr"):
            attributes[item.key.replace("-", "_")] = str(getattr(item.value, kind))
    return attributes


def _gauge(rule: Rule, metric: MessageClass) -> float:
    kind = metric.gauge.WhichOneof("value")
    if kind == "as_bool" and rule.form == Form.FLAG:
        return float(metric.gauge.as_bool)
    if kind not in ("as_double", "as_int"):
        raise BadValueError(f"a gauge of kind {kind}")
    return checked_number(rule.metric, getattr(metric.gauge, kind) / rule.divisor)


def _counter(rule: Rule, metric: MessageClass) -> float:
    kind = metric.counter.WhichOneof("value")
    if kind is None:
        raise BadValueError("no counter")
    return checked_number(rule.metric, getattr(metric.counter, kind) / rule.divisor)


def _histogram(rule: Rule, metric: MessageClass) -> HistogramValue:
    if metric.WhichOneof("measure") != "distribution":
        raise BadDistributionError("no distribution")
    message = metric.distribution
    bounds = _upper_bounds(message.bucket_options)
    return histogram(bounds, message.bucket_counts, message.count, message.mean, rule.divisor)


def _upper_bounds(options: MessageClass) -> list[float]:
    """Returns the finite upper bounds: n finite buckets have n + 1, underflow's the lowest."""
    kind = options.WhichOneof("options")
    if kind == "explicit_buckets":
        return list(options.explicit_buckets.bounds)
    if kind is None:
        raise BadDistributionError("no buckets")
    layout = getattr(options, kind)
    if not 0 <= layout.num_finite_buckets < _MAX_SOURCE_BUCKETS:
        raise BadDistributionError(f"{layout.num_finite_buckets} buckets")
    edges = range(layout.num_finite_buckets + 1)
    if kind == "linear_buckets":
        return [layout.offset + layout.width * edge for edge in edges]
    try:
        return [layout.scale * layout.growth_factor**edge for edge in edges]
    except OverflowError:
        raise BadDistributionError("bounds beyond any number") from None
