"""Links to the engines that the directory lists: opened, opened again, and given to the fleets.

Owns the connections of one gateway. A link that ends is reported to the fleet at once and opened
again as long as the directory lists the engine; an engine the directory has forgotten keeps its
open link.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from serving.directory import SliceRecord, Snapshot
from serving.link.client import ClientLimits, LinkCallbacks, LinkClient
from serving.link.errors import HandshakeError, LinkClosedError
from serving.link.heartbeat import HeartbeatConfig
from serving.link.messages import Step
from serving.slices.lifecycle import SliceState

logger = logging.getLogger(__name__)

# Between two attempts to open a link; the first is made at once.
_RETRY_S = 0.25
_REFUSED_RETRY_S = 5.0
_WATCH_TIMEOUT_S = 10.0


class Fleet(Protocol):
    """A model's engines, as membership tells of them; `FleetCore` says what each call does."""

    def add_engine(
        self, engine_id: str, compute_class: str, link: LinkClient, slice_name: str | None
    ) -> None:
        """An engine is linked. `slice_name` is `None` where it owns no slice."""
        ...

    def drain_engine(self, engine_id: str, reason: str, grace_s: float | None) -> None:
        """It takes no more, and goes in `grace_s` seconds; `None`: when, is told later."""
        ...

    def lose_engine(self, engine_id: str, reason: str) -> None:
        """Its link has ended; a no-op when that has been said before."""
        ...

    def take_step(self, engine_id: str, step: Step) -> None:
        """It has sent a step."""
        ...


class FleetModel(Protocol):
    """A served model, as membership sees it."""

    @property
    def core(self) -> Fleet:
        """Where its engines are added."""
        ...

    def learn(self, engine_info: Mapping[str, Any]) -> None:
        """Takes in what an engine says of itself."""
        ...


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """What every link of this gateway needs."""

    gateway_id: str
    secret: bytes
    heartbeat: HeartbeatConfig
    limits: ClientLimits = field(default_factory=ClientLimits)


@dataclass(slots=True)
class _Member:
    """One listed engine and the task that keeps a link to it."""

    record: SliceRecord
    is_listed: bool = True
    task: asyncio.Task[None] | None = None


class Membership:
    """Keeps links to all engines of a snapshot's models. Used from one event loop."""

    def __init__(self, models: Mapping[str, FleetModel], settings: LinkSettings) -> None:
        self._models = models
        self._settings = settings
        self._members: dict[str, _Member] = {}
        self.snapshot = Snapshot("")

    async def follow(self, watch: Callable[[str, float], Awaitable[Snapshot]]) -> None:
        """Follows the directory for ever; a directory that is away is asked again."""
        while True:
            try:
                snapshot = await watch(self.snapshot.version, _WATCH_TIMEOUT_S)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever ails the directory, links stay up
                logger.warning("directory_unreachable error=%r", str(error))
                await asyncio.sleep(_RETRY_S)
                continue
            self.apply(snapshot)

    def apply(self, snapshot: Snapshot) -> None:
        """Takes in a snapshot: starts links to new engines, notes which are no longer listed."""
        self.snapshot = snapshot
        listed = {
            record.engine_id: record
            for record in snapshot.records
            if record.engine_id is not None and record.has_engine and record.model in self._models
        }
        for engine_id, record in listed.items():
            member = self._members.get(engine_id)
            if member is None:
                member = self._members[engine_id] = _Member(record)
                member.task = asyncio.create_task(
                    self._keep_linked(member), name=f"link-{engine_id}"
                )
            member.record = record
            member.is_listed = True
            if record.state == SliceState.DRAINING:
                self._models[record.model].core.drain_engine(
                    # The engine's own word, over its link, says how long it has.
                    engine_id,
                    "listed as draining",
                    None,
                )
        for engine_id, member in self._members.items():
            member.is_listed = engine_id in listed

    async def close(self) -> None:
        """Ends every link."""
        tasks = [member.task for member in self._members.values() if member.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._members.clear()

    async def _keep_linked(self, member: _Member) -> None:
        record = member.record
        engine_id, address = record.engine_id, record.address
        if engine_id is None or address is None:
            return
        try:
            while member.is_listed:
                delay_s = await self._run_link(record.model, engine_id, address)
                await asyncio.sleep(delay_s)
        finally:
            self._members.pop(engine_id, None)

    async def _run_link(self, model: str, engine_id: str, address: tuple[str, int]) -> float:
        """One link from its opening to its end; how long to wait before the next attempt."""
        core = self._models[model].core
        ended = asyncio.Event()

        def lost(reason: str) -> None:
            core.lose_engine(engine_id, reason)
            ended.set()

        callbacks = LinkCallbacks(
            on_step=lambda step: core.take_step(engine_id, step),
            on_lost=lost,
            on_draining=lambda notice: core.drain_engine(engine_id, notice.reason, notice.grace_s),
        )
        try:
            client = await LinkClient.connect(
                address,
                gateway_id=self._settings.gateway_id,
                secret=self._settings.secret,
                callbacks=callbacks,
                heartbeat=self._settings.heartbeat,
                limits=self._settings.limits,
            )
        except HandshakeError as error:
            logger.error("link_refused engine_id=%s error=%r", engine_id, str(error))
            return _REFUSED_RETRY_S
        except LinkClosedError as error:
            logger.info("link_unreachable engine_id=%s error=%r", engine_id, str(error))
            return _RETRY_S
        try:
            if client.engine_id != engine_id:
                # The port was taken over by another engine; the directory will tell of it.
                return _REFUSED_RETRY_S
            self._models[model].learn(client.engine_info)
            record = self._members[engine_id].record
            core.add_engine(engine_id, record.compute_class, client, record.life.slice_name)
            await ended.wait()
        finally:
            await client.close()
            core.lose_engine(engine_id, "link closed")
        return 0.0
