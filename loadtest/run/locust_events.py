"""Fires Locust's events of a request: one when it is over and, on request, one for its TTFT.

An event per token would cost more than the token. Locust rounds what it shows; the scorecard is
made from the records.
"""

from typing import Protocol

from loadtest.records import RequestRecord

_MS_PER_S = 1000.0


class FiresEvents(Protocol):
    """Fires events as Locust's `events.request` does."""

    def fire(self, **fields: object) -> None:
        """Notifies every listener."""


class FailedRequestError(Exception):
    """Reports a failure for Locust's table of failures."""


def fire_request(requests: FiresEvents, record: RequestRecord, *, with_ttft: bool = False) -> None:
    """Reports a request to Locust, timed from the instant it was due."""
    over_s = record.ended_s if record.last_s is None else record.last_s
    error = None
    if not record.is_ok:
        # Locust counts failures by their text, so what differs from one to the next stays out.
        error = FailedRequestError(record.error)

    def fire(name: str, at_s: float, length: int, exception: Exception | None) -> None:
        requests.fire(
            request_type=record.api.upper(),
            name=name,
            response_time=(at_s - record.scheduled_s) * _MS_PER_S,
            response_length=length,
            exception=exception,
            context={},
        )

    fire(record.model, over_s, record.output_tokens or record.num_chunks, error)
    if with_ttft and record.first_s is not None:
        fire("ttft", record.first_s, 0, None)
