"""The slice replica: one Serve replica, one slice at a time, one engine on it.

Owns the order of its sessions: when a slice is taken away, the replica drains it and looks for the
next at once, in place. The replica stays healthy for Serve meanwhile, because a replica without a
slice is a state, not an error. Requests do not pass through here.
"""

import asyncio
import logging
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from serving.config.application import LinkConfig
from serving.config.slice_settings import DRAIN_GRACE_S
from serving.directory.cluster_secret import cluster_secret
from serving.domain.slice_lifecycle import EndCause
from serving.engine.spec import EngineSpec
from serving.link.engine_protocol import EngineDiedError
from serving.slices.session import SessionEnd, SliceSession
from serving.telemetry.process_log import log_as_replica

logger = logging.getLogger(__name__)

_ASK_S = 3.0


class SliceReplica:
    """The Serve replica that runs one session after another. `serving.app` deploys it."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, spec: EngineSpec, link: LinkConfig, directory: DeploymentHandle
    ) -> None:
        log_as_replica(spec.log_style)
        self._spec = spec
        self._secret = cluster_secret(link)
        self._directory = directory
        self._unfit_reason: str | None = None
        self._num_sessions = 0
        self._current = self._begin_session()
        # Sessions that end while the next one already looks for a slice.
        self._stopping: set[asyncio.Task[None]] = set()
        self._early_end: SessionEnd | None = None
        self._starting = asyncio.create_task(self._current.start(), name="start")
        try:
            await self._starting
        except BaseException as error:
            self._starting.cancel()
            await self._current.stop(self._early_end or _boot_failed(error))
            raise
        self._running = asyncio.create_task(self._run(), name="run")

    async def check_health(self) -> None:
        """Raises after an engine died on a sound slice or did not start; Serve ends the replica."""
        if self._unfit_reason is not None:
            raise EngineDiedError(self._unfit_reason)

    async def status(self) -> dict[str, Any]:
        """Returns the host's requests, gateways and process ids; for operators and tests."""
        return await self._current.status()

    async def __del__(self) -> None:
        """Leaves the engine to another replica, or drains and ends it with its slice.

        Serve ends those that have not started first, and calls this while `__init__` still waits.
        """
        if not hasattr(self, "_running"):
            await self._end_early()
        else:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            if await self._current.hand_on(is_shutdown=await _is_application_ending()):
                await asyncio.gather(*self._stopping)
                return
            end = SessionEnd(
                EndCause.RELEASED,
                "the replica is leaving",
                DRAIN_GRACE_S,
                stay_s=self._spec.stay_s,
            )
            await asyncio.gather(self._current.stop(end), *self._stopping)

    async def _end_early(self) -> None:
        """Ends a start that is under way: the directory hears that it waits for nothing now."""
        if not hasattr(self, "_starting"):
            return
        self._early_end = SessionEnd(EndCause.RELEASED, "the replica leaves before it served", 0.0)
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)
        await self._current.stop(self._early_end)

    async def _run(self) -> None:
        """Runs one session after the other, until an engine dies or will not start."""
        while True:
            end = await self._current.wait_end()
            if end.cause == EndCause.UNHEALTHY:
                self._unfit_reason = end.reason
                await self._current.stop(end)
                return
            leaving = asyncio.create_task(self._current.stop(end), name="leave")
            self._stopping.add(leaving)
            leaving.add_done_callback(self._stopping.discard)
            self._current = self._begin_session()
            try:
                await self._current.start()
            except Exception as error:
                logger.exception("engine_did_not_start")
                self._unfit_reason = str(error)
                await self._current.stop(_boot_failed(error))
                return

    def _begin_session(self) -> SliceSession:
        self._num_sessions += 1
        tag = serve.get_replica_context().replica_tag
        life_id = tag if self._num_sessions == 1 else f"{tag}~{self._num_sessions}"
        return SliceSession(life_id, self._spec, self._secret, self._directory)


async def _is_application_ending() -> bool:
    """Returns whether Serve ends the whole application; `False` if it does not say so."""
    name = serve.get_replica_context().app_name
    try:
        async with asyncio.timeout(_ASK_S):
            status = await asyncio.to_thread(serve.status)
    except Exception as error:  # noqa: BLE001 - then the directory decides
        logger.warning("serve_unreachable error=%r", str(error))
        return False
    application = status.applications.get(name)
    return application is None or application.status == ApplicationStatus.DELETING


def _boot_failed(error: BaseException) -> SessionEnd:
    return SessionEnd(EndCause.BOOT_FAILED, f"the engine did not start: {error}", 0.0)
