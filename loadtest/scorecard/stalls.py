"""Measures what requests in flight noticed of the disturbances of the platform. Pure.

A record knows only the longest gap of its request. So a gap near an event shows unless the same
request had a longer one elsewhere, and a request that had no token yet shows in its TTFT instead.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from loadtest.records import EventRecord, RequestRecord

# A preemption is announced 15 to 30 s before it; what it breaks, breaks within that.
AFTER_EVENT_S = 30.0


@dataclass(frozen=True, slots=True)
class EventImpact:
    """The impact of one event on the requests in flight; `number` is its mark in the plots.

    `failed` of them did not end well. `longest_gap_s` is the longest that began within
    `AFTER_EVENT_S` of the event or was going on at it, of any request; `None` without one.
    `added_s` is what it is longer than a usual gap; `None` also where none is known. `error` states
    why the event itself did not come about.
    """

    number: int
    at_s: float
    until_s: float | None
    action: str
    target: str
    detail: str
    error: str | None
    in_flight: int
    failed: int
    longest_gap_s: float | None
    added_s: float | None


def impacts(
    events: Iterable[EventRecord], requests: Iterable[RequestRecord], usual_gap_s: float | None
) -> tuple[EventImpact, ...]:
    """Returns every event, in order. `usual_gap_s` is the median gap of the run."""
    listed = list(requests)
    return tuple(
        _impact(number, event, listed, usual_gap_s) for number, event in enumerate(events, start=1)
    )


def _impact(
    number: int, event: EventRecord, requests: list[RequestRecord], usual_gap_s: float | None
) -> EventImpact:
    hit = [request for request in requests if request.sent_s <= event.at_s < request.ended_s]
    gaps_s = [
        request.longest_gap_s
        for request in requests
        if request.longest_gap_s is not None
        and request.longest_gap_at_s is not None
        and request.longest_gap_at_s <= event.at_s + AFTER_EVENT_S
        and request.longest_gap_at_s + request.longest_gap_s >= event.at_s
    ]
    longest_s = max(gaps_s, default=None)
    added_s = None
    if longest_s is not None and usual_gap_s is not None:
        added_s = max(0.0, longest_s - usual_gap_s)
    return EventImpact(
        number,
        event.at_s,
        event.until_s,
        event.action,
        event.target,
        event.detail,
        event.error,
        in_flight=len(hit),
        failed=sum(not request.is_ok for request in hit),
        longest_gap_s=longest_s,
        added_s=added_s,
    )
