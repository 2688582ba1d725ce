"""The fleet directory as a Serve deployment: one replica of soft state, restarted by Serve.

It also gives free slices to the replicas that wait for one. What it forgets at a restart, offers
and quarantine, costs a race or another failed probe; the placement groups are the locks.
"""

import asyncio
import logging
import time
import uuid
from typing import Any

from pydantic import JsonValue

from serving.directory.allocator import SliceClerk
from serving.directory.claims import Offer
from serving.directory.ray_hosts import look
from serving.domain.inventory import SliceWant, WholeSlice
from serving.domain.load_report import directory_stats
from serving.domain.slice_records import RENEWAL_S, Directory, SliceRecord, Snapshot
from serving.domain.succession import reason_to_wait

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


class FleetDirectory:
    """See `directory`. `app` makes it a deployment."""

    async def __init__(self) -> None:  # type: ignore[misc] # Serve awaits it
        self._directory = Directory(uuid.uuid4().hex[:8])
        self._started_at_s = time.time()
        self._clerk = SliceClerk(look)
        self._expiry = asyncio.create_task(self._expire())

    def reconfigure(self, told: dict[str, Any]) -> None:
        """Called by Serve with its `user_config`, at the start and when the models change."""
        models: list[dict[str, JsonValue]] = told["models"]
        self._directory.set_models(models)
        names = ",".join(str(model["name"]) for model in models)
        logger.info("models_told models=%s", names)

    async def renew(self, record: SliceRecord) -> None:
        """A slice replica says that it is there, and in which state."""
        self._directory.renew(record, time.monotonic())

    async def forget(self, replica_id: str) -> None:
        """A slice replica says that it is leaving."""
        self._directory.forget(replica_id)

    async def end(self, record: SliceRecord) -> None:
        """A slice replica says that a life is over, and why; it may begin another one."""
        self._directory.end(record)

    async def watch(self, version: str, timeout_s: float) -> Snapshot:
        """A gateway asks for the next picture after `version`."""
        return await self._directory.wait_change(version, timeout_s)

    async def claim(
        self,
        replica_id: str,
        want: SliceWant,
        tried: frozenset[frozenset[str]],
        timeout_s: float,
    ) -> Offer:
        """A slice replica asks for a free slice; see `SliceClerk.claim`.

        A replica that replaces one which still has its slice is not given another one.
        """
        wait = await self._wait_for_predecessor(replica_id, timeout_s)
        if wait is not None:
            return Offer((), wait)
        return await self._clerk.claim(replica_id, want, tried, timeout_s)

    async def quarantine(self, whole: WholeSlice, suspects: frozenset[str], reason: str) -> None:
        """A slice replica says that a slice failed, by the node ids of the hosts to blame."""
        self._clerk.quarantine(whole, suspects, reason)

    async def absolve(self, slice_name: str) -> None:
        """A slice replica says that a slice serves."""
        self._clerk.absolve(slice_name)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """All slices, for an autoscaling policy; see `scaling_stats`."""
        return directory_stats(self._directory.snapshot(), self._started_at_s, time.time())

    async def _wait_for_predecessor(self, replica_id: str, timeout_s: float) -> str | None:
        """Waits while a replica may not take a slice; after `timeout_s` the reason, else `None`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            snapshot = self._directory.snapshot()
            wait = reason_to_wait(snapshot.records, replica_id, time.time())
            left_s = deadline_s - time.monotonic()
            if wait is None or left_s <= 0:
                return wait
            # Some reasons end with time alone.
            await self._directory.wait_change(snapshot.version, min(left_s, _LOOK_S))

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL_S)
            self._directory.expire(time.monotonic(), time.time())
