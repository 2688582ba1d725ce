"""Defines the command lines of `slicewise simulate` and `slicewise plan`, nothing else.

The code behind them is imported when it runs: every `slicewise` command loads this module.
"""

from pathlib import Path
from typing import Annotated

import typer

_Trace = Annotated[
    Path | None,
    typer.Option(
        help="Requests from this trace (Azure, Mooncake, JSON lines) instead of the scenario's."
    ),
]
_Spot = Annotated[
    list[Path] | None,
    typer.Option(
        help="Spot capacity from this file (SkyPilot's format); once per spot class, in order."
    ),
]
_Prices = Annotated[
    Path | None, typer.Option(help="Prices of yours, asked before those that ship with Slicewise.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def simulate_command(
    scenario: Annotated[
        str, typer.Argument(help="A scenario's YAML file, or the name of one that ships.")
    ],
    *,
    trace: _Trace = None,
    spot: _Spot = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="Seed, once or more; else the scenario's own.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policy to play, once or more; else all of them.")
    ] = None,
    as_json: _Json = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for result.json and report.html.")
    ] = None,
    prices: _Prices = None,
) -> None:
    """Compare autoscaling policies in a simulated day: cost, service, and a lower bound."""
    # NumPy, SciPy, Numba and matplotlib take seconds to import.
    from autoscaling.simulator.preparation import Replacements  # noqa: PLC0415
    from autoscaling.simulator.session import run_simulate  # noqa: PLC0415

    files = Replacements(trace, tuple(spot or ()))
    run_simulate(
        scenario, files, seed or (), policy or (), is_json=as_json, out=out, prices_file=prices
    )


def plan_command(
    *,
    model: Annotated[
        str | None, typer.Option(help="Model that is planned for; the profile has to be of it.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Capacity profile of one slice; else the scenario's."),
    ] = None,
    slo: Annotated[
        str | None, typer.Option(help="Objectives in seconds, as ttft=2,tpot=0.1.")
    ] = None,
    trace: _Trace = None,
    rate: Annotated[
        float | None, typer.Option(min=0.0, help="Mean requests per second over a day.")
    ] = None,
    scenario: Annotated[
        str, typer.Option(help="Scenario whose compute classes and shape of day are taken.")
    ] = "azure-day",
    seed: Annotated[int, typer.Option(help="Seed of requests and capacity.")] = 1,
    as_json: _Json = False,
    prices: _Prices = None,
) -> None:
    """Say which classes and how many slices a load takes, what it costs, and what without spot."""
    from autoscaling.simulator.preparation import Replacements  # noqa: PLC0415 - as above
    from autoscaling.simulator.session import run_plan  # noqa: PLC0415

    files = Replacements(trace)
    run_plan(scenario, model, profile, slo, rate, files, seed, is_json=as_json, prices_file=prices)
