"""A replica's tenure of its slices: found, reserved, tried out, watched, given back.

Owns the placement group, and makes one order to leave of those of its slices (`slice_watch`): the
end of one is the end of all, for the engine is one. Does not own what the replica does on them, nor
when.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from ray.serve.handle import DeploymentHandle

from serving.config.slice_spec import SliceSpec, wanted_slice
from serving.directory.claims import Offer
from serving.directory.ray_hosts import draining_nodes
from serving.domain.inventory import SliceWant, WholeSlice
from serving.domain.slice_lifecycle import EndCause
from serving.slices.notices import DrainOrder
from serving.slices.reservation import Reservation, ReservationError, names_of, reserve
from serving.slices.watch import AGENT_CPUS, SliceLostError, SliceWatch
from serving.tpu.multislice import End, joined_ends

logger = logging.getLogger(__name__)

# How long one question to the directory waits for a slice.
_CLAIM_S = 5.0
# After a directory that does not answer.
_RETRY_S = 1.0
_RAY_LOOK_S = 0.5


class ProbeFailedError(RuntimeError):
    """A slice failed its probe and is in quarantine. Release all of them and take others."""

    cause = EndCause.BOOT_FAILED


async def take_slices(
    replica_id: str,
    spec: SliceSpec,
    directory: DeploymentHandle,
    waiting: Callable[[str], Awaitable[None]],
) -> "Tenure":
    """Waits for slices and holds them, watched. Hours if it must; cancelling it holds nothing.

    It holds as many as `spec` says or none: who waits for one keeps no other. `waiting` is told why
    there is none, whenever that changes.
    """
    want = wanted_slice(spec)
    tried: frozenset[frozenset[str]] = frozenset()
    told = ""
    started_s = time.monotonic()
    while True:
        offer = await _claim(directory, replica_id, want, tried)
        if not offer.slices:
            tried = frozenset()
            reason = _out_of_patience(spec, time.monotonic() - started_s) + offer.reason
            if reason != told:
                told = reason
                await waiting(reason)
            continue
        try:
            return await _hold(offer.slices, spec, directory)
        except (ReservationError, SliceLostError) as error:
            name = names_of(offer.slices)
            logger.info("slice_not_had slice=%s reason=%r", name, str(error))
            tried |= {each.node_ids for each in offer.slices}
            told = str(error)
            await waiting(told)


class Tenure:
    """Slices that are held, with an agent on each host."""

    def __init__(
        self,
        reservation: Reservation,
        spec: SliceSpec,
        directory: DeploymentHandle,
    ) -> None:
        self.reservation = reservation
        self._directory = directory
        self._order: asyncio.Future[DrainOrder] = asyncio.get_running_loop().create_future()
        self._watching: tuple[asyncio.Task[None], ...] = ()
        self.watches = tuple(
            SliceWatch(reservation, part, spec, self._on_order)
            for part in range(len(reservation.slices))
        )

    @property
    def slices(self) -> tuple[WholeSlice, ...]:
        """The slices that are held; the engine host is on the first host of the first."""
        return self.reservation.slices

    async def watch(self) -> None:
        """Listens to every host and to Ray.

        Raises:
            SliceLostError: not every host could be watched: one of them is gone already.
        """
        await asyncio.gather(*(each.start() for each in self.watches))
        self._watching = (
            asyncio.create_task(self._watch_ray(), name="watch-ray"),
            asyncio.create_task(self._watch_clock(), name="watch-clock"),
        )

    async def probe(self, timeout_s: float) -> None:
        """Tries out every host and the interconnect of each slice; not the network between slices.

        Raises:
            ProbeFailedError: something is wrong with one; it is in quarantine now.
        """
        found = await asyncio.gather(*(each.probe(timeout_s) for each in self.watches))
        failures = []
        for each, verdict in zip(self.watches, found, strict=True):
            if verdict.has_passed:
                continue
            nodes = {host.worker_id: host.node_id for host in each.slice.hosts}
            suspects = frozenset(nodes[worker_id] for worker_id in verdict.failing)
            await self._keep_others_off(each.slice, suspects, verdict.reason)
            failures.append(self._told(each, verdict.reason))
        if failures:
            raise ProbeFailedError(f"the probe failed: {'; '.join(failures)}")

    async def wait_order(self) -> DrainOrder:
        """Waits until something demands that the slices are left."""
        return await asyncio.shield(self._order)

    def ends(self, cause: EndCause, reason: str) -> tuple[End, ...]:
        """How the life of each slice ends when all are left for `cause` and `reason`."""
        own = {each.part: each.end for each in self.watches if each.end is not None}
        return joined_ends([each.name for each in self.slices], own, cause, reason)

    async def release(self) -> None:
        """Stops watching and gives the slices back. Idempotent.

        One that is about to go looks whole and free to Ray until it has gone: others are kept off.
        """
        for each in self.watches:
            if each.order is not None:
                await self._keep_others_off(each.slice, each.slice.node_ids, each.order.reason)
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await asyncio.gather(*(each.stop() for each in self.watches))
        await self.reservation.release()

    async def _keep_others_off(
        self, whole: WholeSlice, suspects: frozenset[str], reason: str
    ) -> None:
        try:
            async with asyncio.timeout(_RETRY_S):
                await self._directory.quarantine.remote(whole, suspects, reason)
        except Exception as error:  # noqa: BLE001 - then somebody tries the slice, and learns
            logger.warning("directory_unreachable error=%r", str(error))

    def _on_order(self, watch: SliceWatch) -> None:
        """The first slice that has to be left takes the others along."""
        if watch.order is not None and not self._order.done():
            reason = self._told(watch, watch.order.reason)
            self._order.set_result(replace(watch.order, reason=reason))

    def _told(self, watch: SliceWatch, reason: str) -> str:
        return reason if len(self.slices) == 1 else f"{watch.slice.name}: {reason}"

    async def _watch_ray(self) -> None:
        """Looks at what Ray says of the hosts' nodes; without a head it waits for one."""
        while True:
            try:
                deadlines_s = await draining_nodes()
            except Exception as error:  # noqa: BLE001 - whatever ails the head, it is asked again
                logger.warning("ray_unreachable error=%r", str(error))
            else:
                for each in self.watches:
                    each.take_drains(deadlines_s)
            await asyncio.sleep(_RAY_LOOK_S)

    async def _watch_clock(self) -> None:
        """Scheduled ends come when they are due, whether Ray has a head or not."""
        while True:
            for each in self.watches:
                each.decide()
            await asyncio.sleep(_RAY_LOOK_S)


def _out_of_patience(spec: SliceSpec, waited_s: float) -> str:
    """What the reason of a wait begins with once it has been too long."""
    if spec.patience_s is None or waited_s < spec.patience_s:
        return ""
    return f"longer than the {spec.patience_s:g} s that {spec.compute_class} is given: "


async def _claim(
    directory: DeploymentHandle,
    replica_id: str,
    want: SliceWant,
    tried: frozenset[frozenset[str]],
) -> Offer:
    while True:
        try:
            offer: Offer = await directory.claim.remote(replica_id, want, tried, _CLAIM_S)
            return offer
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the directory comes back, and is asked again
            logger.warning("directory_unreachable error=%r", str(error))
            await asyncio.sleep(_RETRY_S)


async def _hold(
    slices: tuple[WholeSlice, ...], spec: SliceSpec, directory: DeploymentHandle
) -> Tenure:
    cpus = spec.cpus_per_host + AGENT_CPUS
    tenure = Tenure(await reserve(slices, spec.shape, cpus), spec, directory)
    try:
        await tenure.watch()
    except BaseException:
        await asyncio.shield(tenure.release())
        raise
    return tenure
