"""Keeps links to the engines that the directory lists, and gives them to their model versions.

Owns the connections of one gateway. A link that ends is reported to its version at once and opened
again as long as the directory lists the engine; an engine the directory has forgotten keeps its
open link. Does not own the traffic of a link: requests and steps pass between it and `dispatcher`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from serving.domain.limits import LinkEncryption
from serving.domain.slice_lifecycle import SliceState
from serving.domain.slice_records import EngineRecord, SliceRecord, Snapshot
from serving.link.client import ClientLimits, LinkCallbacks, LinkClient
from serving.link.errors import HandshakeError, LinkClosedError
from serving.link.heartbeat import HeartbeatConfig
from serving.link.messages import Draining
from serving.link.tls import ClientTls

logger = logging.getLogger(__name__)

# Between two attempts to open a link; the first is made at once.
_RETRY_S = 0.25
_REFUSED_RETRY_S = 5.0
_WATCH_TIMEOUT_S = 10.0


class VersionEngines(Protocol):
    """The engines of one version of a model; see `Dispatcher` for each call."""

    def add_engine(
        self, engine_id: str, compute_class: str, link: LinkClient, slice_name: str | None
    ) -> None:
        """Takes a linked engine into use. `slice_name` is `None` if it owns no slice."""
        ...

    def drain_engine(self, engine_id: str, reason: str, grace_s: float | None) -> None:
        """Gives it no more requests; it goes in `grace_s` seconds (`None`: not known yet when)."""
        ...

    def lose_engine(self, engine_id: str, reason: str) -> None:
        """Gives it up, because its link has ended; a repeated call is a no-op."""
        ...


class FleetModel(Protocol):
    """The interface of a served model for membership."""

    async def register_engine(self, engine_info: Mapping[str, Any]) -> VersionEngines:
        """Returns the engines of the version that an engine with this description belongs to.

        Raises:
            ValueError: it belongs nowhere. Do not use it.
        """
        ...


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """The settings that every link of this gateway needs."""

    gateway_id: str
    secret: bytes
    heartbeat: HeartbeatConfig
    limits: ClientLimits = field(default_factory=ClientLimits)
    encryption: LinkEncryption = LinkEncryption.AUTO


@dataclass(slots=True)
class _Member:
    """The state of one engine that the directory lists, or listed, and of the link to it."""

    record: SliceRecord
    engine: EngineRecord
    is_listed: bool = True
    task: asyncio.Task[None] | None = None
    # Where its engine has been added; `None` while it is not linked.
    fleet: VersionEngines | None = None
    # The notice of its drain, which may come before it is added; `None`: none came.
    draining: Draining | None = None

    def drain(self, notice: Draining) -> None:
        """Passes on that the engine drains."""
        self.draining = notice
        if self.fleet is not None:
            self.fleet.drain_engine(self.engine.engine_id, notice.reason, notice.grace_s)


class Membership:
    """Keeps links to all engines of a snapshot's models. Used from one event loop."""

    def __init__(self, models: Mapping[str, FleetModel], settings: LinkSettings) -> None:
        self._models = models
        self._settings = settings
        self._tls = ClientTls(settings.secret, settings.encryption)
        self._members: dict[str, _Member] = {}
        self.snapshot = Snapshot("")

    async def follow(self, watch: Callable[[str, float], Awaitable[Snapshot]]) -> None:
        """Follows the directory until cancelled, and tries again while it is away."""
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
        """Starts links to new engines of a snapshot, and notes which are no longer listed."""
        self.snapshot = snapshot
        listed = {
            engine.engine_id: (record, engine)
            for record in snapshot.records
            if record.model in self._models
            for engine in record.engines
        }
        for engine_id, (record, engine) in listed.items():
            member = self._members.get(engine_id)
            if member is None:
                member = self._members[engine_id] = _Member(record, engine)
                member.task = asyncio.create_task(
                    self._keep_linked(member), name=f"link-{engine_id}"
                )
            member.record = record
            member.is_listed = True
            if record.state == SliceState.DRAINING and member.fleet is not None:
                # The engine's own notice, over its link, has the time that is left.
                member.fleet.drain_engine(engine_id, "listed as draining", None)
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
        engine_id = member.engine.engine_id
        try:
            while member.is_listed:
                delay_s = await self._run_link(member, engine_id, member.engine.address)
                await asyncio.sleep(delay_s)
        finally:
            self._members.pop(engine_id, None)

    async def _run_link(self, member: _Member, engine_id: str, address: tuple[str, int]) -> float:
        """Keeps one link from its opening to its end; returns the seconds to the next attempt."""
        ended = asyncio.Event()

        def lost(reason: str) -> None:
            if member.fleet is not None:
                member.fleet.lose_engine(engine_id, reason)
            ended.set()

        member.draining = None
        callbacks = LinkCallbacks(on_lost=lost, on_draining=member.drain)
        try:
            client = await LinkClient.connect(
                address,
                gateway_id=self._settings.gateway_id,
                secret=self._settings.secret,
                callbacks=callbacks,
                heartbeat=self._settings.heartbeat,
                limits=self._settings.limits,
                tls=self._tls,
            )
        except HandshakeError as error:
            logger.error("link_refused engine_id=%s error=%r", engine_id, str(error))
            return _REFUSED_RETRY_S
        except LinkClosedError as error:
            logger.info("link_unreachable engine_id=%s error=%r", engine_id, str(error))
            return _RETRY_S
        try:
            if client.engine_id != engine_id:
                # The port was taken over by another engine; the directory will list it.
                return _REFUSED_RETRY_S
            served = self._models.get(member.record.model)
            if served is None:
                return _REFUSED_RETRY_S  # the model is no longer served
            try:
                fleet = await served.register_engine(client.engine_info)
            except ValueError as error:
                logger.error("engine_refused engine_id=%s error=%r", engine_id, str(error))
                return _REFUSED_RETRY_S
            if not ended.is_set():
                self._add(member, fleet, client)
                await ended.wait()
        finally:
            await client.close()
            if member.fleet is not None:
                member.fleet.lose_engine(engine_id, "link closed")
                member.fleet = None
        return 0.0

    def _add(self, member: _Member, fleet: VersionEngines, client: LinkClient) -> None:
        record = member.record
        member.fleet = fleet
        slice_name = record.life.slice_name
        fleet.add_engine(client.engine_id, record.compute_class, client, slice_name)
        if member.draining is not None:
            member.drain(member.draining)
