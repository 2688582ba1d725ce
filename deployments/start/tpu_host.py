"""Defines `slicewise ray-environment` and `slicewise ray-options`, for hosts without Kubernetes.

Owns what `ray start` has to be told on a TPU VM: the environment of every Ray process of ours, and
the resources and labels by which replicas find slices. Ray finds some of them by itself, from
device nodes and the metadata server, and not on every VM; what is said here does not depend on
that.
"""

import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from serving.config.ray_settings import HAPROXY_PROGRAM, RAY_SETTINGS, RECONNECT
from serving.config.slices import MARKET_LABEL
from serving.domain.compute_class import Market
from serving.domain.inventory import (
    ACCELERATOR_LABEL,
    POD_TYPE_LABEL,
    SLICE_NAME_LABEL,
    TOPOLOGY_LABEL,
    WORKER_ID_LABEL,
)
from serving.domain.topology import SliceShape, TopologyError, slice_shape

# As long as on GKE by default: a head that is away costs no engine.
_HEAD_AWAY_S = 86_400
_AUTH = "RAY_AUTH_MODE"


def ingress_program() -> str:
    """Returns the path of `slicewise-haproxy`, which is installed beside the interpreter."""
    return str(Path(sys.executable).with_name("slicewise-haproxy"))


def ray_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns what every Ray process of ours has in its environment; what is set already stays."""
    ours = {
        # With a token file in the user's folder Ray would otherwise ask for it on some paths only.
        _AUTH: "disabled",
        **RAY_SETTINGS,
        HAPROXY_PROGRAM: ingress_program(),
        RECONNECT: str(_HEAD_AWAY_S),
    }
    return {name: inherited.get(name, value) for name, value in ours.items()}


def ray_options(shape: SliceShape, name: str, worker: int, market: Market) -> list[str]:
    """Returns the options of `ray start` on one host of a slice.

    Raises:
        ValueError: the slice has no such host.
    """
    if not 0 <= worker < shape.num_hosts:
        what = f"a {shape.generation} {shape.topology} slice has {shape.num_hosts} hosts"
        raise ValueError(f"worker: {what} (value {worker}); allowed: 0 to {shape.num_hosts - 1}")
    resources: dict[str, float] = {"TPU": shape.chips_per_host, name: 1}
    if worker == 0:
        resources[f"TPU-{shape.ray_pod_type}-head"] = 1
    labels = {
        ACCELERATOR_LABEL: shape.ray_accelerator_type,
        MARKET_LABEL: market.value,
        POD_TYPE_LABEL: shape.ray_pod_type,
        SLICE_NAME_LABEL: name,
        TOPOLOGY_LABEL: shape.topology,
        WORKER_ID_LABEL: str(worker),
    }
    # No space in either, so that a shell takes each for one word.
    return [
        f"--resources={json.dumps(resources, separators=(',', ':'))}",
        f"--labels={','.join(f'{label}={value}' for label, value in labels.items())}",
    ]


def ray_environment_command() -> None:
    """Print the environment of Ray's processes, for `eval "$(slicewise ray-environment)"`."""
    for name, value in ray_environment(os.environ).items():
        typer.echo(f"export {name}={shlex.quote(value)}")


def ray_options_command(
    generation: Annotated[str, typer.Argument(help="TPU generation, such as v6e.")],
    topology: Annotated[str, typer.Argument(help="Topology of the slice, such as 2x2.")],
    *,
    market: Annotated[Market, typer.Option(help="How the slice is bought; its compute class.")],
    name: Annotated[
        str, typer.Option(help="Name of the slice, the same on all of its hosts.")
    ] = "slice-0",
    worker: Annotated[int, typer.Option(help="Which host of its slice this is, from 0.")] = 0,
    chips_per_host: Annotated[
        int | None, typer.Option(help="Chips of this host, where the topology leaves a choice.")
    ] = None,
) -> None:
    """Print what `ray start` has to be told on a host of a slice: its chips and labels."""
    try:
        shape = slice_shape(generation, topology, chips_per_host)
        options = ray_options(shape, name, worker, market)
    except (TopologyError, ValueError) as error:
        _refuse(f"{error}")
    typer.echo(" ".join(options))


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"slicewise: {reason}", err=True)
    raise typer.Exit(1)
