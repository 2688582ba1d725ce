"""`slicewise ledger`: where the fleet's chip-hours went, and what they cost.

Reads the gateways' metrics pages and prints one table of them, for people or for a file.
"""

import http.client
import time
from typing import Annotated
from urllib.parse import urlsplit

import typer

from serving.ledger.table import LedgerPageError, Page, lines, merge, parse_page, to_csv

DEFAULT_URL = "http://127.0.0.1:8000"
_UNUSABLE = 2


class _UnreadableError(Exception):
    """No metrics page came; the message says why."""


def ledger_command(
    *,
    urls: Annotated[
        list[str] | None,
        typer.Option(
            "--url",
            help="Address of a gateway or of the Serve proxy; again for each gateway. "
            f"[default: {DEFAULT_URL}]",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="SLICEWISE_API_KEY", help="API key, where the gateway wants one."),
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="How long to wait for each.")] = 10.0,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print chip-seconds as CSV, for pandas or DuckDB.")
    ] = False,
) -> None:
    """Show chip-hours by state and their cost, by model and compute class.

    The chips are those of the whole fleet. The tokens, and so the price of a million, are those of
    the gateways read: with several gateways, give the address of each.
    """
    try:
        pages = [_read(url, api_key, timeout_s) for url in urls or [DEFAULT_URL]]
    except (_UnreadableError, LedgerPageError) as error:
        typer.echo(f"slicewise ledger: {error}", err=True)
        raise typer.Exit(_UNUSABLE) from error
    rows, now_s = merge(pages), time.time()
    if as_csv:
        typer.echo(to_csv(rows, now_s), nl=False)
        return
    num_gateways = len({page.gateway_id for page in pages})
    hours = (now_s - min(page.started_at_s for page in pages)) / 3600
    typer.echo(f"chip-hours of the last {hours:.2f} h; tokens of {num_gateways} gateway(s)")
    for line in lines(rows):
        typer.echo(line)


def _read(url: str, api_key: str | None, timeout_s: float) -> Page:
    connection, path = _door(url, timeout_s)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read().decode("utf-8")
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
        raise _UnreadableError(
            f"cannot read {url}: {error}; is a gateway running there?"
        ) from error
    finally:
        connection.close()
    if answer.status == http.HTTPStatus.UNAUTHORIZED:
        raise _UnreadableError(f"{url} wants an API key: give --api-key, or set SLICEWISE_API_KEY")
    if answer.status != http.HTTPStatus.OK:
        raise _UnreadableError(f"{url} answered HTTP {answer.status}; is it a Slicewise gateway?")
    return parse_page(body)


def _door(url: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
    """A connection, not opened yet, and the path of its metrics page.

    Not `urllib`, which follows redirects and would carry the API key along.
    """
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    try:
        address = urlsplit(url)
        host = address.netloc.rpartition("@")[2]
        connection = kinds[address.scheme](host, timeout=timeout_s)
    except (KeyError, ValueError, http.client.InvalidURL) as error:
        raise _UnreadableError(
            f"not an address: {url!r}; allowed: such as {DEFAULT_URL}"
        ) from error
    return connection, f"{address.path.rstrip('/')}/metrics"
