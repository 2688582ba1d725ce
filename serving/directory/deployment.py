"""The fleet directory as a Serve deployment: one replica of soft state, restarted by Serve.

It also keeps the records of all slices and grants free ones to the replicas that wait. A restart
forgets pending grants, which costs a race: the placement groups are the locks. What is held against
slices is stored.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import JsonValue
from ray import serve

from serving.config.application import LinkConfig
from serving.directory.allocator import SliceAllocator
from serving.directory.cluster_secret import cluster_secret
from serving.directory.engine_notes import EngineNotes
from serving.directory.exchanges import Exchanges
from serving.directory.orphan_keeper import OrphanKeeper
from serving.directory.orphans import OrphanOffers, fits, is_wanted
from serving.directory.pending_grants import Grant, SliceWish
from serving.directory.plan_store import read_plan_report
from serving.directory.supply_book import life_key
from serving.directory.survey_loop import SurveyLoop
from serving.directory.usage_notes import UsageNotes
from serving.domain.inventory import Slice, SliceRequest
from serving.domain.load_report import directory_stats
from serving.domain.plan_report import PlanReport, PlanReportError
from serving.domain.slice_records import (
    RENEWAL_S,
    Directory,
    HandOn,
    LeaveRequest,
    SliceRecord,
    Snapshot,
)
from serving.domain.supply.faults import FaultCause
from serving.domain.supply.keys import SupplyKeys
from serving.domain.supply.succession import reason_to_wait

logger = logging.getLogger(__name__)

_POLL_S = 1.0
# For the plan: a replica that ends waits for it.
_PLAN_S = 1.0


class FleetDirectory:
    """Serves `domain.slice_records.Directory` and the allocator. `serving.app` deploys it."""

    async def __init__(self, link: LinkConfig) -> None:  # type: ignore[misc] # Serve awaits it
        instance_id = uuid.uuid4().hex[:8]
        self._directory = Directory(instance_id)
        self._started_at_s = time.time()
        self._application = serve.get_replica_context().app_name
        keys = SupplyKeys(self._application)
        self._offers = OrphanOffers()
        self._exchanges = Exchanges()
        self._unwanted: Mapping[str, str] = {}
        self._notes = EngineNotes(keys)
        for record in await self._notes.read():
            # Its replica has one lease to renew it. Else the engine looks for another one.
            self._directory.remember(replace(record, is_orphan=False), time.monotonic())
        self._usage = UsageNotes(instance_id, keys)
        await self._usage.read()
        self._allocator = SliceAllocator()
        self._survey = SurveyLoop(
            instance_id,
            keys,
            self._allocator,
            lambda: self._directory.lives(time.monotonic()),
            self._directory.set_supply,
            self._directory.set_orders,
        )
        self._keeper = OrphanKeeper(
            self._directory,
            f"directory {instance_id}",
            cluster_secret(link),
            lambda: {**self._unwanted, **self._survey.book.leave_reasons()},
            link.encryption,
        )
        self._tasks = (
            asyncio.create_task(self._expire(), name="expire"),
            asyncio.create_task(self._survey.run(), name="survey"),
            asyncio.create_task(self._keeper.run(), name="keep-orphans"),
            asyncio.create_task(self._keep_notes(), name="keep-notes"),
            asyncio.create_task(self._usage.keep_written(), name="keep-usage"),
        )

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Takes Serve's `user_config`, at the start and when the models change."""
        models: list[dict[str, JsonValue]] = user_config["models"]
        self._directory.set_models(models)
        names = ",".join(str(model["name"]) for model in models)
        logger.info("models_told models=%s", names)

    async def renew(self, record: SliceRecord) -> LeaveRequest | None:
        """Registers a slice replica and its state, or renews it.

        Returns a request to leave its slice; `None` if it may stay.
        """
        self._directory.renew(record, time.monotonic())
        reason = self._survey.book.leave_reason(record.replica_id)
        if reason is not None:
            return LeaveRequest(reason, is_replaced=True)
        reason = self._exchanges.leave_reason(record, time.monotonic())
        return None if reason is None else LeaveRequest(reason, is_replaced=False)

    async def forget(self, replica_id: str) -> None:
        """Removes a slice replica that leaves."""
        self._directory.forget(replica_id)

    async def end(self, record: SliceRecord) -> None:
        """Records the end of a session and its cause; the replica may begin another one."""
        self._directory.end(record)
        self._survey.book.note_end(record, time.time())

    async def hand_on(self, replica_id: str, *, is_shutdown: bool) -> HandOn:
        """Returns what becomes of the engine of a replica that Serve ends, which leaves it or not.

        `is_shutdown` says that Serve ends the whole application, and may be told to begin again.
        """
        report = None if is_shutdown else await _plan_report(self._application)
        records = self._directory.snapshot().records
        own = self._record_of(replica_id)
        found = HandOn.WANTED
        if own is not None and not (is_shutdown or is_wanted(own, records)):
            order = () if report is None else report.drain_order(own.model, time.time())
            barred = self._survey.book.leave_reasons()
            if not self._exchanges.leave(own, records, order, barred, time.monotonic()):
                return HandOn.ENDS
            found = HandOn.EXCHANGED
            logger.info("slice_exchanged life=%s slice=%s", replica_id, own.life.slice_name)
        self._directory.hand_on(replica_id)
        return found

    async def find_engine(self, replica_id: str, timeout_s: float) -> SliceRecord | None:
        """Offers a replica an engine that has lost its own; `None` if there is none for it.

        It waits for replicas that are late, because theirs may be one.
        """
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            snapshot = self._directory.snapshot()
            own = self._record_of(replica_id)
            if own is not None:
                engine = self._offers.offer(own, snapshot.records, time.monotonic())
                if engine is not None:
                    return engine
                late = self._directory.late(time.monotonic())
                if not any(fits(own, each) for each in late):
                    return None
            await self._directory.wait_change(snapshot.version, min(left_s, _POLL_S))
        return None

    async def watch(self, version: str, timeout_s: float) -> Snapshot:
        """Returns a snapshot once it differs from `version`, at the latest after `timeout_s`."""
        return await self._directory.wait_change(version, timeout_s)

    async def share_usage(self, report: bytes) -> bytes:
        """Takes what a gateway has counted of tenants' quotas; returns what the others have."""
        return self._usage.take(report)

    async def acquire(
        self,
        replica_id: str,
        request: SliceRequest,
        excluded: frozenset[frozenset[str]],
        timeout_s: float,
    ) -> Grant:
        """Grants a free slice to a slice replica; see `SliceAllocator.acquire`.

        A replica whose predecessor still has its slice gets no other one. It may get an engine
        instead that has lost its replica meanwhile.
        """
        deadline_s = time.monotonic() + timeout_s
        wait = await self._wait_for_predecessor(replica_id, timeout_s)
        own = self._record_of(replica_id)
        if own is None:
            return Grant((), wait or "the directory has no record of the replica any more")
        while True:
            records = self._directory.snapshot().records
            engine = self._offers.offer(own, records, time.monotonic())
            if engine is not None:
                return Grant((), f"the engine of {engine.replica_id} goes on without it", engine)
            if wait is not None:
                return Grant((), wait)
            wish = SliceWish(replica_id, request, own.life.transitions[0].at_s, excluded)
            left_s = deadline_s - time.monotonic()
            grant = await self._allocator.acquire(wish, max(0.0, min(left_s, _POLL_S)))
            if grant.slices or left_s <= _POLL_S:
                return grant

    async def note_failure(
        self,
        replica_id: str,
        whole: Slice,
        suspects: frozenset[str],
        cause: FaultCause,
        reason: str,
    ) -> None:
        """Holds a failure against a slice; `suspects` are the node ids of the hosts to blame."""
        own = self._record_of(replica_id)
        life_id = "" if own is None else life_key(own)
        self._survey.book.note_failure(whole, suspects, cause, reason, time.time(), life_id=life_id)

    async def note_leaving(self, whole: Slice, ends_at_s: float, reason: str) -> None:
        """Keeps replicas off a slice that is taken away at `ends_at_s` (wall clock)."""
        self._survey.book.note_leaving(whole, ends_at_s, reason, time.time())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Reports all slices to the autoscaling policy; see `domain.load_report`."""
        orders = self._survey.book.orders
        return directory_stats(self._directory.snapshot(), self._started_at_s, time.time(), orders)

    async def _wait_for_predecessor(self, replica_id: str, timeout_s: float) -> str | None:
        """Waits until a replica may take a slice; after `timeout_s` returns why it may not."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            snapshot = self._directory.snapshot()
            wait = reason_to_wait(snapshot.records, replica_id, time.time())
            left_s = deadline_s - time.monotonic()
            if wait is None or left_s <= 0:
                return wait
            # Some reasons end with time alone.
            await self._directory.wait_change(snapshot.version, min(left_s, _POLL_S))

    def _record_of(self, replica_id: str) -> SliceRecord | None:
        records = self._directory.snapshot().records
        return next((record for record in records if record.replica_id == replica_id), None)

    async def _keep_notes(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL_S)
            try:
                await self._notes.write(self._directory.snapshot().records)
            except Exception as error:  # noqa: BLE001 - whatever ails the head, it is tried again
                logger.warning("engine_notes_not_written error=%r", error)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL_S)
            self._directory.expire(time.monotonic(), time.time())
            self._unwanted = self._exchanges.look(
                self._directory.snapshot().records,
                self._survey.book.leave_reasons(),
                time.monotonic(),
            )


async def _plan_report(application: str) -> PlanReport | None:
    """Returns the last plans; `None` where there are none, or none that can be read in time."""
    try:
        async with asyncio.timeout(_PLAN_S):
            return await asyncio.to_thread(read_plan_report, application)
    except (PlanReportError, ConnectionError, TimeoutError) as error:
        logger.warning("plan_report_unreadable error=%r", error)
        return None
