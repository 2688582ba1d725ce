"""Reports one session of a replica to the directory: a record for each slice of its engine.

Owns the records, the order of their states, and their renewal. Does not own what happens on the
slices (`session`).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from ray.serve.handle import DeploymentHandle

from serving.domain.slice_lifecycle import EndCause, LoadStage, SliceLifecycle, SliceState
from serving.domain.slice_records import (
    RENEWAL_S,
    EngineRecord,
    HandOn,
    HostRecord,
    LeaveRequest,
    SliceRecord,
    part_suffix,
)
from serving.tpu.multislice import End

logger = logging.getLogger(__name__)

# How long a call to the directory may take. A directory may be away for long, and slices are
# acquired, used and left without it. A renewal repeats what it missed, except for an end.
_CALL_S = 3.0
# Ends whose reason an operator looks for.
_FAILURES = (EndCause.BOOT_FAILED, EndCause.UNHEALTHY, EndCause.PREEMPTED)


class DirectoryReporter:
    """The records of one session, one for each slice. All have the same state until the end.

    A record that the directory did not get is sent again with the next renewal. `on_leave` is
    called with the part and the request, whenever the directory wants one of the slices left.
    """

    def __init__(
        self,
        first: SliceRecord,
        num_slices: int,
        directory: DeploymentHandle,
        on_leave: Callable[[int, LeaveRequest], None],
    ) -> None:
        self._records = tuple(
            replace(first, replica_id=f"{first.replica_id}{part_suffix(part)}", part=part)
            for part in range(num_slices)
        )
        self._directory = directory
        self._on_leave = on_leave
        self._renewing = asyncio.create_task(self._keep_renewed(), name="keep-registered")

    @property
    def life_id(self) -> str:
        """The id of the session, which is that of its first record."""
        return self._records[0].replica_id

    @property
    def state(self) -> SliceState:
        """The state of all records."""
        return self._records[0].state

    async def enter(
        self,
        state: SliceState,
        reason: str,
        *,
        names: Sequence[str] | None = None,
        stage: LoadStage | None = None,
    ) -> None:
        """Enters a state with all records. `names` are those of the slices in order, once known."""
        now_s = time.time()
        for part, record in enumerate(self._records):
            name = None if names is None else names[part]
            life = record.life.enter(state, now_s, reason, slice_name=name, stage=stage)
            if life.state != record.state:
                logger.info(
                    "slice_state life=%s slice=%s from=%s to=%s reason=%r",
                    record.replica_id, life.slice_name, record.state, state, reason,
                )  # fmt: skip
            self._change(part, life=life)
        await self._renew()

    def adopt(self) -> None:
        """Notes that this session's engine ran before, under another replica."""
        for part in range(len(self._records)):
            self._change(part, is_adopted=True)

    async def reserve(self, group_id: str) -> None:
        """Sets the placement group, which stands; its hosts are not known to be there yet."""
        for part in range(len(self._records)):
            self._change(part, group_id=group_id)
        await self._renew()

    async def hold(self, hosts: Sequence[tuple[HostRecord, ...]], group_id: str) -> None:
        """Sets the hosts of each slice, and the placement group around all."""
        for part, of_slice in enumerate(hosts):
            self._change(part, hosts=of_slice, group_id=group_id)
        await self._renew()

    async def serve(self, engines: Sequence[EngineRecord]) -> None:
        """Sets the engines. That of a multislice listens on the first slice."""
        first, *others = engines
        for part in range(len(self._records)):
            self._change(
                part,
                engine_id=first.engine_id,
                address=None if part else first.address,
                control=first.control,
                others=tuple(others),
            )
        await self._renew()

    async def hand_on(self, *, is_shutdown: bool) -> HandOn:
        """Asks what becomes of the engine; unless it ends, this life is over.

        Without a directory another replica is to have it: somebody may come.
        """
        self.close()
        try:
            async with asyncio.timeout(_CALL_S):
                found: HandOn = await self._directory.hand_on.remote(
                    self.life_id, is_shutdown=is_shutdown
                )
        except Exception as error:  # noqa: BLE001 - whatever ails the directory
            logger.warning("directory_unreachable error=%r", str(error))
            return HandOn.WANTED
        if found is HandOn.ENDS:
            self._renewing = asyncio.create_task(self._keep_renewed(), name="keep-registered")
        return found

    async def set_deadlines(self, deadlines_s: Sequence[float | None]) -> None:
        """Sets the wall-clock end of each slice; `None` if nothing takes it away."""
        for part, deadline_s in enumerate(deadlines_s):
            self._change(part, drain_deadline_s=deadline_s)
        await self._renew()

    async def end(self, ends: Sequence[End]) -> None:
        """Ends each record, for its own cause and reason."""
        now_s = time.time()
        for part, (record, (cause, reason)) in enumerate(zip(self._records, ends, strict=True)):
            ended = replace(record, life=record.life.end(cause, now_s, reason))
            logger.info(
                "slice_ended life=%s slice=%s cause=%s reason=%r",
                record.replica_id, ended.life.slice_name, cause, reason,
            )  # fmt: skip
            if cause in _FAILURES:
                _log_tpu_logs(ended)
            await self._send(self._directory.end.remote(ended))
            self._change(
                part,
                life=ended.life, hosts=(), engine_id=None, address=None, drain_deadline_s=None,
                control=None, group_id=None, others=(),
            )  # fmt: skip

    async def restart(self, reason: str) -> None:
        """Begins again under the same id, because the replica looks for other slices."""
        now_s = time.time()
        for part in range(len(self._records)):
            self._change(part, life=SliceLifecycle.begin(now_s, reason))
        await self._renew()

    def close(self) -> None:
        """Stops the renewals."""
        self._renewing.cancel()

    def _change(self, part: int, **changes: Any) -> None:
        changed = replace(self._records[part], **changes)
        self._records = (*self._records[:part], changed, *self._records[part + 1 :])

    async def _renew(self) -> None:
        for record in self._records:
            if record.state != SliceState.GONE:
                # `_keep_renewed` makes up for a failure.
                await self._send(self._renew_one(record))

    async def _renew_one(self, record: SliceRecord) -> None:
        request: LeaveRequest | None = await self._directory.renew.remote(record)
        if request is not None:
            self._on_leave(record.part, request)

    @staticmethod
    async def _send(call: Awaitable[Any]) -> None:
        await best_effort(asyncio.wait_for(call, _CALL_S), "directory_unreachable")

    async def _keep_renewed(self) -> None:
        while True:
            await self._renew()
            await asyncio.sleep(RENEWAL_S)


async def best_effort(work: Awaitable[Any], event: str) -> None:
    """Awaits `work`, which may fail without changing what comes next; logs the failure."""
    try:
        await work
    except Exception as error:  # noqa: BLE001 - whatever has already ended, the stop goes on
        logger.warning("%s error=%r", event, error)


def _log_tpu_logs(ended: SliceRecord) -> None:
    """Logs the folder of libtpu's logs, host by host; nothing where it writes none."""
    for host in ended.hosts:
        if host.tpu_log_dir is not None:
            logger.warning(
                "tpu_logs life=%s slice=%s worker_id=%d node_id=%s ip=%s dir=%s",
                ended.replica_id, ended.life.slice_name,
                host.worker_id, host.node_id, host.address, host.tpu_log_dir,
            )  # fmt: skip
