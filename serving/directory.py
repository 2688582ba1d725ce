"""The fleet directory: which engines there are, where they listen, in which state.

Soft state. Nothing is stored: every slice replica says again and again that it is there, and is
forgotten when it stops. After a restart of the directory, of a replica or of a gateway, in any
order, the picture is whole again within one lease. A gateway never drops an engine because the
directory forgot it; only its link says that an engine is gone.
"""

import asyncio
from dataclasses import dataclass, replace
from enum import StrEnum

# A replica that has not said for this long that it is there is forgotten.
LEASE_S = 5.0
RENEWAL_S = 1.0


class SliceState(StrEnum):
    """Where a slice is in its life (the states that a `local` slice can be in)."""

    LOADING = "loading"  # the engine is starting
    READY = "ready"  # it takes requests
    DRAINING = "draining"  # it takes no more


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One slice replica. `engine_id` and `address` are `None` until its engine has started.

    `since_s` is the wall-clock time at which it entered `state`, seconds since the epoch.
    """

    replica_id: str
    model: str
    compute_class: str
    state: SliceState
    since_s: float
    engine_id: str | None = None
    address: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All records at one moment. `version` changes whenever a record does."""

    version: str
    records: tuple[EngineRecord, ...] = ()


class Directory:
    """Records under lease, and a way to wait for a change. Clockless: callers pass `now_s`."""

    def __init__(self, instance_id: str) -> None:
        # Versions of different directories must differ, or a gateway would wait for a change that
        # happened before the restart.
        self._instance_id = instance_id
        self._counter = 0
        self._leases: dict[str, tuple[EngineRecord, float]] = {}
        self._changed = asyncio.Event()

    def snapshot(self) -> Snapshot:
        """What is known now."""
        records = tuple(record for record, _ in self._leases.values())
        return Snapshot(f"{self._instance_id}:{self._counter}", records)

    def renew(self, record: EngineRecord, now_s: float) -> None:
        """Takes in a record, or keeps it for another lease."""
        known = self._leases.get(record.replica_id)
        self._leases[record.replica_id] = (replace(record), now_s + LEASE_S)
        if known is None or known[0] != record:
            self._note_change()

    def forget(self, replica_id: str) -> None:
        """Drops a replica that has said it is leaving."""
        if self._leases.pop(replica_id, None) is not None:
            self._note_change()

    def expire(self, now_s: float) -> None:
        """Drops the replicas whose lease has run out."""
        late = [key for key, (_, until_s) in self._leases.items() if until_s <= now_s]
        for key in late:
            del self._leases[key]
        if late:
            self._note_change()

    async def wait_change(self, version: str, timeout_s: float) -> Snapshot:
        """The next snapshot that is not `version`; the present one when nothing changes in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.snapshot().version == version:
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self.snapshot()

    def _note_change(self) -> None:
        self._counter += 1
        self._changed.set()
        self._changed = asyncio.Event()
