"""The daily table: what the ledgers of gateways added from one reading to the next. Pure.

Owns which row a series belongs to, and how readings of gateways that come and go become increases.
Does not own files (`parquet`) nor the reading itself (`record`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from deployments.ledger.table import LedgerPageError, parse_page
from serving.ledger.states import LedgerState

_PREFIX = "slicewise_ledger_"


class RowScope(StrEnum):
    """The subject of a row. The same chip-seconds stand in both scopes: choose one."""

    CLASS = "class"
    SLICE = "slice"


class RowKey(NamedTuple):
    """The key of a row of a day. `tenant` and `slice_name` are `None` where none is reported."""

    scope: str
    state: str
    compute_class: str
    model: str
    tenant: str | None = None
    slice_name: str | None = None


class Amounts(NamedTuple):
    """The sums of a row. `cost_usd` is `None` without a price, `tokens` without a tenant."""

    chip_seconds: float
    cost_usd: float | None = None
    tokens: int | None = None


Sums = Mapping[RowKey, Amounts]


class TableFileError(ValueError):
    """Reports a file that is no daily table. Move it away, or give another folder."""


@dataclass(frozen=True, slots=True)
class LedgerReading:
    """The sums of one gateway since `started_at_s`, read at `at_s`; both since the epoch."""

    gateway_id: str
    started_at_s: float
    at_s: float
    sums: Sums = field(repr=False)


def parse_reading(text: str, at_s: float) -> LedgerReading:
    """The ledger on a gateway's metrics page.

    Raises:
        LedgerPageError: there is none, or it is of another version.
    """
    page = parse_page(text)
    amounts: dict[RowKey, dict[str, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = _key_of(sample.name, sample.labels)
                if key is not None:
                    amounts.setdefault(key, {})[sample.name] = sample.value
    except (ValueError, KeyError) as error:
        raise LedgerPageError(f"not a metrics page of this version: {error}") from error
    # Serving stands in rows by tenant, which sum to it.
    whole = RowKey(RowScope.CLASS, LedgerState.SERVING, "", "")
    sums = {
        key: _amounts(key, values, amounts)
        for key, values in amounts.items()
        if key.tenant is not None or key[:2] != whole[:2]
    }
    return LedgerReading(page.gateway_id, page.started_at_s, at_s, sums)


def _key_of(name: str, labels: Mapping[str, str]) -> RowKey | None:
    if not name.startswith(_PREFIX) or name.startswith((f"{_PREFIX}start", f"{_PREFIX}chips")):
        return None
    place = (labels["compute_class"], labels["model"])
    if "tenant" in labels:
        return RowKey(RowScope.CLASS, LedgerState.SERVING, *place, tenant=labels["tenant"])
    state = LedgerState(labels["state"])
    if name.startswith(f"{_PREFIX}slice_"):
        return RowKey(RowScope.SLICE, state, *place, slice_name=labels.get("slice"))
    return RowKey(RowScope.CLASS, state, *place)


def _amounts(
    key: RowKey, values: Mapping[str, float], of_page: Mapping[RowKey, Mapping[str, float]]
) -> Amounts:
    if key.tenant is not None:
        return Amounts(
            values[f"{_PREFIX}tenant_chip_seconds_total"],
            values.get(f"{_PREFIX}tenant_cost_usd_total"),
            round(values[f"{_PREFIX}output_tokens_total"]),
        )
    if key.scope == RowScope.CLASS:
        seconds = values[f"{_PREFIX}chip_seconds_total"]
        return Amounts(seconds, values.get(f"{_PREFIX}cost_usd_total"))
    seconds = values[f"{_PREFIX}slice_chip_seconds_total"]
    of_class = of_page.get(key._replace(scope=RowScope.CLASS, slice_name=None), {})
    usd, whole = (
        of_class.get(f"{_PREFIX}cost_usd_total"),
        of_class.get(f"{_PREFIX}chip_seconds_total"),
    )
    # A class has one price, and slices have its share of it.
    return Amounts(seconds, usd * seconds / whole if usd is not None and whole else None)


def latest_increase(
    before: Mapping[str, LedgerReading], now: Iterable[LedgerReading]
) -> tuple[Sums, float | None]:
    """Returns what was added since `before`, and since when; `before` is keyed by gateway.

    Each gateway counts the whole fleet, so one of them is taken: the one that was read before and
    began first. If there is none, one that began since the last reading counts from its start.
    Else there is nothing to subtract from: the increase is empty and its start is `None`.
    """
    readings = sorted(now, key=lambda reading: reading.started_at_s)
    for reading in readings:
        earlier = before.get(reading.gateway_id)
        if earlier is not None and earlier.started_at_s == reading.started_at_s:
            return subtract(reading.sums, earlier.sums), earlier.at_s
    last_s = max((earlier.at_s for earlier in before.values()), default=None)
    for reading in readings:
        if last_s is not None and reading.started_at_s >= last_s:
            return reading.sums, reading.started_at_s
    return {}, None


def subtract(after: Sums, before: Sums) -> dict[RowKey, Amounts]:
    """Returns what `after` has more than `before`; rows without any are left out.

    A slice's row that is smaller began anew, under another replica.
    """
    increase = {}
    for key, now in after.items():
        then = before.get(key, Amounts(0.0, 0.0, 0))
        if now.chip_seconds < then.chip_seconds:
            then = Amounts(0.0, 0.0, 0)
        amounts = Amounts(
            now.chip_seconds - then.chip_seconds,
            None if now.cost_usd is None else now.cost_usd - (then.cost_usd or 0.0),
            None if now.tokens is None else now.tokens - (then.tokens or 0),
        )
        if amounts.chip_seconds or amounts.tokens:
            increase[key] = amounts
    return increase


def add(sums: Sums, more: Sums) -> dict[RowKey, Amounts]:
    """Returns the sum of both. An amount that one of them does not know is the other's."""
    together = dict(sums)
    for key, amounts in more.items():
        known = together.get(key)
        if known is None:
            together[key] = amounts
            continue
        together[key] = Amounts(
            known.chip_seconds + amounts.chip_seconds,
            _plus(known.cost_usd, amounts.cost_usd),
            _plus(known.tokens, amounts.tokens),
        )
    return together


_N = TypeVar("_N", int, float)


def _plus(one: _N | None, other: _N | None) -> _N | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
