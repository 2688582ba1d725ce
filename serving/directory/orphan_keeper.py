"""Looks after engines without a replica, and after slices that nobody has any more.

Owns when that happens: engines whose process is gone are taken off the list, those of an outdated
version or on a slice that is to be left are drained and ended, placement groups that nobody knows
are removed. Decides nothing (`orphans`), and ends nothing that a replica may still take over.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from ray.util.placement_group import placement_group_table

from serving.config.slice_settings import DRAIN_GRACE_S
from serving.directory.orphans import outdated
from serving.domain.limits import LinkEncryption
from serving.domain.slice_lifecycle import EndCause
from serving.domain.slice_records import LEASE_S, RENEWAL_S, Directory, SliceRecord
from serving.link.errors import HandshakeError, LinkCallError, LinkClosedError
from serving.ownership.actors import engine_actor, is_actor_dead
from serving.ownership.control_client import EngineControl, EngineGoneError, SupersededError
from serving.ownership.group import GROUP_PREFIX, remove_group
from serving.ownership.lease import ClaimRefusedError

logger = logging.getLogger(__name__)

_PERIOD_S = 2.0
_GROUPS_PERIOD_S = 5.0
# A directory that has just started does not know every replica yet; one more is room for the rest.
_SETTLING_S = 2 * (LEASE_S + RENEWAL_S)
# A group stands for a moment before its replica has reported it.
_UNKNOWN_FOR_S = 15.0


class OrphanKeeper:
    """Looks after the orphans of one directory. Used from one event loop."""

    def __init__(
        self,
        directory: Directory,
        name: str,
        secret: bytes,
        leave_reasons: Callable[[], Mapping[str, str]],
        encryption: LinkEncryption = LinkEncryption.AUTO,
    ) -> None:
        """Takes `name`, under which it claims engines to end them.

        `leave_reasons` returns why slices are to be left, by the replica that has or had them.
        """
        self._leave_reasons = leave_reasons
        self._directory = directory
        self._name = name
        self._secret = secret
        self._encryption = encryption
        self._started_s = time.monotonic()
        self._looked_at_groups_s = self._started_s
        self._unknown_since_s: dict[str, float] = {}  # by group id

    def _control(self, address: tuple[str, int]) -> EngineControl:
        return EngineControl(address, self._name, self._secret, encryption=self._encryption)

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001 - whatever ails the head, it is tried again
                logger.warning("orphans_not_seen error=%r", error)

    async def look(self) -> None:
        """Looks once."""
        records = self._directory.snapshot().records
        orphans = [record for record in records if record.is_orphan and record.has_engine]
        gone = await asyncio.gather(*(self._is_gone(each) for each in orphans))
        for orphan, reason in zip(orphans, gone, strict=True):
            if reason is not None and orphan.num_engines > 1:
                # The others on the slice go with it, and its placement group.
                await self._end_unwanted(records, orphan, reason, EndCause.UNHEALTHY)
            elif reason is not None:
                self._end(records, orphan, EndCause.UNHEALTHY, reason)
        now_s = time.monotonic()
        if now_s - self._started_s < _SETTLING_S:
            return
        records = self._directory.snapshot().records
        leave_reasons = self._leave_reasons()
        unwanted = {
            each.replica_id: (each, "its deployment is of another version by now")
            for each in outdated(records)
        } | {
            each.replica_id: (each, leave_reasons[each.replica_id])
            for each in records
            if each.is_orphan and each.has_engine and each.replica_id in leave_reasons
        }
        for orphan, reason in unwanted.values():
            await self._end_unwanted(records, orphan, reason, EndCause.RELEASED)
        if now_s - self._looked_at_groups_s >= _GROUPS_PERIOD_S:
            self._looked_at_groups_s = now_s
            await self._remove_unknown_groups(now_s)

    async def _is_gone(self, orphan: SliceRecord) -> str | None:
        """Returns why an engine is gone; `None` while the processes of all may live."""
        for number, control in enumerate(_controls(orphan)):
            try:
                await self._control(control).touch()
            except EngineGoneError as error:
                return str(error)
            except (HandshakeError, LinkClosedError) as error:
                logger.info("orphan_out_of_reach life=%s reason=%r", orphan.life_id, str(error))
                if orphan.group_id and await is_actor_dead(engine_actor(orphan.group_id, number)):
                    return "its host is gone"
        return None

    async def _end_unwanted(
        self,
        records: Iterable[SliceRecord],
        orphan: SliceRecord,
        reason: str,
        cause: EndCause,
    ) -> None:
        """Drains and ends the engines of a replica that nobody is to have any more."""
        first, *others = _controls(orphan)
        # Who has the first has a right to the others: a replica that takes it over goes before.
        if not await self._end_engine(orphan, first, reason):
            return
        ended = await asyncio.gather(
            *(self._end_engine(orphan, control, reason) for control in others)
        )
        if not all(ended):
            return
        if orphan.group_id is not None:
            await asyncio.to_thread(remove_group, orphan.group_id)
        self._end(records, orphan, cause, reason)

    async def _end_engine(self, orphan: SliceRecord, address: tuple[str, int], reason: str) -> bool:
        """Drains and ends one engine; returns whether it has ended."""
        control = self._control(address)
        try:
            await control.claim()
            await control.drain(reason, DRAIN_GRACE_S, 0.0)
            await control.end()
        except EngineGoneError:
            pass
        except (
            ClaimRefusedError, SupersededError, HandshakeError, LinkCallError, LinkClosedError,
            TimeoutError,
        ) as error:  # fmt: skip
            logger.warning("orphan_not_ended life=%s reason=%r", orphan.life_id, error)
            return False
        finally:
            await control.close()
        return True

    def _end(
        self, records: Iterable[SliceRecord], orphan: SliceRecord, cause: EndCause, reason: str
    ) -> None:
        logger.warning("orphan_ended life=%s cause=%s reason=%r", orphan.life_id, cause, reason)
        for record in records:
            if record.is_orphan and record.life_id == orphan.life_id:
                self._directory.end_orphan(record.replica_id, cause, reason, time.time())

    async def _remove_unknown_groups(self, now_s: float) -> None:
        table = await asyncio.to_thread(placement_group_table)
        known = {record.group_id for record in self._directory.snapshot().records}
        unknown = {
            group_id
            for group_id, group in table.items()
            if group["name"].startswith(GROUP_PREFIX)
            and group["state"] != "REMOVED"
            and group_id not in known
        }
        self._unknown_since_s = {
            group_id: self._unknown_since_s.get(group_id, now_s) for group_id in unknown
        }
        for group_id, since_s in self._unknown_since_s.items():
            if now_s - since_s < _UNKNOWN_FOR_S:
                continue
            # An engine that lives ends by its lease, or is adopted once its replica's note is read.
            if await is_actor_dead(engine_actor(group_id)):
                logger.warning("group_left_behind name=%r", table[group_id]["name"])
                await asyncio.to_thread(remove_group, group_id)


def _controls(record: SliceRecord) -> list[tuple[str, int]]:
    """Returns where the engines of a replica are commanded, the first one first."""
    assert record.control is not None
    others = (other.control for other in record.others)
    return [record.control, *(control for control in others if control is not None)]
