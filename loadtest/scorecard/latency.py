"""The latencies of one request, each from one definition. Pure; seconds, `None` where undefined.

Only whole answers have latencies. A request that failed shows among the errors, not as a fast one.
"""

from collections.abc import Callable

from loadtest.records import RequestRecord

Latency = Callable[[RequestRecord], float | None]


def ttft_s(request: RequestRecord) -> float | None:
    """Returns the time from send to first token."""
    return _until(request.first_s, request.sent_s, request)


def ttft_scheduled_s(request: RequestRecord) -> float | None:
    """Returns the time from scheduled instant to first token: the wait of a user."""
    return _until(request.first_s, request.scheduled_s, request)


def e2e_s(request: RequestRecord) -> float | None:
    """Returns the time from send to last token."""
    return _until(request.last_s, request.sent_s, request)


def e2e_scheduled_s(request: RequestRecord) -> float | None:
    """Returns the time from scheduled instant to last token."""
    return _until(request.last_s, request.scheduled_s, request)


def tpot_s(request: RequestRecord) -> float | None:
    """Returns (E2E - TTFT) / (tokens - 1), by the server's usage; `None` for one token."""
    if not request.is_ok or request.first_s is None or request.last_s is None:
        return None
    if request.output_tokens is None or request.output_tokens < 2:
        return None
    return (request.last_s - request.first_s) / (request.output_tokens - 1)


def ntpot_s(request: RequestRecord) -> float | None:
    """Returns E2E / tokens: a price per token that includes the prefill, no measure of pace."""
    whole_s = e2e_s(request)
    return (
        whole_s / request.output_tokens if whole_s is not None and request.output_tokens else None
    )


def schedule_lag_s(request: RequestRecord) -> float:
    """Returns the time from scheduled instant to send: the client's own queue."""
    return request.sent_s - request.scheduled_s


def _until(event_s: float | None, start_s: float, request: RequestRecord) -> float | None:
    return event_s - start_s if event_s is not None and request.is_ok else None
