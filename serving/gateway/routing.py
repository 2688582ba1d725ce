"""Decides where a request goes: canary, version and engine, and when it leaves an engine.

The choices on a request's way are made in this order:

1. `choose_canary`: whether the canary of the model takes it;
2. `choose_version`: which version does, while a model is being replaced and both versions have
   engines; the request belongs to that one for its whole life;
3. `choose_engine`: which engine of the version;
4. `to_migrate`: whether it leaves an engine that drains.

Pure: no clock, no I/O, no chance.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from serving.gateway.requests import InFlightRequest

# The first bytes of a digest as a number: 2^64 steps between 0 and 1.
_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class CanaryView:
    """The canary of the requested model. `weight` is its share of requests, 0 to 1."""

    name: str
    version: str
    weight: float
    num_ready: int


@dataclass(frozen=True, slots=True)
class CanaryChoice:
    """The decision whether the canary takes the request, and its reason."""

    is_taken: bool
    reason: str


def choose_canary(key: str, canary: CanaryView) -> CanaryChoice:
    """Decides whether `key` lies in the canary's share of all keys, and the canary can take it.

    A key has one place for each canary version, the same on every gateway. So a user of the canary
    stays with it when the weight is raised. Another version draws other users. A canary without a
    ready engine takes nothing.
    """
    if canary.num_ready == 0:
        return CanaryChoice(is_taken=False, reason=f"{canary.name} has no ready engine")
    is_taken = _place(key, canary) < canary.weight
    where = "in" if is_taken else "not in"
    return CanaryChoice(is_taken, f"{where} the {canary.weight:.2%} of {canary.name}")


def _place(key: str, canary: CanaryView) -> float:
    """Returns where the key lies, from 0 to below 1, for this canary version."""
    text = f"{canary.name}\0{canary.version}\0{key}".encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:_HASH_BYTES], "big")
    return number / (1 << 8 * _HASH_BYTES)


@dataclass(frozen=True, slots=True)
class VersionView:
    """The view of one version of one model at this gateway.

    `num_ready` are the engines that take requests now. `is_current` means that the configuration
    names it; all others are on their way out.
    """

    version: str
    num_ready: int
    num_in_flight: int
    is_current: bool


@dataclass(frozen=True, slots=True)
class VersionChoice:
    """The version chosen (`None`: the request waits), and the reason."""

    version: str | None
    reason: str


def choose_version(versions: Iterable[VersionView]) -> VersionChoice:
    """Chooses the version with the fewest requests in flight per ready engine.

    Among equals the current one is chosen. So each version takes what its engines can carry while
    their number changes. A version without a ready engine takes nothing.
    """
    ready = [version for version in versions if version.num_ready > 0]
    if not ready:
        return VersionChoice(None, "no version has a ready engine")
    best = min(
        ready,
        key=lambda view: (view.num_in_flight / view.num_ready, not view.is_current, view.version),
    )
    if len(ready) == 1:
        return VersionChoice(best.version, "the only version with a ready engine")
    load = best.num_in_flight / best.num_ready
    return VersionChoice(best.version, f"fewest in flight per ready engine ({load:.2f})")


@dataclass(frozen=True, slots=True)
class EngineView:
    """The facts that routing may use of one engine.

    `has_isolated` means that a request suspected of killing engines is on it now; it is known only
    where the request to be routed is a suspect too. An engine that drains is leaving once its
    requests have to be gone.
    """

    engine_id: str
    num_in_flight: int
    num_dispatched: int
    is_draining: bool = False
    is_leaving: bool = False
    has_isolated: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """The engine chosen (`None`: the request waits), and the reason."""

    engine_id: str | None
    reason: str


def choose_engine(engines: Iterable[EngineView], *, needs_isolation: bool) -> Route:
    """Chooses the engine with the fewest requests in flight; among equals the least used so far.

    An engine that drains is chosen only where there is no other and it is not leaving yet: the
    request has been admitted already, and has nowhere else to go. A request that needs isolation
    never joins another isolated one.
    """
    engines = list(engines)
    candidates = [engine for engine in engines if not engine.is_draining]
    candidates = candidates or [engine for engine in engines if not engine.is_leaving]
    if not candidates:
        return Route(None, "no engine is ready")
    if needs_isolation:
        candidates = [engine for engine in candidates if not engine.has_isolated]
        if not candidates:
            return Route(None, "every engine has an isolated request")
    best = min(candidates, key=lambda e: (e.num_in_flight, e.num_dispatched, e.engine_id))
    return Route(best.engine_id, f"fewest in flight ({best.num_in_flight})")


def to_migrate(
    requests: Iterable[InFlightRequest], now_s: float, until_s: float
) -> list[InFlightRequest]:
    """Returns the requests that will not have finished by `until_s`, at each one's own pace so far.

    A request that can finish in time stays: moving it would cost a prefill for nothing. The others
    move at once, because each step on an engine that is going has to be computed again in the
    prefill elsewhere. A request without a bound on its tokens, or without a token yet, is one of
    them.
    """
    return [request for request in requests if not _finishes(request, now_s, until_s)]


def _finishes(request: InFlightRequest, now_s: float, until_s: float) -> bool:
    produced = request.num_tokens_since_dispatch
    if request.max_tokens is None or produced <= 0 or now_s >= until_s:
        return False
    pace_s = max(now_s - request.dispatched_at_s, 0.0) / produced
    return now_s + (request.max_tokens - len(request.emitted)) * pace_s <= until_s
