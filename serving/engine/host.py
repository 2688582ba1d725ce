"""The engine host: one engine behind one link server, watched until its end.

Owns the order of things: start the engine, serve it, check now and then that its loop runs, and end
engine and server together. Imports no Ray; `host_actor` puts it into an actor.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serving.artifacts.model_source import resolve_source
from serving.domain.slice_lifecycle import LoadStage
from serving.engine.load_stage import OnStage, stages_reported_to
from serving.engine.paced.config import PacedConfig
from serving.engine.paced.engine import PacedEngine
from serving.engine.spec import EngineSpec
from serving.link.engine_protocol import Engine, EngineDiedError
from serving.link.heartbeat import HeartbeatConfig
from serving.link.messages import EngineEnd
from serving.link.server import LinkServer, ServerLimits
from serving.telemetry.open_tracer import open_tracer

logger = logging.getLogger(__name__)

# To send the last spans at the end; the replica allows the whole close little more.
_TRACES_S = 0.5
# An engine that does not answer is at work while its processes have at least this share of a core.
# One that waits for another process, a host or a chip has next to nothing.
_BUSY_SHARE = 0.5
# Even then it hangs after so many times of `hang_timeout_s`: an endless loop is busy too.
_LONGEST_STEP = 6


async def start_engine(spec: EngineSpec, on_stage: OnStage = lambda _: None) -> Engine:
    """Starts the engine that `spec` describes, and returns it ready; `on_stage` gets its stages.

    Raises:
        ValueError: the engine refuses its arguments. Do not retry.
        EngineDiedError: it failed while starting. Another attempt may succeed.
    """
    if spec.paced is not None:
        return await _start_paced(dict(spec.paced), spec.adapters, on_stage)
    # Imported here because it takes vLLM and torch with it, which the paced engine does without.
    from serving.engine.vllm.engine import VllmEngine  # noqa: PLC0415

    with stages_reported_to(on_stage):
        return await VllmEngine.start(
            resolve_source(spec.source),
            spec.engine_args,
            [(name, resolve_source(path)) for name, path in spec.adapters],
        )


async def _start_paced(
    options: dict[str, Any], adapters: Sequence[tuple[str, str]], on_stage: OnStage
) -> PacedEngine:
    """Starts a paced engine, after the configured time to load and to compile."""
    load_s, compile_s = options.pop("load_s", 0.0), options.pop("compile_s", 0.0)
    await asyncio.sleep(load_s)
    if compile_s > 0:
        on_stage(LoadStage.COMPILING)
        await asyncio.sleep(compile_s)
    return PacedEngine(PacedConfig(**options), adapters=adapters)


class EngineHost:
    """Holds one engine, its link server, and the watch over both."""

    def __init__(
        self, spec: EngineSpec, engine: Engine, secret: bytes, engine_id: str | None = None
    ) -> None:
        """Takes the engine; `engine_id` of `None`: one is made up."""
        self.engine_id = engine_id or uuid.uuid4().hex[:12]
        self.engine = engine
        self._spec = spec
        self._tracer = open_tracer(spec.tracing, "slicewise-engine", self.engine_id)
        self.server = LinkServer(
            engine,
            engine_id=self.engine_id,
            secret=secret,
            heartbeat=HeartbeatConfig(spec.heartbeat_interval_s, spec.gateway_timeout_s),
            limits=ServerLimits(max_buffered_bytes=spec.max_buffered_bytes),
            tracer=self._tracer,
            encryption=spec.encryption,
            host_info={"version": spec.version, "described": dict(spec.described)},
        )
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked_to_end: asyncio.Future[EngineDiedError] = (
            asyncio.get_running_loop().create_future()
        )
        self._watch: asyncio.Task[None] | None = None

    async def listen(self, host: str) -> tuple[str, int]:
        """Serves the engine on a free port of `host`; returns the address to connect to."""
        await self.server.listen(host)
        self._watch = asyncio.create_task(self._watch_engine(), name="watch-engine")
        return self.server.address

    async def wait_died(self) -> str:
        """Waits for the engine's end, and returns the reason."""
        return await asyncio.shield(self._death)

    def ensure_alive(self) -> None:
        """Raises `EngineDiedError` once the engine is gone; the replica then has to be replaced."""
        if self._death.done():
            raise EngineDiedError(self._death.result())

    def end(self, reason: str) -> None:
        """Ends the engine as a lost one: its requests go on elsewhere. Returns at once."""
        if not self._asked_to_end.done():
            self._asked_to_end.set_result(EngineDiedError(reason, EngineEnd.TOLD))

    async def close(self) -> None:
        """Ends links, then engine. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        await self.server.close()
        await self.engine.close()
        await asyncio.to_thread(self._tracer.close, _TRACES_S)
        if not self._death.done():
            self._death.set_result("closed")

    async def _watch_engine(self) -> None:
        """Ends links and engine once the engine dies, hangs or is asked to end."""
        died = asyncio.create_task(self._wait_server_died())
        turning = asyncio.create_task(self._check_turning())
        ends = {died, turning, self._asked_to_end}
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            death = done.pop().result()
        finally:
            died.cancel()
            turning.cancel()
        reason = str(death)
        logger.error("engine_ended engine_id=%s reason=%r", self.engine_id, reason)
        # First the links: what is in flight resumes elsewhere while a hung engine is still being
        # ended.
        await self.server.close(reason, death.end)
        self._death.set_result(reason)
        await self.engine.close()

    async def _wait_server_died(self) -> EngineDiedError:
        return EngineDiedError(await self.server.wait_died())

    async def _check_turning(self) -> EngineDiedError:
        """Returns the error of an engine that is gone, or hangs."""
        clock, spec = asyncio.get_running_loop().time, self._spec
        answered_s = clock()
        while True:
            await asyncio.sleep(spec.check_period_s)
            asked_s, busy_s = clock(), self.engine.busy_s()
            try:
                await self.engine.check(spec.hang_timeout_s - spec.check_period_s)
                answered_s = clock()
            except EngineDiedError as error:
                seen = StepSigns(
                    silent_s=clock() - answered_s,
                    busy_share=_share(busy_s, self.engine.busy_s(), clock() - asked_s),
                    program=self.engine.compiling(asked_s),
                )
                if error.end != EngineEnd.HUNG or not is_at_work(seen, spec.hang_timeout_s):
                    return error
                logger.warning(
                    "engine_works_without_an_answer engine_id=%s silent_s=%.0f busy=%s compiles=%s",
                    self.engine_id,
                    seen.silent_s,
                    "unknown" if seen.busy_share is None else f"{seen.busy_share:.2f}",
                    seen.program,
                )


@dataclass(frozen=True, slots=True)
class StepSigns:
    """What is seen of an engine that does not answer.

    `silent_s` is the time since its last answer. `busy_share` is the share of a core that its
    processes had in this check, `None` where nobody knows. `program` was being compiled in it;
    `None`: none was.
    """

    silent_s: float
    busy_share: float | None
    program: str | None


def is_at_work(seen: StepSigns, hang_timeout_s: float) -> bool:
    """Decides whether an engine that does not answer is in a long step, and not in a hang.

    A step that loads an adapter or computes a long prompt keeps a core busy, and ends some time.
    One that compiles says so: of an engine over several hosts nobody here sees what is busy.
    """
    if seen.silent_s >= _LONGEST_STEP * hang_timeout_s:
        return False
    if seen.program is not None:
        return True
    return seen.busy_share is not None and seen.busy_share >= _BUSY_SHARE


def _share(before_s: float | None, after_s: float | None, during_s: float) -> float | None:
    if before_s is None or after_s is None or during_s <= 0:
        return None
    return (after_s - before_s) / during_s
