"""Runs the two commands: reads, plays, prints, writes. It is the shell around pure modules.

Owns the order of things, the progress bar and the files written. Every error in an operator's
input ends in one line and exit status 2.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from autoscaling.prices.table import PriceError, PriceTable, price_table
from autoscaling.simulator.capacity_plan import (
    CapacityPlan,
    make_plan,
    plan_json,
    planned_scenario,
)
from autoscaling.simulator.comparison import PolicyComparison, Provenance, as_json, compare
from autoscaling.simulator.oracle import OracleError
from autoscaling.simulator.policies import POLICIES
from autoscaling.simulator.preparation import PreparedRun, Replacements, prepare_run
from autoscaling.simulator.report.page import report_page
from autoscaling.simulator.scenario import Scenario, ScenarioError, read_scenario
from autoscaling.simulator.tables import comparison_table, plan_tables, price_lines
from autoscaling.simulator.world.spot_capacity import SpotTraceError
from loadtest.workload.traces import TraceError
from serving.domain.capacity import ProfileError

_OPERATORS_ERRORS = (
    ScenarioError,
    PriceError,
    ProfileError,
    SpotTraceError,
    TraceError,
    OracleError,
)


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """The options of `slicewise simulate`; no seeds are the scenario's, no policies are all."""

    scenario: str
    trace: Path | None
    spot: tuple[Path, ...]
    seeds: tuple[int, ...]
    policies: tuple[str, ...]
    is_json: bool
    out: Path | None
    prices: Path | None


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of `slicewise plan`; what is `None` is the scenario's."""

    scenario: str
    model: str | None
    profile: Path | None
    slo: str | None
    trace: Path | None
    rate: float | None
    seed: int
    is_json: bool
    prices: Path | None


def run_simulate(options: SimulateOptions) -> None:
    """Plays the scenario and shows what came of it."""
    with _one_line_errors():
        names = _policy_names(options.policies)
        scenario = read_scenario(options.scenario)
        prices = price_table(options.prices)
        files = Replacements(options.trace, options.spot)
        runs = [
            prepare_run(scenario, seed, prices, files)
            for seed in options.seeds or tuple(scenario.seeds)
        ]
        console = Console(stderr=options.is_json)
        with _progress(console, len(runs) * (len(names) + 1)) as on_progress:
            comparison = compare(runs, names, _provenance(scenario, files), on_progress)
    document = as_json(comparison)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        written = json.dumps(document, indent=2, allow_nan=False)
        (options.out / "result.json").write_text(written + "\n", encoding="utf-8")
        (options.out / "report.html").write_text(report_page(comparison), encoding="utf-8")
    if options.is_json:
        typer.echo(json.dumps(document, allow_nan=False))
        return
    _print_comparison(console, comparison)
    if options.out is not None:
        console.print(f"written: {options.out / 'result.json'}, {options.out / 'report.html'}")


def run_plan(options: PlanOptions) -> None:
    """Plays our policy on the load, with spot and without, and shows what it takes."""
    with _one_line_errors():
        scenario = planned_scenario(
            read_scenario(options.scenario), options.profile, options.slo, options.rate
        )
        planned = scenario.profile.model
        if options.model not in (None, planned):
            raise ScenarioError(
                f"model is {options.model!r}, the profile is of {planned!r}; "
                "give the --profile of that model (`slicewise profile` measures it)"
            )
        run_setup = _staged(scenario, options, price_table(options.prices))
        plan = make_plan(run_setup)
    if options.is_json:
        typer.echo(json.dumps(plan_json(plan), allow_nan=False))
        return
    _print_plan(Console(), plan)


def _staged(scenario: Scenario, options: PlanOptions, prices: PriceTable) -> PreparedRun:
    return prepare_run(scenario, options.seed, prices, Replacements(options.trace))


def _policy_names(asked: tuple[str, ...]) -> tuple[str, ...]:
    if unknown := [name for name in asked if name not in POLICIES]:
        raise ScenarioError(f"policy is {', '.join(unknown)}; allowed: {', '.join(POLICIES)}")
    return tuple(dict.fromkeys(asked)) or tuple(POLICIES)


def _provenance(scenario: Scenario, files: Replacements) -> Provenance:
    load = scenario.load
    own = f"generated like {load.trace}" if load.kind == "day" else "generated, Poisson arrivals"
    trace = own if files.trace is None else f"file {files.trace.name}"
    spot = ", ".join(each.name for each in files.spot)
    return Provenance(trace, f"files {spot}" if spot else "generated by the scenario")


def _print_comparison(console: Console, comparison: PolicyComparison) -> None:
    console.print(comparison_table(comparison))
    console.print(f"Simulated, not measured. Requests: {comparison.trace}; profile: "
                  f"{comparison.profile_source}.")  # fmt: skip
    for line in price_lines(comparison.prices):
        console.print(line)


def _print_plan(console: Console, plan: CapacityPlan) -> None:
    for table in plan_tables(plan):
        console.print(table)
    for line in price_lines(plan.prices):
        console.print(line)


@contextmanager
def _progress(console: Console, num_plays: int) -> Iterator[Callable[[str, int, float], None]]:
    """Shows a bar over all plays, on the console."""
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
