"""A replica's tenure of a slice: found, reserved, tried out, watched, given back.

Owns the placement group and the agents on the hosts, and folds what they and Ray announce into one
order to leave. Does not own what the replica does on it, nor when.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.serve.handle import DeploymentHandle

from serving.slices.claims import Offer
from serving.slices.host_agent import AgentReport, HostAgent
from serving.slices.host_stream import HostWatcher
from serving.slices.inventory import SliceWant, WholeSlice
from serving.slices.lifecycle import EndCause
from serving.slices.notices import DrainOrder, Notice, NoticeKind, plan_drain
from serving.slices.probe import HostOutcome, HostProbe, Platform, ProbeSpec, Stage, probe_slice
from serving.slices.ray_hosts import draining_nodes
from serving.slices.reservation import Reservation, ReservationError, reserve
from serving.slices.spec import SliceSpec, wanted_slice

logger = logging.getLogger(__name__)

# How long one question to the directory waits for a slice.
_CLAIM_S = 5.0
# After a directory that does not answer.
_RETRY_S = 1.0
# An agent is a process that has to start, on a host that is busy with nothing else.
_AGENTS_S = 60.0
_RAY_LOOK_S = 0.5
_AGENT_CPUS = 0.01
# Beyond the probe's own deadline, for the calls around it.
_PROBE_SLACK_S = 15.0


class SliceLostError(RuntimeError):
    """The slice goes before it could be used. Nothing is held once it is released; take another."""

    def __init__(self, reason: str, cause: EndCause = EndCause.PREEMPTED) -> None:
        super().__init__(reason)
        self.cause = cause


class ProbeFailedError(RuntimeError):
    """The slice failed its probe and is in quarantine. Release it and take another."""

    cause = EndCause.BOOT_FAILED


async def take_slice(
    replica_id: str,
    spec: SliceSpec,
    directory: DeploymentHandle,
    waiting: Callable[[str], Awaitable[None]],
) -> "Tenure":
    """Waits for a slice and holds it, watched. Hours if it must; cancelling it holds nothing.

    `waiting` is told why there is none, whenever that changes.
    """
    want = wanted_slice(spec)
    tried: frozenset[frozenset[str]] = frozenset()
    told = ""
    started_s = time.monotonic()
    while True:
        offer = await _claim(directory, replica_id, want, tried)
        if offer.slice is None:
            tried = frozenset()
            reason = _out_of_patience(spec, time.monotonic() - started_s) + offer.reason
            if reason != told:
                told = reason
                await waiting(reason)
            continue
        try:
            return await _hold(offer.slice, spec, directory)
        except (ReservationError, SliceLostError) as error:
            logger.info("slice_not_had slice=%s reason=%r", offer.slice.name, str(error))
            tried |= {offer.slice.node_ids}
            told = str(error)
            await waiting(told)


class Tenure:
    """A slice that is held, with an agent on each host."""

    def __init__(
        self,
        reservation: Reservation,
        spec: SliceSpec,
        directory: DeploymentHandle,
    ) -> None:
        self.reservation = reservation
        self._spec = spec
        self._shape = spec.shape
        self._directory = directory
        self._agents: list[Any] = []
        self.tpu_log_dirs: dict[int, str | None] = {}  # by worker id, when `watch` is done
        self._notices: dict[tuple[int, str], Notice] = {}
        self._order: asyncio.Future[DrainOrder] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def slice(self) -> WholeSlice:
        """The slice that is held."""
        return self.reservation.slice

    async def watch(self) -> None:
        """Starts an agent on every host and listens to all of them and to Ray.

        Raises:
            SliceLostError: not every host could be watched: one of them is gone already.
        """
        actor = ray.remote(HostAgent)
        for host in self.slice.hosts:
            options = {
                "num_cpus": _AGENT_CPUS,
                "max_concurrency": 8,
                "scheduling_strategy": self.reservation.on_host(host.worker_id),
            }
            agent = actor.options(**options).remote(host.worker_id, self._spec)
            self._agents.append(agent)
        try:
            async with asyncio.timeout(_AGENTS_S):
                reports: list[AgentReport] = await asyncio.gather(
                    *(agent.start.remote() for agent in self._agents)
                )
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise SliceLostError(f"not every host of {self.slice.name} came up: {error}") from error
        self.tpu_log_dirs = {report.worker_id: report.tpu_log_dir for report in reports}
        self._tasks.append(asyncio.create_task(self._watch_ray(), name="watch-ray"))
        for report in reports:
            watcher = HostWatcher(report.worker_id, report.address, self)
            self._tasks.append(asyncio.create_task(watcher.run(), name=f"host-{report.worker_id}"))

    async def probe(self, timeout_s: float) -> None:
        """Tries out every host and the interconnect between them.

        Raises:
            ProbeFailedError: something is wrong with it; it is in quarantine now.
        """
        ip, port = await self._agents[0].free_port.remote()
        found = await probe_slice(
            {
                worker_id: self._probe_host(worker_id, f"{ip}:{port}", timeout_s)
                for worker_id in range(self._shape.num_hosts)
            }
        )
        if found.has_passed:
            logger.info("probe_passed slice=%s %s", self.slice.name, found.reason)
            return
        nodes = {host.worker_id: host.node_id for host in self.slice.hosts}
        suspects = frozenset(nodes[worker_id] for worker_id in found.failing)
        await self._keep_others_off(suspects, found.reason)
        raise ProbeFailedError(f"the probe failed: {found.reason}")

    async def wait_order(self) -> DrainOrder:
        """Waits until something demands that the slice is left."""
        return await asyncio.shield(self._order)

    async def release(self) -> None:
        """Stops watching and gives the slice back. Idempotent.

        One that is about to go looks whole and free to Ray until it has gone: others are kept off.
        """
        if self._order.done():
            await self._keep_others_off(self.slice.node_ids, self._order.result().reason)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for agent in self._agents:
            ray.kill(agent)
        self._agents.clear()
        await self.reservation.release()

    async def _keep_others_off(self, suspects: frozenset[str], reason: str) -> None:
        try:
            async with asyncio.timeout(_RETRY_S):
                await self._directory.quarantine.remote(self.slice, suspects, reason)
        except Exception as error:  # noqa: BLE001 - then somebody tries the slice, and learns
            logger.warning("directory_unreachable error=%r", str(error))

    async def _probe_host(self, worker_id: int, coordinator: str, timeout_s: float) -> HostProbe:
        shape = self._shape
        spec = ProbeSpec(
            platform=Platform.TPU,  # a simulated host knows better
            num_hosts=shape.num_hosts,
            process_id=worker_id,
            devices_per_host=shape.chips_per_host * shape.devices_per_chip,
            coordinator_address=coordinator if shape.num_hosts > 1 else None,
            hbm_bytes_per_device=shape.hbm_bytes_per_device,
        )
        try:
            async with asyncio.timeout(timeout_s + _PROBE_SLACK_S):
                result: HostProbe = await self._agents[worker_id].probe.remote(spec, timeout_s)
                return result
        except (ray.exceptions.RayError, TimeoutError) as error:
            return HostProbe(worker_id, HostOutcome.LOST, Stage.STARTING, f"agent lost: {error}")

    def announce(self, notice: Notice) -> None:
        """Takes in what one source says of one host, in place of what it said before."""
        if self._notices.get((notice.worker_id, notice.source)) == notice:
            return
        self._notices[notice.worker_id, notice.source] = notice
        logger.warning(
            "slice_notice slice=%s host=%d kind=%s deadline_s=%s source=%r reason=%r",
            self.slice.name,
            notice.worker_id,
            notice.kind,
            notice.deadline_s,
            notice.source,
            notice.reason,
        )
        self._decide()

    def withdraw(self, worker_id: int, source: str) -> None:
        """A notice no longer holds; an order that has been given stands."""
        self._notices.pop((worker_id, source), None)

    def _decide(self) -> None:
        if self._order.done():
            return
        order = plan_drain(self._notices.values(), self._spec.drain_notice_s, time.time())
        if order is not None:
            self._order.set_result(order)

    async def _watch_ray(self) -> None:
        """Looks at what Ray says of the hosts' nodes; and at the clock, for scheduled ends."""
        by_node = {host.node_id: host.worker_id for host in self.slice.hosts}
        while True:
            for node_id, deadline_s in (await draining_nodes()).items():
                worker_id = by_node.get(node_id)
                if worker_id is not None:
                    reason = "Ray drains the node"
                    kind = NoticeKind.NODE_DRAINING
                    self.announce(Notice(kind, worker_id, deadline_s, reason, "ray drain"))
            self._decide()
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


async def _hold(whole: WholeSlice, spec: SliceSpec, directory: DeploymentHandle) -> Tenure:
    cpus = spec.cpus_per_host + _AGENT_CPUS
    tenure = Tenure(await reserve(whole, spec.shape, cpus), spec, directory)
    try:
        await tenure.watch()
    except BaseException:
        await asyncio.shield(tenure.release())
        raise
    return tenure
