"""One life of a replica on its slices: wanted, held, tried out, an engine on them, left in time.

Owns the slices (`Tenure`), of which there are several where they are joined, the engine host on the
first, and what the directory is told (`LifeRecords`). Does not own what comes after it: the replica
does. On a compute class without slices (`local`) nothing is reserved: the host is this machine.
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
from serving.domain.slice_lifecycle import EndCause, LoadStage, SliceLife, SliceState
from serving.domain.slice_records import HostRecord, SliceRecord
from serving.engine.host_actor import EngineHostActor, HostReport
from serving.engine.spec import EngineSpec
from serving.engine.tpu.settings import settle_here
from serving.slices.compile_cache_sync import ProgramCourier
from serving.slices.directory_reporter import LifeRecords, quietly
from serving.slices.lease import ProbeFailedError, Tenure, take_slices
from serving.slices.watch import SliceLostError, SliceWatch
from serving.tpu.multislice import joined_environment

logger = logging.getLogger(__name__)

# Of a notice, this much is kept for ending the engine and giving the slice back.
_RELEASE_S = 1.5
# Longer than the end of a host's stream takes to be noticed (`host_stream`).
_HOST_LOST_S = 1.5
_STAGE_WORDS = {
    LoadStage.WEIGHTS: "the engine gets its weights",
    LoadStage.COMPILING: "the engine has its weights: it compiles and warms up",
}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Parting:
    """Why a slice is left, and until when its requests may finish on it.

    `deadline_s` is the wall-clock time at which it goes; `None`: nobody takes it away. For requests
    that no other engine can go on with it stays `stay_s`, where that is longer than the grace.
    """

    cause: EndCause
    reason: str
    grace_s: float
    deadline_s: float | None = None
    stay_s: float = 0.0


class Residency:
    """One life. Come up once, wait for the end of its service, leave."""

    def __init__(
        self, life_id: str, spec: EngineSpec, secret: bytes, directory: DeploymentHandle
    ) -> None:
        """`life_id` is its id in the directory."""
        self._spec = spec
        self._secret = secret
        self._directory = directory
        self._tenure: Tenure | None = None
        self._host: Any = None
        self._leaving: asyncio.Task[None] | None = None
        self._courier: ProgramCourier | None = None
        self._pushing: asyncio.Task[None] | None = None
        shape = None if spec.slice is None else spec.slice.shape
        first = SliceRecord(
            replica_id=life_id,
            model=spec.model,
            compute_class=spec.compute_class,
            version=spec.version,
            life=SliceLife.begin(time.time()),
            generation=None if shape is None else str(shape.generation),
            topology=None if shape is None else shape.topology,
        )
        self._num_slices = 1 if spec.slice is None else spec.slice.num_slices
        self._records = LifeRecords(first, self._num_slices, directory)

    # -- up --

    async def come_up(self) -> None:
        """Waits for slices until an engine runs on one; hours if it must.

        Cancelling it leaves things to `leave`.

        Raises:
            ValueError: the engine refuses its arguments. No other slice would change that.
            EngineDiedError: the engine failed to start on a sound slice. Another try may succeed.
        """
        while True:
            try:
                if self._spec.slice is not None:
                    await self._take_slices(self._spec.slice)
                else:
                    await self._records.enter(
                        SliceState.RESERVED, "this compute class has no slices"
                    )
                await self._records.enter(SliceState.LOADING, "the engine starts")
                report = await self._unless_lost(self._start_engine())
            except (SliceLostError, ProbeFailedError) as error:
                # Not a failure of the deployment: slices come and go, and this one went early.
                await self._give_up(error.cause, str(error))
                await self._records.begin_again("the slice before was lost")
                continue
            await self._records.serve(report.engine_id, report.address)
            await self._records.enter(SliceState.READY, "the engine takes requests")
            await self._records.absolve()
            # Now, and not before: programs of an engine that came up, and nobody waits for them.
            self._pushing = asyncio.create_task(self._push_programs(), name="push-programs")
            return

    async def wait_parting(self) -> Parting:
        """Waits for the first thing that ends the service of this slice."""
        died = asyncio.create_task(self._wait_engine_died())
        waits: set[asyncio.Task[Any]] = {died}
        if self._tenure is not None:
            waits.add(asyncio.create_task(self._tenure.wait_order()))
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
            return Parting(order.cause, order.reason, grace_s, order.deadline_s)
        reason: str = died.result()
        logger.error("engine_died life=%s reason=%r", self._records.life_id, reason)
        return Parting(EndCause.UNHEALTHY, reason, 0.0)

    async def status(self) -> dict[str, Any]:
        """The host's requests, gateways and process ids."""
        status: dict[str, Any] = await self._host.status.remote()
        return status

    # -- down --

    async def leave(self, parting: Parting) -> None:
        """Drains and gives the slice back, once; a second caller waits for the first."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._drain_and_give_up(parting), name="leave")
        await asyncio.shield(self._leaving)

    async def _drain_and_give_up(self, parting: Parting) -> None:
        if self._records.state == SliceState.READY and parting.cause != EndCause.UNHEALTHY:
            # The link first: it is the shorter way to the gateways.
            drain = asyncio.ensure_future(
                self._host.drain.remote(parting.reason, parting.grace_s, parting.stay_s)
            )
            await self._records.leave_by(self._deadlines_s(parting))
            await self._records.enter(SliceState.DRAINING, parting.reason)
            pushing = asyncio.create_task(self._push_programs(), name="push-programs-last")
            limit_s = max(parting.grace_s, parting.stay_s) + _RELEASE_S
            leave_by_s = time.monotonic() + limit_s
            await quietly(asyncio.wait_for(drain, limit_s), "drain_incomplete")
            # What was compiled since the warm-up; it has the time of the drain and no more.
            await asyncio.wait({pushing}, timeout=max(0.0, leave_by_s - time.monotonic()))
            pushing.cancel()
            await quietly(asyncio.wait_for(self._host.close.remote(), _RELEASE_S), "close_failed")
        await self._give_up(parting.cause, parting.reason)
        self._records.close()

    def _deadlines_s(self, parting: Parting) -> list[float | None]:
        """Until when each slice is there; of joined ones only those to blame are taken away."""
        if self._tenure is None or len(self._tenure.slices) == 1:
            return [parting.deadline_s]
        orders = [each.order for each in self._tenure.watches]
        return [None if order is None else order.deadline_s for order in orders]

    async def _give_up(self, cause: EndCause, reason: str) -> None:
        """Ends what runs on the slices, gives them back, and tells the directory."""
        if self._pushing is not None:
            self._pushing.cancel()
            await asyncio.gather(self._pushing, return_exceptions=True)
        self._pushing = self._courier = None
        if self._host is not None:
            ray.kill(self._host)
            self._host = None
        ends = [(cause, reason)] * self._num_slices
        if self._tenure is not None:
            tenure, self._tenure = self._tenure, None
            ends = list(tenure.ends(cause, reason))
            await quietly(tenure.release(), "release_failed")
        await self._records.end(ends)

    # -- the steps of coming up --

    async def _take_slices(self, spec: SliceSpec) -> None:
        async def waiting(reason: str) -> None:
            await self._records.enter(SliceState.PROVISIONING, reason)

        life_id = self._records.life_id
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
        self._tenure = tenure = await take_slices(life_id, spec, self._directory, waiting)
        await self._records.hold([_host_records(each) for each in tenure.watches])
        names = [each.name for each in tenure.slices]
        reason = f"holds every host of {tenure.reservation.name}"
        await self._records.enter(SliceState.RESERVED, reason, names=names)
        if spec.probe_timeout_s > 0:
            reason = "chips and interconnect are tried out"
            await self._records.enter(SliceState.PROBING, reason)
            await self._unless_lost(tenure.probe(spec.probe_timeout_s))

    async def _start_engine(self) -> HostReport:
        spec = self._spec if self._spec.tpu is None else await self._settle()
        await self._pull_programs(spec)
        options: dict[str, Any] = {
            "num_cpus": spec.num_cpus,
            "max_concurrency": 16,
            # vLLM gives it to its workers on other hosts as well, for when their processes begin.
            "runtime_env": {"env_vars": self._environment(spec)},
        }
        if self._tenure is not None:
            options["scheduling_strategy"] = self._tenure.reservation.on_host(0)
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
        if spec.programs is None or self._tenure is None:
            return
        # As when the engine was settled, so that the first host's task finds its process again.
        courier = ProgramCourier(
            spec.programs, self._tenure.reservation, self._spec.engine_env, self._records.life_id
        )
        await self._records.enter(SliceState.LOADING, "compiled programs are pulled")
        reason = await courier.pull()
        await self._records.enter(SliceState.LOADING, f"the engine starts: {reason}")
        self._courier = courier

    async def _push_programs(self) -> None:
        """Gives the store what hosts have compiled, and tells the engine host of it."""
        if self._courier is None or self._host is None:
            return
        await quietly(self._host.note_programs.remote(self._courier.moved), "programs_not_noted")
        await self._courier.push()
        await quietly(self._host.note_programs.remote(self._courier.moved), "programs_not_noted")

    async def _follow_stages(self, host: Any) -> None:
        """Tells the directory how far the engine is, until it is started or gone."""
        while True:
            stage: LoadStage = await host.next_stage.remote()
            await self._records.enter(SliceState.LOADING, _STAGE_WORDS[stage], stage=stage)

    def _environment(self, spec: EngineSpec) -> dict[str, str]:
        """What the engine's processes are told, and where the slices are if there are several."""
        joined = {} if self._tenure is None else joined_environment(self._tenure.slices)
        return {**spec.engine_env, **joined}

    async def _settle(self) -> EngineSpec:
        """What a TPU engine is started with, decided on the first host of its slices.

        Raises:
            ValueError: it would not work, or not fit.
        """
        assert self._tenure is not None
        options = {
            "num_cpus": 0,
            "max_retries": 0,
            "scheduling_strategy": self._tenure.reservation.on_host(0),
            "runtime_env": {"env_vars": dict(self._spec.engine_env)},
        }
        settled: EngineSpec = await ray.remote(settle_here).options(**options).remote(self._spec)
        return settled

    async def _unless_lost(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Does `work`, unless the slice is about to go before it is done.

        Raises:
            SliceLostError: it is.
        """
        if self._tenure is None:
            return await work
        working = asyncio.create_task(work)
        ordered = asyncio.create_task(self._tenure.wait_order())
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
