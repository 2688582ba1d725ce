"""The slice replica: one Serve replica, one slice, one engine.

Owns the engine host's life and says in the directory where it is in it. Requests do not pass
through here. On the compute class `local` there is no slice to reserve: the host is this machine.
"""

import asyncio
import contextlib
import logging
import time
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from serving.cluster_secret import cluster_secret
from serving.config import LinkConfig
from serving.directory import RENEWAL_S, EngineRecord, SliceState
from serving.engine.host_actor import EngineHostActor, HostReport
from serving.engine.protocol import EngineDiedError
from serving.engine.spec import EngineSpec
from serving.process_log import log_as_replica

logger = logging.getLogger(__name__)

# How long a leaving replica waits until the gateways have taken its requests elsewhere.
DRAIN_GRACE_S = 5.0


class SliceReplica:
    """See the module. `app` makes it a deployment."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, spec: EngineSpec, link: LinkConfig, directory: DeploymentHandle
    ) -> None:
        log_as_replica()
        self._spec = spec
        self._directory = directory
        self._death_reason: str | None = None
        self._record = EngineRecord(
            replica_id=serve.get_replica_context().replica_tag,
            model=spec.model,
            compute_class=spec.compute_class,
            state=SliceState.LOADING,
            since_s=time.time(),
        )
        self._registration = asyncio.create_task(self._keep_registered(), name="keep-registered")
        # Not detached: Ray ends the host when this replica's process ends, however it ends.
        self._host: Any = (
            ray.remote(EngineHostActor)
            .options(
                num_cpus=spec.num_cpus,
                max_concurrency=16,
                runtime_env={"env_vars": dict(spec.engine_env)},
            )
            .remote(spec, cluster_secret(link))
        )
        report: HostReport = await self._host.start.remote()
        self._watch = asyncio.create_task(self._watch_host(), name="watch-host")
        await self._enter(SliceState.READY, report)

    async def check_health(self) -> None:
        """Called by Serve; raises when the engine is gone, and Serve replaces the replica."""
        if self._death_reason is not None:
            raise EngineDiedError(self._death_reason)

    async def status(self) -> dict[str, Any]:
        """The host's requests, gateways and process ids; for operators and tests."""
        status: dict[str, Any] = await self._host.status.remote()
        return status

    async def __del__(self) -> None:
        """Drains: the gateways take what is in flight elsewhere, then the engine ends."""
        if hasattr(self, "_watch"):
            self._watch.cancel()
            if self._death_reason is None:
                await self._drain()
        if hasattr(self, "_registration"):
            self._registration.cancel()
            with contextlib.suppress(Exception):  # the directory may be gone already
                await self._directory.forget.remote(self._record.replica_id)
        if hasattr(self, "_host"):
            ray.kill(self._host)

    async def _drain(self) -> None:
        try:
            await self._enter(SliceState.DRAINING)
            await self._host.drain.remote("the replica is leaving", DRAIN_GRACE_S)
            await self._host.close.remote()
        except Exception as error:  # noqa: BLE001 - leaving goes on whatever has already gone
            logger.warning("drain_incomplete replica=%s error=%r", self._record.replica_id, error)

    async def _enter(self, state: SliceState, report: HostReport | None = None) -> None:
        record = self._record
        self._record = EngineRecord(
            replica_id=record.replica_id,
            model=record.model,
            compute_class=record.compute_class,
            state=state,
            since_s=time.time(),
            engine_id=report.engine_id if report else record.engine_id,
            address=report.address if report else record.address,
        )
        logger.info("slice_state replica=%s from=%s to=%s", record.replica_id, record.state, state)
        with contextlib.suppress(Exception):  # `_keep_registered` says it again
            await self._directory.renew.remote(self._record)

    async def _keep_registered(self) -> None:
        while True:
            try:
                await self._directory.renew.remote(self._record)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 - the directory comes back, and is told again
                logger.warning("directory_unreachable error=%r", str(error))
            await asyncio.sleep(RENEWAL_S)

    async def _watch_host(self) -> None:
        try:
            reason = await self._host.wait_died.remote()
        except ray.exceptions.RayError as error:
            reason = f"engine host actor died: {error}"
        logger.error("engine_died replica=%s reason=%r", self._record.replica_id, reason)
        self._death_reason = reason
        self._registration.cancel()
        with contextlib.suppress(Exception):  # the lease runs out by itself
            await self._directory.forget.remote(self._record.replica_id)
