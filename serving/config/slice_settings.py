"""The terms on which a deployment has its slices: its hosts' labels, and the time for their end.

The application reserves and drains by these; manifests give hosts the labels and the time. Pure.
"""

from serving.config.application import AppConfig, ListenOn
from serving.config.models import DeploymentConfig, ModelConfig
from serving.config.slice_spec import SliceSpec
from serving.config.slices import ComputeClassConfig
from serving.domain.inventory import ZONE_LABEL

# A slice starts to drain at most this long before an end that was announced early: time for its
# requests to finish or move. The notice itself may come an hour or a week before the end.
MAX_DRAIN_S = 120.0
# How long a leaving replica waits until the gateways have taken its requests elsewhere.
DRAIN_GRACE_S = 5.0


def node_labels(config: AppConfig, deployment: DeploymentConfig) -> dict[str, str]:
    """Returns the labels that hosts must have for this deployment to take their slice.

    Raises:
        KeyError: its compute class is neither declared nor built in.
    """
    labels = dict(config.compute_class(deployment.compute_class).node_labels)
    if deployment.slice is not None and deployment.slice.zone is not None:
        labels[ZONE_LABEL] = deployment.slice.zone
    return labels


def slice_spec(
    config: AppConfig, model: ModelConfig, deployment: DeploymentConfig
) -> SliceSpec | None:
    """Returns the slice spec of each replica; `None` where it reserves none."""
    if deployment.slice is None:
        return None
    compute_class = config.compute_class(deployment.compute_class)
    return SliceSpec(
        compute_class=deployment.compute_class,
        shape=deployment.slice.shape,
        node_labels=node_labels(config, deployment),
        drain_notice_s=drain_s(compute_class),
        max_run_duration_s=compute_class.max_run_duration_s,
        patience_s=compute_class.patience_s,
        num_slices=deployment.slice.num_slices,
        num_engines=deployment.slice.num_engines,
        probe_timeout_s=config.health.probe_timeout_s,
        cpus_per_host=deployment.cpus_per_host,
        listens_on_loopback=config.link.listen_on == ListenOn.LOOPBACK,
        encryption=config.link.encryption,
        log_style=config.logging.style,
        engine_env=dict(model.engine_env),
    )


def drain_s(compute_class: ComputeClassConfig) -> float:
    """Returns how many seconds before its end a slice of this class starts to drain."""
    return min(compute_class.drain_notice_s, MAX_DRAIN_S)


def replica_end_s(drain_notice_s: float) -> float:
    """Returns the time that a replica may take to end; a drain after a notice is not cut short."""
    return 2 * DRAIN_GRACE_S + drain_notice_s


def replica_stop_s(config: AppConfig, deployment: DeploymentConfig) -> float:
    """Returns how long Serve lets a replica end: its requests may finish, then its slice drains."""
    notice_s = 0.0
    if deployment.slice is not None:
        notice_s = drain_s(config.compute_class(deployment.compute_class))
    return config.rollout.drain_s + replica_end_s(notice_s)


def longest_replica_stop_s(config: AppConfig) -> float:
    """Returns the same for the replica that may take longest."""
    return max(
        replica_stop_s(config, deployment)
        for model in config.models
        for deployment in model.deployments
    )
