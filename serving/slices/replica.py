"""The slice replica: one Serve replica, one slice at a time, one engine on it.

Owns what follows on what: when its slice is taken away it drains that one and looks for the next at
once, in place. To Serve it stays healthy meanwhile: to have no slice is a state, not an error.
Requests do not pass through here.
"""

import asyncio
import logging
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from serving.config.application import LinkConfig
from serving.config.slice_settings import DRAIN_GRACE_S
from serving.directory.cluster_secret import cluster_secret
from serving.domain.slice_lifecycle import EndCause
from serving.engine.spec import EngineSpec
from serving.link.engine_protocol import EngineDiedError
from serving.slices.session import Parting, Residency
from serving.telemetry.process_log import log_as_replica

logger = logging.getLogger(__name__)


class SliceReplica:
    """See the module. `app` makes it a deployment."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, spec: EngineSpec, link: LinkConfig, directory: DeploymentHandle
    ) -> None:
        log_as_replica(spec.log_style)
        self._spec = spec
        self._secret = cluster_secret(link)
        self._directory = directory
        self._unfit_reason: str | None = None
        self._num_lives = 0
        self._current = self._begin_life()
        # Slices that are being left while the next one is already looked for.
        self._leaving: set[asyncio.Task[None]] = set()
        try:
            await self._current.come_up()
        except BaseException as error:
            await self._current.leave(_boot_failed(error))
            raise
        self._living = asyncio.create_task(self._live(), name="live")

    async def check_health(self) -> None:
        """Called by Serve; raises when the engine died on a sound slice: Serve starts anew."""
        if self._unfit_reason is not None:
            raise EngineDiedError(self._unfit_reason)

    async def status(self) -> dict[str, Any]:
        """The host's requests, gateways and process ids; for operators and tests."""
        return await self._current.status()

    async def __del__(self) -> None:
        """Leaves: the gateways take what is in flight elsewhere, then engine and slice go."""
        if hasattr(self, "_living"):
            self._living.cancel()
            await asyncio.gather(self._living, return_exceptions=True)
            parting = Parting(
                EndCause.RELEASED,
                "the replica is leaving",
                DRAIN_GRACE_S,
                stay_s=self._spec.stay_s,
            )
            await asyncio.gather(self._current.leave(parting), *self._leaving)

    async def _live(self) -> None:
        """One slice after the other, until an engine dies on one or will not start."""
        while True:
            parting = await self._current.wait_parting()
            if parting.cause == EndCause.UNHEALTHY:
                self._unfit_reason = parting.reason
                await self._current.leave(parting)
                return
            leaving = asyncio.create_task(self._current.leave(parting), name="leave")
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            self._current = self._begin_life()
            try:
                await self._current.come_up()
            except Exception as error:
                logger.exception("engine_did_not_start")
                self._unfit_reason = str(error)
                await self._current.leave(_boot_failed(error))
                return

    def _begin_life(self) -> Residency:
        self._num_lives += 1
        tag = serve.get_replica_context().replica_tag
        life_id = tag if self._num_lives == 1 else f"{tag}~{self._num_lives}"
        return Residency(life_id, self._spec, self._secret, self._directory)


def _boot_failed(error: BaseException) -> Parting:
    return Parting(EndCause.BOOT_FAILED, f"the engine did not start: {error}", 0.0)
