"""The application: `serve_config.yaml` in, Serve deployments out. The only wiring."""

from typing import Any

from ray import serve
from ray.serve import Application

from serving.config import (
    AppConfig,
    DeploymentConfig,
    EngineKind,
    ListenOn,
    ModelConfig,
    parse_app_config,
)
from serving.directory_deployment import FleetDirectory
from serving.engine.slice_replica import DRAIN_GRACE_S, SliceReplica
from serving.engine.spec import EngineSpec
from serving.gateway.deployment import Gateway

# Wrapped here and not where they are written: Serve sends a decorated class by value, with all its
# module holds, and an undecorated one by name.
_Gateway = serve.deployment(serve.ingress()(Gateway))
_FleetDirectory = serve.deployment(FleetDirectory)
_SliceReplica = serve.deployment(SliceReplica)

# The control parts wait for messages; they need a place, not a core.
_CONTROL_CPUS = 0.01
_DIRECTORY_MAX_ONGOING = 10_000


def build(args: dict[str, Any]) -> Application:
    """What `serve run` and `serve deploy` call.

    Raises:
        ConfigError: the configuration is refused, with every problem; nothing that runs is touched.
    """
    config = parse_app_config(args)
    directory = _FleetDirectory.options(
        name="directory",
        ray_actor_options={"num_cpus": _CONTROL_CPUS},
        max_ongoing_requests=_DIRECTORY_MAX_ONGOING,
        health_check_period_s=1.0,
    ).bind()
    engines = [
        _engine(config, model, deployment).bind(
            engine_spec(config, model, deployment), config.link, directory
        )
        for model in config.models
        for deployment in model.deployments
    ]
    gateway = _Gateway.options(
        name="gateway",
        num_replicas=config.gateway.replicas,
        ray_actor_options={"num_cpus": config.gateway.num_cpus},
        max_ongoing_requests=config.gateway.max_ongoing_requests,
    )
    return gateway.bind(config, directory, *engines)


def engine_spec(config: AppConfig, model: ModelConfig, deployment: DeploymentConfig) -> EngineSpec:
    """What one engine of this deployment is told."""
    paced = model.paced_options() if model.engine == EngineKind.PACED else None
    return EngineSpec(
        model=model.name,
        source=model.source,
        compute_class=deployment.compute_class,
        engine_args=dict(model.engine_args),
        engine_env=dict(model.engine_env),
        paced=paced,
        num_cpus=deployment.num_cpus,
        check_period_s=config.health.check_period_s,
        hang_timeout_s=config.health.hang_timeout_s,
        heartbeat_interval_s=config.link.heartbeat_interval_s,
        max_buffered_bytes=config.link.max_buffered_bytes,
        listens_on_loopback=config.link.listen_on == ListenOn.LOOPBACK,
    )


def _engine(
    config: AppConfig, model: ModelConfig, deployment: DeploymentConfig
) -> serve.Deployment:
    return _SliceReplica.options(
        name=model.deployment_name(deployment),
        num_replicas=deployment.replicas,
        ray_actor_options={"num_cpus": _CONTROL_CPUS},
        health_check_period_s=config.health.check_period_s,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=2 * DRAIN_GRACE_S,
    )
