"""`slicewise status`: which slices and engines a gateway sees, and how busy they are.

Reads the gateway's `/fleet` and prints it, once or again and again. Owns the reader's half of that
contract: it takes what it knows and passes over what a newer gateway adds.
"""

import http.client
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Annotated
from urllib.parse import urlsplit

import typer
from pydantic import BaseModel, ConfigDict, ValidationError

DEFAULT_URL = "http://127.0.0.1:8000"

_UNUSABLE = 2
_HEADER = ("ENGINE", "COMPUTE CLASS", "STATE", "SINCE", "RUNNING", "WAITING", "KV", "IN FLIGHT")
MINUTE_S = 60
HOUR_S = 60 * MINUTE_S
DAY_S = 24 * HOUR_S

WATCH_PERIOD_S = 2.0
_SLICE_HEADER = (
    "SLICE", "COMPUTE CLASS", "STATE", "SINCE", "SHAPE", "HOSTS", "MODEL", "IN FLIGHT", "REASON",
)  # fmt: skip
# Each line is overwritten and what is left of it erased: a redraw that does not flicker.
_HOME, _ERASE_LINE, _ERASE_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class FleetUnavailableError(Exception):
    """The gateway's view of its fleet could not be read; the message says why and what to do."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class EngineView(_Record):
    """One engine. `None` means that the gateway does not know it (yet)."""

    engine_id: str | None = None
    compute_class: str | None = None
    state: str | None = None
    since_s: float | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    kv_usage_ratio: float | None = None
    in_flight: int | None = None


class HostView(_Record):
    """One host of a slice."""

    num_chips: int


class SliceView(_Record):
    """One slice, or a replica that waits for one. `None` means that there is none or none known."""

    name: str | None = None
    replica_id: str | None = None
    compute_class: str | None = None
    state: str | None = None
    since_s: float | None = None
    reason: str | None = None
    generation: str | None = None
    topology: str | None = None
    hosts: tuple[HostView, ...] = ()
    model: str | None = None
    in_flight: int | None = None


class ModelView(_Record):
    """One model: its engines, and the requests that wait for any of them."""

    name: str
    engines: tuple[EngineView, ...]
    waiting: int


class GatewayView(_Record):
    """The gateway that answered; another one may see other loads."""

    id: str
    uptime_s: float


class ChangeView(_Record):
    """A change of a compute class's slices, and why; of all classes where it names none."""

    compute_class: str
    delta: int
    reason: str


class PlanView(_Record):
    """The scaling plan of one model."""

    model: str
    targets: dict[str, int]
    arithmetic: str = ""
    next_slice_in_s: float | None = None
    refusals: tuple[ChangeView, ...] = ()
    alerts: tuple[str, ...] = ()


class AutoscalingView(_Record):
    """The last scaling plans. `age_s` is `None` when there was none yet."""

    age_s: float | None = None
    alerts: tuple[str, ...] = ()
    models: tuple[PlanView, ...] = ()


class FleetView(_Record):
    """The answer of `/fleet`.

    `slices` is `None` when the gateway is too old to tell of them, `autoscaling` where nothing
    scales.
    """

    models: tuple[ModelView, ...]
    gateway: GatewayView
    slices: tuple[SliceView, ...] | None = None
    autoscaling: AutoscalingView | None = None


def status_command(
    *,
    url: Annotated[str, typer.Option(help="Address of the Serve proxy.")] = DEFAULT_URL,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="SLICEWISE_API_KEY", help="API key, where the gateway wants one."),
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="How long to wait.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as it came.")] = False,
    is_watching: Annotated[
        bool, typer.Option("--watch", help="Print it again every 2 s until Ctrl-C.")
    ] = False,
) -> None:
    """Show the models, their engines and slices, and their load, as one gateway sees them."""

    def look() -> list[str]:
        body = fetch_fleet(url, api_key, timeout_s)
        return [body] if as_json else list(fleet_lines(parse_fleet(body)))

    try:
        if is_watching:
            _watch(look)
        else:
            _print_lines(look())
    except FleetUnavailableError as error:
        typer.echo(f"slicewise status: {error}", err=True)
        raise typer.Exit(_UNUSABLE) from error


def _print_lines(lines: list[str]) -> None:
    for line in lines:
        typer.echo(line)


def _watch(look: Callable[[], list[str]]) -> None:
    """Prints what `look` finds until Ctrl-C: on a terminal in place, else one after the other.

    A gateway that stops to answer is asked again. One that does not answer at first is an error,
    most likely of the address.
    """
    lines, problem = look(), None
    try:
        while True:
            if sys.stdout.isatty():
                typer.echo(_screen(lines if problem is None else [problem, "", *lines]), nl=False)
            elif problem is None:
                _print_lines(lines)
            else:
                typer.echo(problem, err=True)
            time.sleep(WATCH_PERIOD_S)
            try:
                lines, problem = look(), None
            except FleetUnavailableError as error:
                problem = f"{error}; the fleet as it was last:"
    except KeyboardInterrupt:
        return


def _screen(lines: list[str]) -> str:
    """The lines as they overwrite what is on the terminal, cut to its size."""
    columns, rows = shutil.get_terminal_size()
    fitting = (
        lines if len(lines) < rows else [*lines[: rows - 2], f"… {len(lines) - rows + 2} more"]
    )
    return _HOME + "".join(f"{line[:columns]}{_ERASE_LINE}\n" for line in fitting) + _ERASE_BELOW


def fetch_fleet(url: str, api_key: str | None, timeout_s: float) -> str:
    """The JSON text of `/fleet`.

    Raises:
        FleetUnavailableError: nobody answers there, or not with the fleet.
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
        raise FleetUnavailableError(_status_words(address, error.code)) from error
    # A timeout while the body is read, unlike one before it, is not a URLError.
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
        reason = getattr(error, "reason", error)
        raise FleetUnavailableError(
            f"cannot read {address}: {reason}; is `serve run serve_config.yaml` running there?"
        ) from error


def parse_fleet(body: str) -> FleetView:
    """The fleet in the JSON text `body`.

    Raises:
        FleetUnavailableError: it is not the answer of a gateway of ours.
    """
    try:
        return FleetView.model_validate_json(body)
    except ValidationError as error:
        where = ", ".join(".".join(map(str, detail["loc"])) or "all" for detail in error.errors())
        raise FleetUnavailableError(
            f"the answer is not a fleet (wrong at: {where}); is that address a Slicewise gateway?"
        ) from error


def fleet_lines(fleet: FleetView) -> Iterator[str]:
    """The fleet: a table of engines per model, one of all slices, and what is planned."""
    gateway = fleet.gateway
    yield f"gateway {gateway.id}, running for {duration_words(gateway.uptime_s)}"
    for model in fleet.models:
        yield ""
        yield f"{model.name}: {model.waiting} requests wait for an engine"
        if not model.engines:
            yield "  no engines"
            continue
        yield from _table([_HEADER, *(_cells(engine) for engine in model.engines)])
    if fleet.slices is not None:
        yield ""
        yield f"slices: {_counts(fleet.slices)}"
        if fleet.slices:
            ordered = sorted(fleet.slices, key=_slice_order)
            yield from _table([_SLICE_HEADER, *(_slice_cells(each) for each in ordered)])
    if fleet.autoscaling is not None:
        yield ""
        yield from _plan_lines(fleet.autoscaling)


def _plan_lines(autoscaling: AutoscalingView) -> Iterator[str]:
    age = "" if autoscaling.age_s is None else f", planned {duration_words(autoscaling.age_s)} ago"
    yield f"autoscaling{age}"
    yield from (f"  ALERT {alert}" for alert in _words(*autoscaling.alerts))
    for plan in autoscaling.models:
        targets = ", ".join(f"{name} {count}" for name, count in sorted(plan.targets.items()))
        coming = ""
        if plan.next_slice_in_s is not None:
            coming = f"; next slice in {duration_words(plan.next_slice_in_s)}"
        yield from _words(f"  {plan.model}: {targets or 'no slices'}{coming}")
        yield from (f"    ALERT {alert}" for alert in _words(*plan.alerts))
        yield from _words(f"    {plan.arithmetic}")
        for each in plan.refusals:
            name = each.compute_class or "all classes"
            yield from _words(f"    refused: {name} {each.delta:+d}: {each.reason}")


def duration_words(seconds: float) -> str:
    """Two units at most: `42s`, `3m10s`, `5h02m`, `2d03h`."""
    whole = int(seconds)
    if whole < MINUTE_S:
        return f"{whole}s"
    if whole < HOUR_S:
        return f"{whole // MINUTE_S}m{whole % MINUTE_S:02d}s"
    if whole < DAY_S:
        return f"{whole // HOUR_S}h{whole % HOUR_S // MINUTE_S:02d}m"
    return f"{whole // DAY_S}d{whole % DAY_S // HOUR_S:02d}h"


def _cells(engine: EngineView) -> tuple[str, ...]:
    since_s, usage = engine.since_s, engine.kv_usage_ratio
    return _words(
        engine.engine_id,
        engine.compute_class,
        engine.state,
        None if since_s is None else duration_words(since_s),
        engine.num_running,
        engine.num_waiting,
        None if usage is None else f"{usage:.0%}",
        engine.in_flight,
    )


def _slice_cells(row: SliceView) -> tuple[str, ...]:
    shape = [word for word in (row.generation, row.topology) if word is not None]
    return _words(
        # What has no name is told apart by its replica; a waiting one has nothing else.
        row.name or row.replica_id,
        row.compute_class,
        row.state,
        None if row.since_s is None else duration_words(row.since_s),
        " ".join(shape) or None,
        _hosts_words(row.hosts),
        row.model,
        row.in_flight,
        row.reason,
    )


def _hosts_words(hosts: tuple[HostView, ...]) -> str | None:
    """Such as `4 x 4 chips`: hosts times the chips of each, or all chips where hosts differ."""
    if not hosts:
        return None
    chips = [host.num_chips for host in hosts]
    if len(set(chips)) == 1:
        return f"{len(hosts)} x {chips[0]} chips"
    return f"{len(hosts)}, {sum(chips)} chips"


def _slice_order(row: SliceView) -> tuple[str, bool, str]:
    return row.compute_class or "", row.name is None, row.name or row.replica_id or ""


def _counts(slices: tuple[SliceView, ...]) -> str:
    counts = Counter(row.state or "unknown" for row in slices)
    words = [f"{count} {state}" for state, count in sorted(counts.items())]
    return ", ".join(words) or "none"


def _words(*values: object) -> tuple[str, ...]:
    # What came from elsewhere may not move the cursor or colour the terminal.
    texts = ("-" if value is None else str(value) for value in values)
    return tuple("".join(c if c.isprintable() else "?" for c in text) for text in texts)


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield ("  " + "  ".join(cells)).rstrip()


def _status_words(address: str, status: int) -> str:
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
