"""Runs the two commands: reads, simulates, prints, writes. It is the shell around pure modules.

Owns the order of things, the progress bar and the files written. Every error in an operator's
input ends in one line and exit status 2.
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from autoscaling.prices.table import PriceError, price_table
from autoscaling.simulator.bounds.hindsight import HindsightError
from autoscaling.simulator.bounds.lower_bound import LowerBoundError
from autoscaling.simulator.capacity_plan import make_plan, plan_json, planned_scenario
from autoscaling.simulator.comparison import as_json, compare
from autoscaling.simulator.policies import CHOOSE_SHAPES, POLICIES
from autoscaling.simulator.preparation import Replacements, prepare_run
from autoscaling.simulator.report.page import report_page
from autoscaling.simulator.scenario import Scenario, ScenarioError, read_scenario
from autoscaling.simulator.tables import comparison_table, plan_tables, price_lines
from autoscaling.simulator.world.spot_capacity import SpotTraceError
from loadtest.workload.traces import TraceError
from serving.domain.capacity.slice_profile import ProfileError

_OPERATORS_ERRORS = (
    ScenarioError,
    PriceError,
    ProfileError,
    SpotTraceError,
    TraceError,
    HindsightError,
    LowerBoundError,
)


def run_simulate(
    scenario_name: str,
    files: Replacements,
    seeds: Sequence[int],
    policies: Sequence[str],
    *,
    is_json: bool,
    out: Path | None,
    prices_file: Path | None,
) -> None:
    """Simulates the scenario and shows the result. Without seeds its own; without policies all."""
    with _one_line_errors():
        scenario = read_scenario(scenario_name)
        names = _policy_names(policies, CHOOSE_SHAPES if scenario.has_shapes else POLICIES)
        prices = price_table(prices_file)
        runs = [prepare_run(scenario, seed, prices, files) for seed in seeds or scenario.seeds]
        console = Console(stderr=is_json)
        with _progress(console, len(runs) * (len(names) + 1)) as on_progress:
            comparison = compare(runs, names, on_progress, **_provenance(scenario, files))
    document = as_json(comparison)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        written = json.dumps(document, indent=2, allow_nan=False)
        (out / "result.json").write_text(written + "\n", encoding="utf-8")
        (out / "report.html").write_text(report_page(comparison), encoding="utf-8")
    if is_json:
        typer.echo(json.dumps(document, allow_nan=False))
        return
    console.print(comparison_table(comparison))
    console.print(f"Simulated, not measured. Requests: {comparison.trace}; profile: "
                  f"{comparison.profile_source}.")  # fmt: skip
    for line in price_lines(comparison.prices):
        console.print(line)
    if out is not None:
        console.print(f"written: {out / 'result.json'}, {out / 'report.html'}")


def run_plan(
    scenario_name: str,
    model: str | None,
    profile: Path | None,
    slo: str | None,
    rate: float | None,
    files: Replacements,
    seed: int,
    *,
    is_json: bool,
    prices_file: Path | None,
) -> None:
    """Simulates our policy with and without spot, and shows it; `None` is the scenario's value."""
    with _one_line_errors():
        scenario = planned_scenario(read_scenario(scenario_name), profile, slo, rate)
        planned = scenario.profile.model
        if model not in (None, planned):
            raise ScenarioError(
                f"model is {model!r}, the profile is of {planned!r}; "
                "give the --profile of that model (`slicewise profile` measures it)"
            )
        plan = make_plan(prepare_run(scenario, seed, price_table(prices_file), files))
    if is_json:
        typer.echo(json.dumps(plan_json(plan), allow_nan=False))
        return
    console = Console()
    for table in plan_tables(plan):
        console.print(table)
    for line in price_lines(plan.prices):
        console.print(line)


def _policy_names(asked: Sequence[str], able: Collection[str]) -> tuple[str, ...]:
    """Returns the policies to compare, each once; without any asked for, all that are `able`."""
    if unknown := [name for name in asked if name not in able]:
        raise ScenarioError(f"policy is {', '.join(unknown)}; allowed: {', '.join(able)}")
    return tuple(dict.fromkeys(asked)) or tuple(able)


def _provenance(scenario: Scenario, files: Replacements) -> dict[str, str]:
    """The sources of requests and of spot capacity, in words."""
    load = scenario.load
    own = f"generated like {load.trace}" if load.kind == "day" else "generated, Poisson arrivals"
    trace = own if files.trace is None else f"file {files.trace.name}"
    spot = ", ".join(each.name for each in files.spot)
    return {"trace": trace, "capacity": f"files {spot}" if spot else "generated by the scenario"}


@contextmanager
def _progress(console: Console, num_plays: int) -> Iterator[Callable[[str, int, float], None]]:
    """Shows a progress bar over all simulations, on the console."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("staging", total=num_plays)
        seen: dict[tuple[str, int], float] = {}

        def on_progress(name: str, seed: int, share: float) -> None:
            seen[name, seed] = share
            # Ticks come by the thousand; the bar need not show each.
            progress.update(
                task, description=f"{name}, seed {seed}", completed=len(seen) - 1 + share
            )

        yield on_progress


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except _OPERATORS_ERRORS as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
