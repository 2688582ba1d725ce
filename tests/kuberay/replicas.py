"""Slice replicas without Serve and without engines: they wait for slices, hold them, and say so.

They take and hold a slice by the very functions that the product's replicas use, with its placement
group pinned to every host; what they say of themselves are the product's records.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from serving.directory.ray_hosts import observe_cluster
from serving.domain.inventory import Slice, SliceRequest
from serving.domain.slice_lifecycle import EndCause, SliceLifecycle, SliceState
from serving.domain.slice_records import HostRecord, SliceRecord
from serving.domain.supply.found import find_slices, match_slices
from serving.domain.topology import SliceShape
from serving.slices.reservation import Reservation, ReservationError, reserve

_POLL_S = 0.2


class Replica:
    """One replica from its start to `leave`. It looks for a slice when it is made."""

    def __init__(self, replica_id: str, fleet: "Replicas") -> None:
        self._fleet = fleet
        self._reservation: Reservation | None = None
        # Slices that went while this replica had them.
        self.lost: list[str] = []
        self.record = SliceRecord(
            replica_id=replica_id,
            model="demo",
            compute_class=fleet.compute_class,
            life=SliceLifecycle.begin(time.time()),
            generation=str(fleet.shape.generation),
            topology=fleet.shape.topology,
        )
        self._task = asyncio.create_task(self._live())

    @property
    def slice_name(self) -> str | None:
        """The slice it holds."""
        return None if self._reservation is None else self._reservation.slices[0].name

    @property
    def node_ids(self) -> frozenset[str]:
        """The hosts it holds: a name may come back, these do not."""
        return self._reservation.slices[0].node_ids if self._reservation else frozenset()

    def notice(self, in_s: float) -> None:
        """Its slice will be taken away: it drains."""
        self.record = replace(
            self.record,
            life=self.record.life.enter(SliceState.DRAINING, time.time(), "preemption notice"),
            drain_deadline_s=time.time() + in_s,
        )

    async def leave(self) -> None:
        """Gives its slice back and is gone."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._release()
        life = self.record.life.end(EndCause.RELEASED, time.time(), "the replica is leaving")
        self.record = replace(self.record, life=life)

    async def _live(self) -> None:
        while True:
            self._enter(SliceState.PROVISIONING, "no slice is free")
            self._reservation = await self._fleet.take()
            whole = self._reservation.slices[0]
            hosts = tuple(
                HostRecord(host.worker_id, host.node_id, host.address, host.num_chips)
                for host in whole.hosts
            )
            # What no record names is left behind, for the directory, and is removed.
            group_id = self._reservation.group_id
            self.record = replace(self.record, hosts=hosts, group_id=group_id)
            self._enter(SliceState.RESERVED, "it stands", whole.name)
            self._enter(SliceState.LOADING, "the engine starts")
            self._enter(SliceState.READY, "the engine takes requests")
            await self._wait_lost(whole)
            self.lost.append(whole.name)
            await self._release()
            life = SliceLifecycle.begin(time.time(), "the slice before was lost")
            self.record = replace(
                self.record, life=life, hosts=(), group_id=None, drain_deadline_s=None
            )

    async def _wait_lost(self, whole: Slice) -> None:
        async def is_incomplete() -> bool:
            return not whole.node_ids <= {host.node_id for host in await observe_cluster()}

        await until(is_incomplete, "its end", float("inf"))

    async def _release(self) -> None:
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            await reservation.release()

    def _enter(self, state: SliceState, reason: str, slice_name: str | None = None) -> None:
        life = self.record.life.enter(state, time.time(), reason, slice_name=slice_name)
        self.record = replace(self.record, life=life)


class Replicas:
    """Replicas that want slices of one kind, and the directory of them.

    `want` is what they look for; `None`: what the groups of `objects` make.
    """

    def __init__(
        self, compute_class: str, shape: SliceShape, want: SliceRequest | None = None
    ) -> None:
        self.compute_class = compute_class
        self.shape = shape
        self.all: list[Replica] = []
        self._taking = asyncio.Lock()
        self._want = want or SliceRequest(
            compute_class=compute_class,
            pod_type=shape.ray_pod_type,
            topology=shape.topology,
            num_hosts=shape.num_hosts,
            chips_per_host=shape.chips_per_host,
            labels={"slicewise.io/compute-class": compute_class},
        )

    async def records(self) -> list[SliceRecord]:
        """What the directory knows now."""
        records = [replica.record for replica in self.all]
        return [record for record in records if record.state != SliceState.GONE]

    def start(self) -> Replica:
        """One more replica."""
        replica = Replica(f"{self.compute_class}#{len(self.all)}", self)
        self.all.append(replica)
        return replica

    async def take(self) -> Reservation:
        """A whole free slice, as soon as there is one; one replica at a time is served."""
        while True:
            async with self._taking:
                for free in match_slices(find_slices(await observe_cluster()), self._want).free:
                    with contextlib.suppress(ReservationError):
                        return await reserve((free,), self.shape, 0.0)
            await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """All of them leave."""
        for replica in self.all:
            await replica.leave()


@asynccontextmanager
async def replicas(
    compute_class: str, shape: SliceShape, want: SliceRequest | None = None
) -> AsyncIterator[Replicas]:
    """Replicas that are gone afterwards, whatever happened."""
    fleet = Replicas(compute_class, shape, want)
    try:
        yield fleet
    finally:
        await fleet.stop()


async def until(
    is_so: Callable[[], bool | Awaitable[bool]], what: str, timeout_s: float = 120.0
) -> float:
    """Waits until `is_so`; the seconds it took. Fails with `what` after `timeout_s`."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while True:
        answer = is_so()
        if answer if isinstance(answer, bool) else await answer:
            return loop.time() - began_s
        assert loop.time() < began_s + timeout_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(_POLL_S / 2)
