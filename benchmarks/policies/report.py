"""The page `docs/results/policies.md`, from the results beside it.

`python -m benchmarks.policies.report` writes the page anew from the results, without a run.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from autoscaling.simulator.comparison import SeedSpread
from autoscaling.simulator.policies import POLICIES, SLICEWISE
from benchmarks.measured_part import with_measured
from benchmarks.policies.aims import aims
from benchmarks.policies.batches import WINDOWS_S
from benchmarks.policies.cases import REPORTING, SCALE, SHIPPED, TUNING, TWO_DAYS
from benchmarks.policies.choice import LEVEL, chosen_of, tried
from benchmarks.policies.curves import drawn
from benchmarks.policies.figures import (
    CurvePoint,
    Table,
    batch_figures,
    cost_at,
    curve,
    is_between,
)
from benchmarks.policies.jobs import (
    CHOICE_SEEDS,
    CHOSEN,
    CURVE_SEEDS,
    HEADLINE,
    HELD_OUT,
    HINDSIGHT,
    IN_WORLDS,
    LOADING_BOUND,
    LOWER_BOUND,
    SAFE_HINDSIGHT,
    parts,
)
from benchmarks.policies.records import PolicyRecord, PolicyResults, read_results
from benchmarks.policies.worlds import AS_BELIEVED, WORLDS

REPORT = Path(__file__).resolve().parents[2] / "docs/results/policies.md"
RESULTS, PLOT = REPORT.with_suffix(".json"), REPORT.with_suffix(".svg")
CHOICE_PLOT = REPORT.with_name("policies-tuning.svg")
_LEVELS = (0.985, 0.99, 0.995, 0.999)
# Of what is told of one day alone.
_SEED = 1
# Who serves half a point less than ours does not do the same, and its cost is not set against ours.
_FAR_BELOW = 0.005
_LESS_SERVICE = "serves less"
_EQUAL_HEADS = ("policy", "knob", "points", *(f"USD at {level:.1%}" for level in _LEVELS))
_CHOICE_HEADS = ("policy", "knob", "ships", "USD", "SLO", "chosen", "USD", "SLO")


def write_report(results: PolicyResults) -> None:
    """Puts the measured part into the page, and draws the curves beside it once there are any."""
    page = REPORT.read_text(encoding="utf-8")
    REPORT.write_text(updated(page, results), encoding="utf-8")
    table = Table(results.records)
    of_day = {name: curve(table, HEADLINE, name, CURVE_SEEDS[HEADLINE]) for name in POLICIES}
    if any(of_day.values()):
        PLOT.write_text(drawn(of_day, "policies", HEADLINE), encoding="utf-8")
    of_choice = {name: tried(table, name) for name in POLICIES}
    if any(of_choice.values()):
        days = "days of the tuning set"
        CHOICE_PLOT.write_text(drawn(of_choice, "policies-tuning", days), encoding="utf-8")


def updated(page: str, results: PolicyResults) -> str:
    """Returns the page with the tables of these results in place of the old ones.

    Raises:
        ValueError: the lines that they stand between are not there.
    """
    return with_measured(page, lambda: "\n\n".join(_sections(results)))


def _sections(results: PolicyResults) -> Iterator[str]:
    table = Table(results.records)
    yield _conditions(results)
    yield f"### Aims\n\n{_rows(('aim', 'is', 'met'), aims(table))}"
    yield f"### `{HEADLINE}`, settings as shipped\n\n{_case(table, HEADLINE)}"
    if equal := list(_at_equal_service(table, HEADLINE)):
        yield (
            f"### Cost at equal service\n\n`{HEADLINE}`, {_seeds(HEADLINE)}; between "
            f"neighbouring points of the knob a straight line over the logarithm of the share that "
            f"misses.\n\n{_rows(_EQUAL_HEADS, equal)}\n\n"
            "![Cost over the share outside the objectives, a line per policy](policies.svg)"
        )
    if equal := list(_at_equal_service(table, HELD_OUT)):
        yield (
            f"`{HELD_OUT}`, of the reporting set, {_seeds(HELD_OUT)}: mean cost and service of a "
            f"day.\n\n{_rows(_EQUAL_HEADS, equal)}"
        )
    groups = (
        ("Reporting set", REPORTING),
        ("Other scenarios", SHIPPED[1:]),
        ("Tuning set", TUNING),
    )
    for title, cases in groups:
        shown = [case for case in cases if any(table.seeds(case, name) for name in POLICIES)]
        if shown:
            yield f"### {title}"
            yield from (f"`{case}`:\n\n{_case(table, case)}" for case in shown)
    if choice := list(_choice(table)):
        num_days = len(TUNING) * len(CHOICE_SEEDS)
        yield (
            f"### Knobs chosen on the tuning set\n\nMeans of {num_days} days "
            f"(seeds {', '.join(map(str, CHOICE_SEEDS))} of each case). Chosen is the cheapest "
            f"value of those that were tried that keeps {LEVEL:.0%}; without any, the one that "
            f"keeps most.\n\n{_rows(_CHOICE_HEADS, choice)}\n\n"
            "![Cost over the share outside the objectives on these days](policies-tuning.svg)"
        )
    if worlds := list(_worlds(table)):
        heads = ("world", "policy", "USD", "of as believed", "SLO", "after the first hour")
        yield f"### Wrong worlds\n\n`{HEADLINE}`, seed {_SEED}.\n\n{_rows(heads, worlds)}"
    if batches := list(_batches(table)):
        heads = ("case", "batches", "seeds", "added cost, of spot", "SLO, points", "lines in time")
        commits = {each.commit for each in results.records if each.case in TWO_DAYS}
        yield (
            f"### Batches of a fifth of all tokens\n\nAt {', '.join(sorted(commits))}, in pairs "
            f"with the same days without them.\n\n{_rows(heads, batches)}"
        )
    for record in table.seeds(SCALE, SLICEWISE).values():
        yield f"### A thousand slices\n\n{_scale(record)}"
    yield f"### Not run\n\n{_not_run(table)}"


def _conditions(results: PolicyResults) -> str:
    commits = " and ".join(sorted({each.commit for each in results.records}))
    return (
        f"Simulated until {results.date}, at {commits}: {len(results.records)} runs, each with the "
        "fingerprint of its code (`source`, where commits may have got other names since). "
        f"{results.machine}, Python {results.python}. ± is half of the 95 % interval of the "
        "mean over paired seeds (Student's t); without it there was one seed."
    )


def _case(table: Table, case: str) -> str:
    heads = (
        *("policy", "seeds", "USD", "of the lower bound", "of hindsight"),
        *("of slicewise, in pairs", "SLO", "worst", "slices"),
    )
    return _rows(heads, _case_rows(table, case))


def _case_rows(table: Table, case: str) -> Iterator[Sequence[str]]:
    for name, compared in POLICIES.items():
        yield from _case_row(table, case, name, None)
        if name in CHOSEN and (value := compared.knob.shown(CHOSEN[name])) is not None:
            yield from _case_row(table, case, name, value)
    for name in (HINDSIGHT, SAFE_HINDSIGHT, LOADING_BOUND, LOWER_BOUND):
        yield from _case_row(table, case, name, None)


def _case_row(table: Table, case: str, name: str, value: float | None) -> Iterator[Sequence[str]]:
    """A row; none where nothing was run. Who serves far less than ours has no ratio to it."""
    seeds = table.seeds(case, name, value=value)
    if not seeds:
        return
    cost = table.spread(case, name, lambda each: each.cost_usd, value=value)
    slo = table.spread(case, name, lambda each: each.slo_ratio, value=value)
    ours = table.spread(case, SLICEWISE, lambda each: each.slo_ratio)
    is_far_below = bool(slo and ours and slo.mean < ours.mean - _FAR_BELOW)

    bound = table.over_bound(case, name, value=value)
    hindsight = table.ratios(case, name, HINDSIGHT, value=value)
    pairs = table.ratios(case, name, SLICEWISE, value=value)
    is_ours = name == SLICEWISE and value is None
    yield (
        _row_name(name, value),
        str(len(seeds)),
        "none keeps 99 %" if cost is None else _spread(cost, _digits(cost.mean)),
        _spread(bound if name != LOWER_BOUND else None, ".2f"),
        _spread(hindsight if name in POLICIES else None, ".2f"),
        _LESS_SERVICE if is_far_below else _spread(None if is_ours else pairs, ".2f"),
        "" if slo is None else f"{slo.mean:.2%}",
        "" if slo is None else f"{slo.lowest:.2%}",
        _mean(table.spread(case, name, lambda each: each.mean_slices, value=value)),
    )


def _row_name(name: str, value: float | None) -> str:
    if value is not None:
        return f"{name}, `{POLICIES[name].knob.name}` {value:g}"
    return f"**{name}**" if name == SLICEWISE else name


def _choice(table: Table) -> Iterator[Sequence[str]]:
    for name, compared in POLICIES.items():
        chosen, knob = chosen_of(table, name), compared.knob
        if chosen is not None:
            ships = next(each for each in tried(table, name) if each.value == knob.shipped)
            yield name, f"`{knob.name}`", *_tried(ships), *_tried(chosen)


def _tried(each: CurvePoint) -> tuple[str, str, str]:
    return f"{each.value:g}", f"{each.cost_usd:,.0f}", f"{each.slo_ratio:.2%}"


def _at_equal_service(table: Table, case: str) -> Iterator[Sequence[str]]:
    for name, compared in POLICIES.items():
        points = curve(table, case, name, CURVE_SEEDS[case])
        if len(points) < 2:
            continue
        knob = compared.knob
        costs = [cost_at(points, level) for level in _LEVELS]
        yield (
            name,
            f"`{knob.name}` {', '.join(f'{each:g}' for each in knob.values)}",
            str(len(points)),
            *(
                _level(cost, is_bracketed=is_between(points, level))
                for cost, level in zip(costs, _LEVELS, strict=True)
            ),
        )


def _seeds(case: str) -> str:
    seeds = CURVE_SEEDS[case]
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"


def _level(cost_usd: float | None, *, is_bracketed: bool) -> str:
    """The cost at a level; where the whole curve is above it nobody knows how much less it is."""
    if cost_usd is None:
        return "not reached"
    return f"{cost_usd:,.0f}" if is_bracketed else f"at most {cost_usd:,.0f}"


def _worlds(table: Table) -> Iterator[Sequence[str]]:
    for world in WORLDS:
        for name in IN_WORLDS:
            record = table.seeds(HEADLINE, name, world).get(_SEED)
            right = table.seeds(HEADLINE, name).get(_SEED)
            if world == AS_BELIEVED or record is None or not record.cost_usd:
                continue
            of_right = f"{record.cost_usd / right.cost_usd:.2f}" if right and right.cost_usd else ""
            yield (
                world,
                name,
                f"{record.cost_usd:,.0f}",
                of_right,
                "" if record.slo_ratio is None else f"{record.slo_ratio:.2%}",
                "" if record.later_slo_ratio is None else f"{record.later_slo_ratio:.2%}",
            )


def _batches(table: Table) -> Iterator[Sequence[str]]:
    for case in TWO_DAYS:
        for world in WINDOWS_S:
            found = batch_figures(table, case, world)
            if found is not None:
                yield (
                    f"`{case}`",
                    world.removeprefix("batches of "),
                    str(found.num_seeds),
                    f"{found.added:.0%}",
                    f"{100 * found.slo_change:+.2f}",
                    f"{found.in_time:.2%}",
                )


def _scale(record: PolicyRecord) -> str:
    return (
        f"`{SCALE}`, {record.num_requests or 0:,} requests in 24 h, {record.mean_slices or 0:,.0f} "
        f"slices on average, production policy and choice of engines: "
        f"{record.wall_s / 60:.1f} minutes, {record.cost_usd or 0:,.0f} USD, "
        f"{record.slo_ratio or 0:.2%} within the objectives."
    )


def _not_run(table: Table) -> str:
    lines = []
    for part in parts():
        missing = [job for job in part.jobs if table.find(job) is None]
        if missing:
            lines.append(f"- {part.name}: {len(missing)} of {len(part.jobs)} runs")
    return "\n".join(lines) or "Everything was run."


def _rows(heads: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _spread(spread: SeedSpread | None, digits: str) -> str:
    if spread is None:
        return ""
    margin = "" if spread.margin is None else f" ± {spread.margin:{digits}}"
    return f"{spread.mean:{digits}}{margin}"


def _digits(usd: float) -> str:
    return ",.2f" if usd < 100 else ",.0f"


def _mean(spread: SeedSpread | None) -> str:
    return "" if spread is None else f"{spread.mean:.1f}"


if __name__ == "__main__":
    write_report(read_results(RESULTS))
