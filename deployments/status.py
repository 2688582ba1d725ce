"""Defines `slicewise status`: it shows the slices and engines a gateway knows, and their load.

Reads the gateway's `/fleet` and prints it, once or again and again. Owns the reader's half of that
contract: it takes what it knows and ignores what a newer gateway adds.
"""

import http.client
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Annotated
from urllib.parse import urlsplit

import typer
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from deployments.applied import describe_applied
from deployments.kubectl import Kubectl, KubectlError
from deployments.terminal import build_table, plain_lines, printable

DEFAULT_URL = "http://127.0.0.1:8000"
ApiKeyOption = Annotated[
    str | None,
    typer.Option(envvar="SLICEWISE_API_KEY", help="API key, where the gateway wants one."),
]

_UNUSABLE = 2
_HEADER = ("ENGINE", "COMPUTE CLASS", "STATE", "SINCE", "RUNNING", "WAITING", "KV", "IN FLIGHT")
MINUTE_S = 60
HOUR_S = 60 * MINUTE_S
DAY_S = 24 * HOUR_S

WATCH_PERIOD_S = 2.0
_HELD = "held"
_SUPPLY_HEADER = (
    "SLICE", "COMPUTE CLASS", "STATE", "SINCE", "UNTIL", "SHAPE", "FAILURES", "REASON",
)  # fmt: skip
_SLICE_HEADER = (
    "SLICE", "COMPUTE CLASS", "STATE", "SINCE", "SHAPE", "HOSTS", "MODEL", "IN FLIGHT", "REASON",
)  # fmt: skip


class FleetUnavailableError(Exception):
    """The gateway's view of its fleet could not be read; the message names cause and fix."""


class _Reported(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ReportedEngine(_Reported):
    """The report of one engine. `None` means that the gateway does not know it (yet)."""

    engine_id: str | None = None
    compute_class: str | None = None
    state: str | None = None
    since_s: float | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    kv_usage_ratio: float | None = None
    in_flight: int | None = None


class ReportedHost(_Reported):
    """The report of one host of a slice."""

    num_chips: int


class ReportedSlice(_Reported):
    """The report of one slice, or of a replica that waits for one; `None`: none, or unknown."""

    name: str | None = None
    replica_id: str | None = None
    compute_class: str | None = None
    state: str | None = None
    since_s: float | None = None
    reason: str | None = None
    generation: str | None = None
    topology: str | None = None
    hosts: tuple[ReportedHost, ...] = ()
    model: str | None = None
    in_flight: int | None = None


class ReportedSupply(_Reported):
    """The report of one slice that exists or was asked for, whoever has it."""

    name: str
    state: str
    since_s: float
    reason: str
    compute_class: str | None = None
    generation: str | None = None
    topology: str | None = None
    ends_in_s: float | None = None
    num_failures: int = 0
    replica_id: str | None = None


class ReportedModel(_Reported):
    """The report of one model: its engines, and the requests that wait for any of them."""

    name: str
    engines: tuple[ReportedEngine, ...]
    waiting: int


class ReportedGateway(_Reported):
    """The gateway that answered; another one may see other loads."""

    id: str
    uptime_s: float


class ReportedChange(_Reported):
    """The change of a compute class's slices, and why; of all classes where it names none."""

    compute_class: str
    delta: int
    reason: str


class ReportedPlan(_Reported):
    """The scaling plan of one model."""

    model: str
    targets: dict[str, int]
    arithmetic: str = ""
    next_slice_in_s: float | None = None
    refusals: tuple[ReportedChange, ...] = ()
    alerts: tuple[str, ...] = ()


class ReportedAutoscaling(_Reported):
    """The last scaling plans. `age_s` is `None` when there was none yet."""

    age_s: float | None = None
    alerts: tuple[str, ...] = ()
    models: tuple[ReportedPlan, ...] = ()


class ReportedFleet(_Reported):
    """The answer of `/fleet`.

    `slices` is `None` when the gateway is too old for them, `autoscaling` where nothing scales.
    """

    models: tuple[ReportedModel, ...]
    gateway: ReportedGateway
    slices: tuple[ReportedSlice, ...] | None = None
    supply: tuple[ReportedSupply, ...] = ()
    autoscaling: ReportedAutoscaling | None = None


def status_command(
    *,
    url: Annotated[str, typer.Option(help="Address of the Serve proxy.")] = DEFAULT_URL,
    api_key: ApiKeyOption = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="How long to wait.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as it came.")] = False,
    is_watching: Annotated[
        bool, typer.Option("--watch", help="Print it again every 2 s until Ctrl-C.")
    ] = False,
    rayservice: Annotated[
        str | None,
        typer.Option(help="Show as well what kubectl's cluster lacks of this RayService."),
    ] = None,
    namespace: Annotated[str, typer.Option(help="Namespace of --rayservice.")] = "serving",
) -> None:
    """Show the models, their engines and slices, and their load, as one gateway sees them."""

    def read_report() -> str:
        body = fetch_fleet(url, api_key, timeout_s)
        if as_json:
            return body
        lines = plain_lines(fleet_report(parse_fleet(body)))
        if rayservice is not None:
            lines += ["", *map(printable, _applied_lines(rayservice, namespace))]
        return "\n".join(lines)

    try:
        if is_watching:
            _watch(read_report)
        else:
            typer.echo(read_report())
    except FleetUnavailableError as error:
        typer.echo(f"slicewise status: {error}", err=True)
        raise typer.Exit(_UNUSABLE) from error


def _applied_lines(rayservice: str, namespace: str) -> Iterator[str]:
    try:
        yield from describe_applied(Kubectl(), rayservice, namespace)
    except KubectlError as error:
        # The fleet is what was asked for first.
        yield f"RayService {namespace}/{rayservice}: not read: {error}"


def _watch(read_report: Callable[[], str]) -> None:
    """Prints the report until Ctrl-C: on a terminal in place, else one after the other.

    A gateway that stops answering is asked again. One that never answered is an error, most likely
    in the address.
    """
    report, problem = read_report(), None
    console = Console(highlight=False)
    try:
        with ExitStack() as stack:
            screen = None
            if console.is_terminal:
                screen = stack.enter_context(Live(console=console, auto_refresh=False))
            while True:
                if screen is not None:
                    text = report if problem is None else f"{problem}\n\n{report}"
                    screen.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
                elif problem is None:
                    typer.echo(report)
                else:
                    typer.echo(problem, err=True)
                time.sleep(WATCH_PERIOD_S)
                try:
                    report, problem = read_report(), None
                except FleetUnavailableError as error:
                    problem = f"{error}; the fleet as it was last:"
    except KeyboardInterrupt:
        return


def fetch_fleet(url: str, api_key: str | None, timeout_s: float) -> str:
    """The JSON text of `/fleet`.

    Raises:
        FleetUnavailableError: nothing answers there, or not with the fleet.
    """
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise FleetUnavailableError(f"not an address: {url!r}; allowed: such as {DEFAULT_URL}")
    address = f"{url.rstrip('/')}/fleet"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(address, headers=headers)
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            body: bytes = response.read()
            return body.decode("utf-8")
    except urllib.error.HTTPError as error:
        error.close()
        raise FleetUnavailableError(_describe_status(address, error.code)) from error
    # A timeout while the body is read, unlike one before it, is not a URLError.
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
        reason = getattr(error, "reason", error)
        raise FleetUnavailableError(
            f"cannot read {address}: {reason}; is `serve run serve_config.yaml` running there?"
        ) from error


def parse_fleet(body: str) -> ReportedFleet:
    """The fleet in the JSON text `body`.

    Raises:
        FleetUnavailableError: it is not the answer of a gateway of ours.
    """
    try:
        return ReportedFleet.model_validate_json(body)
    except ValidationError as error:
        where = ", ".join(".".join(map(str, detail["loc"])) or "all" for detail in error.errors())
        raise FleetUnavailableError(
            f"the answer is not a fleet (wrong at: {where}); is that address a Slicewise gateway?"
        ) from error


def fleet_report(fleet: ReportedFleet) -> Group:
    """Returns the fleet: a table of engines per model, one of all slices, and what is planned."""
    gateway = fleet.gateway
    parts: list[RenderableType] = [
        _line(f"gateway {gateway.id}, running for {format_duration(gateway.uptime_s)}")
    ]
    for model in fleet.models:
        parts += [Text(), _line(f"{model.name}: {model.waiting} requests wait for an engine")]
        if model.engines:
            table = build_table(_HEADER, map(_cells, model.engines), 8)
            parts.append(Padding.indent(table, 2))
        else:
            parts.append(_line("  no engines"))
    if fleet.slices is not None:
        parts += [Text(), _line(f"slices: {_counts(fleet.slices)}")]
        if fleet.slices:
            rows = map(_slice_cells, sorted(fleet.slices, key=_slice_order))
            parts.append(Padding.indent(build_table(_SLICE_HEADER, rows, 9), 2))
    # A slice that a replica has is above, with its engine.
    unheld = [row for row in fleet.supply if row.state != _HELD]
    if unheld:
        parts += [Text(), _line(f"not held: {_counts(unheld)}")]
        rows = map(_supply_cells, sorted(unheld, key=_supply_order))
        parts.append(Padding.indent(build_table(_SUPPLY_HEADER, rows, 8), 2))
    if fleet.autoscaling is not None:
        parts += [Text(), *map(_line, _plan_lines(fleet.autoscaling))]
    return Group(*parts)


def _line(text: str) -> Text:
    return Text(printable(text))


def _plan_lines(autoscaling: ReportedAutoscaling) -> Iterator[str]:
    age = "" if autoscaling.age_s is None else f", planned {format_duration(autoscaling.age_s)} ago"
    yield f"autoscaling{age}"
    yield from (f"  ALERT {alert}" for alert in autoscaling.alerts)
    for plan in autoscaling.models:
        targets = ", ".join(f"{name} {count}" for name, count in sorted(plan.targets.items()))
        coming = ""
        if plan.next_slice_in_s is not None:
            coming = f"; next slice in {format_duration(plan.next_slice_in_s)}"
        yield f"  {plan.model}: {targets or 'no slices'}{coming}"
        yield from (f"    ALERT {alert}" for alert in plan.alerts)
        yield f"    {plan.arithmetic}"
        for refusal in plan.refusals:
            name = refusal.compute_class or "all classes"
            yield f"    refused: {name} {refusal.delta:+d}: {refusal.reason}"


def format_duration(seconds: float) -> str:
    """Formats two units at most: `42s`, `3m10s`, `5h02m`, `2d03h`."""
    whole = int(seconds)
    if whole < MINUTE_S:
        return f"{whole}s"
    if whole < HOUR_S:
        return f"{whole // MINUTE_S}m{whole % MINUTE_S:02d}s"
    if whole < DAY_S:
        return f"{whole // HOUR_S}h{whole % HOUR_S // MINUTE_S:02d}m"
    return f"{whole // DAY_S}d{whole % DAY_S // HOUR_S:02d}h"


def _cells(engine: ReportedEngine) -> tuple[object, ...]:
    since_s, usage = engine.since_s, engine.kv_usage_ratio
    return (
        engine.engine_id,
        engine.compute_class,
        engine.state,
        None if since_s is None else format_duration(since_s),
        engine.num_running,
        engine.num_waiting,
        None if usage is None else f"{usage:.0%}",
        engine.in_flight,
    )


def _slice_cells(row: ReportedSlice) -> tuple[object, ...]:
    shape = [word for word in (row.generation, row.topology) if word is not None]
    return (
        # What has no name is identified by its replica; a waiting one has nothing else.
        row.name or row.replica_id,
        row.compute_class,
        row.state,
        None if row.since_s is None else format_duration(row.since_s),
        " ".join(shape) or None,
        _format_hosts(row.hosts),
        row.model,
        row.in_flight,
        row.reason,
    )


def _format_hosts(hosts: tuple[ReportedHost, ...]) -> str | None:
    """Formats hosts as `4 x 4 chips`: hosts times chips each, or all chips where hosts differ."""
    if not hosts:
        return None
    chips = [host.num_chips for host in hosts]
    if len(set(chips)) == 1:
        return f"{len(hosts)} x {chips[0]} chips"
    return f"{len(hosts)}, {sum(chips)} chips"


def _slice_order(row: ReportedSlice) -> tuple[str, bool, str]:
    return row.compute_class or "", row.name is None, row.name or row.replica_id or ""


def _supply_cells(row: ReportedSupply) -> tuple[object, ...]:
    shape = [word for word in (row.generation, row.topology) if word is not None]
    return (
        row.name,
        row.compute_class,
        row.state,
        format_duration(row.since_s),
        None if row.ends_in_s is None else format_duration(row.ends_in_s),
        " ".join(shape) or None,
        row.num_failures or None,
        row.reason,
    )


def _supply_order(row: ReportedSupply) -> tuple[str, str]:
    return row.compute_class or "", row.name


def _counts(slices: Iterable[ReportedSlice | ReportedSupply]) -> str:
    counts = Counter(row.state or "unknown" for row in slices)
    words = [f"{count} {state}" for state, count in sorted(counts.items())]
    return ", ".join(words) or "none"


def _describe_status(address: str, status: int) -> str:
    if status == 401:
        return f"{address} wants an API key: give --api-key, or set SLICEWISE_API_KEY"
    if 300 <= status < 400:
        return f"{address} redirects (HTTP {status}); give the gateway's own address with --url"
    return f"{address} answered HTTP {status}; is that address a Slicewise gateway?"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows none: a redirect would carry the API key to another address."""

    def redirect_request(self, *_args: object, **_keywords: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect())
