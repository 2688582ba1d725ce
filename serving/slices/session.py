"""The session of a replica on its slices: request, hold, probe, start engines, leave in time.

Owns the slices (`HeldSlices`; several where they are a multislice), the engine hosts on them
(`EngineHosts`; several where a slice is divided), and the reports to the directory
(`DirectoryReporter`). Does not own what follows a session: the replica does. A compute class
without slices (`local`) reserves nothing: its engine host runs on any Ray node that has room.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ray.serve.handle import DeploymentHandle

from serving.config.slice_settings import DRAIN_GRACE_S
from serving.config.slice_spec import SliceSpec, Work
from serving.domain.inventory import ZONE_LABEL
from serving.domain.names.deployment_names import engine_deployment_name
from serving.domain.slice_lifecycle import EndCause, LoadStage, SliceLifecycle, SliceState
from serving.domain.slice_records import HandOn, LeaveRequest, SliceRecord, Snapshot
from serving.engine.spec import EngineSpec
from serving.link.errors import HandshakeError, LinkClosedError
from serving.ownership.control_client import (
    EngineControl,
    EngineGoneError,
    SupersededError,
)
from serving.ownership.deed import DeedEngine, DeedError, EngineDeed
from serving.ownership.group import placement_group
from serving.ownership.lease import ClaimRefusedError
from serving.slices.compile_cache_sync import CompileCacheSync
from serving.slices.directory_reporter import DirectoryReporter, best_effort
from serving.slices.engine_hosts import EngineHosts, resolve_on_first_host
from serving.slices.held import (
    HeldSlices,
    ProbeFailedError,
    acquire_slices,
    find_engine,
    host_records,
)
from serving.slices.reservation import Reservation
from serving.slices.watch import SliceLostError
from serving.tpu.multislice import multislice_environment

logger = logging.getLogger(__name__)

# Of a notice, this much is kept for ending the engine and giving the slice back.
_RELEASE_S = 1.5
# Longer than the end of a host's stream takes to be noticed (`host_heartbeat`).
_HOST_LOST_S = 1.5
_RETRY_S = 2.0
# How long chips may stay with a process that is ending. The kernel closes those of a host within
# seconds; what has them longer has not ended.
_CHIPS_FREE_S = 60.0
# For the directory's answer.
_ASK_S = 5.0
# How long an engine is kept that is handed on to a replica which is there: it waits for an engine,
# or gives its own slice up for it. If none comes, the engine ends, as it would have at once.
_HANDED_ON_S = 60.0
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
        self._engines = EngineHosts(life_id, self._control_of, spec.lease_s)
        # What could not be given back yet: somebody else may own it by now.
        self._giving_back: set[asyncio.Task[None]] = set()
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
            zone=None if spec.slice is None else spec.slice.node_labels.get(ZONE_LABEL),
            fingerprint=spec.fingerprint,
            num_engines=1 if spec.slice is None else spec.slice.num_engines,
        )
        self._num_slices = 1 if spec.slice is None else spec.slice.num_slices
        self._reporter = DirectoryReporter(
            first, self._num_slices, directory, self._leave_when_asked
        )

    # -- up --

    async def start(self) -> None:
        """Takes over an engine, or waits for slices, for hours if it must, and starts one on them.

        When it is cancelled, `stop` cleans up.

        Raises:
            ValueError: the engine refuses its arguments. No other slice would change that.
            EngineDiedError: the engine failed to start on a sound slice. Another try may succeed.
        """
        while True:
            try:
                if await self._find_engine():
                    return
                if self._spec.slice is not None:
                    if not await self._acquire_slices(self._spec.slice):
                        return
                else:
                    await self._reporter.enter(
                        SliceState.RESERVED, "this compute class has no slices"
                    )
                await self._reporter.enter(SliceState.LOADING, "the engine starts")
                await self._unless_lost(self._start_engines())
            except (SliceLostError, ProbeFailedError) as error:
                # Not a failure of the deployment: slices come and go, and this one went early.
                await self._give_up(error.cause, str(error))
                await self._reporter.restart("the slice before was lost")
                continue
            await self._engines.store_deed(self._deed_of)
            await self._reporter.serve(self._engines.records)
            await self._reporter.enter(SliceState.READY, "the engine takes requests")
            # Only now: they are programs of an engine that works, and nobody waits for the push.
            self._pushing = asyncio.create_task(self._push_programs(), name="push-programs")
            return

    async def wait_end(self) -> SessionEnd:
        """Waits for the first event that ends the service of these slices."""
        died = asyncio.create_task(self._engines.wait_end())
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
            if order.deadline_s is None:
                return SessionEnd(
                    order.cause, order.reason, DRAIN_GRACE_S, stay_s=self._spec.stay_s
                )
            grace_s = max(0.0, order.deadline_s - time.time() - _RELEASE_S)
            return SessionEnd(order.cause, order.reason, grace_s, order.deadline_s)
        try:
            reason, others_serve = died.result()
        except SupersededError as error:
            logger.warning("engine_superseded life=%s reason=%r", self._reporter.life_id, error)
            return SessionEnd(EndCause.ADOPTED, f"another replica has the engine: {error}", 0.0)
        logger.error("engine_died life=%s reason=%r", self._reporter.life_id, reason)
        return SessionEnd(EndCause.UNHEALTHY, reason, DRAIN_GRACE_S if others_serve else 0.0)

    def _leave_when_asked(self, part: int, request: LeaveRequest) -> None:
        if self._held is not None and request.is_replaced:
            self._held.ask_to_leave(part, request.reason)
        elif self._held is not None:
            self._held.give_up(request.reason)

    async def status(self) -> dict[str, Any]:
        """Returns the host's requests, gateways and process ids.

        Raises:
            LinkClosedError: there is no engine, or it cannot be reached.
        """
        return await self._engines.status()

    # -- down --

    async def stop(self, end: SessionEnd) -> None:
        """Drains and releases the slices, once; a second caller waits for the first."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._drain_and_give_up(end), name="leave")
        await asyncio.shield(self._stopping)

    async def hand_on(self, *, is_shutdown: bool) -> bool:
        """Leaves slices and engine to another replica; returns whether it did.

        It does not if the directory wants the engine ended, or there is none that could go on.
        `is_shutdown` says that Serve ends the whole application: nobody is there to want it.
        """
        if self._stopping is not None or self._reporter.state != SliceState.READY:
            return False
        if not self._engines.are_commanded or not self._spec.fingerprint:
            return False
        found = await self._reporter.hand_on(is_shutdown=is_shutdown)
        if found is HandOn.ENDS:
            return False
        within_s = self._spec.handover_s
        if not is_shutdown:
            within_s = min(self._spec.lease_s, _HANDED_ON_S)
        await self._engines.leave(within_s)
        if self._pushing is not None:
            self._pushing.cancel()
        if self._held is not None:
            await self._held.leave()
        return True

    async def _drain_and_give_up(self, end: SessionEnd) -> None:
        # An engine that died has no requests; what others on its slice have is given the grace.
        is_ended = end.cause is EndCause.ADOPTED or (
            end.cause is EndCause.UNHEALTHY and end.grace_s == 0
        )
        if self._reporter.state == SliceState.READY and not is_ended:
            # The link first: it is the shorter way to the gateways.
            drain = asyncio.ensure_future(self._engines.drain(end.reason, end.grace_s, end.stay_s))
            await self._reporter.set_deadlines(self._deadlines_s(end))
            await self._reporter.enter(SliceState.DRAINING, end.reason)
            pushing = asyncio.create_task(self._push_programs(), name="push-programs-last")
            limit_s = max(end.grace_s, end.stay_s) + _RELEASE_S
            leave_by_s = time.monotonic() + limit_s
            await best_effort(asyncio.wait_for(drain, limit_s), "drain_incomplete")
            # What was compiled since the warm-up; it has the time of the drain and no more.
            await asyncio.wait({pushing}, timeout=max(0.0, leave_by_s - time.monotonic()))
            pushing.cancel()
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
        engines, self._engines = self._engines, self._no_engines()
        held, self._held = self._held, None
        ends = [(cause, reason)] * self._num_slices if held is None else held.ends(cause, reason)
        is_ours = await engines.end()
        if held is not None and is_ours:
            await best_effort(held.release(), "release_failed")
        elif held is not None:
            await held.leave()
        if is_ours is None:
            # As long as this process lives; the directory finds what it leaves.
            giving_back = asyncio.create_task(_give_back_later(engines, held), name="give-back")
            self._giving_back.add(giving_back)
            giving_back.add_done_callback(self._giving_back.discard)
        await self._reporter.end(ends)

    def _no_engines(self) -> EngineHosts:
        return EngineHosts(self._reporter.life_id, self._control_of, self._spec.lease_s)

    def _control_of(self, address: tuple[str, int]) -> EngineControl:
        return EngineControl(
            address,
            self._reporter.life_id,
            self._secret,
            silence_s=self._spec.silence_s,
            may_give_up=self._is_listed_as_ours,
            encryption=self._spec.encryption,
        )

    async def _is_listed_as_ours(self) -> bool:
        """Returns whether the directory lists the engine as this replica's; `False` if away.

        A replica that is cut off alone finds its engine silent, and another one may have it.
        """
        try:
            async with asyncio.timeout(_ASK_S):
                snapshot: Snapshot = await self._directory.watch.remote("", 0.0)
        except Exception:  # noqa: BLE001 - whatever ails the directory: nobody says so
            return False
        return any(each.replica_id == self._reporter.life_id for each in snapshot.records)

    # -- the steps of the start --

    async def _find_engine(self) -> bool:
        """Takes over an engine whose replica is gone; returns whether there was one."""
        if not self._spec.fingerprint:
            return False
        engine = await find_engine(self._reporter.life_id, self._directory)
        return engine is not None and await self._adopt(engine)

    async def _adopt(self, engine: SliceRecord) -> bool:
        """Becomes the owner of a ready engine and its slices; returns whether it could."""
        assert engine.control is not None
        engines = self._no_engines()
        try:
            deed = await engines.adopt(engine.control)
        except (ClaimRefusedError, EngineGoneError, HandshakeError, LinkClosedError) as error:
            logger.warning(
                "engine_not_adopted life=%s engine_id=%s reason=%r",
                self._reporter.life_id, engine.engine_id, str(error),
            )  # fmt: skip
            return False
        except DeedError as error:
            logger.warning("engine_not_understood engine_id=%s reason=%r", engine.engine_id, error)
            return False
        self._engines = engines
        self._reporter.adopt()
        names = None
        if self._spec.slice is not None and deed.group_id is not None:
            slices = tuple(each.whole for each in deed.slices)
            reservation = Reservation(slices, placement_group(deed.group_id))
            self._held = HeldSlices(
                reservation, self._slice_spec(self._spec.slice), self._secret, self._directory
            )
            self._held.adopt(deed)
            names = [each.name for each in slices]
            await self._reporter.hold([each.hosts for each in deed.slices], deed.group_id)
        reason = f"takes over the engine of {engine.replica_id}"
        await self._reporter.enter(SliceState.RESERVED, reason, names=names)
        await self._reporter.enter(SliceState.LOADING, "the engine runs already")
        await self._reporter.serve(engines.records)
        await self._reporter.enter(SliceState.READY, f"took over the engine of {engine.replica_id}")
        return True

    def _slice_spec(self, spec: SliceSpec) -> SliceSpec:
        deployment = engine_deployment_name(self._spec.model, self._spec.compute_class)
        return replace(
            spec,
            log_style=self._spec.log_style,
            engine_env=self._spec.engine_env,
            work=Work(self._spec.model, deployment, self._reporter.life_id),
        )

    async def _acquire_slices(self, spec: SliceSpec) -> bool:
        """Holds slices, probed; returns `False` if it took over an engine instead."""

        async def waiting(reason: str) -> None:
            await self._reporter.enter(SliceState.PROVISIONING, reason)

        life_id = self._reporter.life_id
        spec = self._slice_spec(spec)
        held = await acquire_slices(
            life_id,
            spec,
            self._secret,
            self._directory,
            waiting,
            self._adopt,
            self._reporter.reserve,
        )
        if held is None:
            return False
        self._held = held
        await self._reporter.hold(
            [host_records(each) for each in held.watches], held.reservation.group_id
        )
        names = [each.name for each in held.slices]
        reason = f"holds every host of {held.reservation.name}"
        await self._reporter.enter(SliceState.RESERVED, reason, names=names)
        if spec.probe_timeout_s > 0:
            # An engine that was here before may not have let go of them.
            await self._wait_chips_free(held)
            reason = "chips and interconnect are probed"
            await self._reporter.enter(SliceState.PROBING, reason)
            await self._unless_lost(held.probe(spec.probe_timeout_s))
        await self._wait_chips_free(held)
        return True

    async def _wait_chips_free(self, held: HeldSlices) -> None:
        """Waits until no process has chips of the slices; says so where that takes a while."""
        in_use = await self._unless_lost(held.chips_in_use())
        if in_use:
            await self._reporter.enter(SliceState.PROBING, f"waits for chips: {in_use}")
            await self._unless_lost(held.wait_chips_free(_CHIPS_FREE_S))

    async def _start_engines(self) -> None:
        spec = self._spec
        reservation = None if self._held is None else self._held.reservation
        if spec.tpu is not None:
            assert reservation is not None
            spec = await resolve_on_first_host(spec, reservation)
        await self._pull_programs(spec)
        joined = {} if self._held is None else multislice_environment(self._held.slices)
        await self._engines.start(spec, self._secret, reservation, joined, self._note_stage)

    async def _note_stage(self, stage: LoadStage) -> None:
        await self._reporter.enter(SliceState.LOADING, _STAGE_WORDS[stage], stage=stage)

    def _deed_of(self, engines: tuple[DeedEngine, ...]) -> EngineDeed:
        if self._held is None:
            return EngineDeed(engines, None, ())
        return EngineDeed(engines, self._held.reservation.group_id, self._held.deeds())

    async def _pull_programs(self, spec: EngineSpec) -> None:
        """Brings compiled programs to all hosts of the slices; without them the engine compiles."""
        if spec.programs is None or self._held is None:
            return
        # The environment of its settings, so that Ray uses its process on the first host again.
        sync = CompileCacheSync(
            spec.programs, self._held.reservation, self._spec.engine_env, self._reporter.life_id
        )
        await self._reporter.enter(SliceState.LOADING, "compiled programs are pulled")
        reason = await sync.pull()
        await self._reporter.enter(SliceState.LOADING, f"the engine starts: {reason}")
        self._sync = sync

    async def _push_programs(self) -> None:
        if self._sync is None or not self._engines.are_commanded:
            return
        engines = self._engines
        await best_effort(engines.note_programs(self._sync.moved), "programs_not_noted")
        await self._sync.push()
        await best_effort(engines.note_programs(self._sync.moved), "programs_not_noted")

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


async def _give_back_later(engines: EngineHosts, held: HeldSlices | None) -> None:
    """Gives the slices back once the engines can be ended, or their processes are gone."""
    is_ours: bool | None = None
    while is_ours is None:
        await asyncio.sleep(_RETRY_S)
        is_ours = await engines.end()
    if is_ours and held is not None:
        await best_effort(held.release(), "release_failed")
