"""Defines `slicewise provision`, which keeps the slices of a RayCluster at what replicas request.

Owns the command line and the environment. Runs in the head pod as a sidecar that shares `/tmp/ray`
with the Ray container, under the head's service account.
"""

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from autoscaling.provisioning.kubernetes import HOST_VARIABLE, KubernetesAccess
from autoscaling.provisioning.plan import ProvisioningRules

_RULES = ProvisioningRules()


def provision_command(
    *,
    ray_address: Annotated[
        str, typer.Option(help="Ray's address on this machine or in this pod.")
    ] = "auto",
    namespace: Annotated[str, typer.Option(help="Kubernetes namespace of the RayCluster.")],
    raycluster: Annotated[str, typer.Option(help="Name of the RayCluster.")],
    application: Annotated[
        str, typer.Option(help="Serve application whose directory is read.")
    ] = "slicewise",
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two rounds while nothing changes.")
    ] = 10.0,
    idle: Annotated[
        float, typer.Option(help="Seconds after which an unwanted slice is dropped.")
    ] = _RULES.idle_s,
    min_change_interval: Annotated[
        float, typer.Option(help="Seconds between two changes of one worker group.")
    ] = _RULES.min_change_interval_s,
    kubernetes_url: Annotated[
        str | None,
        typer.Option(help="Address of the Kubernetes API; left out, as every pod is told it."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with a bearer token, with --kubernetes-url.")
    ] = None,
    ca_file: Annotated[
        Path | None, typer.Option(help="Certificate of the API's CA, with --kubernetes-url.")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65_535, help="Port of a page for Prometheus; left out, there is none."
        ),
    ] = None,
    installation: Annotated[
        str | None,
        typer.Option(
            help="Name under which the cluster was rendered: its control pods, quotas and compute "
            "classes are shown on that page too."
        ),
    ] = None,
) -> None:
    """Add and drop TPU slices of a RayCluster as the replicas of the application need them."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # Each of its requests would be a line.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        rules = ProvisioningRules(idle, min_change_interval)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if kubernetes_url is not None:
        access = KubernetesAccess(kubernetes_url, namespace, token_file, ca_file)
    elif HOST_VARIABLE in os.environ:
        access = KubernetesAccess.in_pod(os.environ, namespace)
    else:
        raise typer.BadParameter("this is no pod: give the API's address with --kubernetes-url")
    # Ray takes seconds to import, and every `slicewise` command loads this module.
    from autoscaling.provisioning.sidecar.process import SidecarOptions, run_sidecar  # noqa: PLC0415

    run_sidecar(
        SidecarOptions(
            ray_address,
            raycluster,
            application,
            access,
            rules,
            interval,
            metrics_port,
            installation,
        )
    )
