"""One slice's life under its replica: wanted, held, tried out, an engine on it, left in time.

Owns the slice (`Tenure`), the engine host on it, and the record of its life in the directory. Does
not own what comes after it: the replica does. On a compute class without slices (`local`) nothing
is reserved: the host is this machine.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import ray
from ray.serve.handle import DeploymentHandle

from serving.deployment_names import engine_deployment_name
from serving.directory import RENEWAL_S, HostRecord, SliceRecord
from serving.engine.host_actor import EngineHostActor, HostReport
from serving.engine.spec import EngineSpec
from serving.engine.tpu_engine import settle_here
from serving.slices.lifecycle import EndCause, LoadStage, SliceLife, SliceState
from serving.slices.spec import SliceSpec, Work
from serving.slices.tenure import ProbeFailedError, SliceLostError, Tenure, take_slice

logger = logging.getLogger(__name__)

# Of a notice, this much is kept for ending the engine and giving the slice back.
_RELEASE_S = 1.5
# Longer than the end of a host's stream takes to be noticed (`host_stream`).
_HOST_LOST_S = 1.5
# Ends that somebody asks the reason of.
_FAILURES = (EndCause.BOOT_FAILED, EndCause.UNHEALTHY, EndCause.PREEMPTED)
_STAGE_WORDS = {
    LoadStage.WEIGHTS: "the engine gets its weights",
    LoadStage.COMPILING: "the engine has its weights: it compiles and warms up",
}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Parting:
    """Why a slice is left, and until when its requests may finish on it.

    `deadline_s` is the wall-clock time at which it goes; `None`: nobody takes it away.
    """

    cause: EndCause
    reason: str
    grace_s: float
    deadline_s: float | None = None


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
        shape = None if spec.slice is None else spec.slice.shape
        self._record = SliceRecord(
            replica_id=life_id,
            model=spec.model,
            compute_class=spec.compute_class,
            life=SliceLife.begin(time.time()),
            generation=None if shape is None else str(shape.generation),
            topology=None if shape is None else shape.topology,
        )
        self._registration = asyncio.create_task(self._keep_registered(), name="keep-registered")

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
                    await self._take_slice(self._spec.slice)
                else:
                    await self._enter(SliceState.RESERVED, "this compute class has no slices")
                await self._enter(SliceState.LOADING, "the engine starts")
                report = await self._unless_lost(self._start_engine())
            except (SliceLostError, ProbeFailedError) as error:
                # Not a failure of the deployment: slices come and go, and this one went early.
                await self._give_up(error.cause, str(error))
                await self._say(life=SliceLife.begin(time.time(), "the slice before was lost"))
                continue
            await self._say(engine_id=report.engine_id, address=report.address)
            await self._enter(SliceState.READY, "the engine takes requests")
            if (name := self._record.life.slice_name) is not None:
                await _quietly(self._directory.absolve.remote(name), "directory_unreachable")
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
        logger.error("engine_died life=%s reason=%r", self._life_id, reason)
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
        if self._record.state == SliceState.READY and parting.cause != EndCause.UNHEALTHY:
            # The link first: it is the shorter way to the gateways.
            drain = asyncio.ensure_future(self._host.drain.remote(parting.reason, parting.grace_s))
            await self._say(drain_deadline_s=parting.deadline_s)
            await self._enter(SliceState.DRAINING, parting.reason)
            limit_s = parting.grace_s + _RELEASE_S
            await _quietly(asyncio.wait_for(drain, limit_s), "drain_incomplete")
            await _quietly(asyncio.wait_for(self._host.close.remote(), _RELEASE_S), "close_failed")
        await self._give_up(parting.cause, parting.reason)
        self._registration.cancel()

    async def _give_up(self, cause: EndCause, reason: str) -> None:
        """Ends what runs on the slice, gives it back, and tells the directory."""
        if self._host is not None:
            ray.kill(self._host)
            self._host = None
        if self._tenure is not None:
            tenure, self._tenure = self._tenure, None
            await _quietly(tenure.release(), "release_failed")
        life = self._record.life.end(cause, time.time(), reason)
        ended = self._record = replace(self._record, life=life)
        logger.info(
            "slice_ended life=%s slice=%s cause=%s reason=%r",
            self._life_id, life.slice_name, cause, reason,
        )  # fmt: skip
        if cause in _FAILURES:
            self._note_tpu_logs(ended)
        await _quietly(self._directory.end.remote(ended), "directory_unreachable")
        self._record = replace(ended, hosts=(), engine_id=None, address=None, drain_deadline_s=None)

    def _note_tpu_logs(self, ended: SliceRecord) -> None:
        """Where to look for what libtpu said, host by host; nothing where it writes no logs."""
        for host in ended.hosts:
            if host.tpu_log_dir is not None:
                logger.warning(
                    "tpu_logs life=%s slice=%s worker_id=%d node_id=%s ip=%s dir=%s",
                    self._life_id, ended.life.slice_name,
                    host.worker_id, host.node_id, host.address, host.tpu_log_dir,
                )  # fmt: skip

    # -- the steps of coming up --

    async def _take_slice(self, spec: SliceSpec) -> None:
        async def waiting(reason: str) -> None:
            await self._enter(SliceState.PROVISIONING, reason)

        spec = replace(
            spec,
            log_style=self._spec.log_style,
            engine_env=self._spec.engine_env,
            work=Work(
                self._spec.model,
                engine_deployment_name(self._spec.model, self._spec.compute_class),
                self._life_id,
            ),
        )
        self._tenure = tenure = await take_slice(self._life_id, spec, self._directory, waiting)
        hosts = tuple(
            HostRecord(
                host.worker_id,
                host.node_id,
                host.address,
                host.num_chips,
                tenure.tpu_log_dirs.get(host.worker_id),
            )
            for host in tenure.slice.hosts
        )
        await self._say(hosts=hosts)
        name = tenure.slice.name
        await self._enter(SliceState.RESERVED, f"holds every host of {name}", slice_name=name)
        if spec.probe_timeout_s > 0:
            await self._enter(SliceState.PROBING, "chips and interconnect are tried out")
            await self._unless_lost(tenure.probe(spec.probe_timeout_s))

    async def _start_engine(self) -> HostReport:
        spec = self._spec if self._spec.tpu is None else await self._settle()
        options: dict[str, Any] = {
            "num_cpus": spec.num_cpus,
            "max_concurrency": 16,
            # vLLM gives it to its workers on other hosts as well, for when their processes begin.
            "runtime_env": {"env_vars": dict(spec.engine_env)},
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

    async def _follow_stages(self, host: Any) -> None:
        """Tells the directory how far the engine is, until it is started or gone."""
        while True:
            stage: LoadStage = await host.next_stage.remote()
            await self._enter(SliceState.LOADING, _STAGE_WORDS[stage], stage=stage)

    async def _settle(self) -> EngineSpec:
        """What a TPU engine is started with, decided on the first host of its slice.

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

    # -- what the directory is told --

    @property
    def _life_id(self) -> str:
        return self._record.replica_id

    async def _enter(
        self,
        state: SliceState,
        reason: str,
        *,
        slice_name: str | None = None,
        stage: LoadStage | None = None,
    ) -> None:
        before = self._record.life
        life = before.enter(state, time.time(), reason, slice_name=slice_name, stage=stage)
        self._record = replace(self._record, life=life)
        if life.state != before.state:
            logger.info(
                "slice_state life=%s slice=%s from=%s to=%s reason=%r",
                self._life_id, life.slice_name, before.state, state, reason,
            )  # fmt: skip
        await self._renew()

    async def _say(self, **changes: Any) -> None:
        self._record = replace(self._record, **changes)
        await self._renew()

    async def _renew(self) -> None:
        if self._record.state != SliceState.GONE:
            # A failure is made good by `_keep_registered`, which says it again.
            await _quietly(self._directory.renew.remote(self._record), "directory_unreachable")

    async def _keep_registered(self) -> None:
        while True:
            await self._renew()
            await asyncio.sleep(RENEWAL_S)


async def _quietly(work: Awaitable[Any], event: str) -> None:
    """Waits for something that may fail without changing what comes next; the failure is logged."""
    try:
        await work
    except Exception as error:  # noqa: BLE001 - whatever has already gone, leaving goes on
        logger.warning("%s error=%r", event, error)
