"""Asks one libtpu runtime metric service for everything that we know how to read.

Owns the calls and their common deadline. Does not own what the answers mean (`decode`).
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from serving.exporters.collector import Code, CollectError, LibtpuAnswers
from serving.exporters.libtpu_service.metric_table import RULES
from serving.exporters.wire import GET_METRIC, LIBTPU, LIST_SUPPORTED

# The service speaks plain HTTP/2 on loopback and pod addresses; local credentials work on loopback
# alone. Each channel has its own connection, because the process-wide pool would keep the back-off
# of a channel that was given up.
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
# gRPC takes a timeout of 0 for none.
_SHORTEST_S = 0.001


class LibtpuCollector:
    """The collector of one runtime process. Two threads must not call it at once."""

    name = "libtpu"

    def __init__(self, target: str) -> None:
        self.target = target
        self._channel: grpc.Channel | None = None

    def collect(self, timeout_s: float) -> LibtpuAnswers:
        """Asks for the supported metrics, then for all at once, so a hang costs one deadline.

        Raises:
            CollectError: with gRPC's code, if not even the list came.
        """
        deadline_s = time.monotonic() + timeout_s
        # A channel that failed is given up: its back-off grows with the outage, and a runtime that
        # is back after minutes must be found by the next scrape.
        channel = self._channel or grpc.insecure_channel(self.target, _OPTIONS)
        self._channel = None
        try:
            answers = _ask(channel, deadline_s)
        except BaseException:
            channel.close()
            raise
        if answers.failures:
            channel.close()
        else:
            self._channel = channel
        return answers


def _ask(channel: grpc.Channel, deadline_s: float) -> LibtpuAnswers:
    list_supported = channel.unary_unary(
        LIST_SUPPORTED, response_deserializer=LIBTPU["ListSupportedMetricsResponse"].FromString
    )
    get_metric = channel.unary_unary(GET_METRIC)
    try:
        listed = list_supported(b"", timeout=_left_s(deadline_s))
    except grpc.RpcError as error:
        raise _translated(error) from error
    supported = tuple(metric.metric_name for metric in listed.supported_metric)
    calls = {
        name: get_metric.future(
            LIBTPU["MetricRequest"](metric_name=name).SerializeToString(),
            timeout=_left_s(deadline_s),
        )
        for name in dict.fromkeys(supported)
        if name in RULES
    }
    answers, failures = _gather({name: call.result for name, call in calls.items()})
    return LibtpuAnswers(supported=supported, answers=answers, failures=failures)


def _gather(
    calls: Mapping[str, Callable[[], bytes]],
) -> tuple[dict[str, bytes], dict[str, str]]:
    """Returns the answers of calls that are under way, and the codes of those that failed."""
    answers, failures = {}, {}
    for name, result in calls.items():
        try:
            answers[name] = result()
        except grpc.RpcError as error:
            failures[name] = _translated(error).code
    return answers, failures


def _left_s(deadline_s: float) -> float:
    return max(_SHORTEST_S, deadline_s - time.monotonic())


def _translated(error: Any) -> CollectError:
    """Translates gRPC's error, which is `Any` because gRPC's types do not show its methods."""
    code = error.code()
    # An answer that is no such message fails in the deserialiser, which gRPC calls internal.
    if code == grpc.StatusCode.INTERNAL and "deserializ" in f"{error.details()}":
        return CollectError(Code.UNREADABLE, f"{error.details()}")
    return CollectError(code.name, f"{error.details()}")
