"""`slicewise status`: which engines a gateway sees, and how busy they are.

Reads the gateway's `/fleet` and prints it. Owns the reader's half of that contract: it takes what
it knows and passes over what a newer gateway adds.
"""

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator
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


class ModelView(_Record):
    """One model: its engines, and the requests that wait for any of them."""

    name: str
    engines: tuple[EngineView, ...]
    waiting: int


class GatewayView(_Record):
    """The gateway that answered; another one may see other loads."""

    id: str
    uptime_s: float


class FleetView(_Record):
    """The answer of `/fleet`."""

    models: tuple[ModelView, ...]
    gateway: GatewayView


def status_command(
    *,
    url: Annotated[str, typer.Option(help="Address of the Serve proxy.")] = DEFAULT_URL,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="SLICEWISE_API_KEY", help="API key, where the gateway wants one."),
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="How long to wait.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as it came.")] = False,
) -> None:
    """Show the models, their engines and their load, as one gateway sees them."""
    try:
        body = fetch_fleet(url, api_key, timeout_s)
        if as_json:
            typer.echo(body)
            return
        lines = list(fleet_lines(parse_fleet(body)))
    except FleetUnavailableError as error:
        typer.echo(f"slicewise status: {error}", err=True)
        raise typer.Exit(_UNUSABLE) from error
    for line in lines:
        typer.echo(line)


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
    """The fleet as a table per model."""
    gateway = fleet.gateway
    yield f"gateway {gateway.id}, running for {duration_words(gateway.uptime_s)}"
    for model in fleet.models:
        yield ""
        yield f"{model.name}: {model.waiting} requests wait for an engine"
        if not model.engines:
            yield "  no engines"
            continue
        yield from _table([_HEADER, *(_cells(engine) for engine in model.engines)])


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
    known = (
        engine.engine_id,
        engine.compute_class,
        engine.state,
        None if since_s is None else duration_words(since_s),
        engine.num_running,
        engine.num_waiting,
        None if usage is None else f"{usage:.0%}",
        engine.in_flight,
    )
    return tuple("-" if value is None else str(value) for value in known)


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
