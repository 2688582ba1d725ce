"""What the directory is told of one life of a replica: a record for each slice of its engine.

Owns the records, their order of states, and that they are said again and again. Does not own what
happens (`residency`).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any

from ray.serve.handle import DeploymentHandle

from serving.domain.slice_lifecycle import EndCause, LoadStage, SliceLife, SliceState
from serving.domain.slice_records import RENEWAL_S, HostRecord, SliceRecord, part_suffix
from serving.tpu.multislice import End

logger = logging.getLogger(__name__)

# How long a word to the directory may take. One that is not there may stay away for long, and a
# slice is taken, served on and left without it. It is told again, but for an end.
_WORD_S = 3.0
# Ends that somebody asks the reason of.
_FAILURES = (EndCause.BOOT_FAILED, EndCause.UNHEALTHY, EndCause.PREEMPTED)


class LifeRecords:
    """The records of one life, one for each joined slice. All are in the same state until the end.

    A record that the directory does not take is said again with the next renewal.
    """

    def __init__(self, first: SliceRecord, num_slices: int, directory: DeploymentHandle) -> None:
        self._records = tuple(
            replace(first, replica_id=f"{first.replica_id}{part_suffix(part)}", part=part)
            for part in range(num_slices)
        )
        self._directory = directory
        self._renewing = asyncio.create_task(self._keep_renewed(), name="keep-registered")

    @property
    def life_id(self) -> str:
        """The id of the life, which is that of its first record."""
        return self._records[0].replica_id

    @property
    def state(self) -> SliceState:
        """The state of all of them."""
        return self._records[0].state

    @property
    def slice_names(self) -> list[str]:
        """The slices that are or were held; none where nothing is reserved."""
        return [name for each in self._records if (name := each.life.slice_name) is not None]

    async def enter(
        self,
        state: SliceState,
        reason: str,
        *,
        names: Sequence[str] | None = None,
        stage: LoadStage | None = None,
    ) -> None:
        """All enter a state. `names` are those of the slices, in order, once they are known."""
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

    async def hold(self, hosts: Sequence[tuple[HostRecord, ...]]) -> None:
        """The hosts of each slice are known."""
        for part, of_slice in enumerate(hosts):
            self._change(part, hosts=of_slice)
        await self._renew()

    async def serve(self, engine_id: str, address: tuple[str, int]) -> None:
        """The engine has started; it listens on the first slice."""
        for part in range(len(self._records)):
            self._change(part, engine_id=engine_id, address=None if part else address)
        await self._renew()

    async def leave_by(self, deadlines_s: Sequence[float | None]) -> None:
        """Until when each slice is there, wall clock; `None`: nobody takes it away."""
        for part, deadline_s in enumerate(deadlines_s):
            self._change(part, drain_deadline_s=deadline_s)
        await self._renew()

    async def end(self, ends: Sequence[End]) -> None:
        """The life of each slice is over, for its own cause and reason."""
        now_s = time.time()
        for part, (record, (cause, reason)) in enumerate(zip(self._records, ends, strict=True)):
            ended = replace(record, life=record.life.end(cause, now_s, reason))
            logger.info(
                "slice_ended life=%s slice=%s cause=%s reason=%r",
                record.replica_id, ended.life.slice_name, cause, reason,
            )  # fmt: skip
            if cause in _FAILURES:
                _note_tpu_logs(ended)
            await self._tell(self._directory.end.remote(ended))
            self._change(
                part,
                life=ended.life, hosts=(), engine_id=None, address=None, drain_deadline_s=None,
            )  # fmt: skip

    async def begin_again(self, reason: str) -> None:
        """The replica looks for other slices, under the same id."""
        now_s = time.time()
        for part in range(len(self._records)):
            self._change(part, life=SliceLife.begin(now_s, reason))
        await self._renew()

    async def absolve(self) -> None:
        """The slices serve: what they did before is forgotten."""
        for name in self.slice_names:
            await self._tell(self._directory.absolve.remote(name))

    def close(self) -> None:
        """Says nothing any more."""
        self._renewing.cancel()

    def _change(self, part: int, **changes: Any) -> None:
        changed = replace(self._records[part], **changes)
        self._records = (*self._records[:part], changed, *self._records[part + 1 :])

    async def _renew(self) -> None:
        for record in self._records:
            if record.state != SliceState.GONE:
                # A failure is made good by `_keep_renewed`, which says it again.
                await self._tell(self._directory.renew.remote(record))

    @staticmethod
    async def _tell(word: Awaitable[Any]) -> None:
        await quietly(asyncio.wait_for(word, _WORD_S), "directory_unreachable")

    async def _keep_renewed(self) -> None:
        while True:
            await self._renew()
            await asyncio.sleep(RENEWAL_S)


async def quietly(work: Awaitable[Any], event: str) -> None:
    """Waits for something that may fail without changing what comes next; the failure is logged."""
    try:
        await work
    except Exception as error:  # noqa: BLE001 - whatever has already gone, leaving goes on
        logger.warning("%s error=%r", event, error)


def _note_tpu_logs(ended: SliceRecord) -> None:
    """Where to look for what libtpu said, host by host; nothing where it writes no logs."""
    for host in ended.hosts:
        if host.tpu_log_dir is not None:
            logger.warning(
                "tpu_logs life=%s slice=%s worker_id=%d node_id=%s ip=%s dir=%s",
                ended.replica_id, ended.life.slice_name,
                host.worker_id, host.node_id, host.address, host.tpu_log_dir,
            )  # fmt: skip
