"""The directory's loop: observe hosts and pods, make all records, grant slices, publish.

Owns when that happens and what follows a failure; decides nothing. While a replica waits for a
slice it looks twice a second, otherwise once; where a look computes for long it looks less often,
so that it never takes more than a tenth of its processor. What could not be read or stored is tried
again at the next look.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from serving.directory import supply_store
from serving.directory.allocator import SliceAllocator
from serving.directory.ray_hosts import observe_cluster
from serving.directory.supply_book import SupplyBook
from serving.domain.slice_records import LEASE_S, RENEWAL_S, SliceRecord
from serving.domain.supply.beat import BEAT_S, BeatWatch, ReportBeat
from serving.domain.supply.faults import SliceFaults
from serving.domain.supply.keys import SupplyKeys
from serving.domain.supply.orders import OperatorOrder, OrdersError
from serving.domain.supply.pods import GroupPods, PodsReportError
from serving.domain.supply.records import SupplyRecord, SupplyReport
from serving.domain.supply.survey import waiting_replicas

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
_WAITED_FOR_PERIOD_S = 0.5
_MOST_OF_A_CORE = 0.1
# Pods that nobody has confirmed for so long may be any.
_PODS_STALE_S = 60.0
# A directory that has just started does not know every replica yet: it publishes nothing.
_SETTLING_S = LEASE_S + RENEWAL_S


def pause_s(took_s: float, worked_s: float, *, is_waited_for: bool) -> float:
    """Returns how long to wait after a look that took so long, in which the process computed.

    A look without a head takes until that is back, or Ray gives up, and computes nothing: what
    follows it may not wait for nine times as long.
    """
    period_s = _WAITED_FOR_PERIOD_S if is_waited_for else _PERIOD_S
    return max(period_s - took_s, worked_s * (1 / _MOST_OF_A_CORE - 1))


class SurveyLoop:
    """Keeps `book` at what is observed. Used from one event loop.

    `lives` returns the replicas' records; `on_change` gets all slices whenever one is another,
    `on_orders` the orders that stand, at every look.
    """

    def __init__(
        self,
        instance_id: str,
        keys: SupplyKeys,
        allocator: SliceAllocator,
        lives: Callable[[], Sequence[SliceRecord]],
        on_change: Callable[[tuple[SupplyRecord, ...]], None],
        on_orders: Callable[[tuple[OperatorOrder, ...]], None],
    ) -> None:
        self._instance_id = instance_id
        self._keys = keys
        self._allocator = allocator
        self._lives = lives
        self._on_change = on_change
        self._on_orders = on_orders
        self._started_s = time.monotonic()
        self.book = SupplyBook(SliceFaults())
        self._has_faults = False  # those of before have been read
        self._pods: tuple[GroupPods, ...] = ()
        self._pods_version: str | None = None
        self._pods_beat = BeatWatch()
        self._published: SupplyReport | None = None
        self._beat = ReportBeat("", 0)
        self._beat_at_s = float("-inf")
        self._failed = ""

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            began_s, worked_s = time.monotonic(), time.process_time()
            try:
                await self.look()
                self._failed = ""
            except Exception as error:  # noqa: BLE001 - whatever ails the head, it is asked again
                if self._failed != (text := repr(error)):
                    self._failed = text
                    logger.warning("supply_not_seen error=%s", text)
            took_s, worked_s = time.monotonic() - began_s, time.process_time() - worked_s
            is_waited_for = self._allocator.has_askers.is_set()
            await self._sleep(pause_s(took_s, worked_s, is_waited_for=is_waited_for))

    async def look(self) -> None:
        """Looks once, answers who can be answered, and publishes what has changed."""
        if not self._has_faults:
            faults = await asyncio.to_thread(supply_store.read_faults, self._keys)
            # What was reported while they could not be read stands beside them.
            self.book.faults = SliceFaults((*faults.all(), *self.book.faults.all()))
            self._has_faults = True
        hosts = await observe_cluster()
        await self._read_pods()
        now_s = time.time()
        await self._read_orders(now_s)
        before = self.book.records
        # Of one moment, as the report: a life that went on meanwhile would be in it twice, or not.
        lives = self._lives()
        self.book.look(hosts, self._pods, lives, now_s)
        self._allocator.decide(
            lambda request: self.book.match(request, now_s),
            self.book.failed_at_s(),
            time.monotonic(),
        )
        if self.book.records != before:
            self._on_change(self.book.records)
        await self._store(lives)

    async def _sleep(self, delay_s: float) -> None:
        """Waits, but not for longer than who has just begun to wait for a slice should."""
        if not self._allocator.has_askers.is_set():
            try:
                async with asyncio.timeout(delay_s):
                    await self._allocator.has_askers.wait()
            except TimeoutError:
                pass
            return
        await asyncio.sleep(delay_s)

    async def _read_pods(self) -> None:
        beat = await asyncio.to_thread(supply_store.read_pods_beat, self._keys)
        now_s = time.monotonic()
        self._pods_beat.see(beat, now_s)
        if self._pods_beat.silence_s(now_s) > _PODS_STALE_S:
            self._pods, self._pods_version = (), None
        elif self._pods_beat.version != self._pods_version:
            try:
                self._pods = await asyncio.to_thread(supply_store.read_pods, self._keys)
            except PodsReportError as error:
                logger.warning("pods_not_read error=%r", str(error))
                self._pods = ()
            self._pods_version = self._pods_beat.version

    async def _read_orders(self, now_s: float) -> None:
        """Orders that cannot be read change nothing: those of before stand."""
        try:
            orders = await asyncio.to_thread(supply_store.read_orders, self._keys)
        except OrdersError as error:
            logger.warning("orders_not_read error=%r", str(error))
            return
        self.book.orders = orders.at(now_s)
        self._on_orders(self.book.orders.orders)

    async def _store(self, lives: Sequence[SliceRecord]) -> None:
        faults = self.book.faults
        if faults.is_dirty:
            faults.is_dirty = False
            try:
                await asyncio.to_thread(supply_store.write_faults, self._keys, faults.encode())
            except BaseException:
                faults.is_dirty = True
                raise
        now_s = time.monotonic()
        if now_s - self._started_s < _SETTLING_S:
            return
        freeze = self.book.orders.freeze
        frozen = None if freeze is None else freeze.words
        report = SupplyReport("", self.book.records, waiting_replicas(lives), frozen)
        is_news = report != self._published
        if is_news:
            version = f"{self._instance_id}:{self._beat.count + 1}"
            named = replace(report, version=version)
            await asyncio.to_thread(supply_store.write_supply, self._keys, named)
            self._published = report
            self._beat = ReportBeat(version, self._beat.count)
        if is_news or now_s - self._beat_at_s >= BEAT_S:
            self._beat = ReportBeat(self._beat.version, self._beat.count + 1)
            await asyncio.to_thread(supply_store.write_supply_beat, self._keys, self._beat)
            self._beat_at_s = now_s
