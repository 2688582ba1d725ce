"""The spans of sampled requests at an engine host: one for each, for the time on its engine.

Owns the spans of requests whose gateway sent a `traceparent`, by request id, and the times inside
them: queued, prompt, decoding. Requests without one are not known here. Does not own which requests
there are (`server`).
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from serving.link.messages import Finish, TokenOutput, TokenRequest
from serving.telemetry.spans import Span, SpanKind, Tracer

_FINISHES = {int(finish): finish.name.lower() for finish in Finish}


@dataclass(slots=True)
class _OpenSpan:
    """The state of one sampled request; instants are monotonic seconds, `None` until they come."""

    span: Span
    taken_at_s: float
    scheduled_at_s: float | None = None
    first_at_s: float | None = None
    num_tokens: int = 0


class RequestSpans:
    """The spans of one engine's requests."""

    def __init__(self, tracer: Tracer, engine_id: str) -> None:
        self._tracer = tracer
        self._engine_id = engine_id
        self._open: dict[str, _OpenSpan] = {}

    def __bool__(self) -> bool:
        """Returns whether any sampled request is here; without one, steps cost nothing."""
        return bool(self._open)

    def trace_id(self, request_id: str) -> str | None:
        """Returns the trace of a request that is here; `None` if it has none."""
        opened = self._open.get(request_id)
        return None if opened is None else opened.span.trace_id

    def taken(self, request: TokenRequest) -> None:
        """Notes that a request waits for the engine."""
        if request.traceparent is None:
            return
        attributes: dict[str, str | int] = {
            "slicewise.engine_id": self._engine_id,
            "slicewise.wire_id": request.request_id,
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
            "slicewise.resumed_tokens": len(request.emitted_token_ids),
        }
        span = self._tracer.begin("engine", SpanKind.SERVER, attributes, request.traceparent)
        if span is not None:
            self._open[request.request_id] = _OpenSpan(span, time.monotonic())

    def scheduled(self, request_id: str, at_s: float) -> None:
        """Notes when the engine began with a request (monotonic); later calls are ignored."""
        opened = self._open.get(request_id)
        if opened is not None and opened.scheduled_at_s is None:
            opened.scheduled_at_s = at_s
            opened.span.event("scheduled", {}, _wall_ns(at_s))

    def stepped(self, outputs: Iterable[TokenOutput]) -> None:
        """Notes that the engine made a step."""
        now_s = time.monotonic()
        for output in outputs:
            opened = self._open.get(output.request_id)
            if opened is None:
                continue
            opened.num_tokens += len(output.token_ids)
            if opened.first_at_s is None and output.token_ids:
                opened.first_at_s = now_s
                opened.span.event("first_token", {})
            if output.finish is not None:
                self.ended(output.request_id, _FINISHES[output.finish])

    def ended(self, request_id: str, outcome: str, error: str | None = None) -> None:
        """Notes that a request is no longer here; unknown ones are ignored."""
        opened = self._open.pop(request_id, None)
        if opened is None:
            return
        opened.span.annotate(
            {
                "slicewise.outcome": outcome,
                "gen_ai.usage.output_tokens": opened.num_tokens,
                **_durations(opened, time.monotonic()),
            }
        )
        opened.span.end(error)

    def end_all(self, reason: str) -> None:
        """Ends all spans, because the engine is gone or is being ended."""
        for request_id, opened in list(self._open.items()):
            opened.span.annotate({"slicewise.reason": reason})
            self.ended(request_id, "lost", "lost")


def _durations(opened: _OpenSpan, now_s: float) -> dict[str, float]:
    """Returns the seconds of each part of the time on the engine; a part not begun is left out."""
    durations = {}
    begun_s = opened.taken_at_s if opened.scheduled_at_s is None else opened.scheduled_at_s
    if opened.scheduled_at_s is not None:
        durations["slicewise.engine.queue_s"] = max(0.0, begun_s - opened.taken_at_s)
    if opened.first_at_s is not None:
        durations["slicewise.engine.prefill_s"] = max(0.0, opened.first_at_s - begun_s)
        durations["slicewise.engine.decode_s"] = now_s - opened.first_at_s
    return durations


def _wall_ns(at_s: float) -> int:
    """Returns a monotonic time of this host on its wall clock, in nanoseconds."""
    return time.time_ns() - int((time.monotonic() - at_s) * 1e9)
