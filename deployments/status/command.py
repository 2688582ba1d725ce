"""Defines `slicewise status`: what is wrong, and the slices and engines that a gateway knows.

Owns the command line, and when what is asked. Does not own what is wrong (`findings`).
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from deployments.applied import RunningCluster, describe_applied
from deployments.kubectl import Kubectl, KubectlError
from deployments.status.cluster.reading import ClusterReading, read_cluster_of
from deployments.status.findings.finding import FleetFinding
from deployments.status.findings.join import PATIENCE_S, StatusReadings, find_faults
from deployments.status.findings.lines import finding_lines
from deployments.status.gateway import (
    DEFAULT_URL,
    ApiKeyOption,
    FleetUnavailableError,
    fetch_fleet,
)
from deployments.status.reports import parse_fleet
from deployments.status.tables import fleet_report, gateway_line
from deployments.terminal import plain_lines, printable

WATCH_PERIOD_S = 2.0
_UNUSABLE = 2


@dataclass(frozen=True, slots=True)
class _Target:
    """What is read through kubectl."""

    kind: str
    name: str
    namespace: str
    context: str | None
    kubeconfig: str | None


@dataclass(frozen=True, slots=True)
class _Screen:
    """What is shown. `problem` is why the gateway's half of it is missing; `None` if it is not."""

    text: str
    problem: str | None


def status_command(
    *,
    url: Annotated[str, typer.Option(help="Address of the Serve proxy.")] = DEFAULT_URL,
    api_key: ApiKeyOption = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="How long to wait.")] = 10.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer as it came, and what is wrong.")
    ] = False,
    is_watching: Annotated[
        bool, typer.Option("--watch", help="Print it again every 2 s until Ctrl-C.")
    ] = False,
    rayservice: Annotated[
        str | None,
        typer.Option(help="Look through kubectl at this RayService too: pods, quotas, classes."),
    ] = None,
    raycluster: Annotated[
        str | None, typer.Option(help="The same of a RayCluster without RayService.")
    ] = None,
    namespace: Annotated[str, typer.Option(help="Namespace of either.")] = "serving",
    context: Annotated[
        str | None, typer.Option(help="kubectl's context. [default: the current one]")
    ] = None,
    kubeconfig: Annotated[
        str | None, typer.Option(help="kubectl's file. [default: as kubectl has it]")
    ] = None,
    patience_s: Annotated[
        float, typer.Option(min=0.0, help="What may be on its way for so long is not told.")
    ] = PATIENCE_S,
) -> None:
    """Show what is wrong, and the models, their engines and slices, as one gateway sees them.

    With --rayservice or --raycluster pods, quotas and compute classes are looked at too, also when
    no gateway answers. Exits with 2 if none does.
    """
    if rayservice is not None and raycluster is not None:
        raise typer.BadParameter("give --rayservice or --raycluster, not both")
    target = None
    if (name := rayservice or raycluster) is not None:
        kind = "RayService" if rayservice is not None else "RayCluster"
        target = _Target(kind, name, namespace, context, kubeconfig)

    def look() -> _Screen:
        def fetch() -> str:
            return fetch_fleet(url, api_key, timeout_s)

        return _look(fetch, target, patience_s, as_json=as_json)

    try:
        if is_watching:
            _watch(look)
            return
        screen = look()
    except FleetUnavailableError as error:
        typer.echo(f"slicewise status: {error}", err=True)
        raise typer.Exit(_UNUSABLE) from error
    typer.echo(screen.text)
    if screen.problem is not None:
        typer.echo(f"slicewise status: {screen.problem}", err=True)
        raise typer.Exit(_UNUSABLE)


def _look(
    fetch: Callable[[], str], target: _Target | None, patience_s: float, *, as_json: bool
) -> _Screen:
    """Reads everything once.

    Raises:
        FleetUnavailableError: no gateway answers, and the cluster was not to be asked or does not
            answer either.
    """
    cluster, running, cluster_problem = _read_cluster(target)
    body, fleet, problem = "{}", None, None
    try:
        body = fetch()
        fleet = parse_fleet(body)
    except FleetUnavailableError as error:
        if cluster_problem is not None:
            raise FleetUnavailableError(f"{error}; {cluster_problem}") from error
        if cluster is None:
            raise
        body, problem = "{}", f"{error}"
    readings = StatusReadings(fleet, cluster, problem, cluster_problem)
    findings = find_faults(readings, time.time(), patience_s)
    if as_json:
        return _Screen(_as_json(body, findings), problem)
    lines = [gateway_line(fleet)] if fleet is not None else []
    lines += finding_lines(findings)
    if fleet is not None:
        lines += plain_lines(fleet_report(fleet))
    if target is not None and running is not None and target.kind == "RayService":
        applied = describe_applied(running, target.name, target.namespace)
        lines += ["", *map(printable, applied)]
    return _Screen("\n".join(lines), problem)


def _read_cluster(
    target: _Target | None,
) -> tuple[ClusterReading | None, RunningCluster | None, str | None]:
    if target is None:
        return None, None, None
    try:
        kubectl = Kubectl(target.context, target.kubeconfig)
        reading, running = read_cluster_of(kubectl, target.kind, target.name, target.namespace)
    except KubectlError as error:
        # The fleet is what was asked for first.
        return None, None, f"{target.kind} {target.namespace}/{target.name}: {error}"
    return reading, running, None


def _as_json(body: str, findings: tuple[FleetFinding, ...]) -> str:
    """Returns the gateway's answer with one key more."""
    return json.dumps(json.loads(body) | {"findings": [asdict(each) for each in findings]})


def _watch(look: Callable[[], _Screen]) -> None:
    """Prints the report until Ctrl-C: on a terminal in place, else one after the other.

    A gateway that stops answering is asked again. One that never answered is an error, most likely
    in the address.
    """
    screen = look()
    console = Console(highlight=False)
    try:
        with ExitStack() as stack:
            live = None
            if console.is_terminal:
                live = stack.enter_context(Live(console=console, auto_refresh=False))
            problem = screen.problem
            while True:
                if live is not None:
                    text = screen.text if problem is None else f"{problem}\n\n{screen.text}"
                    live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
                else:
                    for line in _news(screen, problem):
                        typer.echo(line, err=line is problem)
                time.sleep(WATCH_PERIOD_S)
                try:
                    screen = look()
                    problem = screen.problem
                except FleetUnavailableError as error:
                    problem = f"{error}; the fleet as it was last:"
    except KeyboardInterrupt:
        return


def _news(screen: _Screen, problem: str | None) -> Iterator[str]:
    """Yields what is printed where nothing is redrawn: not again what it was before a failure."""
    if problem is not None:
        yield problem
    if problem is None or problem == screen.problem:
        yield screen.text
