"""What Prometheus sees of tenants' quotas: use, limits, refusals, and if others are heard of."""

import asyncio
import time
from collections.abc import Callable

import msgspec
from prometheus_client import CollectorRegistry

from serving.domain.usage.quotas import Period, Quota, QuotaKind
from serving.domain.usage.usage_report import UsageKeeper, UsageReport
from serving.gateway.metrics.quotas import QuotaCollector
from serving.gateway.quotas.book import QuotaBook
from serving.gateway.quotas.teller import UsageTeller
from serving.telemetry.metric_names import ALL, MAX_TENANT_QUOTAS, labels_of

START_S = 1_790_000_000.0
REQUESTS = Quota(QuotaKind.REQUESTS, 2, Period.MINUTE)
TOKENS = Quota(QuotaKind.TOKENS, 100, Period.DAY, frozenset({"chat", "code"}))
CONCURRENT = Quota(QuotaKind.CONCURRENT, 4)
USED, LIMIT = "slicewise_tenant_quota_used", "slicewise_tenant_quota_limit"
LEFT_OUT = "slicewise_tenant_quotas_left_out"
REFUSED = "slicewise_tenant_quota_refusals_total"
AGE = "slicewise_tenant_quota_answer_age_seconds"
EXCEEDED = "rate_limit_exceeded"


def page(book: QuotaBook, age_s: Callable[[], float | None] = lambda: None) -> CollectorRegistry:
    """A page of these alone, two seconds after what the book was told."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(QuotaCollector(book, age_s, lambda: START_S + 2))
    return registry


def ask(book: QuotaBook, tenant: str, *quotas: Quota, model: str = "chat") -> None:
    book.admit(tenant, quotas, (model,), START_S)


def series(registry: CollectorRegistry, name: str) -> dict[tuple[str, ...], float]:
    """Every series of a family, by its labels in the registry's order."""
    names = labels_of(ALL[name])[1:]
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name == name:
                assert set(sample.labels) <= set(names)
                found[tuple(sample.labels.get(each, "") for each in names)] = sample.value
    return found


def test_use_and_limit_of_every_quota_are_told_apart() -> None:
    book = QuotaBook()
    book.know({"acme": [REQUESTS, TOKENS, CONCURRENT], "other": [REQUESTS]})
    ask(book, "acme", REQUESTS, TOKENS, CONCURRENT)
    ticket = book.admit("acme", [TOKENS], ("code",), START_S).ticket
    assert ticket is not None
    assert ticket.reserve(60, START_S) is None
    registry = page(book)
    assert series(registry, USED) == {
        ("acme", "requests", "minute", ""): 1,
        ("acme", "tokens", "day", "chat,code"): 60,
        ("acme", "concurrent", "", ""): 1,
        ("other", "requests", "minute", ""): 0,
    }
    assert series(registry, LIMIT) == {
        ("acme", "requests", "minute", ""): 2,
        ("acme", "tokens", "day", "chat,code"): 100,
        ("acme", "concurrent", "", ""): 4,
        ("other", "requests", "minute", ""): 2,
    }
    assert series(registry, LEFT_OUT) == {(): 0}


def test_refusals_begin_at_zero_and_are_counted_by_their_reason() -> None:
    book = QuotaBook()
    book.know({"acme": [REQUESTS, TOKENS], "other": [CONCURRENT]})
    none_yet = {
        ("acme", "requests", EXCEEDED): 0,
        ("acme", "tokens", EXCEEDED): 0,
        ("acme", "tokens", "request_over_quota"): 0,
        ("other", "concurrent", EXCEEDED): 0,
    }
    assert series(page(book), REFUSED) == none_yet
    for _ in range(5):
        ask(book, "acme", REQUESTS)
    # Two sequences of one request: it is refused once.
    ticket = book.admit("acme", [TOKENS], ("chat",), START_S).ticket
    assert ticket is not None
    assert None not in [ticket.reserve(101, START_S) for _ in range(2)]
    assert series(page(book), REFUSED) == none_yet | {
        ("acme", "requests", EXCEEDED): 3,
        ("acme", "tokens", "request_over_quota"): 1,
    }


def test_refusals_never_fall_while_the_tenant_has_a_quota_of_the_kind() -> None:
    book = QuotaBook()
    a_day = Quota(QuotaKind.REQUESTS, 1000, Period.DAY)
    book.know({"acme": [REQUESTS, a_day], "gone": [REQUESTS]})
    for tenant in ("acme", "gone"):
        for _ in range(5):
            ask(book, tenant, REQUESTS)
    book.know({"acme": [a_day]})
    assert series(page(book), REFUSED) == {("acme", "requests", EXCEEDED): 3}
    book.know({"acme": [REQUESTS, a_day]})
    for _ in range(4):
        ask(book, "acme", REQUESTS)
    assert series(page(book), REFUSED) == {("acme", "requests", EXCEEDED): 5}


def test_of_many_quotas_those_that_are_nearest_to_their_limits_are_shown() -> None:
    book = QuotaBook()
    tenants = [f"t{number}" for number in range(MAX_TENANT_QUOTAS)]
    book.know({tenant: [CONCURRENT] for tenant in ("idle 1", "idle 2", *tenants)})
    for tenant in tenants:
        ask(book, tenant, CONCURRENT)
    registry = page(book)
    assert {key[0] for key in series(registry, USED)} == set(tenants)
    assert len(series(registry, LIMIT)) == MAX_TENANT_QUOTAS
    assert series(registry, LEFT_OUT) == {(): 2}


def test_without_quotas_nothing_is_shown() -> None:
    assert list(page(QuotaBook()).collect()) == []


async def test_age_is_since_the_keepers_last_answer_and_goes_with_the_last_quota() -> None:
    """The keeper answers once, is away, and comes back. Then no tenant has a quota any more."""
    book, keeper, quotas = QuotaBook("g1"), UsageKeeper("k"), {"acme": [REQUESTS]}
    is_away = False

    async def tell(report: bytes) -> bytes:
        if is_away:
            raise ConnectionError("away")
        told = msgspec.msgpack.decode(report, type=UsageReport)
        return msgspec.msgpack.encode(keeper.take(told, time.time()))

    def known() -> dict[str, list[Quota]]:
        has_looked.set()
        return quotas

    has_looked = asyncio.Event()
    teller = UsageTeller(book, tell, known)
    assert teller.age_s(time.monotonic()) is None
    await teller.tell()
    answered_s = time.monotonic()

    def age_s() -> float | None:
        return teller.age_s(answered_s + 100)

    first = series(page(book, age_s), AGE)[()]
    assert first >= 100
    is_away = True
    await teller.tell()
    assert series(page(book, age_s), AGE)[()] == first
    is_away = False
    await teller.tell()
    assert series(page(book, age_s), AGE)[()] < first
    quotas.clear()
    running = asyncio.create_task(teller.run())
    await has_looked.wait()
    running.cancel()
    assert series(page(book, age_s), AGE) == {}


async def test_keeper_that_never_answered_has_been_away_since_it_was_first_asked() -> None:
    async def tell(report: bytes) -> bytes:
        raise ConnectionError(f"away, with {len(report)} bytes")

    teller = UsageTeller(QuotaBook(), tell, lambda: {"acme": [REQUESTS]})
    before_s = time.monotonic()
    await teller.tell()
    first = teller.age_s(before_s + 100)
    assert first is not None
    assert first <= 100
    await teller.tell()
    assert teller.age_s(before_s + 100) == first
