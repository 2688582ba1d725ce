"""Which engine takes a request. Pure: engines and request in, engine and reason out."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineView:
    """What routing may know of one engine.

    `has_trial` says that a request suspected of killing engines is on it now. One that drains is
    leaving once its requests have to be gone.
    """

    engine_id: str
    num_in_flight: int
    num_dispatched: int
    is_draining: bool = False
    is_leaving: bool = False
    has_trial: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """The engine chosen (`None`: the request waits), and why."""

    engine_id: str | None
    reason: str


def choose_engine(engines: Iterable[EngineView], *, needs_trial: bool) -> Route:
    """The engine with the fewest requests in flight; among equals the least used so far.

    An engine that drains only where there is no other and it is not leaving yet: who asks has been
    let in already, and has nowhere else to go. A request that needs a trial never joins another one
    on trial.
    """
    engines = list(engines)
    candidates = [engine for engine in engines if not engine.is_draining]
    candidates = candidates or [engine for engine in engines if not engine.is_leaving]
    if not candidates:
        return Route(None, "no engine is ready")
    if needs_trial:
        candidates = [engine for engine in candidates if not engine.has_trial]
        if not candidates:
            return Route(None, "every engine has a request on trial")
    best = min(candidates, key=lambda e: (e.num_in_flight, e.num_dispatched, e.engine_id))
    return Route(best.engine_id, f"fewest in flight ({best.num_in_flight})")
