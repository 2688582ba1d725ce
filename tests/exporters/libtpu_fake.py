"""A libtpu runtime metric service on a real socket, with faults; also a program of its own.

`tpu-info` and the libtpu SDK read it as they read libtpu (`test_outside_readers.py`).
"""

import threading
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc

from serving.exporters.wire import LIBTPU, MessageClass

GIB = 1 << 30
DUTY = "tpu.runtime.tensorcore.dutycycle.percent"
HBM_TOTAL = "tpu.runtime.hbm.memory.total.bytes"
HBM_USED = "tpu.runtime.hbm.memory.usage.bytes"
BANDWIDTH = "tpu.runtime.hbm.utilization.percent"
IDLE = "tpu.runtime.tensorcore.idle_duration.seconds"
UPTIME = "tpu.runtime.uptime.seconds.gauge"
QUEUE = "hlo.queue.size.gauge"
EXECUTION = "hlo.execution.timing.distribution.microseconds"
TRANSFER = "megascale.dcn_transfer_latencies.microsecond.cumulative.distribution"
BYTES_SENT = "megascale.grpc_tcp_bytes_sent.cumulative.count"
MEGASCALE_ERROR = "megascale.error.detected.gauge"


@dataclass
class Faults:
    """What is wrong; everything may be changed while the server runs.

    Calls that hang do so until `release` is set.
    """

    code: grpc.StatusCode | None = None
    failing: dict[str, grpc.StatusCode] = field(default_factory=dict)
    hangs: bool = False
    hanging: set[str] = field(default_factory=set)
    is_empty: bool = False
    missing_devices: set[int] = field(default_factory=set)
    overrides: dict[str, list[MessageClass]] = field(default_factory=dict)
    release: threading.Event = field(default_factory=threading.Event)


class FakeLibtpu:
    """One runtime process with these devices, by their ids within the slice."""

    def __init__(self, devices: Iterable[int] = (0, 1, 2, 3)) -> None:
        self.devices = list(devices)
        self.faults = Faults()
        self.asked: list[str] = []
        self.port = 0
        self._server: grpc.Server | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, address: str = "127.0.0.1") -> "FakeLibtpu":
        """Listens; again on the same port after `stop`."""
        server = grpc.server(ThreadPoolExecutor(32), options=(("grpc.so_reuseport", 0),))
        server.add_generic_rpc_handlers((_handlers(self),))
        self.port = server.add_insecure_port(f"{address}:{self.port}")
        server.start()
        self._server = server
        return self

    def stop(self) -> None:
        if self._server is not None:
            self.faults.release.set()
            self._server.stop(None).wait()
            self._server = None

    def wait(self) -> None:
        assert self._server is not None
        self._server.wait_for_termination()

    def metrics(self) -> dict[str, Callable[[], list[MessageClass]]]:
        devices = [device for device in self.devices if device not in self.faults.missing_devices]
        first = self.devices[0]
        return {
            HBM_TOTAL: lambda: [by_device(device, gauge(31 * GIB)) for device in devices],
            HBM_USED: lambda: [by_device(device, gauge(18 * GIB)) for device in devices],
            DUTY: lambda: [by_device(device, gauge(87.5)) for device in devices],
            BANDWIDTH: lambda: [by_device(device, gauge(41.25)) for device in devices],
            IDLE: lambda: [by_device(device, gauge(0.5)) for device in devices],
            UPTIME: lambda: [
                metric(
                    several(
                        "uptime_attributes", ml_framework_name="JAX", ml_framework_version="0.8.0"
                    ),
                    gauge=gauge(7)["gauge"],
                )
            ],
            QUEUE: lambda: [metric(of_program(device), **gauge(3)) for device in devices],
            EXECUTION: lambda: [
                metric(of_program(device), **distribution([0, 1, 5, 20, 4, 0], 100.0, 560.0))
                for device in devices
            ],
            TRANSFER: lambda: [
                metric(
                    several("megascale", buffer_size="8MB+", type="grpc"),
                    **distribution([0, 2, 8, 3, 1, 0], 1000.0, 3400.0),
                )
            ],
            BYTES_SENT: lambda: [by_device(first, counter(123))],
            MEGASCALE_ERROR: lambda: [],
            "tpu.runtime.of.tomorrow": lambda: [by_device(first, gauge(1))],
        }

    def list_supported(self, _request: MessageClass, context: grpc.ServicerContext) -> MessageClass:
        self.asked.append("list")
        self._misbehave(context, "")
        names = [LIBTPU["SupportedMetric"](metric_name=name) for name in self.metrics()]
        return LIBTPU["ListSupportedMetricsResponse"](supported_metric=names)

    def get(self, request: MessageClass, context: grpc.ServicerContext) -> MessageClass:
        name = request.metric_name
        self.asked.append(name)
        self._misbehave(context, name)
        read = self.metrics().get(name)
        if read is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no metric {name}")
            raise AssertionError("abort returned")
        found = [] if self.faults.is_empty else self.faults.overrides.get(name, read())
        return LIBTPU["MetricResponse"](
            metric=LIBTPU["TPUMetric"](name=name, description="fake", metrics=found)
        )

    def _misbehave(self, context: grpc.ServicerContext, name: str) -> None:
        if self.faults.hangs or name in self.faults.hanging:
            self.faults.release.wait()
        code = self.faults.failing.get(name, self.faults.code)
        if code is not None:
            context.abort(code, "injected")


def _handlers(fake: FakeLibtpu) -> grpc.GenericRpcHandler:
    def unary(
        act: Callable[[MessageClass, grpc.ServicerContext], MessageClass], request: str
    ) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(
            act,
            request_deserializer=LIBTPU[request].FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )

    return grpc.method_handlers_generic_handler(
        "tpu.monitoring.runtime.RuntimeMetricService",
        {
            "ListSupportedMetrics": unary(fake.list_supported, "ListSupportedMetricsRequest"),
            "GetRuntimeMetric": unary(fake.get, "MetricRequest"),
        },
    )


def attribute(key: str, value: int | str) -> MessageClass:
    kind = "int_attr" if isinstance(value, int) else "string_attr"
    return LIBTPU["Attribute"](key=key, value=LIBTPU["AttrValue"](**{kind: value}))


def several(key: str, **values: int | str) -> MessageClass:
    """An attribute that is a list of attributes."""
    listed = [attribute(name, value) for name, value in values.items()]
    kvlist = LIBTPU["KeyValueList"](attributes=listed)
    return LIBTPU["Attribute"](key=key, value=LIBTPU["AttrValue"](kvlist_attr=kvlist))


def of_program(device: int) -> MessageClass:
    return several("hlo", device_ordinal=f"{device}", core_type="tensorcore")


def metric(attributes: MessageClass, **measure: MessageClass) -> MessageClass:
    return LIBTPU["Metric"](attribute=attributes, **measure)


def by_device(device: int, measure: dict[str, MessageClass]) -> MessageClass:
    return metric(attribute("device-id", device), **measure)


def gauge(value: float | str) -> dict[str, MessageClass]:
    kinds = {int: "as_int", float: "as_double", str: "as_string"}
    return {"gauge": LIBTPU["Gauge"](**{kinds[type(value)]: value})}


def counter(value: int) -> dict[str, MessageClass]:
    return {"counter": LIBTPU["Counter"](as_int=value)}


def distribution(
    counts: list[int], scale: float, mean: float, count: int | None = None
) -> dict[str, MessageClass]:
    """Buckets that double; the first of `counts` is below `scale`, the last above all."""
    layout = LIBTPU["Exponential"](num_finite_buckets=len(counts) - 2, growth_factor=2, scale=scale)
    return {
        "distribution": LIBTPU["Distribution"](
            count=sum(counts) if count is None else count,
            mean=mean,
            bucket_options=LIBTPU["BucketOptions"](exponential_buckets=layout),
            bucket_counts=counts,
        )
    }


def main() -> None:
    """Serves four devices on the given port until it is killed."""
    parser = ArgumentParser()
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    fake = FakeLibtpu()
    fake.port = options.port
    fake.start(options.address)
    print(fake.port, flush=True)  # noqa: T201 - whoever started it waits for this line
    fake.wait()


if __name__ == "__main__":
    main()
