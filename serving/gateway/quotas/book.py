"""Counts what tenants use at one gateway, and refuses what is over their quotas.

Owns the decision, with what other gateways have counted as far as that is known here. Does not own
how it comes to be known (`teller`). No clock: callers pass wall-clock times.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from serving.domain.errors import QuotaExceededError, RequestError, RequestOverQuotaError
from serving.domain.usage.quotas import (
    Period,
    Quota,
    QuotaKind,
    TenantUse,
    UsageWindow,
    drop_before,
    falls_to_in_s,
    used,
)
from serving.domain.usage.usage_report import MeterKey, Parts, UsageAnswer, UsageReport, period_of

# Nothing says when a request in flight will end.
_RETRY_CONCURRENT_S = 1.0
# What a request needs to be let in. What it takes of chips is known long after that.
_NEEDS = {QuotaKind.CHIP_SECONDS: 1e-9, QuotaKind.USD: 1e-9}
# Only of tokens a request can need more than all that its tenant may have.
REASONS_OF_KIND: Mapping[QuotaKind, tuple[str, ...]] = {
    kind: (
        QuotaExceededError.code,
        *((RequestOverQuotaError.code,) if kind is QuotaKind.TOKENS else ()),
    )
    for kind in QuotaKind
}
_DECIMALS = {QuotaKind.CHIP_SECONDS: 1, QuotaKind.USD: 4}


@dataclass(slots=True, eq=False)
class _Count:
    """What was counted in the last period: here, and at the other gateways."""

    own: UsageWindow
    others: Parts
    changed: set[int] = field(default_factory=set)  # parts that no keeper has been told

    def total(self, now_s: float) -> float:
        return used((self.own.parts, self.others), self.own.period.first_part(now_s))

    def add(self, amount: float, now_s: float) -> None:
        self.own.add(amount, now_s)
        self.changed.add(self.own.period.part(now_s))

    def untold(self) -> Parts:
        return {part: self.own.parts.get(part, 0.0) for part in self.changed}

    def note_told(self, parts: Parts) -> None:
        for part, amount in parts.items():
            # What has been counted meanwhile is told the next time.
            if self.own.parts.get(part, 0.0) == amount:
                self.changed.discard(part)


@dataclass(slots=True, eq=False)
class _Meter:
    """What a tenant has used under one quota, and what was refused because of it."""

    quota: Quota
    counted: _Count | None  # `None` for what is counted in no period
    refusals: _Count
    refused: Counter[str]  # here, by the codes of errors; the same of all quotas of this kind
    in_flight: int = 0
    others_in_flight: int = 0

    def used(self, now_s: float) -> float:
        if self.counted is None:
            return self.in_flight + self.others_in_flight
        return self.counted.total(now_s)

    def add(self, amount: float, now_s: float) -> None:
        assert self.counted is not None
        self.counted.add(amount, now_s)

    def falls_to_in_s(self, most: float, now_s: float) -> float:
        """Returns in how many seconds so much is used, if nothing is meanwhile."""
        if self.counted is None:
            return _RETRY_CONCURRENT_S
        parts = (self.counted.own.parts, self.counted.others)
        return falls_to_in_s(parts, self.counted.own.period, most, now_s)

    def note_refused(self, error: RequestError, now_s: float) -> None:
        self.refusals.add(1, now_s)
        self.refused[error.code or ""] += 1

    def refusal(self, needs: float, now_s: float) -> RequestError | None:
        """Returns why there is no room for so much; `None` if there is."""
        limit = self.quota.limit
        if needs > limit:
            return RequestOverQuotaError(str(self.quota), needs)
        now_used = self.used(now_s)
        if now_used + needs <= limit:
            return None
        in_s = self.falls_to_in_s(limit - needs, now_s)
        return QuotaExceededError(str(self.quota), now_used, max(1.0, in_s))


class QuotaTicket:
    """What one HTTP request counts for, from its admission to its end."""

    def __init__(self, meters: Collection[_Meter], now_s: float) -> None:
        """Counts the request itself."""
        self._meters = meters
        self._is_over = self._is_refused = False
        self._began_at_s = now_s
        for meter in meters:
            if meter.quota.kind is QuotaKind.REQUESTS:
                meter.add(1, now_s)
            elif meter.quota.kind is QuotaKind.CONCURRENT:
                meter.in_flight += 1

    def reserve(self, num_tokens: int, now_s: float) -> RequestError | None:
        """Counts tokens that are about to be used; returns the refusal if they are too many."""
        of_tokens = [each for each in self._meters if each.quota.kind is QuotaKind.TOKENS]
        for meter in of_tokens:
            if (error := meter.refusal(num_tokens, now_s)) is not None:
                # Several sequences of one request may be too many.
                if not self._is_refused:
                    meter.note_refused(error, now_s)
                self._is_refused = True
                return error
        for meter in of_tokens:
            meter.add(num_tokens, now_s)
        return None

    def settle(self, num_more: int, reserved_at_s: float, now_s: float) -> None:
        """Counts tokens that were used beyond what was reserved; negative: less were."""
        # What is given back is taken from where it was counted, or it would outlast that.
        at_s = now_s if num_more > 0 else reserved_at_s
        if num_more:
            for meter in self._meters:
                if meter.quota.kind is QuotaKind.TOKENS:
                    meter.add(num_more, at_s)

    def end(self, *, was_refused: bool) -> None:
        """Notes that the request is over. One that we refused for want of room counts as none.

        Idempotent.
        """
        if self._is_over:
            return
        self._is_over = True
        for meter in self._meters:
            if meter.quota.kind is QuotaKind.CONCURRENT:
                meter.in_flight -= 1
            elif meter.quota.kind is QuotaKind.REQUESTS and was_refused:
                meter.add(-1, self._began_at_s)


@dataclass(frozen=True, slots=True)
class RefusalCount:
    """How many requests one gateway has refused because of a tenant's quotas of one kind.

    `reason` is the code of the error.
    """

    tenant: str
    kind: QuotaKind
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class QuotaDecision:
    """Whether a request may go on: with a `ticket`, or not, with an `error`; and its headers."""

    ticket: QuotaTicket | None
    error: RequestError | None
    headers: list[tuple[bytes, bytes]]


class QuotaBook:
    """All counts of one gateway."""

    def __init__(self, gateway_id: str = "") -> None:
        """Makes an empty one."""
        self._gateway_id = gateway_id
        self._meters: dict[MeterKey, _Meter] = {}
        # Of these meters what counts in a period, as gateways tell each other.
        self._counts: dict[MeterKey, _Count] = {}
        # Also of tenants that have not come here yet.
        self._others: dict[MeterKey, Parts] = {}
        self._others_in_flight: dict[MeterKey, int] = {}
        self._epoch, self._seen = "", 0
        # Since this gateway began.
        self._refused: dict[tuple[str, QuotaKind], Counter[str]] = {}
        # Until another gateway is known to do it.
        self.counts_chips = True

    def know(self, tenants: Mapping[str, Iterable[Quota]]) -> None:
        """Makes a count of each tenant's quotas, also where it has not come, and drops others."""
        known = {self._meter(tenant, quota) for tenant in tenants for quota in tenants[tenant]}
        for (tenant, key), meter in list(self._meters.items()):
            if meter not in known:
                del self._meters[tenant, key]
                self._counts.pop((tenant, key), None)
                del self._counts[tenant, meter.quota.refusals_key]
        kept = {(tenant, meter.quota.kind) for (tenant, _), meter in self._meters.items()}
        for account in self._refused.keys() - kept:
            del self._refused[account]

    def admit(
        self, tenant: str, quotas: Iterable[Quota], names: Collection[str], now_s: float
    ) -> QuotaDecision:
        """Decides on a request for the model that these names select; an admitted one counts."""
        meters = [self._meter(tenant, quota) for quota in quotas if quota.covers(names)]
        error = None
        for meter in meters:
            error = meter.refusal(_NEEDS.get(meter.quota.kind, 1.0), now_s)
            if error is not None:
                meter.note_refused(error, now_s)
                break
        ticket = None if error is not None else QuotaTicket(meters, now_s)
        return QuotaDecision(ticket, error, list(_headers(meters, now_s)))

    def used_chips(
        self, tenant: str, model: str, chip_seconds: float, usd: float, now_s: float
    ) -> None:
        """Counts what a tenant's requests have had of chips, if it has a quota on them."""
        amounts = {QuotaKind.CHIP_SECONDS: chip_seconds, QuotaKind.USD: usd}
        for (name, _), meter in self._meters.items():
            amount = amounts.get(meter.quota.kind, 0.0)
            if name == tenant and amount and meter.quota.covers((model,)):
                meter.add(amount, now_s)

    def uses(self, now_s: float) -> Iterator[TenantUse]:
        """Yields what each tenant has used of each of its quotas."""
        for (tenant, _), meter in self._meters.items():
            refused = round(meter.refusals.total(now_s))
            yield TenantUse(tenant, meter.quota, meter.used(now_s), refused)

    def refusal_counts(self) -> Iterator[RefusalCount]:
        """Yields what was refused here since this gateway began, also where nothing was."""
        for (tenant, kind), refused in self._refused.items():
            for reason in REASONS_OF_KIND[kind]:
                yield RefusalCount(tenant, kind, reason, refused[reason])

    # -- the other gateways --

    def report(self) -> UsageReport:
        """Returns what the keeper has not been told; what it misses is told again."""
        meters = [(*key, count.untold()) for key, count in self._counts.items() if count.changed]
        in_flight = [
            (*key, meter.in_flight) for key, meter in self._meters.items() if meter.in_flight
        ]
        return UsageReport(self._gateway_id, self._epoch, self._seen, meters, in_flight)

    def take(self, answer: UsageAnswer, told: UsageReport) -> None:
        """Takes in what a keeper has answered to a report."""
        for tenant, key, parts in told.meters:
            count = self._counts.get((tenant, key))
            if count is not None:
                count.note_told(parts)
        if answer.epoch != self._epoch:
            # Another keeper: it knows what its predecessor has stored, and is told the rest.
            for others in self._others.values():
                others.clear()
            for count in self._counts.values():
                count.changed.update(count.own.parts)
        self._epoch, self._seen = answer.epoch, answer.seen
        self.counts_chips = answer.counts_chips
        for tenant, key, parts in answer.meters:
            self._others.setdefault((tenant, key), {}).update(parts)
        self._others_in_flight = {(tenant, key): number for tenant, key, number in answer.in_flight}
        for name, meter in self._meters.items():
            meter.others_in_flight = self._others_in_flight.get(name, 0)

    def forget(self, now_s: float) -> None:
        """Drops what is over, also of tenants that do not come any more."""
        for key, parts in list(self._others.items()):
            if (period := period_of(key)) is not None:
                drop_before(parts, period.first_part(now_s))
            if not parts and key not in self._counts:
                del self._others[key]

    def _meter(self, tenant: str, quota: Quota) -> _Meter:
        key = (tenant, quota.key)
        meter = self._meters.get(key)
        if meter is None:
            counted = None if quota.period is None else self._count(key, quota.period)
            refusals = self._count((tenant, quota.refusals_key), quota.refusals_period)
            refused = self._refused.setdefault((tenant, quota.kind), Counter())
            meter = _Meter(quota, counted, refusals, refused)
            meter.others_in_flight = self._others_in_flight.get(key, 0)
            self._meters[key] = meter
        meter.quota = quota  # its limit may be another one since
        return meter

    def _count(self, key: MeterKey, period: Period) -> _Count:
        count = _Count(UsageWindow(period), self._others.setdefault(key, {}))
        self._counts[key] = count
        return count


def _headers(meters: Iterable[_Meter], now_s: float) -> Iterator[tuple[bytes, bytes]]:
    """Returns what clients read of their quotas: of each kind the one that is nearest its end."""
    nearest: dict[QuotaKind, tuple[float, _Meter]] = {}
    for meter in meters:
        left = max(0.0, meter.quota.limit - meter.used(now_s))
        kind = meter.quota.kind
        if kind not in nearest or left / meter.quota.limit < (
            nearest[kind][0] / nearest[kind][1].quota.limit
        ):
            nearest[kind] = left, meter
    for kind, (left, meter) in nearest.items():
        name = kind.replace("_", "-")
        values = {"limit": _number(kind, meter.quota.limit), "remaining": _number(kind, left)}
        if meter.counted is not None:
            values["reset"] = duration(meter.falls_to_in_s(0.0, now_s))
        for what, value in values.items():
            yield f"x-ratelimit-{what}-{name}".encode(), value.encode()


def _number(kind: QuotaKind, amount: float) -> str:
    decimals = _DECIMALS.get(kind, 0)
    scale = 10**decimals
    return f"{math.floor(amount * scale) / scale:.{decimals}f}"


def duration(seconds: float) -> str:
    """Returns a length of time as OpenAI's headers have it: `59s`, `6m0s`, `23h4m12s`."""
    whole = math.ceil(seconds)
    hours, minutes, left = whole // 3600, whole % 3600 // 60, whole % 60
    if hours:
        return f"{hours}h{minutes}m{left}s"
    return f"{minutes}m{left}s" if minutes else f"{left}s"
