"""Which version of a model takes a request: the canary or not, the old one or the new one.

While a model is being replaced both of its versions have engines, and a request belongs to one of
them for its whole life. Owns the two choices. Does not own which engine of the version takes it
(`gateway.routing`). Pure.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

# The first bytes of a digest as a number: 2^64 steps between 0 and 1.
_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class VersionView:
    """One version of one model at this gateway.

    `num_ready` are the engines that take requests now. `is_current` says that the configuration
    names it; all others are on their way out.
    """

    version: str
    num_ready: int
    num_in_flight: int
    is_current: bool


@dataclass(frozen=True, slots=True)
class VersionChoice:
    """The version chosen (`None`: the request waits), and why."""

    version: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class CanaryView:
    """The canary of the model that was asked for. `weight` is its share of requests, 0 to 1."""

    name: str
    version: str
    weight: float
    num_ready: int


@dataclass(frozen=True, slots=True)
class CanaryChoice:
    """Whether the canary takes the request, and why."""

    is_taken: bool
    reason: str


def choose_version(versions: Iterable[VersionView]) -> VersionChoice:
    """The version with the fewest requests in flight per ready engine; among equals the current.

    So each version takes what its engines can carry while their number changes. One without a
    ready engine takes nothing.
    """
    ready = [each for each in versions if each.num_ready > 0]
    if not ready:
        return VersionChoice(None, "no version has a ready engine")
    best = min(
        ready,
        key=lambda each: (each.num_in_flight / each.num_ready, not each.is_current, each.version),
    )
    if len(ready) == 1:
        return VersionChoice(best.version, "the only version with a ready engine")
    load = best.num_in_flight / best.num_ready
    return VersionChoice(best.version, f"fewest in flight per ready engine ({load:.2f})")


def choose_canary(key: str, canary: CanaryView) -> CanaryChoice:
    """Whether `key` lies in the canary's share of all keys, and the canary can take it.

    The same key always lies at the same place of one canary version, on every gateway: a user stays
    where they are, also when the weight is raised. Another version draws other users. A canary
    without a ready engine takes nothing.
    """
    if canary.num_ready == 0:
        return CanaryChoice(is_taken=False, reason=f"{canary.name} has no ready engine")
    is_taken = _place(key, canary) < canary.weight
    where = "in" if is_taken else "not in"
    return CanaryChoice(is_taken, f"{where} the {canary.weight:.2%} of {canary.name}")


def _place(key: str, canary: CanaryView) -> float:
    """Where the key lies, from 0 to below 1, for this canary version."""
    text = f"{canary.name}\0{canary.version}\0{key}".encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:_HASH_BYTES], "big")
    return number / (1 << 8 * _HASH_BYTES)
