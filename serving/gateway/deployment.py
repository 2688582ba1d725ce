"""The gateway as a Serve deployment: its parts, made once and wired here."""

import asyncio
import gc
import logging
import os
import time
import uuid
from typing import Any

from prometheus_client import REGISTRY
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from serving.cluster_secret import cluster_secret
from serving.config import AppConfig, AuthConfig, exposure_problem
from serving.directory import Snapshot
from serving.errors import ConfigError
from serving.gateway.fleet_view import GatewayView, ModelView, SeatView, describe_fleet
from serving.gateway.http_edge import EdgeRules, HttpEdge
from serving.gateway.keys import ApiKeys, read_keys
from serving.gateway.membership import LinkSettings, Membership
from serving.gateway.metrics_page import render_metrics
from serving.gateway.served_model import ServedModel
from serving.link.client import ClientLimits
from serving.link.heartbeat import HeartbeatConfig
from serving.model_source import resolve_file
from serving.process_log import log_as_replica

logger = logging.getLogger(__name__)


def ensure_not_exposed(auth: AuthConfig) -> None:
    """Refuses to serve everybody who reaches an address other machines reach, unless told to.

    Raises:
        ConfigError: no keys, and Serve listens beyond this machine.
    """
    problem = exposure_problem(auth, _get_global_client().http_config.host)
    if problem is not None:
        raise ConfigError([problem])


def load_keys(auth: AuthConfig) -> ApiKeys:
    """The accepted API keys.

    Raises:
        ValueError: a named source has no key; serving without would open the gateway to everybody.
    """
    if auth.keys_file is not None:
        source, text = (
            f"auth.keys_file {auth.keys_file!r}",
            resolve_file(auth.keys_file).read_text(),
        )
    elif auth.keys_env is not None:
        source, text = f"auth.keys_env {auth.keys_env!r}", os.environ.get(auth.keys_env, "")
    else:
        return ApiKeys(())
    keys = read_keys(text)
    if not keys:
        raise ValueError(f"{source} holds no API key")
    return ApiKeys(keys)


class Gateway:
    """vLLM's OpenAI frontend over the fleet, behind the HTTP edge. `app` makes it a deployment."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, config: AppConfig, directory: DeploymentHandle, *_engines: Any
    ) -> None:
        # `_engines` binds the engine deployments into the application; requests reach them by link.
        log_as_replica()
        ensure_not_exposed(config.auth)
        self._view = GatewayView(uuid.uuid4().hex[:12], time.time())
        self._directory = directory
        self._models = {
            model.name: await ServedModel.build(model, config.gateway) for model in config.models
        }
        self._edge = HttpEdge(
            self._models,
            EdgeRules(
                keys=load_keys(config.auth),
                max_body_bytes=config.gateway.max_body_bytes,
            ),
            self._render_metrics,
            self._describe_fleet,
        )
        link = config.link
        self._membership = Membership(
            self._models,
            LinkSettings(
                gateway_id=self._view.gateway_id,
                secret=cluster_secret(link),
                heartbeat=HeartbeatConfig(link.heartbeat_interval_s, link.heartbeat_timeout_s),
                limits=ClientLimits(max_buffered_bytes=link.max_buffered_bytes),
            ),
        )
        self._follower = asyncio.create_task(self._membership.follow(self._watch_directory))
        # What start-up made lives as long as the process: the collector need not walk it again.
        gc.collect()
        gc.freeze()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Serve when the constructor is done."""
        return self._edge

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What an autoscaling policy may want to know of this gateway, by model."""
        stats = {}
        for name, model in self._models.items():
            described = model.describe()
            stats[f"{name}/waiting"] = float(described["waiting"])
            stats[f"{name}/in_flight"] = float(described["in_flight"])
        return stats

    async def __del__(self) -> None:
        """Ends the links; engines free what was in flight here."""
        if hasattr(self, "_follower"):
            self._follower.cancel()
            await self._membership.close()

    async def _watch_directory(self, version: str, timeout_s: float) -> Snapshot:
        snapshot: Snapshot = await self._directory.watch.remote(version, timeout_s)
        return snapshot

    def _render_metrics(self) -> tuple[bytes, str]:
        return render_metrics([REGISTRY, *(model.metrics for model in self._models.values())])

    def _describe_fleet(self) -> dict[str, Any]:
        models = [
            ModelView(model.describe(), tuple(_seat_view(seat) for seat in model.core.seats))
            for model in self._models.values()
        ]
        return describe_fleet(self._view, models, self._membership.snapshot, time.time())


def _seat_view(seat: Any) -> SeatView:
    # A seat whose link is a `LinkClient`: its load is kept fresh by heartbeats while the engine
    # makes no step.
    load = seat.link.load
    return SeatView(seat.engine_id, seat.compute_class, seat.is_draining, len(seat.flights), load)
