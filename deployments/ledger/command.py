"""Defines `slicewise ledger`: it reports the fleet's chip-hours by use, and what they cost.

Reads the gateways' metrics pages and prints one table of them, for people or for a file.
"""

import http.client
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, NoReturn
from urllib.parse import urlsplit

import typer

from deployments.ledger.daily import LedgerReading, TableFileError, parse_reading
from deployments.ledger.table import LedgerPageError, hours_table, merge, parse_page, to_csv
from deployments.status.gateway import DEFAULT_URL, ApiKeyOption
from deployments.terminal import plain_lines

_UNUSABLE = 2


class _UnreadableError(Exception):
    """Reports that no metrics page came; the message gives the reason."""


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
    api_key: ApiKeyOption = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="How long to wait for each.")] = 10.0,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print chip-seconds as CSV, for pandas or DuckDB.")
    ] = False,
    parquet: Annotated[
        Path | None, typer.Option(help="Write the sums of now to this Parquet file instead.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Keep one Parquet file a day in this folder instead, until Ctrl-C."),
    ] = None,
    every_s: Annotated[
        float, typer.Option("--every", min=1, max=3600, help="Seconds between two readings.")
    ] = 60.0,
) -> None:
    """Show chip-hours by state and their cost, by model and compute class.

    The chips are those of the whole fleet. The tokens, and so the price of a million, are those of
    the gateways read: with several gateways, give the address of each.
    """
    urls = urls or [DEFAULT_URL]
    if sum((as_csv, parquet is not None, record is not None)) > 1:
        typer.echo("slicewise ledger: give one of --csv, --parquet and --record", err=True)
        raise typer.Exit(_UNUSABLE)
    try:
        if record is not None:
            _record(record, every_s, lambda: _readings(urls, api_key, timeout_s))
        if parquet is not None:
            _write_parquet(parquet, _readings(urls, api_key, timeout_s))
            return
        pages = [parse_page(_read(url, api_key, timeout_s)) for url in urls]
    except (_UnreadableError, LedgerPageError, TableFileError, OSError) as error:
        typer.echo(f"slicewise ledger: {error}", err=True)
        raise typer.Exit(_UNUSABLE) from error
    rows, now_s = merge(pages), time.time()
    if as_csv:
        typer.echo(to_csv(rows, now_s), nl=False)
        return
    num_gateways = len({page.gateway_id for page in pages})
    hours = (now_s - min(page.started_at_s for page in pages)) / 3600
    typer.echo(f"chip-hours of the last {hours:.2f} h; tokens of {num_gateways} gateway(s)")
    typer.echo("\n".join(plain_lines(hours_table(rows))))


def _readings(urls: Iterable[str], api_key: str | None, timeout_s: float) -> list[LedgerReading]:
    return [parse_reading(_read(url, api_key, timeout_s), time.time()) for url in urls]


def _write_parquet(path: Path, readings: Iterable[LedgerReading]) -> None:
    """Writes the sums of the gateway that has counted longest, as the table of a day."""
    # Imported here, because pyarrow takes a while, and no other command should wait for it.
    from deployments.ledger.parquet import DayTable, write_table  # noqa: PLC0415
    from deployments.ledger.record import utc_day  # noqa: PLC0415

    longest = min(readings, key=lambda reading: reading.started_at_s)
    day = utc_day(longest.at_s)
    write_table(path, DayTable(day, longest.started_at_s, longest.at_s, longest.sums))
    typer.echo(f"written: {path}, {len(longest.sums)} rows")


def _record(folder: Path, every_s: float, read: Callable[[], list[LedgerReading]]) -> NoReturn:
    """Reads until Ctrl-C. Gateways that do not answer are asked again: they count meanwhile."""
    from deployments.ledger.record import LedgerRecorder, wait_s  # noqa: PLC0415 - as above

    recorder = LedgerRecorder(folder)
    try:
        while True:
            try:
                path = recorder.take(read())
                typer.echo(f"read: {path or 'what the first increase will be counted from'}")
            except (_UnreadableError, LedgerPageError) as error:
                typer.echo(f"slicewise ledger: {error}; asked again", err=True)
            time.sleep(wait_s(time.time(), every_s))
    except KeyboardInterrupt:
        raise typer.Exit from None


def _read(url: str, api_key: str | None, timeout_s: float) -> str:
    connection, path = _connection_to(url, timeout_s)
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
    return body


def _connection_to(url: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
    # Not `urllib`, which follows redirects and would carry the API key along.
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
