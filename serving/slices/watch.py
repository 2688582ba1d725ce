"""The watch over one held slice: an agent on each host, its probe, and the signs of its end.

Owns the agents and folds what they and Ray announce into the order to leave the slice. Does not own
the reservation, nor what the replica does (`held`).
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from serving.config.slice_spec import SliceSpec
from serving.directory.ray_hosts import is_listening, node_addresses
from serving.domain.inventory import Slice
from serving.domain.slice_lifecycle import EndCause
from serving.link.tls import ClientTls, TlsRole
from serving.slices.host_agent import AgentReport, HostAgent
from serving.slices.host_heartbeat.watcher import HostWatcher
from serving.slices.notices import DrainOrder, Notice, NoticeKind, plan_drain
from serving.slices.probe import (
    HostOutcome,
    HostProbe,
    Platform,
    ProbeSpec,
    ProbeVerdict,
    Stage,
    probe_slice,
)
from serving.slices.reservation import Reservation
from serving.tpu.multislice import End

logger = logging.getLogger(__name__)

# An agent is a process that has to start, on a host that is busy with nothing else.
AGENTS_S = 60.0
AGENT_CPUS = 0.01
# An agent whose process alone has died begins anew; one that dies again and again has a reason.
_AGENT_RESTARTS = 3
# How often a host is looked at whose agent is away, and how long its answer may take. The answer is
# its kernel's, and the question comes only after the kernel has ended the agent's stream.
_HOST_CHECK_S = 0.25
_HOST_ANSWER_S = 1.0
# Beyond the deadline of what an agent is asked, for the call itself.
_ANSWER_SLACK_S = 15.0


class SliceLostError(RuntimeError):
    """The slice goes before it could be used. Release all slices, then take others."""

    def __init__(self, reason: str, cause: EndCause = EndCause.PREEMPTED) -> None:
        super().__init__(reason)
        self.cause = cause


class SliceWatch:
    """The watch of slice number `part`. `on_order` is called once, when the slice must be left."""

    def __init__(
        self,
        reservation: Reservation,
        part: int,
        spec: SliceSpec,
        secret: bytes,
        on_order: Callable[["SliceWatch"], None],
    ) -> None:
        self.slice: Slice = reservation.slices[part]
        self.part = part
        self.order: DrainOrder | None = None
        self.reports: dict[int, AgentReport] = {}  # by worker id, when `start` is done
        self._reservation = reservation
        self._spec = spec
        self._secret = secret
        self._tls = ClientTls(secret, spec.encryption, TlsRole.HOST_WATCHER)
        self._on_order = on_order
        self._failure: End | None = None
        self._agents: list[Any] = []
        self._notices: dict[tuple[int, str], Notice] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._watchers: list[HostWatcher] = []
        self._ray_nodes: dict[str, tuple[str, int]] = {}
        self._by_node = {host.node_id: host.worker_id for host in self.slice.hosts}

    @property
    def end(self) -> End | None:
        """The cause and reason for which this slice itself ends; `None` while it is sound."""
        if self.order is not None:
            return self.order.cause, self.order.reason
        return self._failure

    async def start(self) -> None:
        """Starts an agent on every host and listens to all of them.

        Raises:
            SliceLostError: not every host could be watched: one of them is gone already.
        """
        actor, agents = ray.remote(HostAgent), []
        for host in self.slice.hosts:
            options = {
                "num_cpus": AGENT_CPUS,
                "max_concurrency": 8,
                # As the group is: a successor finds them at work.
                "lifetime": "detached",
                "name": self._agent_name(host.worker_id),
                "max_restarts": _AGENT_RESTARTS,
                "scheduling_strategy": self._reservation.on_host(host.worker_id, self.part),
            }
            agents.append(actor.options(**options).remote(host.worker_id, self._spec, self._secret))
        try:
            async with asyncio.timeout(AGENTS_S):
                reports: list[AgentReport] = await asyncio.gather(
                    *(agent.start.remote() for agent in agents)
                )
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise SliceLostError(f"not every host of {self.slice.name} came up: {error}") from error
        self.listen(reports, agents)

    def listen(self, reports: Sequence[AgentReport], agents: Sequence[Any] = ()) -> None:
        """Listens to agents that are at work already; `agents` by worker id are to be asked too."""
        self._agents = list(agents)
        self.reports = {report.worker_id: report for report in reports}
        for report in reports:
            revive = functools.partial(self._revive, report)
            watcher = HostWatcher(report.worker_id, report.address, self, self._tls, revive=revive)
            self._watchers.append(watcher)
            self._tasks.append(asyncio.create_task(watcher.run(), name=f"host-{report.worker_id}"))

    async def learn_nodes(self) -> None:
        """Asks Ray where the nodes of the hosts listen, for a time at which it may have no head."""
        while not self._ray_nodes:
            try:
                self._ray_nodes = await node_addresses()
            except Exception as error:  # noqa: BLE001 - whatever ails the head, it is asked again
                logger.warning("ray_unreachable error=%r", str(error))
                await asyncio.sleep(_HOST_CHECK_S)

    async def _revive(self, report: AgentReport) -> tuple[str, int] | None:
        """Returns the address of the agent that Ray starts in the place of a dead one.

        `None`: the host is gone, which its Ray node tells without the head, or Ray starts none.
        """
        node = self._ray_nodes.get(report.node_id)
        if node is None or not await is_listening(node, _HOST_ANSWER_S):
            return None
        starting = asyncio.create_task(self._start_again(report.worker_id))
        try:
            while not starting.done():
                await asyncio.wait({starting}, timeout=_HOST_CHECK_S)
                if not await is_listening(node, _HOST_ANSWER_S):
                    return None
            anew = starting.result()
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        if anew is None:
            return None
        self.reports[report.worker_id] = anew
        return anew.address

    async def _start_again(self, worker_id: int) -> AgentReport | None:
        """Returns the report of an agent that Ray has started again; `None` if it never will.

        Without a head nothing is started, so this takes as long as there is none.
        """
        name = self._agent_name(worker_id)
        while True:
            try:
                agent = await asyncio.to_thread(ray.get_actor, name)
                report: AgentReport = await agent.start.remote()
            except (ValueError, ray.exceptions.ActorDiedError) as error:
                logger.warning("agent_gone slice=%s reason=%r", self.slice.name, str(error))
                return None
            except Exception as error:  # noqa: BLE001 - it starts, or there is no head
                logger.info("agent_awaited slice=%s reason=%r", self.slice.name, str(error))
                await asyncio.sleep(_HOST_CHECK_S)
            else:
                return report

    def _agent_name(self, worker_id: int) -> str:
        return f"{self._reservation.group_id}:agent:{self.part}:{worker_id}"

    def tell_left(self) -> None:
        """Says on each host that the slice is left: its pod need not be held any longer."""
        for watcher in self._watchers:
            watcher.tell_left()

    async def stop(self) -> None:
        """Stops watching; the agents go on until the slice is given back. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait_chips_free(self, timeout_s: float) -> dict[int, str]:
        """Waits until no process has chips of the slice; returns by host what still has some.

        At 0 it looks once. A host that cannot be asked is no reason to wait: whoever comes to it
        next finds out.
        """

        async def ask(worker_id: int) -> str:
            try:
                async with asyncio.timeout(timeout_s + _ANSWER_SLACK_S):
                    left = await self._agents[worker_id].wait_chips_free.remote(timeout_s)
            except (ray.exceptions.RayError, TimeoutError) as error:
                logger.warning("chips_not_seen slice=%s error=%r", self.slice.name, str(error))
                return ""
            return "; ".join(left)

        hosts = range(self._spec.shape.num_hosts)
        found = dict(zip(hosts, await asyncio.gather(*map(ask, hosts)), strict=True))
        return {worker_id: words for worker_id, words in found.items() if words}

    def fail(self, reason: str) -> None:
        """Notes why the slice itself is of no use, where nothing else has ended it."""
        self._failure = (EndCause.BOOT_FAILED, reason)

    async def probe(self, timeout_s: float) -> ProbeVerdict:
        """Probes every host and the interconnect between them."""
        ip, port = await self._agents[0].free_port.remote()
        found = await probe_slice(
            {
                worker_id: self._probe_host(worker_id, f"{ip}:{port}", timeout_s)
                for worker_id in range(self._spec.shape.num_hosts)
            }
        )
        if found.has_passed:
            logger.info("probe_passed slice=%s %s", self.slice.name, found.reason)
        else:
            self.fail(f"the probe failed: {found.reason}")
        return found

    async def _probe_host(self, worker_id: int, coordinator: str, timeout_s: float) -> HostProbe:
        shape = self._spec.shape
        spec = ProbeSpec(
            platform=Platform.TPU,  # a simulated host knows better
            num_hosts=shape.num_hosts,
            process_id=worker_id,
            devices_per_host=shape.chips_per_host * shape.devices_per_chip,
            coordinator_address=coordinator if shape.num_hosts > 1 else None,
            hbm_bytes_per_device=shape.hbm_bytes_per_device,
        )
        try:
            async with asyncio.timeout(timeout_s + _ANSWER_SLACK_S):
                result: HostProbe = await self._agents[worker_id].probe.remote(spec, timeout_s)
                return result
        except (ray.exceptions.RayError, TimeoutError) as error:
            return HostProbe(worker_id, HostOutcome.LOST, Stage.STARTING, f"agent lost: {error}")

    # -- what is announced --

    def announce(self, notice: Notice) -> None:
        """Adds the notice, in place of an earlier one from the same source for the same host."""
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
        self.decide()

    def withdraw(self, worker_id: int, source: str) -> None:
        """Removes a notice that no longer holds; an order that has been given stands."""
        self._notices.pop((worker_id, source), None)

    def take_drains(self, deadlines_s: dict[str, float | None]) -> None:
        """Announces the drains of this slice's nodes by Ray; `deadlines_s` are by node id."""
        for node_id, deadline_s in deadlines_s.items():
            worker_id = self._by_node.get(node_id)
            if worker_id is not None:
                reason = "Ray drains the node"
                kind = NoticeKind.NODE_DRAINING
                self.announce(Notice(kind, worker_id, deadline_s, reason, "ray drain"))

    def decide(self) -> None:
        """Gives the order once the notices or the clock demand it."""
        if self.order is not None:
            return
        self.order = plan_drain(self._notices.values(), self._spec.drain_notice_s, time.time())
        if self.order is not None:
            self._on_order(self)
