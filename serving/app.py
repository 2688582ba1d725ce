"""The application: `serve_config.yaml` in, Serve deployments out. No other module wires parts."""

import json
from dataclasses import asdict, replace
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException

from serving.config.application import (
    CONTROL_CPUS,
    AppConfig,
    ControlPlacement,
    ListenOn,
    parse_app_config,
)
from serving.config.models import DeploymentConfig, ModelConfig
from serving.config.slice_settings import replica_stop_s, slice_spec
from serving.dashboard.deployment import Dashboard, DashboardSettings
from serving.directory.deployment import FleetDirectory
from serving.domain import limits
from serving.domain.errors import ConfigError
from serving.domain.inventory import ACCELERATOR_LABEL
from serving.domain.models.engine_kind import EngineKind
from serving.domain.names.deployment_names import DASHBOARD, DIRECTORY, GATEWAY
from serving.domain.names.gke_names import CONTROL_ROLE, ROLE_LABEL
from serving.domain.topology import TPU_ACCELERATOR_TYPES
from serving.engine.spec import CompileCacheSpec, EngineSpec, TpuSpec
from serving.gateway.deployment import Gateway
from serving.pinned_version import pin_version, version_of
from serving.slices.replica import SliceReplica

# Wrapped here and not where they are written: Serve sends a decorated class by value, with all its
# module holds, and an undecorated one by name.
_Gateway = serve.deployment(serve.ingress()(Gateway))
_FleetDirectory = serve.deployment(FleetDirectory)
_Dashboard = serve.deployment(Dashboard)

_DIRECTORY_MAX_ONGOING = 10_000
# Some hundred gateways send a sample each, and each forwards a few pages at once.
_DASHBOARD_MAX_ONGOING = 10_000
# How often gateways and directory report to the scaling policy. Serve counts what it was sent over
# a period, which the policy does not use: the shortest one keeps reports small.
_REPORT_INTERVAL_S = 2.0
_REPORT_PERIOD_S = 2.5 * _REPORT_INTERVAL_S
# How often Serve checks whether a replica that is to end still has requests. Its default of 2 s
# would be added to the replacement of each slice.
_IDLE_CHECK_INTERVAL_S = 0.1
# Outputs that vLLM's frontend takes in before the loop turns for others. What comes meanwhile is
# joined, so more of them save little, and new requests wait for a turn.
_OUTPUTS_PER_TURN = "256"
# No bound: the frontend has checked token ids against the vocabulary of the model that is played.
_PACED_VOCAB_SIZE = 2**31


def build(args: dict[str, Any]) -> Application:
    """Builds the application for `serve run` and `serve deploy`.

    Raises:
        RayServeException: the configuration is refused, with every problem; nothing that runs is
            touched. Serve shows the message of this class alone, at once and without a traceback.
    """
    try:
        config = parse_app_config(args)
    except ConfigError as error:
        raise RayServeException(str(error)) from error
    directory = _FleetDirectory.options(
        name=DIRECTORY,
        ray_actor_options=_control_options(config),
        **_reporting_replicas(config, 1),
        max_ongoing_requests=_DIRECTORY_MAX_ONGOING,
        health_check_period_s=1.0,
        # Serve hands this to the running directory, which hands it on to the gateways: neither has
        # to be replaced when a model changes.
        user_config={"models": [model.model_dump(mode="json") for model in config.models]},
    )
    directory = pin_version(directory, _plain(config.link.model_dump())).bind(config.link)
    settings = DashboardSettings(config.logging.style, config.gateway.tpu_exporter_port)
    dashboard = _Dashboard.options(
        name=DASHBOARD,
        num_replicas=1,
        ray_actor_options=_control_options(config),
        max_ongoing_requests=_DASHBOARD_MAX_ONGOING,
    )
    dashboard = pin_version(dashboard, _plain(asdict(settings))).bind(settings, directory)
    engines = []
    for model in config.models:
        for deployment in model.deployments:
            spec = engine_spec(config, model, deployment)
            engine = _engine(config, model, deployment)
            part = _engine_part(config, spec)
            spec = replace(spec, fingerprint=version_of(part))
            engines.append(pin_version(engine, part).bind(spec, config.link, directory))
    gateway = _Gateway.options(
        name=GATEWAY,
        **_reporting_replicas(config, config.gateway_count.number),
        ray_actor_options=_gateway_options(config)
        | {
            # vLLM would close the handlers of all other loggers to set up its own.
            # Its own bound of `n` would be 16,384.
            "runtime_env": {
                "env_vars": {
                    "VLLM_CONFIGURE_LOGGING": "0",
                    "VLLM_MAX_N_SEQUENCES": str(config.gateway.max_sequences),
                    "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": _OUTPUTS_PER_TURN,
                    # A host that clients may name could send the gateway on to any other.
                    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
                    "VLLM_MEDIA_CONNECTOR": "http",  # the bounded one (`edge.media`)
                }
            },
        },
        max_ongoing_requests=config.gateway.max_ongoing_requests,
        # An update starts the new gateways before it ends the old ones: somebody always answers.
        max_surge_percent=100,
        graceful_shutdown_timeout_s=config.rollout.gateway_drain_s,
        graceful_shutdown_wait_loop_s=_IDLE_CHECK_INTERVAL_S,
    )
    return pin_version(gateway, _gateway_part(config)).bind(config, directory, dashboard, *engines)


def engine_spec(config: AppConfig, model: ModelConfig, deployment: DeploymentConfig) -> EngineSpec:
    """Returns the spec of one engine of this deployment."""
    paced = None
    if model.engine == EngineKind.PACED:
        paced = model.paced_options() | {"vocab_size": _PACED_VOCAB_SIZE}
    return EngineSpec(
        model=model.name,
        source=model.source,
        compute_class=deployment.compute_class,
        engine_args=dict(model.engine_args),
        engine_env=dict(model.engine_env),
        adapters=tuple((adapter.name, adapter.path) for adapter in model.lora_adapters),
        paced=paced,
        num_cpus=deployment.num_cpus,
        check_period_s=config.health.check_period_s,
        hang_timeout_s=_hang_timeout_s(config, model),
        heartbeat_interval_s=config.link.heartbeat_interval_s,
        gateway_timeout_s=config.link.gateway_timeout_s,
        max_buffered_bytes=config.link.max_buffered_bytes,
        log_style=config.logging.style,
        tracing=config.tracing.settings,
        listens_on_loopback=config.link.listen_on == ListenOn.LOOPBACK,
        encryption=config.link.encryption,
        slice=slice_spec(config, model, deployment),
        tpu=_tpu_spec(model) if model.is_on_tpu else None,
        version=model.version_id,
        described=model.model_dump(mode="json"),
        stay_s=config.rollout.drain_s,
        lease_s=config.health.engine_lease_s,
        handover_s=config.health.engine_handover_s,
        silence_s=config.health.engine_silence_s,
        start_timeout_s=_start_timeout_s(config, model),
    )


def _hang_timeout_s(config: AppConfig, model: ModelConfig) -> float:
    """Returns how long an engine of this model may not answer; by its kind if nobody said so."""
    if config.health.hang_timeout_s is not None:
        return config.health.hang_timeout_s
    by_kind = {
        EngineKind.PACED: limits.PACED_HANG_TIMEOUT_S,
        EngineKind.VLLM: limits.CPU_HANG_TIMEOUT_S,
        EngineKind.VLLM_TPU: limits.TPU_HANG_TIMEOUT_S,
    }
    return by_kind[model.engine]


def _start_timeout_s(config: AppConfig, model: ModelConfig) -> float:
    """Returns how long an engine of this model may take to start; by its kind if nobody said so."""
    if config.health.start_timeout_s is not None:
        return config.health.start_timeout_s
    return limits.TPU_START_TIMEOUT_S if model.is_on_tpu else limits.CPU_START_TIMEOUT_S


# Fields of an engine's spec whose change replaces no running engine; a new engine gets them.
_NOT_OF_THE_ENGINE = (
    "described",
    "stay_s",
    "lease_s",
    "handover_s",
    "silence_s",
    "start_timeout_s",
    "fingerprint",
)


def _engine_part(config: AppConfig, spec: EngineSpec) -> dict[str, Any]:
    """Returns the settings whose change replaces an engine."""
    settings = {
        name: value for name, value in asdict(spec).items() if name not in _NOT_OF_THE_ENGINE
    }
    return _plain({"spec": settings, "link": config.link.model_dump()})


def _gateway_part(config: AppConfig) -> dict[str, Any]:
    """Returns the settings whose change replaces a gateway: all but the models.

    A running gateway receives the models.
    """
    of_others = {
        *("replicas", "expected_tokens_per_s", "expected_requests_per_s"),
        "tpu_exporter_port",
    }
    settings = config.model_dump(exclude={"models": True, "rollout": True, "gateway": of_others})
    return _plain(settings | {"is_autoscaled": config.is_autoscaled})


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings as JSON values; a value that JSON does not have becomes text."""
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


def _tpu_spec(model: ModelConfig) -> TpuSpec:
    cache = model.compile_cache
    if cache is None:
        return TpuSpec()
    return TpuSpec(CompileCacheSpec(cache.store, cache.local_dir, cache.budget_s))


# Nodes without the label match too, here and below.
_OFF_TPU_HOSTS = {ACCELERATOR_LABEL: f"!in({','.join(TPU_ACCELERATOR_TYPES)})"}


def _control_options(config: AppConfig) -> dict[str, Any]:
    """Returns Ray's options for directory, dashboard and slice replicas.

    They are on the nodes for them. Where there are none, or none has room, Ray takes any node
    without chips at once: a replica that waits for a place would leave its engine without one.
    """
    options: dict[str, Any] = {"num_cpus": CONTROL_CPUS}
    if config.control_placement == ControlPlacement.OFF_TPU_HOSTS:
        options["label_selector"] = _OFF_TPU_HOSTS | {ROLE_LABEL: CONTROL_ROLE}
        options["fallback_strategy"] = [{"label_selector": _OFF_TPU_HOSTS}]
    return options


def _gateway_options(config: AppConfig) -> dict[str, Any]:
    """Returns Ray's options for a gateway, which is never on a node for control processes.

    Not even while there is no other: Ray would take one at once, as at a start before the gateways'
    own nodes have come, and nothing would lead clients there or move the gateway away.
    """
    options: dict[str, Any] = {"num_cpus": config.gateway.num_cpus}
    if config.control_placement == ControlPlacement.OFF_TPU_HOSTS:
        options["label_selector"] = _OFF_TPU_HOSTS | {ROLE_LABEL: f"!{CONTROL_ROLE}"}
    return options


def _reporting_replicas(config: AppConfig, count: int) -> dict[str, Any]:
    """Returns a fixed number of replicas, as scaling bounds where a policy needs stats.

    Serve collects stats for a policy only from a deployment that scales.
    """
    if not config.is_autoscaled:
        return {"num_replicas": count}
    scaling = {
        "min_replicas": count,
        "max_replicas": count,
        "initial_replicas": count,
        # Serve 2.60 names environment variables to use in its place, and reads neither of them.
        "metrics_interval_s": _REPORT_INTERVAL_S,
        "look_back_period_s": _REPORT_PERIOD_S,
    }
    return {"autoscaling_config": scaling}


def _engine_replicas(deployment: DeploymentConfig) -> dict[str, Any]:
    """Returns a fixed number of replicas, or bounds within which the policy alone decides."""
    if not deployment.is_autoscaled:
        return {"num_replicas": deployment.replicas}
    scaling = {
        "min_replicas": deployment.min_replicas,
        "max_replicas": deployment.max_replicas,
        # Serve 2.60 goes back to a number of these whenever anything of the deployment changes, and
        # ends what is more before it asks the policy. Without one it keeps its target.
        "initial_replicas": None,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "downscale_to_zero_delay_s": 0.0,
        "upscaling_factor": 1.0,
        "downscaling_factor": 1.0,
    }
    return {"autoscaling_config": scaling}


def _engine(
    config: AppConfig, model: ModelConfig, deployment: DeploymentConfig
) -> serve.Deployment:
    # One of a few options that only the decorator takes.
    deployed = serve.deployment(rolling_update_percentage=config.rollout.step_ratio)
    return deployed(SliceReplica).options(
        name=model.deployment_name(deployment),
        **_engine_replicas(deployment),
        ray_actor_options=_control_options(config),
        health_check_period_s=config.health.check_period_s,
        graceful_shutdown_wait_loop_s=_IDLE_CHECK_INTERVAL_S,
        graceful_shutdown_timeout_s=replica_stop_s(config, deployment),
    )
