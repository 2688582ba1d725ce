"""The tables of the two commands, for a terminal. Pure: records in, rich tables out."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from autoscaling.simulator.capacity_plan import CapacityPlan
from autoscaling.simulator.comparison import PolicyComparison, PolicyResult, SeedSpread
from autoscaling.simulator.preparation import UsedPrice

# Together they fit into eighty columns.
_HEADINGS = ("USD", "static", "bound", "known", "served", "SLO", "worst", "slices")


def comparison_table(comparison: PolicyComparison) -> Table:
    """Makes one row per policy; means over the seeds, with half the 95 % interval.

    The costs stand beside the static fleet's, the lower bound, and what was `known`: the plan with
    hindsight that keeps the service level. `worst` is the worst seed's SLO. Slices are those held
    on average, and at most.
    """
    objectives = comparison.objectives
    table = Table(
        title=f"{comparison.scenario}: {comparison.duration_s / 3600:g} h, seeds "
        f"{', '.join(map(str, comparison.seeds))}, demand {comparison.mean_demand_slices:.1f} "
        f"slices on average; TTFT {objectives.ttft_words}, TPOT {objectives.tpot_s:g} s",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("policy", no_wrap=True)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in comparison.policies:
        table.add_row(result.name, *_cells(result))
    blank = [""] * (len(_HEADINGS) - 1)
    played = [each for each in comparison.yardsticks if each.cost_usd is not None]
    if len(played) == len(comparison.yardsticks):
        costs = SeedSpread.of([each.cost_usd or 0.0 for each in played])
        slo = SeedSpread.of([each.slo_ratio or 0.0 for each in played])
        cells = ("", "", "1.00x", "", f"{slo.mean:.2%}", f"{slo.lowest:.2%}", "")
        table.add_row("hindsight", _usd(costs), *cells, style="dim")
    least = SeedSpread.of([each.lower_bound_usd for each in comparison.yardsticks])
    table.add_row("lower bound", _usd(least), *blank, style="dim")
    return table


def plan_tables(plan: CapacityPlan) -> Iterator[Table]:
    """Yields one table per operating point."""
    for situation in plan.operating_points:
        table = Table(
            title=f"{plan.profile.model} at {plan.mean_requests_per_s:.3g} requests/s, "
            f"{situation.name}: {situation.usd_per_month:,.0f} USD/month, "
            f"{situation.usd_per_million_tokens:.3f} USD per million tokens, "
            f"served {situation.served_ratio:.3%}, SLO {situation.slo_ratio:.2%}",
            title_justify="left",
        )
        table.add_column("class")
        for heading in ("slices on average", "peak", "USD/month"):
            table.add_column(heading, justify="right")
        for use in situation.uses:
            table.add_row(
                use.compute_class,
                f"{use.mean_slices:.1f}",
                str(use.peak_slices),
                f"{use.usd_per_month:,.0f}",
            )
        yield table


def price_lines(prices: Sequence[UsedPrice]) -> Iterator[str]:
    """Yields one line per price, so that a reader knows where the dollars come from."""
    for used in prices:
        price_text = f"{used.compute_class}: {used.usd_per_slice_hour:.3f} USD per slice-hour"
        price = used.price
        if price is None:
            yield f"{price_text} (the scenario's own figure)"
            continue
        doubt = "" if price.is_verified else " - UNVERIFIED, override it"
        yield (
            f"{price_text} ({price.usd_per_chip_hour:g} per chip-hour, {price.generation} "
            f"{price.market} in {price.region}, read {price.read}{doubt})"
        )


def _cells(result: PolicyResult) -> tuple[str, ...]:
    static, known = result.multiple("vs_on_demand"), result.multiple("vs_hindsight")
    return (
        _usd(result.spread("cost_usd")),
        "" if static is None else f"{static - 1:+.0%}",
        f"{result.spread('vs_lower_bound').mean:.2f}x",
        "" if known is None else f"{known:.2f}x",
        f"{result.spread('served_ratio').mean:.2%}",
        f"{result.spread('slo_ratio').mean:.2%}",
        f"{result.spread('slo_ratio').lowest:.2%}",
        f"{result.spread('mean_slices').mean:.2f}/{result.spread('peak_slices').highest:.0f}",
    )


def _usd(spread: SeedSpread) -> str:
    digits = 2 if spread.mean < 100 else 0
    margin = "" if spread.margin is None else f" ±{spread.margin:,.{digits}f}"
    return f"{spread.mean:,.{digits}f}{margin}"
