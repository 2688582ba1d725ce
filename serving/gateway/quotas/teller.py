"""Tells the keeper what this gateway has counted, twice a second, and learns what others have.

Owns when, and what an absent keeper means: this gateway goes on with its own counts and with what
it has learned before.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

import msgspec

from serving.domain.usage.quotas import Quota
from serving.domain.usage.usage_report import UsageAnswer
from serving.gateway.quotas.book import QuotaBook
from serving.ledger.ledger import Ledger

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
_TIMEOUT_S = 5.0
_MS_PER_HOUR = 3_600_000

# Passes a report to the keeper, both encoded. Raises `ConnectionError` while it is away.
TellUsage = Callable[[bytes], Awaitable[bytes]]
TenantQuotas = Mapping[str, Iterable[Quota]]


class UsageTeller:
    """Keeps the counts of one gateway up to date with the others'."""

    def __init__(
        self, book: QuotaBook, tell: TellUsage, quotas: Callable[[], TenantQuotas]
    ) -> None:
        """Where no tenant has `quotas` nothing is told."""
        self._book = book
        self._tell = tell
        self._quotas = quotas
        self._is_away = False
        self._answered_at_s: float | None = None  # monotonic; or when it was first told anything
        self._decoder = msgspec.msgpack.Decoder(UsageAnswer)

    def age_s(self, now_s: float) -> float | None:
        """Returns for how long the keeper has not answered; `None` while no tenant has quotas.

        `now_s` is monotonic.
        """
        return None if self._answered_at_s is None else now_s - self._answered_at_s

    async def run(self) -> None:
        """Tells and learns, until it is cancelled."""
        while True:
            quotas = self._quotas()
            self._book.know(quotas)
            if quotas:
                await self.tell()
            else:
                self._answered_at_s = None
            await asyncio.sleep(PERIOD_S)

    async def tell(self) -> None:
        """Tells and learns once; an absent keeper is logged once."""
        if self._answered_at_s is None:
            self._answered_at_s = time.monotonic()
        report = self._book.report()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                encoded = await self._tell(msgspec.msgpack.encode(report))
            answer = self._decoder.decode(encoded)
        except (TimeoutError, ConnectionError, msgspec.MsgspecError) as error:
            if not self._is_away:
                logger.warning("usage_keeper_away error=%r", error)
            self._is_away = True
            return
        if self._is_away:
            logger.info("usage_keeper_back")
        self._is_away = False
        self._answered_at_s = time.monotonic()
        self._book.take(answer, report)
        self._book.forget(time.time())


class ChipUse:
    """Counts the chips that tenants' requests have had since the last time it was asked."""

    def __init__(self, ledger: Ledger, usd_per_chip_hour: Mapping[str, float]) -> None:
        """Reads the ledger; prices are by compute class."""
        self._ledger = ledger
        self._usd_per_chip_hour = usd_per_chip_hour
        self._counted: dict[tuple[str, str, str], int] = {}

    def count(self, book: QuotaBook, now_s: float) -> None:
        """Counts what is new. Every gateway sees the whole fleet's, so one of them counts it."""
        for entry in self._ledger.tenants():
            key = (entry.model, entry.compute_class, entry.tenant)
            new_ms = entry.chip_ms - self._counted.get(key, 0)
            self._counted[key] = entry.chip_ms
            if new_ms > 0 and book.counts_chips:
                price = self._usd_per_chip_hour.get(entry.compute_class, 0.0)
                usd = new_ms / _MS_PER_HOUR * price
                book.used_chips(entry.tenant, entry.model, new_ms / 1000, usd, now_s)
