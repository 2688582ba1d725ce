"""The messages of two gRPC services: libtpu's runtime metrics and the kubelet's pod resources.

Owns the field numbers, which is all that the wire carries. The classes live in descriptor pools of
our own under names of our own: a second copy of the published schema in the default pool breaks as
soon as `tpu-info` is imported into the process, which the TPU build of the engine does. Pure.

Source: `tpu_metric_service.proto` of tpu-info 0.14.2 (Apache-2.0) and `v1/api.proto` of the
kubelet's pod-resources API, read 2026-11-21.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# Any, because the classes are made at import and no checker can know their fields.
MessageClass = Any

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "double": _Field.TYPE_DOUBLE,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "string": _Field.TYPE_STRING,
    "uint64": _Field.TYPE_UINT64,
}


@dataclass(frozen=True, slots=True)
class Field:
    """The description of a message field. `kind` is a scalar or a message; `oneof` its group."""

    number: int
    kind: str
    repeated: bool = False
    oneof: str | None = None


def _many(number: int, kind: str) -> Field:
    return Field(number, kind, repeated=True)


def _one_of(group: str, **choices: tuple[int, str]) -> dict[str, Field]:
    return {name: Field(number, kind, oneof=group) for name, (number, kind) in choices.items()}


Schema = Mapping[str, Mapping[str, Field]]

LIBTPU_SCHEMA: Schema = {
    "ListSupportedMetricsRequest": {"filter": Field(1, "string")},
    "ListSupportedMetricsResponse": {"supported_metric": _many(1, "SupportedMetric")},
    "SupportedMetric": {"metric_name": Field(1, "string")},
    "MetricRequest": {"metric_name": Field(1, "string")},
    "MetricResponse": {"metric": Field(1, "TPUMetric")},
    "TPUMetric": {
        "name": Field(1, "string"),
        "description": Field(2, "string"),
        "metrics": _many(3, "Metric"),
    },
    "Metric": {
        "attribute": Field(1, "Attribute"),
        **_one_of(
            "measure", gauge=(3, "Gauge"), counter=(4, "Counter"), distribution=(5, "Distribution")
        ),
    },
    "Attribute": {"key": Field(1, "string"), "value": Field(2, "AttrValue")},
    "AttrValue": _one_of(
        "attr",
        string_attr=(1, "string"),
        bool_attr=(2, "bool"),
        int_attr=(3, "int64"),
        double_attr=(4, "double"),
        kvlist_attr=(6, "KeyValueList"),
    ),
    "KeyValueList": {"attributes": _many(1, "Attribute")},
    "Gauge": _one_of(
        "value",
        as_double=(1, "double"),
        as_int=(2, "int64"),
        as_string=(3, "string"),
        as_bool=(4, "bool"),
    ),
    "Counter": _one_of("value", as_double=(1, "double"), as_int=(2, "uint64")),
    "Distribution": {
        "count": Field(1, "int64"),
        "mean": Field(2, "double"),
        "bucket_options": Field(6, "BucketOptions"),
        "bucket_counts": _many(7, "int64"),
    },
    "BucketOptions": _one_of(
        "options",
        exponential_buckets=(2, "Exponential"),
        explicit_buckets=(3, "Explicit"),
        linear_buckets=(4, "Linear"),
    ),
    "Exponential": {
        "num_finite_buckets": Field(1, "int32"),
        "growth_factor": Field(2, "double"),
        "scale": Field(3, "double"),
    },
    "Explicit": {"bounds": _many(1, "double")},
    "Linear": {
        "num_finite_buckets": Field(1, "int32"),
        "width": Field(2, "double"),
        "offset": Field(3, "double"),
    },
}
POD_RESOURCES_SCHEMA: Schema = {
    "ListPodResourcesRequest": {},
    "ListPodResourcesResponse": {"pod_resources": _many(1, "PodResources")},
    "PodResources": {
        "name": Field(1, "string"),
        "namespace": Field(2, "string"),
        "containers": _many(3, "ContainerResources"),
    },
    "ContainerResources": {
        "name": Field(1, "string"),
        "devices": _many(2, "ContainerDevices"),
    },
    "ContainerDevices": {
        "resource_name": Field(1, "string"),
        "device_ids": _many(2, "string"),
    },
}


def build_messages(package: str, schema: Schema) -> Mapping[str, MessageClass]:
    """Returns a class for each message, by its name, in a pool of its own."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package}.proto", package=package, syntax="proto3"
    )
    for name, fields in schema.items():
        _add_message(file.message_type.add(name=name), package, fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in schema
    }


def _add_message(
    message: descriptor_pb2.DescriptorProto, package: str, fields: Mapping[str, Field]
) -> None:
    groups: dict[str, int] = {}
    for name, field in fields.items():
        added = message.field.add(
            name=name,
            number=field.number,
            label=_Field.LABEL_REPEATED if field.repeated else _Field.LABEL_OPTIONAL,
        )
        if field.kind in _SCALARS:
            added.type = _SCALARS[field.kind]
        else:
            added.type, added.type_name = _Field.TYPE_MESSAGE, f".{package}.{field.kind}"
        if field.oneof is not None:
            if field.oneof not in groups:
                groups[field.oneof] = len(groups)
                message.oneof_decl.add(name=field.oneof)
            added.oneof_index = groups[field.oneof]


LIBTPU = build_messages("slicewise.libtpu", LIBTPU_SCHEMA)
LIST_SUPPORTED = "/tpu.monitoring.runtime.RuntimeMetricService/ListSupportedMetrics"
GET_METRIC = "/tpu.monitoring.runtime.RuntimeMetricService/GetRuntimeMetric"

POD_RESOURCES = build_messages("slicewise.podresources", POD_RESOURCES_SCHEMA)
LIST_PODS = "/v1.PodResourcesLister/List"
