"""Defines `slicewise scorecard` and `slicewise compare`: finished runs, judged or compared."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from loadtest.errors import ExitCode, LoadTestError

_Folder = Annotated[Path, typer.Argument(exists=True, file_okay=False, metavar="DIR")]
_SloFile = Annotated[
    Path | None, typer.Option("--slo", exists=True, dir_okay=False, help="File of objectives.")
]


def scorecard_command(
    directory: _Folder,
    slo: _SloFile = None,
    prices: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="USD per chip and hour, by compute class."),
    ] = None,
) -> None:
    """Judge the load test in DIR again: scorecard.json, report.html, the table.

    Exits with 0 when all is well, 1 when requests failed, 3 when an objective was missed, 4 when
    the client itself distorted the numbers.
    """
    # Plots take half a second to import, and every `slicewise` command loads this module.
    from loadtest.recorder import merge_parts  # noqa: PLC0415
    from loadtest.report.outputs import write_outputs  # noqa: PLC0415
    from loadtest.scorecard.prices import read_prices  # noqa: PLC0415
    from loadtest.scorecard.slo import read_slo  # noqa: PLC0415

    with _refusals():
        level = read_slo(slo) if slo is not None else None
        usd_per_chip_hour = read_prices(prices) if prices is not None else None
        merge_parts(directory)  # of a run whose command was killed
        code = write_outputs(directory, level, usd_per_chip_hour)
    raise typer.Exit(code)


def compare_command(
    dir_a: Annotated[Path, typer.Argument(exists=True, file_okay=False, metavar="DIR_A")],
    dir_b: Annotated[Path, typer.Argument(exists=True, file_okay=False, metavar="DIR_B")],
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for JSON and page.")
    ] = None,
    slo: _SloFile = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap.")] = 0,
) -> None:
    """Say how the load test in DIR_B differs from the one in DIR_A, and how sure that is.

    Exits with 4 when the client of either distorted its numbers.
    """
    from loadtest.report.outputs import write_comparison  # noqa: PLC0415 - as above
    from loadtest.scorecard.slo import read_slo  # noqa: PLC0415

    with _refusals():
        level = read_slo(slo) if slo is not None else None
        code = write_comparison(dir_a, dir_b, out, level, seed)
    raise typer.Exit(code)


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except LoadTestError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(ExitCode.USAGE) from error
