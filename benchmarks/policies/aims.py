"""The aims that the table is judged by, each with what was found. Pure."""

from collections.abc import Iterator

from autoscaling.simulator.policies import SLICEWISE
from benchmarks.policies.batches import WINDOWS_S
from benchmarks.policies.cases import REPORTING, SCALE, TWO_DAYS
from benchmarks.policies.figures import Table, batch_figures, cost_at, curve
from benchmarks.policies.jobs import (
    CURVE_SEEDS,
    DROUGHT,
    HEADLINE,
    HELD_OUT,
    HINDSIGHT,
    SAFE_HINDSIGHT,
)

_SEED = 1
Row = tuple[str, str, str]


def aims(table: Table) -> list[Row]:
    """A row per aim: what was aimed at, what it is, and whether that meets it."""
    return [
        *_reporting(table),
        *(_wrong_profile(table, world) for world in ("profile +50 %", "profile -50 %")),
        *(_equal_service(table, case) for case in (HEADLINE, HELD_OUT)),
        _drought(table),
        *(_batches(table, case, world) for case in TWO_DAYS for world in WINDOWS_S),
        _scale(table),
    ]


def _reporting(table: Table) -> Iterator[Row]:
    for case in REPORTING:
        aim = f"`{case}`: SLO at least 99.5 % at most 1.35 of the lower bound"
        slo = table.spread(case, SLICEWISE, lambda each: each.slo_ratio)
        over = table.over_bound(case, SLICEWISE)
        if slo is None or over is None:
            yield _unknown(aim)
            continue
        yield _row(
            aim,
            f"{slo.mean:.2%} at {over.mean:.2f}",
            is_met=slo.mean >= 0.995 and over.mean <= 1.35,
        )


def _wrong_profile(table: Table, world: str) -> Row:
    aim = (
        f"{world}: SLO at least 99 % after the first hour at most 1.15 of the right profile's cost"
    )
    wrong = table.seeds(HEADLINE, SLICEWISE, world).get(_SEED)
    right = table.seeds(HEADLINE, SLICEWISE).get(_SEED)
    if not (wrong and right and wrong.cost_usd and right.cost_usd and wrong.later_slo_ratio):
        return _unknown(aim)
    ratio = wrong.cost_usd / right.cost_usd
    return _row(
        aim,
        f"{wrong.later_slo_ratio:.2%} at {ratio:.2f}",
        is_met=wrong.later_slo_ratio >= 0.99 and ratio <= 1.15,
    )


def _equal_service(table: Table, case: str) -> Row:
    aim = f"`{case}`: cost beside HPA on the ladder at an SLO of 99.5 %: at most 0.80"
    ours, theirs = (
        curve(table, case, name, CURVE_SEEDS[case]) for name in (SLICEWISE, "hpa-ladder")
    )
    for level in (0.995, 0.99, 0.985):
        ours_usd, theirs_usd = cost_at(ours, level), cost_at(theirs, level)
        if ours_usd is not None and theirs_usd is not None:
            found = f"{ours_usd / theirs_usd:.2f} at {level:.1%}"
            return _row(aim, found, is_met=level >= 0.995 and ours_usd <= 0.80 * theirs_usd)
    return _unknown(aim)


def _drought(table: Table) -> Row:
    aim = "`spot-drought`: at most 1.4 of the plan with hindsight"
    over = table.ratios(DROUGHT, SLICEWISE, HINDSIGHT)
    if over is None:
        return _unknown(aim)
    safe = table.ratios(DROUGHT, SLICEWISE, SAFE_HINDSIGHT)
    beside = "" if safe is None else f" ({safe.mean:.2f} of the one that keeps our floor)"
    return _row(aim, f"{over.mean:.2f}{beside}", is_met=over.mean <= 1.4)


def _batches(table: Table, case: str, world: str) -> Row:
    aim = (
        f"`{case}`, {world}: at most 20 % of what their tokens cost on spot, requests served as"
        " before (0.1 points), every line in time"
    )
    found = batch_figures(table, case, world)
    if found is None:
        return _unknown(aim)
    return _row(
        aim,
        f"{found.added:.0%}, {100 * found.slo_change:+.2f} points, {found.in_time:.2%}",
        is_met=found.added <= 0.2 and found.slo_change >= -0.001 and found.in_time == 1,
    )


def _scale(table: Table) -> Row:
    aim = "a thousand slices, 24 h, production policy and choice of engines: less than 5 minutes"
    found = table.seeds(SCALE, SLICEWISE).get(_SEED)
    if found is None:
        return _unknown(aim)
    return _row(aim, f"{found.wall_s / 60:.1f} minutes", is_met=found.wall_s < 300)


def _row(aim: str, found: str, *, is_met: bool) -> Row:
    return aim, found, "yes" if is_met else "no"


def _unknown(aim: str) -> Row:
    return aim, "not known", "not run, or not reached by the curve"
