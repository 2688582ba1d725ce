"""Defines `slicewise doctor`: it gathers, checks, and prints what to do."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deployments.doctor import gather
from deployments.doctor.cluster import (
    Reach,
    check_control_nodes,
    check_nodes,
    check_ray,
    check_wanted,
)
from deployments.doctor.findings import Finding, Level, Unknown, error, exit_code, ok
from deployments.doctor.host import (
    Chips,
    Holder,
    Port,
    check_chips,
    check_limits,
    check_metadata,
    check_port,
)
from deployments.doctor.serving_config import (
    check_gateway,
    check_niceness,
    check_settings,
    wanted_slices,
)
from deployments.doctor.simulated import what_is_simulated
from deployments.doctor.tpu_environment import check_tpu_environment, host_shape, is_tpu_host
from deployments.doctor.versions import check_versions
from deployments.kubectl import Kubectl, KubectlError
from deployments.status.gateway import ApiKeyOption
from deployments.terminal import printable
from serving.config.check import CheckReport
from serving.tpu.host.limits import read_host_limits

_GATEWAY_PORT, _EXPORTER_PORT, _GCS_PORT = 8000, 9450, 6379
_STYLES = {Level.OK: "green", Level.NOTE: "dim", Level.WARNING: "yellow", Level.ERROR: "red"}
_ORDER = (Level.ERROR, Level.WARNING, Level.NOTE, Level.OK)


def doctor_command(
    *,
    url: Annotated[
        str | None, typer.Option(help="Address of a running gateway, to be asked as well.")
    ] = None,
    api_key: ApiKeyOption = None,
    config: Annotated[
        Path | None, typer.Option(help="A serve_config.yaml that is to be served here.")
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(help="host:port of Ray's head. [default: RAY_ADDRESS, or what runs here]"),
    ] = None,
    lock: Annotated[
        Path | None,
        typer.Option(envvar="SLICEWISE_LOCK", help="Versions to compare with, as name==version."),
    ] = None,
    manifests: Annotated[
        Path | None,
        typer.Option(
            exists=True, help="Values or rendered folder, to be held against kubectl's cluster."
        ),
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="kubectl's context. [default: the current one]")
    ] = None,
    kubeconfig: Annotated[
        str | None, typer.Option(help="kubectl's file. [default: as kubectl has it]")
    ] = None,
    gateway_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port that gateways will take; 0: a free one. [default: of --config, or 8000]",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this environment and say what to fix. Exits with 1 if something will not work."""
    if manifests is None:
        findings = list(_examine(url, api_key, config, ray_address, lock, gateway_port, os.environ))
    else:
        findings = list(_examine_kubernetes(manifests, context, kubeconfig))
    if as_json:
        typer.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print(findings)
    raise typer.Exit(exit_code(findings))


def _examine(
    url: str | None,
    api_key: str | None,
    config: Path | None,
    ray_address: str | None,
    lock: Path | None,
    gateway_port: int | None,
    environment: Mapping[str, str],
) -> Iterator[Finding]:
    address = gather.ray_address(ray_address, environment)
    # Both wait for somebody else, most of their time.
    with ThreadPoolExecutor(2) as others:
        asked_ray = others.submit(gather.ask_ray, address)
        asked_metadata = others.submit(gather.ask_metadata)
        packages = gather.packages(lock)
        chips = gather.chips()
        report = None if config is None else gather.config(config)
        ray, metadata = asked_ray.result(), asked_metadata.result()
    here = chips.chips if isinstance(chips, Chips) else ()
    yield from check_versions(packages)
    yield from check_tpu_environment(environment, here)
    yield from check_chips(chips, environment)
    shape = host_shape(environment, len(here) or None)
    generation = here[0].generation if here else None if shape is None else shape.generation
    yield from check_limits(
        read_host_limits(environment), generation, is_tpu_host=is_tpu_host(environment, here)
    )
    yield from check_metadata(metadata, environment, here)
    yield from check_ray(ray, gather.token(environment))
    is_cluster = bool(address) or is_tpu_host(environment, here)
    yield check_niceness(environment, is_cluster=is_cluster)
    if ray.reach == Reach.ANSWERED:
        yield from check_nodes(ray.nodes)
    if config is not None and report is not None:
        yield from check_settings(f"{config}", report, environment)
        if ray.reach == Reach.ANSWERED and isinstance(report, CheckReport):
            yield from check_wanted(wanted_slices(report), ray.nodes)
            num_processes = sum(each.num_control_processes for each in report.applications.values())
            yield from check_control_nodes(num_processes, ray.nodes)
    yield from _ports(report, gateway_port, is_gcs_ours=ray.reach == Reach.ANSWERED)
    if url is not None:
        yield check_gateway(url, gather.gateway(url, api_key))
    yield from what_is_simulated(environment, packages.installed, chips, metadata, ray.nodes)


def _examine_kubernetes(
    manifests: Path, context: str | None, kubeconfig: str | None
) -> Iterator[Finding]:
    # Only those who have manifests need the libraries that read them.
    from deployments.doctor.kubernetes import ask_kubernetes, check_kubernetes  # noqa: PLC0415
    from deployments.rollout.gather import (  # noqa: PLC0415
        ManifestsUnreadableError,
        read_manifests,
    )

    try:
        folder = read_manifests(manifests)
        kubectl = Kubectl(context, kubeconfig)
    except (ManifestsUnreadableError, KubectlError) as reason:
        yield error("manifests and kubectl", f"{reason}", "both readable", "mend what it says")
        return
    yield from check_kubernetes(folder, ask_kubernetes(kubectl, folder))


def _ports(
    report: CheckReport | Unknown | None, gateway_port: int | None, *, is_gcs_ours: bool
) -> Iterator[Finding]:
    gateway, exporter = _GATEWAY_PORT, _EXPORTER_PORT
    if isinstance(report, CheckReport) and not report.problems:
        gateway = report.http_port
        configured = (
            application.gateway.tpu_exporter_port for application in report.applications.values()
        )
        exporter = next(filter(None, configured), exporter)
    if gateway_port != 0:
        gateway = gateway_port or gateway
        setting = "http_options.port in serve_config.yaml chooses another"
        yield check_port(Port("gateways", gateway, gather.holder(gateway, "/health", ""), setting))
    yield check_port(
        Port(
            "TPU exporter",
            exporter,
            gather.holder(exporter, "/metrics", "tpu_exporter"),
            "`slicewise tpu-exporter --port`, and gateway.tpu_exporter_port",
            is_needed=False,
        )
    )
    gcs = gather.plain_holder(_GCS_PORT)
    if gcs == Holder.OTHER and is_gcs_ours:
        gcs = Holder.EXPECTED
    setting = "Redis has the same default: `ray start --head --port` chooses another"
    yield check_port(Port("Ray's GCS", _GCS_PORT, gcs, setting, is_needed=False))
    # Each engine host listens on a port that the system gives it.
    if gather.plain_holder(0) == Holder.NOBODY:
        yield ok("port (token link)", "each engine host takes a free one")
    else:
        allowed = "a free port of net.ipv4.ip_local_port_range"
        yield error("port (token link)", "the system gives none", allowed, "end what holds them")


def _print(findings: list[Finding]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "WHAT", "FOUND"):
        table.add_column(name, overflow="fold")
    for one_finding in sorted(findings, key=lambda finding: _ORDER.index(finding.level)):
        level = Text(one_finding.level.value, style=_STYLES[one_finding.level])
        # Text, because a found value may hold what rich would take for markup.
        found = Text(printable(one_finding.found))
        for word, text in (("allowed", one_finding.allowed), ("fix", one_finding.fix)):
            if text:
                found.append(f"\n{word}: ", style="bold").append(printable(text))
        table.add_row(level, Text(printable(one_finding.what)), found)
    Console(highlight=False).print(table)
    counts = Counter(finding.level for finding in findings)
    typer.echo(f"\n{counts[Level.ERROR]} errors, {counts[Level.WARNING]} warnings")
