"""Which requests leave an engine that is about to go, and when. Pure.

A request that can finish in time stays: moving it would cost a prefill for nothing. The others move
at once, because each step on an engine that is going is a step that has to be computed again in the
prefill elsewhere.
"""

from collections.abc import Iterable

from serving.gateway.flights import Flight

# Of the time an engine has left, this share is kept for moving what did not finish after all.
_MOVE_SHARE = 0.25
_MIN_MOVE_S = 0.5


def stay_until_s(now_s: float, grace_s: float) -> float:
    """When the last request has to leave an engine that goes in `grace_s` seconds."""
    return now_s + max(0.0, grace_s - max(_MIN_MOVE_S, grace_s * _MOVE_SHARE))


def leaving(flights: Iterable[Flight], now_s: float, until_s: float) -> list[Flight]:
    """Those that will not have finished by `until_s`, at the pace each has had so far.

    A request without a bound on its tokens, or without a token yet, counts as one of them.
    """
    return [flight for flight in flights if not _finishes(flight, now_s, until_s)]


def _finishes(flight: Flight, now_s: float, until_s: float) -> bool:
    produced = flight.num_tokens_since_dispatch
    if flight.max_tokens is None or produced <= 0 or now_s >= until_s:
        return False
    pace_s = max(now_s - flight.dispatched_at_s, 0.0) / produced
    return now_s + (flight.max_tokens - len(flight.emitted)) * pace_s <= until_s
