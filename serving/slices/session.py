"""The session of a replica on its slices: request, hold, probe, start an engine, leave in time.

Owns the slices (`HeldSlices`; several where they are a multislice), the engine host on the first of
them, and the reports to the directory (`DirectoryReporter`). Does not own what follows a session:
the replica does. A compute class without slices (`local`) reserves nothing: its engine host runs on
any Ray node that has room.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import ray
from ray.serve.handle import DeploymentHandle

from serving.config.slice_spec import SliceSpec, Work
from serving.domain.deployment_names import engine_deployment_name
from serving.domain.slice_lifecycle import EndCause, LoadStage, SliceLifecycle, SliceState
from serving.domain.slice_records import HostRecord, SliceRecord
from serving.engine.host_actor import EngineHostActor, HostReport
from serving.engine.spec import EngineSpec
from serving.engine.tpu.settings import resolve_settings_here
from serving.slices.compile_cache_sync import CompileCacheSync
from serving.slices.directory_reporter import DirectoryReporter, best_effort
from serving.slices.held import HeldSlices, ProbeFailedError, acquire_slices
from serving.slices.watch import SliceLostError, SliceWatch
from serving.tpu.multislice import multislice_environment

logger = logging.getLogger(__name__)

# Of a notice, this much is kept for ending the engine and giving the slice back.
_RELEASE_S = 1.5
# Longer than the end of a host's stream takes to be noticed (`host_heartbeat`).
_HOST_LOST_S = 1.5
_STAGE_WORDS = {
    LoadStage.WEIGHTS: "the engine gets its weights",
    LoadStage.COMPILING: "the engine has its weights: it compiles and warms up",
}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """The reason to leave a slice, and the time that its requests have to finish there.

    `deadline_s` is the wall-clock time at which the slice ends; `None` if nothing takes it away.
    Requests that no other engine can continue may stay `stay_s`, where that is longer than the
    grace.
    """

    cause: EndCause
    reason: str
    grace_s: float
    deadline_s: float | None = None
    stay_s: float = 0.0


class SliceSession:
    """The session of one engine: start once, wait for its end, stop."""

    def __init__(
        self, life_id: str, spec: EngineSpec, secret: bytes, directory: DeploymentHandle
    ) -> None:
        """Takes `life_id`, the id of the session in the directory."""
        self._spec = spec
        self._secret = secret
        self._directory = directory
        self._held: HeldSlices | None = None
        self._host: Any = None
        self._stopping: asyncio.Task[None] | None = None
        self._sync: CompileCacheSync | None = None
        self._pushing: asyncio.Task[None] | None = None
        shape = None if spec.slice is None else spec.slice.shape
        first = SliceRecord(
            replica_id=life_id,
            model=spec.model,
            compute_class=spec.compute_class,
            version=spec.version,
            life=SliceLifecycle.begin(time.time()),
            generation=None if shape is None else str(shape.generation),
            topology=None if shape is None else shape.topology,
        )
        self._num_slices = 1 if spec.slice is None else spec.slice.num_slices
        self._reporter = DirectoryReporter(first, self._num_slices, directory)

    # -- up --

    async def start(self) -> None:
        """Waits for slices, for hours if it must, and starts an engine on them.

        When it is cancelled, `stop` cleans up.

        Raises:
            ValueError: the engine refuses its arguments. No other slice would change that.
            EngineDiedError: the engine failed to start on a sound slice. Another try may succeed.
        """
        while True:
            try:
                if self._spec.slice is not None:
                    await self._acquire_slices(self._spec.slice)
                else:
                    await self._reporter.enter(
                        SliceState.RESERVED, "this compute class has no slices"
                    )
                await self._reporter.enter(SliceState.LOADING, "the engine starts")
                report = await self._unless_lost(self._start_engine())
            except (SliceLostError, ProbeFailedError) as error:
                # Not a failure of the deployment: slices come and go, and this one went early.
                await self._give_up(error.cause, str(error))
                await self._reporter.restart("the slice before was lost")
                continue
            await self._reporter.serve(report.engine_id, report.address)
            await self._reporter.enter(SliceState.READY, "the engine takes requests")
            await self._reporter.clear_quarantine()
            # Only now: they are programs of an engine that works, and nobody waits for the push.
            self._pushing = asyncio.create_task(self._push_programs(), name="push-programs")
            return

    async def wait_end(self) -> SessionEnd:
        """Waits for the first event that ends the service of these slices."""
        died = asyncio.create_task(self._wait_engine_died())
        waits: set[asyncio.Task[Any]] = {died}
        if self._held is not None:
            waits.add(asyncio.create_task(self._held.wait_order()))
        try:
            done, rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if died in done and rest:
                # A lost host takes the engine with it, and may be known a moment later.
                done |= (await asyncio.wait(rest, timeout=_HOST_LOST_S))[0]
        finally:
            for task in waits:
                task.cancel()
        for ordered in done - {died}:
            order = ordered.result()
            grace_s = max(0.0, order.deadline_s - time.time() - _RELEASE_S)
            return SessionEnd(order.cause, order.reason, grace_s, order.deadline_s)
        reason: str = died.result()
        logger.error("engine_died life=%s reason=%r", self._reporter.life_id, reason)
        return SessionEnd(EndCause.UNHEALTHY, reason, 0.0)

    async def status(self) -> dict[str, Any]:
        """Returns the host's requests, gateways and process ids."""
        status: dict[str, Any] = await self._host.status.remote()
        return status

    # -- down --

    async def stop(self, end: SessionEnd) -> None:
        """Drains and releases the slices, once; a second caller waits for the first."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._drain_and_give_up(end), name="leave")
        await asyncio.shield(self._stopping)

    async def _drain_and_give_up(self, end: SessionEnd) -> None:
        if self._reporter.state == SliceState.READY and end.cause != EndCause.UNHEALTHY:
            # The link first: it is the shorter way to the gateways.
            drain = asyncio.ensure_future(
                self._host.drain.remote(end.reason, end.grace_s, end.stay_s)
            )
            await self._reporter.set_deadlines(self._deadlines_s(end))
            await self._reporter.enter(SliceState.DRAINING, end.reason)
            pushing = asyncio.create_task(self._push_programs(), name="push-programs-last")
            limit_s = max(end.grace_s, end.stay_s) + _RELEASE_S
            leave_by_s = time.monotonic() + limit_s
            await best_effort(asyncio.wait_for(drain, limit_s), "drain_incomplete")
            # What was compiled since the warm-up; it has the time of the drain and no more.
            await asyncio.wait({pushing}, timeout=max(0.0, leave_by_s - time.monotonic()))
            pushing.cancel()
            await best_effort(
                asyncio.wait_for(self._host.close.remote(), _RELEASE_S), "close_failed"
            )
        await self._give_up(end.cause, end.reason)
        self._reporter.close()

    def _deadlines_s(self, end: SessionEnd) -> list[float | None]:
        """Returns the deadline of each slice; only those to blame of a multislice have one."""
        if self._held is None or len(self._held.slices) == 1:
            return [end.deadline_s]
        orders = [each.order for each in self._held.watches]
        return [None if order is None else order.deadline_s for order in orders]

    async def _give_up(self, cause: EndCause, reason: str) -> None:
        if self._pushing is not None:
            self._pushing.cancel()
            await asyncio.gather(self._pushing, return_exceptions=True)
        self._pushing = self._sync = None
        if self._host is not None:
            ray.kill(self._host)
            self._host = None
        ends = [(cause, reason)] * self._num_slices
        if self._held is not None:
            held, self._held = self._held, None
            ends = list(held.ends(cause, reason))
            await best_effort(held.release(), "release_failed")
        await self._reporter.end(ends)

    # -- the steps of the start --

    async def _acquire_slices(self, spec: SliceSpec) -> None:
        async def waiting(reason: str) -> None:
            await self._reporter.enter(SliceState.PROVISIONING, reason)

        life_id = self._reporter.life_id
        spec = replace(
            spec,
            log_style=self._spec.log_style,
            engine_env=self._spec.engine_env,
            work=Work(
                self._spec.model,
                engine_deployment_name(self._spec.model, self._spec.compute_class),
                life_id,
            ),
        )
        self._held = held = await acquire_slices(life_id, spec, self._directory, waiting)
        await self._reporter.hold([_host_records(each) for each in held.watches])
        names = [each.name for each in held.slices]
        reason = f"holds every host of {held.reservation.name}"
        await self._reporter.enter(SliceState.RESERVED, reason, names=names)
        if spec.probe_timeout_s > 0:
            reason = "chips and interconnect are probed"
            await self._reporter.enter(SliceState.PROBING, reason)
            await self._unless_lost(held.probe(spec.probe_timeout_s))

    async def _start_engine(self) -> HostReport:
        spec = self._spec if self._spec.tpu is None else await self._resolve()
        await self._pull_programs(spec)
        joined = {} if self._held is None else multislice_environment(self._held.slices)
        options: dict[str, Any] = {
            "num_cpus": spec.num_cpus,
            "max_concurrency": 16,
            # vLLM gives it to its workers on other hosts as well, for when their processes begin.
            "runtime_env": {"env_vars": {**spec.engine_env, **joined}},
        }
        if self._held is not None:
            options["scheduling_strategy"] = self._held.reservation.on_host(0)
        # Not detached: Ray ends the host when this replica's process ends, however it ends.
        self._host = ray.remote(EngineHostActor).options(**options).remote(spec, self._secret)
        stages = asyncio.create_task(self._follow_stages(self._host), name="follow-stages")
        try:
            report: HostReport = await self._host.start.remote()
        finally:
            stages.cancel()
            await asyncio.gather(stages, return_exceptions=True)
        return report

    async def _pull_programs(self, spec: EngineSpec) -> None:
        """Brings compiled programs to all hosts of the slices; without them the engine compiles."""
        if spec.programs is None or self._held is None:
            return
        # The environment of `_resolve`, so that Ray uses its process on the first host again.
        sync = CompileCacheSync(
            spec.programs, self._held.reservation, self._spec.engine_env, self._reporter.life_id
        )
        await self._reporter.enter(SliceState.LOADING, "compiled programs are pulled")
        reason = await sync.pull()
        await self._reporter.enter(SliceState.LOADING, f"the engine starts: {reason}")
        self._sync = sync

    async def _push_programs(self) -> None:
        if self._sync is None or self._host is None:
            return
        await best_effort(self._host.note_programs.remote(self._sync.moved), "programs_not_noted")
        await self._sync.push()
        await best_effort(self._host.note_programs.remote(self._sync.moved), "programs_not_noted")

    async def _follow_stages(self, host: Any) -> None:
        while True:
            stage: LoadStage = await host.next_stage.remote()
            await self._reporter.enter(SliceState.LOADING, _STAGE_WORDS[stage], stage=stage)

    async def _resolve(self) -> EngineSpec:
        """Resolves the settings of a TPU engine on the first host of its slices.

        Raises:
            ValueError: it would not work, or not fit.
        """
        assert self._held is not None
        options = {
            "num_cpus": 0,
            "max_retries": 0,
            "scheduling_strategy": self._held.reservation.on_host(0),
            "runtime_env": {"env_vars": dict(self._spec.engine_env)},
        }
        resolved: EngineSpec = (
            await ray.remote(resolve_settings_here).options(**options).remote(self._spec)
        )
        return resolved

    async def _unless_lost(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Awaits `work`, unless a slice has to be left before it is done.

        Raises:
            SliceLostError: a slice has to be left.
        """
        if self._held is None:
            return await work
        working = asyncio.create_task(work)
        ordered = asyncio.create_task(self._held.wait_order())
        try:
            await asyncio.wait({working, ordered}, return_when=asyncio.FIRST_COMPLETED)
            if ordered.done():
                order = ordered.result()
                raise SliceLostError(order.reason, order.cause)
            return working.result()
        finally:
            working.cancel()
            ordered.cancel()
            await asyncio.gather(working, ordered, return_exceptions=True)

    async def _wait_engine_died(self) -> str:
        try:
            return str(await self._host.wait_died.remote())
        except ray.exceptions.RayError as error:
            return f"engine host actor died: {error}"


def _host_records(watch: SliceWatch) -> tuple[HostRecord, ...]:
    return tuple(
        HostRecord(
            host.worker_id,
            host.node_id,
            host.address,
            host.num_chips,
            watch.tpu_log_dirs.get(host.worker_id),
        )
        for host in watch.slice.hosts
    )
