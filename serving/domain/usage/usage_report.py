"""How gateways tell each other what tenants have used: through one keeper. Pure.

A gateway tells what it has counted in each part of a period, not what has come since: a report may
be lost, or come twice. The keeper answers with what the others have counted.
"""

from dataclasses import dataclass, field

import msgspec

from serving.domain.usage.quotas import Period, drop_before

# A gateway that is silent for longer no longer has requests in flight, nor counts chips.
SILENT_S = 5.0
# What is over is dropped so often: nobody counts it meanwhile.
_FORGET_S = 10.0

# What a tenant has used under one quota: `tenant`, and the quota's key.
MeterKey = tuple[str, str]
# Of each meter the parts of its period, with what was used in each.
Parts = dict[int, float]


def period_of(key: MeterKey) -> Period | None:
    """Returns the period of a meter; `None` if it counts in none, or in one that is not known."""
    name = key[1].split("/")[1] if key[1].count("/") >= 2 else ""
    return Period(name) if name in set(Period) else None


class UsageReport(msgspec.Struct, array_like=True, frozen=True):
    """What one gateway has counted, and what it knows of the others.

    `meters` has the parts that have changed since its last report that was answered; all of them
    if another keeper answered that, by its `epoch`. `seen` is the last change that it has taken in.
    """

    gateway_id: str
    epoch: str
    seen: int
    meters: list[tuple[str, str, Parts]]
    in_flight: list[tuple[str, str, int]]


class UsageAnswer(msgspec.Struct, array_like=True, frozen=True):
    """What the other gateways have counted, in the parts that have changed since `seen`.

    `in_flight` is all of it. One gateway `counts_chips`: each sees those of the whole fleet.
    """

    epoch: str
    seen: int
    meters: list[tuple[str, str, Parts]]
    in_flight: list[tuple[str, str, int]]
    counts_chips: bool


class StoredUsage(msgspec.Struct, array_like=True, frozen=True):
    """What a keeper's successor begins with: by gateway, what it has counted."""

    meters: list[tuple[str, str, str, Parts]]


@dataclass(slots=True)
class _Gateway:
    heard_at_s: float
    in_flight: dict[MeterKey, int]


@dataclass(slots=True)
class _Part:
    by_gateway: dict[str, float] = field(default_factory=dict)
    changed: int = 0  # the last change

    def without(self, gateway_id: str) -> float:
        return sum(amount for name, amount in self.by_gateway.items() if name != gateway_id)


@dataclass(slots=True)
class _Meter:
    period: Period
    parts: dict[int, _Part] = field(default_factory=dict)
    changed: int = 0  # the last change of any of them


class UsageKeeper:
    """Adds up what gateways tell. Times are wall-clock."""

    def __init__(self, epoch: str) -> None:
        """Makes an empty one; no other has its `epoch`."""
        self._epoch = epoch
        self._num_changes = 0
        self._gateways: dict[str, _Gateway] = {}  # the one that was heard first counts chips
        self._meters: dict[MeterKey, _Meter] = {}
        self._forgets_at_s = 0.0

    def take(self, report: UsageReport, now_s: float) -> UsageAnswer:
        """Takes in a report; returns what its gateway does not know yet."""
        for name in [
            name
            for name, gateway in self._gateways.items()
            if now_s - gateway.heard_at_s > SILENT_S and name != report.gateway_id
        ]:
            del self._gateways[name]
        in_flight = {(tenant, quota): count for tenant, quota, count in report.in_flight}
        gateway = self._gateways.setdefault(report.gateway_id, _Gateway(now_s, in_flight))
        gateway.heard_at_s, gateway.in_flight = now_s, in_flight
        for tenant, quota, parts in report.meters:
            self._note((tenant, quota), report.gateway_id, parts)
        if now_s >= self._forgets_at_s:
            self._forgets_at_s = now_s + _FORGET_S
            self._forget(now_s)
        is_known = report.epoch == self._epoch
        return UsageAnswer(
            self._epoch,
            self._num_changes,
            self._others(report.gateway_id, report.seen if is_known else 0),
            self._others_in_flight(report.gateway_id),
            counts_chips=next(iter(self._gateways)) == report.gateway_id,
        )

    def stored(self) -> StoredUsage:
        """Returns what its successor is to begin with."""
        meters: dict[tuple[str, str, str], Parts] = {}
        for key, meter in self._meters.items():
            for number, part in meter.parts.items():
                for gateway_id, amount in part.by_gateway.items():
                    meters.setdefault((gateway_id, *key), {})[number] = amount
        return StoredUsage([(*key, parts) for key, parts in meters.items()])

    def begin_with(self, stored: StoredUsage) -> None:
        """Takes in what its predecessor has stored."""
        for gateway_id, tenant, quota, parts in stored.meters:
            self._note((tenant, quota), gateway_id, parts)

    def _note(self, key: MeterKey, gateway_id: str, parts: Parts) -> None:
        meter = self._meters.get(key)
        if meter is None:
            period = period_of(key)
            if period is None:
                return  # of a gateway of another build
            meter = self._meters[key] = _Meter(period)
        for number, amount in parts.items():
            part = meter.parts.setdefault(number, _Part())
            if part.by_gateway.get(gateway_id) != amount:
                self._num_changes += 1
                part.by_gateway[gateway_id] = amount
                part.changed = meter.changed = self._num_changes

    def _forget(self, now_s: float) -> None:
        for key, meter in list(self._meters.items()):
            drop_before(meter.parts, meter.period.first_part(now_s))
            if not meter.parts:
                del self._meters[key]

    def _others(self, gateway_id: str, seen: int) -> list[tuple[str, str, Parts]]:
        changed = []
        for key, meter in self._meters.items():
            if meter.changed > seen:
                parts = {
                    number: part.without(gateway_id)
                    for number, part in meter.parts.items()
                    if part.changed > seen
                }
                changed.append((*key, parts))
        return changed

    def _others_in_flight(self, gateway_id: str) -> list[tuple[str, str, int]]:
        sums: dict[MeterKey, int] = {}
        for name, gateway in self._gateways.items():
            if name != gateway_id:
                for key, count in gateway.in_flight.items():
                    sums[key] = sums.get(key, 0) + count
        return [(*key, count) for key, count in sums.items()]
