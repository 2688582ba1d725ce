"""The gateway as a Serve deployment.

Imports no vLLM: whoever builds the application takes the class by name, and only the process that
serves pays for vLLM's import (8 s of a core).
"""

from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from serving.config.application import AppConfig, AuthConfig, exposure_problem
from serving.directory.plan_store import read_plan_report
from serving.domain.errors import ConfigError
from serving.domain.slice_records import Snapshot
from serving.gateway.edge.open_latch import OpenLatch
from serving.gateway.reports.dashboard_client import DashboardClient
from serving.telemetry.process_log import log_as_replica


def ensure_not_exposed(auth: AuthConfig) -> None:
    """Refuses to serve without keys on an address that other machines reach, unless allowed.

    Raises:
        ConfigError: no keys, and Serve listens beyond this machine.
    """
    problem = exposure_problem(auth, _serve_host())
    if problem is not None:
        raise ConfigError([problem])


def _serve_host() -> str:
    host: str = _get_global_client().http_config.host
    return host


class Gateway:
    """Serves vLLM's OpenAI frontend over the fleet, behind the HTTP edge; `app` deploys it."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self,
        config: AppConfig,
        directory: DeploymentHandle,
        dashboard: DeploymentHandle,
        *_engines: Any,
    ) -> None:
        # `_engines` binds the engine deployments into the application; requests reach them by link.
        log_as_replica(config.logging.style)
        ensure_not_exposed(config.auth)
        from serving.gateway.parts import DirectoryCalls, GatewayParts  # noqa: PLC0415

        async def watch(version: str, timeout_s: float) -> Snapshot:
            try:
                snapshot: Snapshot = await directory.watch.remote(version, timeout_s)
            except (RayError, RayServeException) as error:
                raise ConnectionError(f"the directory is away: {error!r}") from error
            return snapshot

        async def share_usage(report: bytes) -> bytes:
            try:
                answer: bytes = await directory.share_usage.remote(report)
            except (RayError, RayServeException) as error:
                raise ConnectionError(f"the directory is away: {error!r}") from error
            return answer

        client = DashboardClient(dashboard)
        application = serve.get_replica_context().app_name
        ways = DirectoryCalls(watch, share_usage, lambda: read_plan_report(application))
        parts = GatewayParts(config, ways, client, OpenLatch(), _serve_host())
        await parts.start()
        self._parts = parts

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Builds the ASGI application; Serve calls it when the constructor is done."""
        return self._parts.edge

    async def check_health(self) -> None:
        """Tells Serve whether this gateway can answer; Serve replaces it if it cannot.

        Raises:
            RuntimeError: the frontend of a model has died.
        """
        self._parts.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the load of every model at this gateway, for an autoscaling policy."""
        return self._parts.load_stats()

    async def __del__(self) -> None:
        """Ends the links; engines free what was in flight here."""
        if hasattr(self, "_parts"):
            await self._parts.close()
