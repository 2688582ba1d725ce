"""Leases batches for one gateway, and carries each on by a job of its own.

Owns how many at once, and when to look for more. Does not own what a job does (`job`).

A gateway asks the lines of so many batches at once. A batch may not come to its end for as long as
its window is: its tenant has used up a quota, or its model has no engine. So beyond those a tenant
of whom nobody has a batch gets one begun; and batches of which no line is to be asked are read,
and ended, beside.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from serving.domain.capacity.batch_lines import EnginePace, LineRoom, few_wait
from serving.gateway.batches.costs import BatchPrices
from serving.gateway.batches.records import BatchLease
from serving.gateway.batches.running.job import BatchJob, JobSettings, LineCaller, LineCounts
from serving.gateway.batches.running.threads import StoreCalls
from serving.gateway.batches.store import BatchStore, Claim, LeaseLostError

logger = logging.getLogger(__name__)

# How often files and batches are looked for that have had their time.
_SWEEP_S = 600.0
# Batches that a gateway has beside those whose lines it asks, to read them or to end them: each
# takes seconds of a thread.
_MOST_BESIDE = 2


@dataclass(frozen=True, slots=True)
class OthersWork:
    """What a gateway tells of the work beside its batches.

    `num_batch_waiting` requests of batches have no engine. `is_pressed` says that interactive and
    standard requests of the last half minute missed their objectives more often than they may.
    `pace` is that of the engines of the models that requests name so, the least of several; `None`
    while it is not known, or none has an objective for it.
    """

    num_batch_waiting: Callable[[], float] = lambda: math.inf
    is_pressed: Callable[[], bool] = lambda: False
    pace: Callable[[Iterable[str]], EnginePace | None] = lambda _names: None


NO_OTHERS = OthersWork()


def most_leased(batches_at_once: int) -> int:
    """Returns how many batches a gateway has at most, of which it asks so many as a rule."""
    return 2 * batches_at_once + _MOST_BESIDE


class BatchRunner:
    """The batches that one gateway has leased. Used from one event loop."""

    def __init__(
        self,
        store: BatchStore,
        caller: LineCaller,
        settings: JobSettings,
        owner: str,
        batches_at_once: int,
        now_s: Callable[[], float],
        calls: StoreCalls,
        batch_lifetime_s: float,
        prices: BatchPrices | None = None,
        max_lines: int = 0,
        others: OthersWork = NO_OTHERS,
    ) -> None:
        """Makes a runner that claims batches as `owner`; `now_s` is Unix time.

        Batches stay for `batch_lifetime_s` after their end. Without `prices` they cost nothing.
        All that run together have `max_lines` in flight at most, where that is more than settings
        give each; more than those only while `others` leave room, and fewer where they suffer.
        Beyond `batches_at_once` there are as many again at most, as far as there are lines for them
        and one at least.
        """
        self._store = store
        self._caller = caller
        self._settings = settings
        self._owner = owner
        self._batches_at_once = batches_at_once
        has_lines_for = max_lines // settings.lines_in_flight - batches_at_once
        self._most_at_once = batches_at_once + max(1, min(batches_at_once, has_lines_for))
        self._now_s = now_s
        self._calls = calls
        self._batch_lifetime_s = batch_lifetime_s
        self._prices = prices
        self._room = LineRoom(
            most=lambda: max_lines // max(1, len(self._jobs)),
            has_room=lambda: few_wait(others.num_batch_waiting(), settings.lines_in_flight),
            is_pressed=others.is_pressed,
            pace=others.pace,
            num_batches=lambda: len(self._jobs),
        )
        self._jobs: dict[asyncio.Task[None], BatchLease] = {}
        self._beside: dict[asyncio.Task[None], BatchLease] = {}  # these ask no line
        self._is_woken = asyncio.Event()
        self.counts = LineCounts()

    @property
    def num_leased(self) -> int:
        """The batches that this gateway works on."""
        return len(self._jobs) + len(self._beside)

    def wake(self) -> None:
        """Has it look for batches now: one was made here."""
        self._is_woken.set()

    async def run(self) -> None:
        """Works until it is cancelled; then it gives its batches back."""
        sweep_at_s = self._now_s()
        try:
            while True:
                try:
                    if self._now_s() >= sweep_at_s:
                        # One that fails is not tried again at once.
                        sweep_at_s = self._now_s() + _SWEEP_S
                        if await self._sweep():
                            sweep_at_s = self._now_s()
                    await self._claim()
                except Exception:
                    # A full disk passes; whatever it is, the streams go on.
                    logger.exception("batch_store_failed")
                await self._wait()
        finally:
            await self._give_back()

    async def _sweep(self) -> bool:
        """Deletes what has had its time; returns whether there may be more of it."""
        swept = await self._calls.bulk(self._store.sweep, self._now_s(), self._batch_lifetime_s)
        if swept.file_ids or swept.batch_ids:
            num_files, num_batches = len(swept.file_ids), len(swept.batch_ids)
            logger.info("batch_lane_swept files=%d batches=%d", num_files, num_batches)
        return bool(swept.has_more)

    async def _claim(self) -> None:
        self._is_woken.clear()
        for which, jobs, most in (
            (Claim.ANY, self._jobs, self._batches_at_once),
            (Claim.OF_NEW_TENANT, self._jobs, self._most_at_once),
            (Claim.WITHOUT_LINES, self._beside, _MOST_BESIDE),
        ):
            while len(jobs) < most:
                lease = await self._calls.brief(
                    self._store.claim, self._owner, self._now_s(), self._settings.lease_s, which
                )
                if lease is None and which is Claim.ANY:
                    return  # then there is none of the others either
                if lease is None:
                    break
                logger.info(
                    "batch_leased batch=%s term=%d claim=%s", lease.batch_id, lease.term, which
                )
                asks_lines = jobs is self._jobs
                jobs[asyncio.create_task(self._carry(lease, asks_lines=asks_lines))] = lease

    async def _carry(self, lease: BatchLease, *, asks_lines: bool) -> None:
        job = BatchJob(
            lease,
            self._store,
            self._caller,
            self._settings,
            self._now_s,
            self._calls,
            self.counts,
            self._prices,
            self._room,
            asks_lines=asks_lines,
        )
        try:
            if await job.run():
                logger.info("batch_ended batch=%s", lease.batch_id)
            else:
                await self._calls.brief(self._store.release, lease)
                logger.info("batch_waits batch=%s", lease.batch_id)
        except* LeaseLostError:
            logger.warning("batch_lease_lost batch=%s term=%d", lease.batch_id, lease.term)
        except* Exception:
            # Somebody tries again when the lease is over.
            logger.exception("batch_failed batch=%s", lease.batch_id)

    async def _wait(self) -> None:
        """Waits until a job ends, a batch is made here, or it is time to look for others'."""
        woken = asyncio.ensure_future(self._is_woken.wait())
        try:
            await asyncio.wait(
                [woken, *self._jobs, *self._beside],
                timeout=self._settings.check_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            woken.cancel()
        for jobs in (self._jobs, self._beside):
            for task in [task for task in jobs if task.done()]:
                del jobs[task]

    async def _give_back(self) -> None:
        jobs = self._jobs | self._beside
        self._jobs, self._beside = {}, {}
        for task in jobs:
            task.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        for lease in jobs.values():
            await self._calls.brief(self._store.release, lease)
