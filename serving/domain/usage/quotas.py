"""What a tenant may use of the models: quotas, and the count of what it has used. Pure.

A quota bounds what is used in any span of its period, not in the minutes of a clock: what counts
was used within the last period, to a sixtieth of it. Times are wall-clock, in Unix seconds, so that
the counts of several gateways add up.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

# A period is counted in so many parts.
NUM_PARTS = 60


class QuotaKind(StrEnum):
    """What a quota counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"  # of prompts, cached ones included, and of outputs
    CHIP_SECONDS = "chip_seconds"  # as the slice ledger has them
    USD = "usd"  # those chip-seconds at the prices of their compute classes
    CONCURRENT = "concurrent"  # requests in flight, in no period


class Period(StrEnum):
    """The span of time in which a quota counts."""

    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"

    @property
    def seconds(self) -> int:
        """Its length."""
        return _SECONDS[self]

    @property
    def part_s(self) -> int:
        """The length of one of the parts that it is counted in, in seconds."""
        return self.seconds // NUM_PARTS

    def part(self, now_s: float) -> int:
        """Returns the number of the part that a time is in."""
        return math.floor(now_s / self.part_s)

    def first_part(self, now_s: float) -> int:
        """Returns the oldest part that counts: a whole period is covered, and the present part."""
        return self.part(now_s) - NUM_PARTS


_SECONDS = {Period.MINUTE: 60, Period.HOUR: 3600, Period.DAY: 86_400}


@dataclass(frozen=True, slots=True)
class Quota:
    """One bound on what a tenant uses.

    `period` is `None` for requests in flight, and for nothing else. It is on the sum of all
    `models`; `None` means of every model.
    """

    kind: QuotaKind
    limit: float
    period: Period | None = None
    models: frozenset[str] | None = None

    def covers(self, names: Iterable[str]) -> bool:
        """Returns whether a request counts: one of the names that select its model is covered."""
        return self.models is None or not self.models.isdisjoint(names)

    @property
    def key(self) -> str:
        """What tells it from a tenant's other quotas; a limit may change without a new count."""
        return f"{self.kind}/{self.period or ''}/{self._models}"

    @property
    def refusals_key(self) -> str:
        """What tells the count of requests that it has refused from all other counts."""
        return f"refused_{self.kind}/{self.refusals_period}/{self._models}"

    @property
    def refusals_period(self) -> Period:
        """The span in which refusals count: its own, and an hour for requests in flight."""
        return self.period or Period.HOUR

    @property
    def _models(self) -> str:
        return "" if self.models is None else ",".join(sorted(self.models))

    def __str__(self) -> str:
        """Returns it in words."""
        what = self.kind.replace("_", "-")
        limit = f"{format_amount(self.limit)} {what}"
        limit += f" per {self.period}" if self.period else ""
        return limit if self.models is None else f"{limit} of {', '.join(sorted(self.models))}"


@dataclass(frozen=True, slots=True)
class TenantUse:
    """What a tenant has used of a quota at one instant, in its period.

    `refused` requests were refused because of it in its `refusals_period`.
    """

    tenant: str
    quota: Quota
    used: float
    refused: int

    @property
    def ratio(self) -> float:
        """The share of the limit that is used; more than 1 where more was used than is allowed."""
        return self.used / self.quota.limit


def nearest_uses(uses: Iterable[TenantUse], most: int) -> list[TenantUse]:
    """Returns the uses that are nearest to their limits, the nearest first; `most` of them."""
    return heapq.nsmallest(
        most, uses, key=lambda use: (-use.ratio, -use.refused, use.tenant, use.quota.key)
    )


@dataclass(slots=True)
class UsageWindow:
    """What was used in the last period, by its parts."""

    period: Period
    parts: dict[int, float] = field(default_factory=dict)

    def add(self, amount: float, now_s: float) -> None:
        """Counts an amount; a negative one gives back what was counted too much."""
        part = self.period.part(now_s)
        self.parts[part] = self.parts.get(part, 0.0) + amount
        if len(self.parts) > 2 * NUM_PARTS:
            drop_before(self.parts, self.period.first_part(now_s))


def format_amount(amount: float) -> str:
    """Returns an amount in digits, to four decimals: `5,000,000`, `0.25`."""
    return f"{round(amount, 4):,.15g}"


def drop_before(parts: MutableMapping[int, Any], first_part: int) -> None:
    """Drops what is over, of what is kept by parts."""
    for part in [part for part in parts if part < first_part]:
        del parts[part]


def used(windows: Iterable[Mapping[int, float]], first_part: int) -> float:
    """Returns what counts, of all of these by their parts; never less than nothing."""
    total = sum(amount for parts in windows for part, amount in parts.items() if part >= first_part)
    return max(0.0, total)


def falls_to_in_s(
    windows: Iterable[Mapping[int, float]], period: Period, most: float, now_s: float
) -> float:
    """Returns in how many seconds no more than `most` counts, if nothing is used meanwhile.

    0 if it is so now. `most` is 0 or more.
    """
    first = period.first_part(now_s)
    sums: dict[int, float] = {}
    for parts in windows:
        for part, amount in parts.items():
            if part >= first:
                sums[part] = sums.get(part, 0.0) + amount
    left = sum(sums.values())
    if left <= most:
        return 0.0
    for part in sorted(sums):
        left -= sums[part]
        if left <= most:
            break
    # A part counts until a whole period has gone by since its end.
    return (part + NUM_PARTS + 1) * period.part_s - now_s
