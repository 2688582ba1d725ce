"""The slices that a replica holds: acquired, reserved, probed, watched, released.

Owns the placement group. Makes one drain order of the orders of its slices (`watch`): they carry
one engine, so the end of one slice is the end of all. Does not own what the replica does on them,
nor when.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ray.serve.handle import DeploymentHandle

from serving.config.slice_settings import MAX_DRAIN_S
from serving.config.slice_spec import SliceSpec, slice_request
from serving.directory.pending_grants import Grant
from serving.directory.ray_hosts import draining_nodes
from serving.domain.inventory import Slice
from serving.domain.slice_lifecycle import EndCause
from serving.domain.slice_records import HostRecord, SliceRecord
from serving.domain.supply.faults import FaultCause
from serving.link.handshake import validate_secret
from serving.ownership.deed import DeedSlice, EngineDeed
from serving.slices.host_agent import AgentReport
from serving.slices.notices import DrainOrder, Notice, NoticeKind
from serving.slices.reservation import Reservation, ReservationError, names_of, reserve
from serving.slices.watch import AGENT_CPUS, SliceLostError, SliceWatch
from serving.tpu.multislice import End, multislice_ends

logger = logging.getLogger(__name__)

# How long one call of the directory waits for a slice.
_ACQUIRE_S = 5.0
# The pause after a directory that does not answer.
_RETRY_S = 1.0
_RAY_POLL_S = 0.5


class ProbeFailedError(RuntimeError):
    """A slice failed its probe, or its chips stayed taken; it is in quarantine.

    Release all slices and acquire others.
    """

    cause = EndCause.BOOT_FAILED


async def acquire_slices(
    replica_id: str,
    spec: SliceSpec,
    secret: bytes,
    directory: DeploymentHandle,
    waiting: Callable[[str], Awaitable[None]],
    adopt: Callable[[SliceRecord], Awaitable[bool]],
    reserved: Callable[[str], Awaitable[None]],
) -> "HeldSlices | None":
    """Waits for slices, for hours if it must; returns them reserved and watched.

    They are as many as `spec` requires, or none are held. A cancelled wait holds nothing. `waiting`
    gets the reason why there are none, whenever it changes. `adopt` gets an engine that has lost
    its replica meanwhile; returns `None` if that succeeds. `reserved` gets the id of each placement
    group as soon as it stands: one that nobody reports is removed. Agents prove `secret`, the
    cluster's, and are proved it.

    Raises:
        ValueError: the secret is short enough to be guessed.
    """
    validate_secret(secret)
    request = slice_request(spec)
    excluded: frozenset[frozenset[str]] = frozenset()
    reported = ""
    started_s = time.monotonic()
    while True:
        grant: Grant = await _ask(directory.acquire, replica_id, request, excluded, _ACQUIRE_S)
        if grant.engine is not None and await adopt(grant.engine):
            return None
        if not grant.slices:
            excluded = frozenset()
            reason = _out_of_patience(spec, time.monotonic() - started_s) + grant.reason
            if reason != reported:
                reported = reason
                await waiting(reason)
            continue
        try:
            return await _hold(grant.slices, spec, secret, directory, reserved)
        except (ReservationError, SliceLostError) as error:
            name = names_of(grant.slices)
            logger.info("slice_not_had slice=%s reason=%r", name, str(error))
            excluded |= {each.node_ids for each in grant.slices}
            reported = str(error)
            await waiting(reported)


class HeldSlices:
    """The slices under one placement group, with an agent on each host."""

    def __init__(
        self,
        reservation: Reservation,
        spec: SliceSpec,
        secret: bytes,
        directory: DeploymentHandle,
    ) -> None:
        self.reservation = reservation
        self._directory = directory
        self._life_id = "" if spec.work is None else spec.work.replica
        self._order: asyncio.Future[DrainOrder] = asyncio.get_running_loop().create_future()
        self._watching: tuple[asyncio.Task[None], ...] = ()
        self.watches = tuple(
            SliceWatch(reservation, part, spec, secret, self._on_order)
            for part in range(len(reservation.slices))
        )

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The slices; the engine host is on the first host of the first."""
        return self.reservation.slices

    async def watch(self) -> None:
        """Starts to watch every host and Ray's nodes.

        Raises:
            SliceLostError: a host could not be watched: it has ended already.
        """
        await asyncio.gather(*(each.start() for each in self.watches))
        self._watch_all()

    def adopt(self, deed: EngineDeed) -> None:
        """Goes on watching slices that another replica had taken."""
        for each, of_slice in zip(self.watches, deed.slices, strict=True):
            each.listen(
                [
                    AgentReport(
                        host.worker_id, host.node_id, agent, host.tpu_log_dir, host.ends_at_s
                    )
                    for host, agent in zip(of_slice.hosts, of_slice.agents, strict=True)
                ]
            )
        self._watch_all()

    def deeds(self) -> tuple[DeedSlice, ...]:
        """Returns what a successor has to know of the slices."""
        return tuple(
            DeedSlice(
                each.slice,
                host_records(each),
                tuple(each.reports[host.worker_id].address for host in each.slice.hosts),
            )
            for each in self.watches
        )

    def _watch_all(self) -> None:
        self._watching = (
            asyncio.create_task(self._watch_ray(), name="watch-ray"),
            asyncio.create_task(self._watch_clock(), name="watch-clock"),
            *(asyncio.create_task(each.learn_nodes(), name="learn-nodes") for each in self.watches),
        )

    def ask_to_leave(self, part: int, reason: str) -> None:
        """Orders all slices to be left in time, because slice number `part` is replaced."""
        watch = self.watches[part]
        if watch.order is None:
            ends_at_s = time.time() + MAX_DRAIN_S
            watch.announce(Notice(NoticeKind.REPLACEMENT, 0, ends_at_s, reason, "directory"))

    def give_up(self, reason: str) -> None:
        """Orders all slices to be left, which stay and are given back."""
        if not self._order.done():
            self._order.set_result(DrainOrder(None, reason, EndCause.RELEASED))

    async def chips_in_use(self) -> str:
        """Returns what has chips of the slices now, for a reader; empty if they are free."""
        found = await asyncio.gather(*(each.wait_chips_free(0) for each in self.watches))
        pairs = zip(self.watches, found, strict=True)
        return "; ".join(self._with_name(each, _by_host(taken)) for each, taken in pairs if taken)

    async def wait_chips_free(self, timeout_s: float) -> None:
        """Waits until no process has chips of the slices any more.

        Raises:
            ProbeFailedError: some have after `timeout_s`; that slice is in quarantine now.
        """
        found = await asyncio.gather(*(each.wait_chips_free(timeout_s) for each in self.watches))
        failures = []
        for each, taken in zip(self.watches, found, strict=True):
            if taken:
                reason = f"its chips are not free after {timeout_s:g} s: {_by_host(taken)}"
                each.fail(reason)
                failures.append(await self._quarantine(each, taken, reason))
        if failures:
            raise ProbeFailedError("; ".join(failures))

    async def probe(self, timeout_s: float) -> None:
        """Probes every host and the interconnect of each slice; not the network between slices.

        Raises:
            ProbeFailedError: a slice failed; it is in quarantine now.
        """
        found = await asyncio.gather(*(each.probe(timeout_s) for each in self.watches))
        failures = [
            await self._quarantine(each, verdict.failing, verdict.reason)
            for each, verdict in zip(self.watches, found, strict=True)
            if not verdict.has_passed
        ]
        if failures:
            raise ProbeFailedError(f"the probe failed: {'; '.join(failures)}")

    async def _quarantine(self, watch: SliceWatch, hosts: Iterable[int], reason: str) -> str:
        """Has the directory keep others off a slice, by its `hosts`; returns the named reason."""
        nodes = {host.worker_id: host.node_id for host in watch.slice.hosts}
        suspects = frozenset(nodes[worker_id] for worker_id in hosts)
        await self._tell_directory(
            self._directory.note_failure,
            self._life_id, watch.slice, suspects, FaultCause.PROBE, reason,
        )  # fmt: skip
        return self._with_name(watch, reason)

    async def wait_order(self) -> DrainOrder:
        """Waits for the order to leave the slices, and returns it."""
        return await asyncio.shield(self._order)

    def ends(self, cause: EndCause, reason: str) -> tuple[End, ...]:
        """Returns the end of each slice when all are left for `cause` and `reason`."""
        own = {each.part: each.end for each in self.watches if each.end is not None}
        return multislice_ends([each.name for each in self.slices], own, cause, reason)

    async def release(self) -> None:
        """Stops watching and releases the slices. Idempotent.

        Ray sees a slice that is about to end as whole and free until it has ended. So the directory
        learns of it, and keeps other replicas off it.
        """
        for each in self.watches:
            if each.order is not None and each.order.is_lost:
                await self._tell_directory(
                    self._directory.note_failure,
                    self._life_id, each.slice, frozenset(), FaultCause.HOST, each.order.reason,
                )  # fmt: skip
            elif each.order is not None:
                await self._tell_directory(
                    self._directory.note_leaving,
                    each.slice, each.order.deadline_s, each.order.reason,
                )  # fmt: skip
            each.tell_left()
        await self.leave()
        await self.reservation.release()

    async def leave(self) -> None:
        """Stops watching, and leaves the slices to whoever has them now. Idempotent."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await asyncio.gather(*(each.stop() for each in self.watches))

    async def _tell_directory(self, method: Any, *arguments: Any) -> None:
        try:
            async with asyncio.timeout(_RETRY_S):
                await method.remote(*arguments)
        except Exception as error:  # noqa: BLE001 - then somebody acquires the slice, and learns
            logger.warning("directory_unreachable error=%r", str(error))

    def _on_order(self, watch: SliceWatch) -> None:
        """Takes the first order of a slice as the order of all."""
        if watch.order is not None and not self._order.done():
            reason = self._with_name(watch, watch.order.reason)
            self._order.set_result(replace(watch.order, reason=reason))

    def _with_name(self, watch: SliceWatch, reason: str) -> str:
        return reason if len(self.slices) == 1 else f"{watch.slice.name}: {reason}"

    async def _watch_ray(self) -> None:
        """Watches which nodes Ray drains; without a head it waits for one."""
        while True:
            try:
                deadlines_s = await draining_nodes()
            except Exception as error:  # noqa: BLE001 - whatever ails the head, it is asked again
                logger.warning("ray_unreachable error=%r", str(error))
            else:
                for each in self.watches:
                    each.take_drains(deadlines_s)
            await asyncio.sleep(_RAY_POLL_S)

    async def _watch_clock(self) -> None:
        """Applies scheduled ends when they are due, whether Ray has a head or not."""
        while True:
            for each in self.watches:
                each.decide()
            await asyncio.sleep(_RAY_POLL_S)


def _by_host(words: Mapping[int, str]) -> str:
    return "; ".join(f"host {worker_id}: {each}" for worker_id, each in words.items())


def host_records(watch: SliceWatch) -> tuple[HostRecord, ...]:
    """Returns the records of a slice's hosts, as its agents told them."""
    return tuple(
        HostRecord(
            host.worker_id,
            host.node_id,
            host.address,
            host.num_chips,
            watch.reports[host.worker_id].tpu_log_dir,
            watch.reports[host.worker_id].ends_at_s,
        )
        for host in watch.slice.hosts
    )


async def find_engine(replica_id: str, directory: DeploymentHandle) -> SliceRecord | None:
    """Returns an engine that this replica may take over; `None` if there is none."""
    found: SliceRecord | None = await _ask(directory.find_engine, replica_id, _ACQUIRE_S)
    return found


def _out_of_patience(spec: SliceSpec, waited_s: float) -> str:
    if spec.patience_s is None or waited_s < spec.patience_s:
        return ""
    return f"longer than the {spec.patience_s:g} s that {spec.compute_class} is given: "


async def _ask(method: Any, *arguments: Any) -> Any:
    """Asks the directory until it answers."""
    while True:
        try:
            return await method.remote(*arguments)
        except Exception as error:  # noqa: BLE001 - the directory comes back, and is asked again
            logger.warning("directory_unreachable error=%r", str(error))
            await asyncio.sleep(_RETRY_S)


async def _hold(
    slices: tuple[Slice, ...],
    spec: SliceSpec,
    secret: bytes,
    directory: DeploymentHandle,
    reserved: Callable[[str], Awaitable[None]],
) -> HeldSlices:
    cpus = spec.cpus_per_host + AGENT_CPUS
    held = HeldSlices(await reserve(slices, spec.shape, cpus), spec, secret, directory)
    try:
        await reserved(held.reservation.group_id)
        await held.watch()
    except BaseException:
        await asyncio.shield(held.release())
        raise
    return held
