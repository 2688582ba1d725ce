"""Defines `slicewise sim`: a simulated TPU cluster, and what a cloud does to one."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
import yaml

from deployments.simulation.control import ControlError, ControlServer, call, default_socket
from deployments.simulation.deployed import (
    PROXY_PORT_VARIABLE,
    ensure_lasting,
    lasting_environment,
    proxy_url,
    serve_deployed,
)
from deployments.simulation.hosts.namespaces import Hosts, NotPermittedError
from deployments.simulation.hosts.user_namespace import is_inside, relaunch, settle
from deployments.simulation.plan import SimulationPlan, parse_plan
from deployments.simulation.redis import RedisServer, RedisUnavailableError
from deployments.start.ports import free_ports
from deployments.start.ray_access import AUTH_MODE, TOKEN, WITH_TOKEN, shell_hint
from deployments.start.serve import child_environment, dashboard_port, run_serve, site_of
from serving.domain.errors import ConfigError

# Checks that a node may miss; there is one every 3 s (Ray 2.60).
_PATIENCE_VARIABLE = "RAY_health_check_failure_threshold"
sim = typer.Typer(help="A simulated TPU cluster on this machine.", no_args_is_help=True)

_Socket = Annotated[
    Path | None, typer.Option("--socket", help="Control socket, where there are several clusters.")
]
_Slice = Annotated[str, typer.Argument(metavar="SLICE", help="As `slicewise sim list` names it.")]
_Host = Annotated[int, typer.Option("--host", help="Worker id of the host.")]
_Notice = Annotated[float, typer.Option("--notice", help="Seconds until the slice goes.")]
_For = Annotated[float, typer.Option("--for", help="How long, in seconds.")]

_PLAN = Path("deployments/sim/cluster.yaml")
_CONFIG = Path("deployments/sim/serve_config.yaml")


@sim.command("up")
def up_command(
    plan: Annotated[Path, typer.Argument(help="What the cluster consists of.")] = _PLAN,
    config: Annotated[Path, typer.Option(help="What is served on it.")] = _CONFIG,
    socket: _Socket = None,
    redis: Annotated[  # noqa: FBT002
        bool, typer.Option("--redis", help="Keep the head's state in Redis: then it may be killed.")
    ] = False,
    verbose: Annotated[bool, typer.Option(help="Show Ray's and vLLM's own log.")] = False,  # noqa: FBT002
) -> None:
    """Start a simulated cluster and serve on it until Ctrl-C."""
    settle()
    # Ray reads it once, when it is imported, and what checks the configuration imports it.
    os.environ.setdefault(AUTH_MODE, WITH_TOKEN)
    described = _read_plan(plan)
    site = site_of(config)
    proxy_port, gcs_port, redis_port = free_ports(3)
    if redis:
        # Known before anything is started that may answer there.
        os.environ.setdefault(PROXY_PORT_VARIABLE, str(proxy_port))
    _go_inside(site.url, *([proxy_url(os.environ)] if redis else []))
    if redis:
        with _refusals():
            ensure_lasting(described, yaml.safe_load(config.read_text(encoding="utf-8")))
    # Short: Ray's sockets lie below it.
    with tempfile.TemporaryDirectory(prefix="sw-", ignore_cleanup_errors=True) as folder:
        inherited = lasting_environment(os.environ, proxy_port) if redis else os.environ
        environment = child_environment(inherited, folder)
        # All hosts share this machine's cores. Where they are busy one may not answer for 15 s,
        # Ray's own patience, and is no dead host for that.
        environment.setdefault(_PATIENCE_VARIABLE, "10")
        # Ray takes it from the process that starts the nodes.
        os.environ.update(environment)
        os.environ.pop("RAY_ADDRESS")
        os.environ.pop(TOKEN, None)
        # Imported once the environment is Ray's, and only where Ray is needed.
        from deployments.simulation.cluster import SimulatedCluster  # noqa: PLC0415

        num_hosts = sum(kind.count * kind.shape.num_hosts for kind in described.slices)
        typer.echo(f"slicewise: starting a head and up to {num_hosts} simulated hosts")
        store = RedisServer(Path(folder) / "redis", redis_port) if redis else None
        with (
            _refusals(),
            _network(Path(folder)) as network,
            store or contextlib.nullcontext(),
            SimulatedCluster(
                described,
                dashboard_port(environment),
                gcs_port=gcs_port if redis else None,
                redis=store,
                network=network,
            ) as cluster,
            ControlServer(cluster, socket or default_socket()),
        ):
            names = ", ".join(cluster.names())
            typer.echo(f"slicewise: slices {names}; `slicewise sim --help` can take them away")
            if redis:
                typer.echo(shell_hint(environment, Path(folder)))
                code = serve_deployed(
                    config, cluster.control_plane.dashboard_url, proxy_url(environment)
                )
            else:
                code = run_serve(
                    config, Path(folder), site, verbose=verbose, ray_address=cluster.address
                )
    raise typer.Exit(code)


@sim.command("list")
def list_command(socket: _Socket = None) -> None:
    """Print the slices that exist, as JSON."""
    typer.echo(json.dumps(_do(socket, "describe"), indent=2))


@sim.command("preempt")
def preempt_command(
    name: _Slice, notice: _Notice = 15.0, host: _Host = 0, socket: _Socket = None
) -> None:
    """Tell one host that it is preempted; the slice goes when the notice is over."""
    _do(socket, "preempt", name=name, notice_s=notice, worker_id=host)


@sim.command("maintain")
def maintain_command(
    name: _Slice, notice: _Notice = 60.0, host: _Host = 0, socket: _Socket = None
) -> None:
    """Announce maintenance of one host; the slice goes when the notice is over."""
    _do(socket, "maintain", name=name, notice_s=notice, worker_id=host)


@sim.command("drain")
def drain_command(
    name: _Slice, notice: _Notice = 15.0, host: _Host = 0, socket: _Socket = None
) -> None:
    """Have Ray drain one host's node; the slice goes when the notice is over."""
    _do(socket, "drain", name=name, notice_s=notice, worker_id=host)


@sim.command("kill")
def kill_command(
    name: _Slice,
    host: Annotated[int | None, typer.Option(help="Worker id; left out: all hosts.")] = None,
    socket: _Socket = None,
) -> None:
    """End a host, or the whole slice, at once and without notice."""
    _do(socket, "kill", name=name, worker_id=host)


@sim.command("slow")
def slow_command(
    name: _Slice,
    factor: Annotated[float, typer.Option(help="How many times as long everything takes.")] = 3.0,
    for_s: _For = 30.0,
    socket: _Socket = None,
) -> None:
    """Give the engine of a slice only a part of the time."""
    _do(socket, "slow", name=name, factor=factor, for_s=for_s)


@sim.command("partition")
def partition_command(name: _Slice, for_s: _For = 10.0, socket: _Socket = None) -> None:
    """Have all of a slice stand still, and come back as it was."""
    _do(socket, "partition", name=name, for_s=for_s)


@sim.command("add")
def add_command(
    kind: Annotated[str, typer.Argument(help="A name from the plan.")], socket: _Socket = None
) -> None:
    """Bring one more slice of a kind into being."""
    typer.echo(_do(socket, "add", kind_name=kind))


@sim.command("add-host")
def add_host_command(
    role: Annotated[str, typer.Argument(help="What it is for: gateway or control.")],
    socket: _Socket = None,
) -> None:
    """Bring one more host without chips into being."""
    typer.echo(_do(socket, "add_host", role=role))


@sim.command("kill-host")
def kill_host_command(
    name: Annotated[str, typer.Argument(help="Such as control-0; `slicewise sim list` has them.")],
    socket: _Socket = None,
) -> None:
    """End a host without chips at once, with all that is on it."""
    _do(socket, "kill_host", name=name)


@sim.command("stockout")
def stockout_command(
    compute_class: Annotated[str, typer.Argument(help="Such as spot.")],
    over: Annotated[bool, typer.Option("--over", help="There are slices again.")] = False,  # noqa: FBT002
    socket: _Socket = None,
) -> None:
    """From now on no slice of a compute class comes into being."""
    _do(socket, "stock_out", compute_class=compute_class, is_dry=not over)


@sim.command("kill-head")
def kill_head_command(socket: _Socket = None) -> None:
    """End the head node at once, as if its pod were gone. With `up --redis` only."""
    _do(socket, "kill_head")


@sim.command("start-head")
def start_head_command(socket: _Socket = None) -> None:
    """Start a head in place of the killed one."""
    _do(socket, "start_head")


@sim.command("kill-redis")
def kill_redis_command(
    lose: Annotated[bool, typer.Option(help="With all that it has kept.")] = False,  # noqa: FBT002
    socket: _Socket = None,
) -> None:
    """End Redis at once. With `up --redis` only."""
    _do(socket, "kill_redis", lose=lose)


@sim.command("start-redis")
def start_redis_command(socket: _Socket = None) -> None:
    """Start Redis again, with what its file holds."""
    _do(socket, "start_redis")


def _go_inside(*urls: str) -> None:
    """Starts this command again where it may make hosts, if it may not here and may there."""
    addresses = [(str(parts.hostname), parts.port or 0) for parts in map(urlsplit, urls)]
    try:
        relaunch(addresses)
    except NotPermittedError:
        return  # said where the hosts are made
    except OSError as error:
        typer.echo(f"slicewise: one of {', '.join(urls)} cannot be had: {error}", err=True)
        raise typer.Exit(1) from error


@contextlib.contextmanager
def _network(folder: Path) -> Iterator[Hosts | None]:
    """A network for hosts with namespaces of their own; says so where that is not permitted."""
    with contextlib.ExitStack() as end:
        try:
            network = end.enter_context(Hosts(folder, joins_machine=True))
        except NotPermittedError as error:
            typer.echo(f"slicewise: all hosts share this machine's network and processes: {error}")
            yield None
            return
        if is_inside():
            typer.echo(
                "slicewise: in a user namespace, with a network of its own. A command inside: "
                f"nsenter --target {os.getpid()} --user --net --preserve-credentials COMMAND"
            )
        yield network


def _do(socket: Path | None, command: str, **arguments: Any) -> Any:
    with _refusals():
        return call(socket or default_socket(), command, **arguments)


def _read_plan(path: Path) -> SimulationPlan:
    with _refusals():
        try:
            return parse_plan(yaml.safe_load(path.read_text(encoding="utf-8")))
        except (OSError, yaml.YAMLError) as error:
            raise ControlError(f"{path} cannot be read: {error}") from error


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (ControlError, ConfigError, RedisUnavailableError) as error:
        typer.echo(f"slicewise: {error}", err=True)
        raise typer.Exit(1) from error
