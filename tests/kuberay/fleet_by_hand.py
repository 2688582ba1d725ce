"""The product's directory and provisioner over `ray_by_hand`, with replicas that want slices.

Directory, road, fence and reconciler are the product's, as `deployment` and `sidecar` wire them.
A replica is emulated by what it says to the directory: it does what `serving.slices` does, in that
order, but has no engine. How late it says that it has a slice or notices a loss, and how long it
drains, `dice` say.
"""

import asyncio
import contextlib
import functools
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace

from autoscaling.provisioning.kuberay import KubeRayProvisioner
from autoscaling.provisioning.kubernetes import KubernetesAccess, KubernetesApi
from autoscaling.provisioning.objects.cluster import WatchedCluster
from autoscaling.provisioning.plan import ProvisioningRules
from autoscaling.provisioning.protocol import Provisioner
from autoscaling.provisioning.reconcile import Reconciler
from autoscaling.provisioning.sidecar.directory import DirectoryRoad
from autoscaling.provisioning.sidecar.fence import RayFence
from serving.config.application import LinkConfig
from serving.directory.deployment import FleetDirectory
from serving.domain.inventory import Slice, SliceRequest
from serving.domain.slice_lifecycle import EndCause, SliceLifecycle, SliceState
from serving.domain.slice_records import LEASE_S, RENEWAL_S, HostRecord, SliceRecord, Snapshot
from serving.domain.supply.faults import FaultCause
from serving.domain.supply.keys import SupplyKeys
from serving.domain.supply.records import SupplyRecord
from serving.domain.topology import SliceShape

from .objects import RAYCLUSTER
from .ray_by_hand import RayByHand, standing_in
from .replicas import until

APPLICATION = "slicewise"
COMPUTE_CLASS = "spot"
# As impatient as rules may be.
RULES = ProvisioningRules(idle_s=LEASE_S, min_change_interval_s=1.0)
_ACQUIRE_S = 5.0
_REPORTED_S = 2.0
_NOTICED_S = 1.0
_DRAINED_S = 1.0


@dataclass(frozen=True, slots=True)
class ReplicaTools:
    """What every replica of a fleet shares."""

    directory: FleetDirectory
    ray: RayByHand
    dice: random.Random


class ReplicaByHand:
    """One replica from its start to `leave`.

    `lives` counts how often it began: once, and once more after each slice that it lost. `had_at_s`
    is when it got each of its slices, on the monotonic clock.
    """

    def __init__(
        self,
        replica_id: str,
        shape: SliceShape,
        tools: ReplicaTools,
        compute_class: str = COMPUTE_CLASS,
    ) -> None:
        self.replica_id = replica_id
        self.shape = shape
        self.lives = 1
        self.had_at_s: list[float] = []
        self.whole: Slice | None = None
        self._tools = tools
        self._request = SliceRequest(
            compute_class=compute_class,
            pod_type=shape.ray_pod_type,
            topology=shape.topology,
            num_hosts=shape.num_hosts,
            chips_per_host=shape.chips_per_host,
            labels={"slicewise.io/compute-class": compute_class},
        )
        self._record = SliceRecord(
            replica_id=replica_id,
            model=f"model-{shape.topology}-{compute_class}",
            compute_class=compute_class,
            life=SliceLifecycle.begin(time.time()),
            generation=str(shape.generation),
            topology=shape.topology,
        )
        self._living = asyncio.create_task(self._live(), name=f"replica {replica_id}")
        self._renewing = asyncio.create_task(self._keep_renewed(), name=f"renew {replica_id}")

    @property
    def reason(self) -> str:
        """Why it is in its present state."""
        assert not self._living.done() or self._living.cancelled(), self._living
        return self._record.life.reason

    async def leave(self) -> None:
        """It is told to stop: it drains, gives its slice back and is gone."""
        self._living.cancel()
        await asyncio.gather(self._living, return_exceptions=True)
        if self.whole is not None:
            await self._enter(SliceState.DRAINING, "it is told to stop")
        await self._end(EndCause.RELEASED, "it is told to stop")
        await self.close()

    async def close(self) -> None:
        """Ends it without a word."""
        for task in (self._living, self._renewing):
            task.cancel()
        await asyncio.gather(self._living, self._renewing, return_exceptions=True)

    async def _live(self) -> None:
        while True:
            await self._renew()
            whole = await self._take_slice()
            # Agents start on its hosts.
            await asyncio.sleep(self._tools.dice.uniform(0.0, _REPORTED_S))
            self.whole = whole
            hosts = tuple(
                HostRecord(host.worker_id, host.node_id, host.address, host.num_chips)
                for host in whole.hosts
            )
            engine_id = f"engine-of-{self.replica_id}-{self.lives}"
            self._record = replace(self._record, hosts=hosts, engine_id=engine_id)
            await self._enter(SliceState.RESERVED, "it holds every host", whole.name)
            await self._enter(SliceState.LOADING, "the engine starts")
            await self._enter(SliceState.READY, "the engine takes requests")
            self.had_at_s.append(time.monotonic())
            await self._leave_lost(whole, await self._lost_host(whole))
            self.lives += 1
            life = SliceLifecycle.begin(time.time(), "the slice before was lost")
            self._record = replace(self._record, life=life)

    async def _take_slice(self) -> Slice:
        excluded: frozenset[frozenset[str]] = frozenset()
        while True:
            grant = await self._tools.directory.acquire(
                self.replica_id, self._request, excluded, _ACQUIRE_S
            )
            if not grant.slices:
                excluded = frozenset()
                await self._enter(SliceState.PROVISIONING, grant.reason)
                continue
            (whole,) = grant.slices
            if self._tools.ray.take(whole.node_ids, self.replica_id):
                return whole
            excluded |= {whole.node_ids}

    async def _lost_host(self, whole: Slice) -> str:
        """Waits until a host has ended and this is noticed; its pod."""
        ended = functools.partial(self._tools.ray.ended, whole.node_ids)
        await until(lambda: ended() is not None, "the end of a host", float("inf"))
        await asyncio.sleep(self._tools.dice.uniform(0.0, _NOTICED_S))
        return str(ended())

    async def _leave_lost(self, whole: Slice, pod: str) -> None:
        """What `SliceSession` does of a slice that has lost a host."""
        reason = f"{pod} is gone"
        self._record = replace(self._record, drain_deadline_s=time.time())
        await self._enter(SliceState.DRAINING, reason)
        await asyncio.sleep(self._tools.dice.uniform(0.0, _DRAINED_S))
        await self._tools.directory.note_failure(
            self.replica_id, whole, frozenset(), FaultCause.HOST, reason
        )
        await self._end(EndCause.PREEMPTED, reason)

    async def _end(self, cause: EndCause, reason: str) -> None:
        self._tools.ray.release(self.replica_id)
        self.whole = None
        self._record = replace(self._record, life=self._record.life.end(cause, time.time(), reason))
        await self._tools.directory.end(self._record)
        self._record = replace(self._record, hosts=(), engine_id=None, drain_deadline_s=None)

    async def _enter(self, state: SliceState, reason: str, name: str | None = None) -> None:
        life = self._record.life.enter(state, time.time(), reason, slice_name=name)
        self._record = replace(self._record, life=life)
        await self._renew()

    async def _renew(self) -> None:
        if self._record.state != SliceState.GONE:
            await self._tools.directory.renew(self._record)

    async def _keep_renewed(self) -> None:
        while True:
            await self._renew()
            await asyncio.sleep(RENEWAL_S)


@dataclass
class FleetByHand:
    """Replicas, and the directory that they ask."""

    tools: ReplicaTools
    replicas: list[ReplicaByHand] = field(default_factory=list)

    def start(
        self, shape: SliceShape, count: int, compute_class: str = COMPUTE_CLASS
    ) -> list[ReplicaByHand]:
        """So many more replicas that want a slice of a shape."""
        first = len(self.replicas)
        made = [
            ReplicaByHand(f"{shape.topology}#{first + number}", shape, self.tools, compute_class)
            for number in range(count)
        ]
        self.replicas += made
        return made

    async def leave(self, replica: ReplicaByHand) -> None:
        """One replica fewer."""
        self.replicas.remove(replica)
        await replica.leave()

    def holding(self, shape: SliceShape | None = None) -> list[ReplicaByHand]:
        """Those of a shape, or all, that have a slice."""
        return [
            each for each in self.replicas if each.whole is not None and shape in (None, each.shape)
        ]

    async def snapshot(self) -> Snapshot:
        """What the directory tells gateways."""
        return await self.tools.directory.watch("", 0.0)

    async def supply(self) -> tuple[SupplyRecord, ...]:
        """The directory's records of all slices."""
        return (await self.snapshot()).supply


def _as_it_is(provisioner: Provisioner) -> Provisioner:
    return provisioner


@contextlib.asynccontextmanager
async def fleet_on(
    access: KubernetesAccess,
    ray: RayByHand,
    dice: random.Random,
    around: Callable[[Provisioner], Provisioner] = _as_it_is,
    *,
    raycluster: str = RAYCLUSTER,
) -> AsyncIterator[FleetByHand]:
    """A fleet without replicas, whose slices the worker groups of `raycluster` make.

    `around` may put something between the reconciler and what it plans for.
    """
    with standing_in(ray, APPLICATION):
        before = asyncio.all_tasks()
        directory = FleetDirectory.__new__(FleetDirectory)
        await directory.__init__(LinkConfig())  # type: ignore[misc] # as Serve does
        tasks = asyncio.all_tasks() - before
        fleet = FleetByHand(ReplicaTools(directory, ray, dice))
        try:
            # It publishes nothing before it may know every replica.
            key = SupplyKeys(APPLICATION).supply_beat
            await until(lambda: ray.internal_kv_get(key) is not None, "the directory has settled")
            async with _provisioning(access, raycluster, ray, around):
                yield fleet
        finally:
            for replica in fleet.replicas:
                await replica.close()
            await _cancel(tasks)


@contextlib.asynccontextmanager
async def _provisioning(
    access: KubernetesAccess,
    raycluster: str,
    ray: RayByHand,
    around: Callable[[Provisioner], Provisioner],
) -> AsyncIterator[None]:
    """What `run_sidecar` does in the head's pod."""
    road = DirectoryRoad(ray, APPLICATION)
    api = KubernetesApi(access)
    changed = asyncio.Event()
    watched = WatchedCluster(api, raycluster, changed.set)
    reconciler = Reconciler(
        road.read_supply,
        around(KubeRayProvisioner(api, raycluster, watched)),
        RULES,
        fence=RayFence(ray),
        report_pods=road.report_pods,
        interval_s=10.0,
        changed=changed,
    )
    try:
        async with watched:
            running = asyncio.create_task(reconciler.run(), name="reconcile")
            try:
                yield
            finally:
                await _cancel([running])
    finally:
        await api.aclose()


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
