"""The fleet directory as a Serve deployment: one replica of soft state, restarted by Serve.

It also grants free slices to the replicas that wait for one. A restart forgets pending grants and
quarantine. That costs a race or another failed probe: the placement groups are the locks.
"""

import asyncio
import logging
import time
import uuid
from typing import Any

from pydantic import JsonValue

from serving.directory.allocator import SliceAllocator
from serving.directory.pending_grants import Grant
from serving.directory.ray_hosts import observe_cluster
from serving.domain.inventory import Slice, SliceRequest
from serving.domain.load_report import directory_stats
from serving.domain.slice_records import RENEWAL_S, Directory, SliceRecord, Snapshot
from serving.domain.succession import reason_to_wait

logger = logging.getLogger(__name__)

_POLL_S = 1.0


class FleetDirectory:
    """Serves `domain.slice_records.Directory` and the allocator. `serving.app` deploys it."""

    async def __init__(self) -> None:  # type: ignore[misc] # Serve awaits it
        self._directory = Directory(uuid.uuid4().hex[:8])
        self._started_at_s = time.time()
        self._allocator = SliceAllocator(observe_cluster)
        self._expiry = asyncio.create_task(self._expire())

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Takes Serve's `user_config`, at the start and when the models change."""
        models: list[dict[str, JsonValue]] = user_config["models"]
        self._directory.set_models(models)
        names = ",".join(str(model["name"]) for model in models)
        logger.info("models_told models=%s", names)

    async def renew(self, record: SliceRecord) -> None:
        """Registers a slice replica and its state, or renews it."""
        self._directory.renew(record, time.monotonic())

    async def forget(self, replica_id: str) -> None:
        """Removes a slice replica that leaves."""
        self._directory.forget(replica_id)

    async def end(self, record: SliceRecord) -> None:
        """Records the end of a session and its cause; the replica may begin another one."""
        self._directory.end(record)

    async def watch(self, version: str, timeout_s: float) -> Snapshot:
        """Returns a snapshot once it differs from `version`, at the latest after `timeout_s`."""
        return await self._directory.wait_change(version, timeout_s)

    async def acquire(
        self,
        replica_id: str,
        request: SliceRequest,
        excluded: frozenset[frozenset[str]],
        timeout_s: float,
    ) -> Grant:
        """Grants a free slice to a slice replica; see `SliceAllocator.acquire`.

        A replica whose predecessor still has its slice gets no other one.
        """
        wait = await self._wait_for_predecessor(replica_id, timeout_s)
        if wait is not None:
            return Grant((), wait)
        return await self._allocator.acquire(replica_id, request, excluded, timeout_s)

    async def quarantine(self, whole: Slice, suspects: frozenset[str], reason: str) -> None:
        """Quarantines a slice that failed; `suspects` are the node ids of the hosts to blame."""
        self._allocator.quarantine(whole, suspects, reason)

    async def clear_quarantine(self, slice_name: str) -> None:
        """Clears the failures of a slice that serves."""
        self._allocator.clear_quarantine(slice_name)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Reports all slices to the autoscaling policy; see `domain.load_report`."""
        return directory_stats(self._directory.snapshot(), self._started_at_s, time.time())

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

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL_S)
            self._directory.expire(time.monotonic(), time.time())
