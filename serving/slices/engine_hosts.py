"""The engine hosts of one session, commanded as one: one of them, or one for each part of a slice.

Owns the settings' place and bound, the order of the starts, which is at once, and what becomes of
the others when one fails. Does not own the slices, nor what is decided about engines (`session`).
"""

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import ray

from serving.domain.slice_lifecycle import LoadStage
from serving.domain.slice_records import EngineRecord
from serving.engine.host_actor import EngineHostActor, HostReport
from serving.engine.spec import EngineSpec
from serving.engine.tpu.settings import resolve_settings_here
from serving.link.engine_protocol import EngineDiedError
from serving.link.errors import HandshakeError, LinkCallError, LinkClosedError
from serving.link.messages import ProgramsMoved
from serving.ownership.actors import engine_actor, is_actor_dead, kill_actor
from serving.ownership.control_client import (
    EngineControl,
    EngineGoneError,
    EngineSilentError,
    SupersededError,
)
from serving.ownership.deed import (
    DeedEngine,
    DeedError,
    EngineDeed,
    decode_deed,
    encode_deed,
)
from serving.ownership.group import remove_group
from serving.ownership.lease import ClaimRefusedError
from serving.slices.directory_reporter import best_effort
from serving.slices.reservation import Reservation
from serving.tpu.chips import chips_environment, host_of_engine

logger = logging.getLogger(__name__)

# For the answer of an engine host that is told to end.
_END_S = 3.0
# A host that hears nothing of its owner takes it for gone after 10 s; others may know it earlier.
_OWNER_GONE_S = 15.0
_RETRY_S = 0.25
# For a process to start on the host and a file of a few KB to come there. The clients of Hugging
# Face and of buckets give up within a minute; what takes longer hangs, such as a mounted folder.
_SETTINGS_S = 300.0

ControlOf = Callable[[tuple[str, int]], EngineControl]
OnStage = Callable[[LoadStage], Awaitable[None]]
_T = TypeVar("_T")


@dataclass(slots=True)
class _Host:
    """One engine host. `handle` is there where this process started it."""

    actor: str
    handle: Any = None
    control: EngineControl | None = None
    report: HostReport | None = None


class EngineHosts:
    """The engine hosts that this session started or took over. None at first."""

    def __init__(self, life_id: str, control_of: ControlOf, lease_s: float) -> None:
        """`control_of` makes the command of the host at an address, for this session.

        Engines that were claimed in vain are left to others for `lease_s`.
        """
        self._life_id = life_id
        self._control_of = control_of
        self._lease_s = lease_s
        self._hosts: list[_Host] = []

    @property
    def are_there(self) -> bool:
        """True if any was started or taken over."""
        return bool(self._hosts)

    @property
    def are_commanded(self) -> bool:
        """True if every one there is can be told what to do."""
        return self.are_there and all(each.control is not None for each in self._hosts)

    @property
    def records(self) -> tuple[EngineRecord, ...]:
        """The engines that are ready, in order."""
        return tuple(
            EngineRecord(each.report.engine_id, each.report.address, each.control.address)
            for each in self._hosts
            if each.report is not None and each.control is not None
        )

    # -- up --

    async def start(
        self,
        spec: EngineSpec,
        secret: bytes,
        reservation: Reservation | None,
        environment: Mapping[str, str],
        on_stage: OnStage,
    ) -> None:
        """Starts as many engines as `spec` has on a slice, each on its part; ends when all serve.

        All their processes get `environment`. `on_stage` gets a stage once all are in it.

        Raises:
            ValueError: an engine refuses its arguments. No other slice would change that.
            EngineDiedError: one failed to start, or was not ready in time. The caller ends the
                others.
        """
        group_id = None if reservation is None else reservation.group_id
        name = uuid.uuid4().hex if group_id is None else group_id
        num_engines = 1 if spec.slice is None else spec.slice.num_engines
        reached: Counter[LoadStage] = Counter()

        async def staged(stage: LoadStage) -> None:
            reached[stage] += 1
            if reached[stage] == num_engines:
                await on_stage(stage)

        self._hosts = [_Host(engine_actor(name, number)) for number in range(num_engines)]
        for number, host in enumerate(self._hosts):
            actor = ray.remote(EngineHostActor).options(
                **_options(host.actor, spec, reservation, number, environment)
            )
            host.handle = actor.remote(spec, secret, group_id)
        starting = _all_or_none(self._start_one(host, staged) for host in self._hosts)
        limit = f"{spec.start_timeout_s:g} s after its start (health.start_timeout_s)"
        await in_time(
            starting, spec.start_timeout_s, lambda: f"not ready {limit}: {_stage_words(reached)}"
        )

    async def _start_one(self, host: _Host, on_stage: OnStage) -> None:
        await self._command(host, await host.handle.open.remote(self._life_id))
        stages = asyncio.create_task(_follow_stages(host.handle, on_stage), name="follow-stages")
        try:
            host.report = await host.handle.start.remote()
            # The last stage may come after the start has ended; it is told before what follows.
            await asyncio.wait({stages})
        finally:
            stages.cancel()
            await asyncio.gather(stages, return_exceptions=True)

    async def _command(self, host: _Host, address: tuple[str, int]) -> None:
        """Becomes the first owner of the engine that is to be.

        Raises:
            EngineDiedError: its host is gone already, or cannot be reached from here.
        """
        control = self._control_of(address)
        try:
            await control.claim()
        except (ClaimRefusedError, EngineGoneError, HandshakeError, LinkClosedError) as error:
            raise EngineDiedError(f"the engine host cannot be commanded: {error}") from error
        host.control = control

    async def adopt(self, control: tuple[str, int]) -> EngineDeed:
        """Becomes the owner of engines that serve; returns their deed, which the first keeps.

        Who owns the first has a right to the others. Where one of those is gone, the rest is ended
        and the slice given back: they come and go together.

        Raises:
            ClaimRefusedError, EngineGoneError, HandshakeError, LinkClosedError: they are not to be
                had.
            DeedError: another version wrote their deed.
        """
        first = self._control_of(control)
        text = await first.claim()
        try:
            deed = decode_deed(text)
        except DeedError:
            await best_effort(first.leave(self._lease_s), "leave_failed")
            raise
        hosts = [_Host(each.actor) for each in deed.engines]
        hosts[0].control = first
        self._hosts = hosts
        try:
            for host, engine in zip(hosts[1:], deed.engines[1:], strict=True):
                host.control = await self._claim_soon(engine.control)
        except EngineGoneError:
            self._hosts = [each for each in hosts if each.control is not None]
            await self.end()
            self._hosts = []
            if deed.group_id is not None:
                await asyncio.to_thread(remove_group, deed.group_id)
            raise
        except BaseException:
            await self.leave(self._lease_s)
            raise
        for host, engine in zip(hosts, deed.engines, strict=True):
            host.report = HostReport(engine.engine_id, engine.address)
        return deed

    async def _claim_soon(self, address: tuple[str, int]) -> EngineControl:
        """Claims an engine whose last owner is gone, though its host may not know that yet."""
        control = self._control_of(address)
        give_up_s = time.monotonic() + _OWNER_GONE_S
        while True:
            try:
                await control.claim()
            except ClaimRefusedError:
                if time.monotonic() >= give_up_s:
                    raise
                await asyncio.sleep(_RETRY_S)
            else:
                return control

    async def store_deed(self, deed_of: Callable[[tuple[DeedEngine, ...]], EngineDeed]) -> None:
        """Stores what a successor needs with each engine; from now on there can be one.

        Raises:
            EngineDiedError: an engine ended in this moment.
        """
        engines = tuple(
            DeedEngine(each.report.engine_id, each.report.address, each.control.address, each.actor)
            for each in self._hosts
            if each.report is not None and each.control is not None
        )
        deed = encode_deed(deed_of(engines))
        try:
            await asyncio.gather(*(each.store_deed(deed) for each in self._controls))
        except (LinkClosedError, LinkCallError, TimeoutError) as error:
            raise EngineDiedError(f"the engine host ended: {error}") from error

    # -- while they serve --

    async def wait_end(self) -> tuple[str, bool]:
        """Waits for the end of any; returns the reason, and whether others serve on.

        Raises:
            SupersededError: another replica owns them.
        """
        waits = {asyncio.create_task(self._wait_one(each)): each for each in self._hosts}
        try:
            done, rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        reasons = [task.result() for task in done]
        for task in done:
            # It is not asked any more.
            waits[task].report = None
        return "; ".join(reasons), bool(rest)

    async def _wait_one(self, host: _Host) -> str:
        assert host.control is not None
        try:
            reason = await host.control.wait_end()
        except EngineSilentError as error:
            # It stands still, with its chips: nobody can ask it to end.
            reason = str(error)
            await best_effort(kill_actor(host.actor), "kill_failed")
        if len(self._hosts) > 1 and host.report is not None:
            reason = f"engine {host.report.engine_id} of {len(self._hosts)} on the slice: {reason}"
        return reason

    async def status(self) -> dict[str, Any]:
        """Returns the requests, gateways and process ids of all.

        Raises:
            LinkClosedError: there is no engine, or one cannot be reached.
        """
        if not self.are_commanded:
            raise LinkClosedError("there is no engine")
        found = await asyncio.gather(*(each.status() for each in self._controls))
        return {
            "num_requests": sum(each["num_requests"] for each in found),
            "gateway_ids": sorted({name for each in found for name in each["gateway_ids"]}),
            "process_ids": [pid for each in found for pid in each["process_ids"]],
        }

    async def note_programs(self, moved: ProgramsMoved) -> None:
        """Notes the moves of the engines' programs so far, to be reported with their stats."""
        await asyncio.gather(*(each.note_programs(moved) for each in self._controls))

    # -- down --

    async def drain(self, reason: str, grace_s: float, stay_s: float) -> None:
        """Asks the gateways to take the requests of those that serve elsewhere; waits for it."""
        await asyncio.gather(
            *(
                best_effort(each.control.drain(reason, grace_s, stay_s), "drain_incomplete")
                for each in self._hosts
                if each.control is not None and each.report is not None
            )
        )

    async def leave(self, within_s: float) -> None:
        """Lets another replica have the engines, which end after `within_s` if none comes."""
        hosts, self._hosts = self._hosts, []
        for each in hosts:
            if each.control is not None:
                await best_effort(each.control.leave(within_s), "leave_failed")

    async def end(self) -> bool | None:
        """Ends all; returns whether the slices are this replica's to give back.

        `None`: it cannot be known now. The first engine is out of reach and may have another owner,
        or another may still run. It can be asked again.
        """
        if not self._hosts:
            return True
        first, *others = self._hosts
        found = await self._end_one(first)
        if not found:
            # Who has the first has a right to the others, which may not have been told yet.
            await asyncio.gather(*(each.control.close() for each in others if each.control))
            return found
        ended = await asyncio.gather(*(self._end_one(each) for each in others))
        return True if all(ended) else None

    async def _end_one(self, host: _Host) -> bool | None:
        if host.control is None:
            if host.handle is not None:
                ray.kill(host.handle)
            return True
        try:
            await asyncio.wait_for(host.control.end(), _END_S)
        except SupersededError as error:
            logger.warning("engine_superseded life=%s reason=%r", self._life_id, error)
            return False
        except (LinkClosedError, LinkCallError, TimeoutError) as error:
            logger.warning("engine_out_of_reach life=%s reason=%r", self._life_id, error)
            return True if await is_actor_dead(host.actor) else None
        finally:
            await host.control.close()
        return True

    @property
    def _controls(self) -> list[EngineControl]:
        return [each.control for each in self._hosts if each.control is not None]


def _options(
    actor: str,
    spec: EngineSpec,
    reservation: Reservation | None,
    number: int,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Returns Ray's options for the host of engine `number`."""
    own: dict[str, str] = {}
    options: dict[str, Any] = {"num_cpus": spec.num_cpus, "max_concurrency": 16}
    if reservation is not None and spec.slice is not None:
        shape, num_engines = spec.slice.shape, spec.slice.num_engines
        own = chips_environment(shape, num_engines, number)
        host = host_of_engine(shape, num_engines, number)
        options["scheduling_strategy"] = reservation.on_host(host)
    # vLLM gives it to its workers on other hosts as well, for when their processes begin.
    options["runtime_env"] = {"env_vars": {**spec.engine_env, **environment, **own}}
    # Detached: it outlives this process, and a successor takes it over.
    return options | {"lifetime": "detached", "name": actor}


async def _follow_stages(host: Any, on_stage: OnStage) -> None:
    stage: LoadStage | None
    while (stage := await host.next_stage.remote()) is not None:
        await on_stage(stage)


async def resolve_on_first_host(spec: EngineSpec, reservation: Reservation) -> EngineSpec:
    """Returns a TPU engine with its settings, as the first host of its slices resolves them.

    Raises:
        ValueError: it would not work, or not fit. Do not retry.
        EngineDiedError: the host took too long. Another try may succeed.
    """
    options = {
        "num_cpus": 0,
        "max_retries": 0,
        "scheduling_strategy": reservation.on_host(0),
        "runtime_env": {"env_vars": dict(spec.engine_env)},
    }
    run = ray.remote(resolve_settings_here).options(**options).remote(spec)
    resolved: EngineSpec = await settings_in_time(
        run,
        min(_SETTINGS_S, spec.start_timeout_s),
        reservation.slices[0].name,
        lambda: ray.cancel(run, force=True),
    )
    return resolved


async def settings_in_time(
    resolving: Awaitable[_T], timeout_s: float, slice_name: str, end: Callable[[], None]
) -> _T:
    """Awaits settings; `end` ends the work for them where it is not awaited to its own end.

    Raises:
        EngineDiedError: they have taken `timeout_s`.
    """
    try:
        return await in_time(
            resolving,
            timeout_s,
            lambda: (
                f"the settings of the engine were not there after {timeout_s:g} s: on host 0 of "
                f"{slice_name} no process started, or the model's config.json did not come"
            ),
        )
    except (EngineDiedError, asyncio.CancelledError):
        end()
        raise


async def in_time(work: Awaitable[_T], timeout_s: float, complaint: Callable[[], str]) -> _T:
    """Returns what a part of a start gives; `complaint` says what took too long, once it has.

    Raises:
        EngineDiedError: it has taken `timeout_s`, and was cancelled. Another try may succeed.
    """
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise EngineDiedError(complaint()) from error


def _stage_words(reached: Mapping[LoadStage, int]) -> str:
    """Returns how far engines have come of which so many have reached each stage."""
    if reached.get(LoadStage.COMPILING):
        return "it has its weights, and was compiling or warming up"
    return "it was getting its weights"


async def _all_or_none(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Awaits all, or cancels the others at the first failure."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
