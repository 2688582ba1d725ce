"""Defines `slicewise replay LOG`: it reports whether today's policy would plan as the log did."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from autoscaling.replay import DecisionLogError, Replay, replay_log

_UNREADABLE, _DIFFERS = 2, 3


def replay_command(
    log: Annotated[Path, typer.Argument(help="A decision log, as the policy wrote it.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run today's policy on the observations in LOG and show where it plans otherwise.

    Exit status: 0 as it was planned, 3 differences, 2 the log cannot be read.
    """
    try:
        replay = replay_log(log)
    except DecisionLogError as error:
        typer.echo(f"slicewise replay: {error}", err=True)
        raise typer.Exit(_UNREADABLE) from error
    if as_json:
        typer.echo(json.dumps(asdict(replay)))
    else:
        _print(replay)
    if replay.differences:
        raise typer.Exit(_DIFFERS)


def _print(replay: Replay) -> None:
    typer.echo(
        f"{replay.num_decisions} decisions, {len(replay.differences)} would be planned otherwise"
    )
    if not replay.differences:
        return
    table = Table("AT (UTC)", "MODEL", "LOGGED", "TODAY", "TODAY'S ARITHMETIC")
    for each in replay.differences:
        table.add_row(
            f"{datetime.fromtimestamp(each.at_s, UTC):%Y-%m-%d %H:%M:%S}",
            each.model,
            _format_targets(each.logged),
            _format_targets(each.today),
            each.arithmetic,
        )
    Console().print(table)


def _format_targets(targets: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in sorted(targets.items())) or "none"
