"""What traces cost a gateway: its fleet client with none, with none sampled, with all sampled.

`python -m benchmarks.tracing` drives a `FleetEngineClient` and the edge's part of a trace in this
process, with a link that answers at once, and prints CPU time per request side by side: that of the
event loop's thread, which is what a request waits for, and that of the process, in which the thread
that sends the spans and a collector that reads and forgets them are too. The base is the same code
without a tracer, so what its checks for `None` cost is in it: for that, run it before and after.
"""

import asyncio
import random
import statistics
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from serving.gateway.dispatch.admission import FleetLimits
from serving.gateway.dispatch.dispatcher import Dispatcher
from serving.gateway.streams.engine_client import FleetEngineClient
from serving.gateway.telemetry.request_metrics import EdgeMetrics
from serving.gateway.telemetry.request_telemetry import REQUEST_CONTEXT, RequestContext
from serving.link.client import LinkStats
from serving.link.connection import Traffic
from serving.link.messages import (
    CacheDelta,
    CacheSnapshot,
    Finish,
    RoomWanted,
    Step,
    TokenOutput,
    TokenRequest,
)
from serving.telemetry.open_tracer import open_tracer
from serving.telemetry.otlp import OtlpTracer
from serving.telemetry.spans import NO_TRACER, Tracer, TraceSettings

_REQUESTS = 500
_TOKENS = 64
_ROUNDS = 15
_ROUTE = "/v1/completions"


class _Sink(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


class _Link:
    """Takes requests, and answers when it is told to."""

    tells_room = False
    cache_layout = None
    late_s = 0.0

    def __init__(self) -> None:
        self.running: list[str] = []
        self.reported_end = None
        self.stats = LinkStats(Traffic())

    def want_room(self, wanted: RoomWanted) -> None:
        """Nothing: everything is given to it at once."""

    def make_way(self) -> None:
        """Nothing: it has no batch work."""

    def watch_cache(self, on_change: Callable[[CacheSnapshot | CacheDelta], None]) -> None:
        """Nothing: it tells of no cache."""

    def deliver_to(self, on_step: Callable[[Step], None]) -> None:
        self.take_step = on_step

    def submit(self, request: TokenRequest) -> None:
        self.running.append(request.request_id)

    def abort(self, request_ids: list[str]) -> None:
        """Nothing is aborted here."""

    async def call(self, method: str, args: bytes, timeout_s: float) -> bytes:
        raise NotImplementedError


async def _round(tracer: Tracer) -> tuple[float, float]:
    """CPU seconds per request, of the loop and of the process, of requests that run at once."""
    client = FleetEngineClient(Dispatcher("demo", FleetLimits()), ("generate",))
    link = _Link()
    client.dispatcher.add_engine("e1", "local", link)
    params = SamplingParams(max_tokens=_TOKENS)
    edge = EdgeMetrics()
    contexts: list[RequestContext] = []
    began_s = time.thread_time(), time.process_time()
    for number in range(_REQUESTS):
        context = RequestContext(time.monotonic(), str(number), _ROUTE, edge=edge)
        if tracer.is_on:
            context.begin_trace(tracer, "POST", "", "")
        context.body_read()
        context.admitted()
        REQUEST_CONTEXT.set(context)
        contexts.append(context)
        await client.add_request_async(_request(str(number), params))
    for position in range(_TOKENS):
        finish = int(Finish.LENGTH) if position + 1 == _TOKENS else None
        link.take_step(Step([TokenOutput(wire_id, [7], finish) for wire_id in link.running]))
        await client.get_output_async()
    for context in contexts:
        context.ended(time.monotonic(), _ROUTE, 200, is_whole=True, is_cancelled=False)
    spent_s = time.thread_time() - began_s[0]
    if isinstance(tracer, OtlpTracer):
        await asyncio.to_thread(tracer.flush)
    return spent_s / _REQUESTS, (time.process_time() - began_s[1]) / _REQUESTS


def _request(request_id: str, params: SamplingParams) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def main() -> None:
    """Prints the table."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    open_to: Callable[[float], Tracer] = lambda ratio: open_tracer(  # noqa: E731
        TraceSettings(endpoint, ratio), "benchmark", "0"
    )
    tracers = {
        "off": NO_TRACER,
        "none sampled": open_to(0.0),
        "1 in 100 sampled": open_to(0.01),
        "all sampled": open_to(1.0),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in tracers}
    order = list(tracers)
    for number in range(_ROUNDS + 1):
        random.Random(number).shuffle(order)
        for name in order:
            spent_s = asyncio.run(_round(tracers[name]))
            if number:  # the first warms up
                times[name].append(spent_s)
    medians = {
        name: [statistics.median(each) for each in zip(*spent, strict=True)]
        for name, spent in times.items()
    }
    print(f"{_ROUNDS} rounds of {_REQUESTS} requests of {_TOKENS} tokens; medians per request")
    for name, (loop_s, process_s) in medians.items():
        ratio = loop_s / medians["off"][0]
        loop = f"loop {loop_s * 1e6:6.1f} us ({ratio:5.3f})"
        print(f"{name:18} {loop}, process {process_s * 1e6:6.1f} us")
    for name, tracer in tracers.items():
        tracer.close(5.0)
        print(f"{name:18} {tracer.counts}")
    server.shutdown()


if __name__ == "__main__":
    main()
