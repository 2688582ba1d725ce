"""The trace of one sampled request at a gateway: which spans it has, how they are named.

Owns the names of spans, events and attributes on the gateway's side
(`docs/operate/observability.md` lists them) and that every span ends with its request. Does not own
who calls when: the edge, admission and the fleet client do, and only where there is a trace.
Prompts and answers are in no span.
"""

from collections.abc import Mapping

from serving.telemetry.spans import Span, SpanKind

PROVIDER = "slicewise"
# The conventions' names of what a client may ask for; the rest have none. Source: GenAI attributes
# of opentelemetry.io's semantic conventions, read 2026-11-21.
_OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


def request_attributes(method: str, route: str, request_id: str) -> dict[str, str]:
    """Returns the attributes that are known at a request's first byte."""
    attributes = {
        "http.request.method": method,
        "http.route": route,
        "gen_ai.provider.name": PROVIDER,
        "slicewise.request_id": request_id,
    }
    operation = _OPERATIONS.get(route)
    if operation is not None:
        attributes["gen_ai.operation.name"] = operation
    return attributes


class RequestTrace:
    """Traces one HTTP request, from its arrival to the end of its answer."""

    def __init__(self, span: Span) -> None:
        self.trace_id = span.trace_id
        self._span = span
        self._admission: Span | None = None
        self._queue: Span | None = None
        self._num_resumes = 0
        self._has_answered = False
        self._error: str | None = None

    def of_model(self, model: str) -> None:
        """Notes the model."""
        self._span.annotate({"gen_ai.request.model": model})

    def asks_admission(self) -> None:
        """Notes that the body is read; the decision on admission begins here."""
        self._admission = self._span.child("admission", SpanKind.INTERNAL, {})

    def queued(self) -> None:
        """Notes that no engine is ready, and nothing has been promised yet."""
        above = self._admission or self._span
        self._queue = above.child("wait", SpanKind.INTERNAL, {"slicewise.reason": "no engine"})

    def dequeued(self) -> None:
        """Notes that an engine came, or none did in time."""
        if self._queue is not None:
            self._queue.end()

    def record_admission(self, result: str, *, is_refused: bool) -> None:
        """Notes that admission is over: `admitted`, or refused with the code of an error."""
        if is_refused:
            self._error = result
        if self._admission is not None:
            self._admission.annotate({"slicewise.admission": result})
            self._admission.end(result if is_refused else None)

    def sequence(self, request_id: str, num_prompt_tokens: int) -> "SequenceTrace":
        """Begins the trace of a sequence that it asks for, which goes to the fleet."""
        return SequenceTrace(self, self._span, request_id, num_prompt_tokens)

    def answers(self) -> None:
        """Notes that a part of the answer's body is handed over; the first one is an event."""
        if not self._has_answered:
            self._has_answered = True
            self._span.event("first_byte", {})

    def resumed(self) -> None:
        """Notes that one of its sequences has to go on elsewhere."""
        self._num_resumes += 1

    def failed(self, code: str) -> None:
        """Notes that one of its sequences ended with an error; the last one is kept."""
        self._error = code

    def ended(self, status: int | None, *, has_client_left: bool) -> None:
        """Ends the trace. `status` is `None` when no answer was begun."""
        self._span.event("stream_end", {})
        attributes: dict[str, int | bool] = {"slicewise.resumes": self._num_resumes}
        if status is not None:
            attributes["http.response.status_code"] = status
        if has_client_left:
            attributes["slicewise.client_left"] = True
        self._span.annotate(attributes)
        for span in (self._queue, self._admission):
            if span is not None:
                span.end()
        error = self._error
        if error is None and not has_client_left and (status is None or status >= 500):
            error = "exception" if status is None else str(status)
        self._span.end(error)


class SequenceTrace:
    """Traces one sequence of a request: waiting, and an attempt for each engine that gets it."""

    def __init__(
        self, request: RequestTrace, above: Span, request_id: str, num_prompt_tokens: int
    ) -> None:
        self.trace_id = request.trace_id
        self._request = request
        self._above = above
        self._request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._waiting: Span | None = None
        self._attempt: Span | None = None
        self._num_attempts = 0
        self._cause: str | None = None
        self._has_token = False

    @property
    def traceparent(self) -> str | None:
        """The parent of the engine's span; `None` without an engine."""
        return None if self._attempt is None else self._attempt.traceparent

    def waits(self, reason: str) -> None:
        """Notes that there is no engine for it now."""
        if self._waiting is None:
            self._waiting = self._above.child(
                "wait",
                SpanKind.INTERNAL,
                {"slicewise.sequence_id": self._request_id, "slicewise.reason": reason},
            )

    def dispatched(self, engine: Mapping[str, str], route: str, num_engines: int) -> None:
        """Notes that an engine has it. `engine` are its attributes, `route` is the reason."""
        self._end_wait(None)
        self._num_attempts += 1
        self._has_token = False
        attributes: dict[str, str | int] = {
            "gen_ai.provider.name": PROVIDER,
            "slicewise.sequence_id": self._request_id,
            "slicewise.attempt": self._num_attempts,
            "slicewise.route": route,
            "slicewise.engines": num_engines,
            **engine,
        }
        if self._cause is not None:
            attributes["slicewise.resume_cause"] = self._cause
        self._attempt = self._above.child("engine attempt", SpanKind.CLIENT, attributes)

    def emitted(self) -> None:
        """Notes an output with tokens. Runs for every token."""
        if not self._has_token:
            self._has_token = True
            if self._attempt is not None:
                self._attempt.event("first_token", {})

    def migrated(self, cause: str, reason: str, num_emitted: int) -> None:
        """Notes that its engine was `lost` or is `draining`; it goes on elsewhere."""
        self._cause = cause
        self._request.resumed()
        if self._attempt is not None:
            self._attempt.annotate(
                {
                    "slicewise.outcome": cause,
                    "slicewise.reason": reason,
                    "slicewise.emitted_tokens": num_emitted,
                }
            )
            self._attempt.end(cause)
            self._attempt = None

    def ended(self, outcome: str, num_emitted: int) -> None:
        """Ends the trace as the metrics count it."""
        self._end_attempt(outcome, num_emitted, None)

    def failed(self, code: str, num_emitted: int) -> None:
        """Ends the trace with an error that its client reads."""
        self._request.failed(code)
        self._end_attempt(code, num_emitted, code)

    def _end_attempt(self, outcome: str, num_emitted: int, error: str | None) -> None:
        self._end_wait(error)
        if self._attempt is not None:
            self._attempt.annotate(
                {
                    "slicewise.outcome": outcome,
                    "gen_ai.usage.input_tokens": self._num_prompt_tokens,
                    "gen_ai.usage.output_tokens": num_emitted,
                }
            )
            self._attempt.end(error)

    def _end_wait(self, error: str | None) -> None:
        if self._waiting is not None:
            self._waiting.end(error)
            self._waiting = None
