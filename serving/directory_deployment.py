"""The fleet directory as a Serve deployment: one replica of soft state, restarted by Serve."""

import asyncio
import time
import uuid

from serving.directory import RENEWAL_S, Directory, EngineRecord, Snapshot


class FleetDirectory:
    """See `directory`. `app` makes it a deployment."""

    async def __init__(self) -> None:  # type: ignore[misc] # Serve awaits it
        self._directory = Directory(uuid.uuid4().hex[:8])
        self._expiry = asyncio.create_task(self._expire())

    async def renew(self, record: EngineRecord) -> None:
        """A slice replica says that it is there, and in which state."""
        self._directory.renew(record, time.monotonic())

    async def forget(self, replica_id: str) -> None:
        """A slice replica says that it is leaving."""
        self._directory.forget(replica_id)

    async def watch(self, version: str, timeout_s: float) -> Snapshot:
        """A gateway asks for the next picture after `version`."""
        return await self._directory.wait_change(version, timeout_s)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL_S)
            self._directory.expire(time.monotonic())
