"""The command `slicewise tpu-exporter`: a host's chips as Prometheus metrics.

Owns the command line and the environment. Wiring only.
"""

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from serving.domain.errors import ConfigError


def tpu_exporter_command(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 9450,
    libtpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="A libtpu runtime metric service; may be given several times. Without it the "
            "ports of TPU_RUNTIME_METRICS_PORTS on this host, or 8431.",
        ),
    ] = None,
    device_plugin: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The GKE TPU device plugin's page, on port 2112."),
    ] = None,
    no_libtpu: Annotated[
        bool,
        typer.Option("--no-libtpu", help="Ask no runtime: take its values from the device plugin."),
    ] = False,
    sdk_python: Annotated[
        str | None,
        typer.Option(
            metavar="PYTHON",
            help="Python with libtpu, to read throttling and link health each minute. Not on GKE.",
        ),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder in which replicas say what runs on which chip.")
    ] = None,
    expected_chips: Annotated[
        int | None,
        typer.Option(min=1, help="Chips of this host, if the topology leaves a choice."),
    ] = None,
    budget: Annotated[
        float, typer.Option(min=0.05, max=60.0, help="Seconds that a scrape takes at most.")
    ] = 2.0,
    dump_raw: Annotated[
        Path | None, typer.Option(help="Write the raw answers of one scrape to a file and end.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Serve what such a file holds instead of this host.")
    ] = None,
) -> None:
    """Serve what the TPU chips of this host say of themselves, for Prometheus."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # gRPC and its kin take 0.1 s to import, and every `slicewise` command loads this module.
    from serving.exporters.server import ExporterServer  # noqa: PLC0415
    from serving.exporters.service import (  # noqa: PLC0415
        ExporterOptions,
        ExporterService,
        replaying_exporter,
        serve_until_signal,
    )

    if no_libtpu and libtpu:
        raise typer.BadParameter("--no-libtpu and --libtpu exclude each other")
    try:
        if replay is not None:
            exporter = replaying_exporter(replay, budget)
            serve = serve_until_signal
        else:
            options = ExporterOptions(
                () if no_libtpu else tuple(libtpu) if libtpu else None,
                device_plugin,
                sdk_python,
                run_dir,
                expected_chips,
                budget,
            )
            service = ExporterService(options, os.environ)
            if dump_raw is not None:
                typer.echo(f"{dump_raw}: raw answers of {service.dump_raw(dump_raw)} sources")
                return
            exporter, serve = service.exporter, service.serve
        server = ExporterServer(exporter, host, port)
    except (ValueError, ConfigError, OSError) as error:
        raise typer.BadParameter(f"{error}") from error
    typer.echo(f"http://{host}:{server.port}/metrics")
    serve(server)
