"""The page of policies is what its results say, and figures and records are what they should be."""

from itertools import chain
from pathlib import Path

import msgspec
import pytest

from autoscaling.simulator.policies import POLICIES, SLICEWISE
from benchmarks.policies.aims import aims
from benchmarks.policies.cases import TUNING
from benchmarks.policies.choice import chosen_of
from benchmarks.policies.command import chosen_parts, with_stored
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
    HEADLINE,
    HELD_OUT,
    HINDSIGHT,
    LOWER_BOUND,
    Job,
    in_order,
    parts,
    together,
)
from benchmarks.policies.records import (
    PolicyRecord,
    PolicyResults,
    append,
    of_code,
    read_lines,
    read_results,
    write_results,
)
from benchmarks.policies.report import REPORT, RESULTS, updated
from benchmarks.policies.sources import code_of, fingerprint, syntax
from benchmarks.policies.worlds import AS_BELIEVED

_EMPTY = "before\n<!-- begin: measured -->\n<!-- end: measured -->\nafter"


def record(policy: str, seed: int, cost_usd: float, **changes: object) -> PolicyRecord:
    fields: dict[str, object] = {"world": AS_BELIEVED, "value": None, "slo_ratio": 0.995}
    return PolicyRecord(
        **({"case": HEADLINE, "policy": policy, "seed": seed, "commit": "abc"} | fields | changes),  # type: ignore[arg-type]
        cost_usd=cost_usd,
    )


def results(*records: PolicyRecord) -> PolicyResults:
    return PolicyResults("2026-11-26", "abc", "2 CPU cores", "3.11", records)


def test_page_is_what_the_stored_results_say() -> None:
    page = REPORT.read_text(encoding="utf-8")

    assert updated(page, read_results(RESULTS)) == page


def test_what_is_compared_is_of_one_code_and_of_jobs_that_there_are() -> None:
    stored = read_results(RESULTS)
    known = set(in_order(parts()))

    assert stored.records
    for jobs in together(parts()):
        compared = [each for each in stored.records if each.job in jobs]
        ours = {each.source for each in compared if each.policy == SLICEWISE}
        theirs = {each.source for each in compared if each.policy in POLICIES.keys() - {SLICEWISE}}
        yardsticks = {each.source for each in compared if each.policy not in POLICIES}
        assert len(ours) <= 1
        assert len(theirs) <= 1
        assert len(yardsticks) <= 1
    for each in stored.records:
        assert "dirty" not in each.commit
        assert each.job in known


def test_no_row_of_a_trace_is_in_what_is_kept() -> None:
    """Some traces have no licence: of them only sums over a whole run may be in the project."""
    kinds = {
        name: type(value)
        for each in read_results(RESULTS).records
        for name, value in msgspec.structs.asdict(each).items()
    }
    assert kinds["cost_usd"] is float
    assert set(kinds.values()) <= {str, int, float, type(None)}


def test_new_records_take_the_place_of_what_they_are_compared_with_and_of_nothing_else() -> None:
    day, batch, _floor = (next(iter(each)) for each in together(parts()))

    def of(job: Job, commit: str) -> PolicyRecord:
        return PolicyRecord(*job, commit=commit, cost_usd=1.0)

    stored = [of(day, "old"), of(batch, "older")]
    assert with_stored([of(batch, "new")], stored) == [of(batch, "new"), of(day, "old")]
    assert with_stored([of(day, "new")], stored) == [of(day, "new"), of(batch, "older")]
    assert with_stored([of(day, "new")], []) == [of(day, "new")]
    gone = of(Job("azure-day", "as believed", SLICEWISE, -1.0, 1), "old")
    assert with_stored([of(day, "new")], [gone]) == [of(day, "new")]


def test_batches_are_told_in_pairs_with_the_same_days_without_them() -> None:
    case, world = "spot-drought-48h", "batches of 4 h"
    lines = {"num_lines": 1000, "num_lines_in_time": 990, "lines_spot_usd": 50.0}
    table = Table(
        [
            record("slicewise", 1, 100.0, case=case, slo_ratio=0.995),
            record("slicewise", 2, 200.0, case=case, slo_ratio=0.995),
            record("slicewise", 1, 105.0, case=case, world=world, slo_ratio=0.994, **lines),
            record("slicewise", 2, 215.0, case=case, world=world, slo_ratio=0.995, **lines),
            record("slicewise", 3, 999.0, case=case, world=world, **lines),
        ]
    )
    found = batch_figures(table, case, world)
    assert found is not None
    assert (found.num_seeds, found.in_time) == (2, 0.99)
    assert found.added == pytest.approx(0.2)
    assert found.slo_change == pytest.approx(-0.0005)
    assert batch_figures(table, case, "batches of 1 h") is None
    row = next(each for each in aims(table) if each[0].startswith(f"`{case}`, {world}"))
    assert row[1:] == ("20%, -0.05 points, 99.00%", "no")


def test_costs_are_set_against_the_same_seed_of_another() -> None:
    table = Table(
        [
            *(record("slicewise", seed, 100.0 * seed) for seed in (1, 2, 3)),
            *(record("hpa", seed, 150.0 * seed) for seed in (1, 2)),
        ]
    )

    pairs = table.ratios(HEADLINE, "hpa", "slicewise")

    assert pairs is not None
    assert (pairs.lowest, pairs.highest) == (1.5, 1.5)


def test_page_has_a_row_a_policy_and_says_what_was_not_run() -> None:
    page = updated(
        _EMPTY,
        results(
            record("slicewise", 1, 4000.0),
            record("slicewise", 2, 4200.0),
            record(LOWER_BOUND, 1, 2000.0, slo_ratio=None),
            record(LOWER_BOUND, 2, 2000.0, slo_ratio=None),
            msgspec.structs.replace(record(HINDSIGHT, 1, 0.0), cost_usd=None, slo_ratio=None),
        ),
    )

    assert "| **slicewise** | 2 | 4,100 ± 1,271 | 2.05 ± 0.64 |" in page
    assert "| plan with hindsight | 1 | none keeps 99 % |" in page
    assert "- headline: 145 of 150 runs" in page
    assert page.startswith("before\n")
    assert page.endswith("\nafter")


def test_knob_that_is_chosen_is_the_cheapest_that_keeps_99_percent_over_all_days() -> None:
    def days(value: float | None, cost_usd: float, *ratios: float) -> list[PolicyRecord]:
        days = [(case, seed) for case in TUNING for seed in CHOICE_SEEDS]
        return [
            record("hpa", seed, cost_usd, case=case, value=value, slo_ratio=ratio)
            for (case, seed), ratio in zip(days[: len(ratios)], ratios, strict=True)
        ]

    def chosen(*values: list[PolicyRecord]) -> float | None:
        found = chosen_of(Table(chain.from_iterable(values)), "hpa")
        return None if found is None else found.value

    dear = [days(value, 300.0, 1, 1, 1, 1) for value in (0.5, 0.57)]
    kept = days(0.65, 200.0, 1, 1, 0.97, 0.99)
    missed = [days(value, 100.0, 1, 1, 1, 0.95) for value in (0.72, None)]
    assert chosen(*dear, kept, *missed, days(0.9, 50.0, 1, 1, 1, 0.9)) == 0.65
    assert chosen(*dear, kept, *missed, days(0.9, 50.0, 1, 1, 1)) is None
    none_keeps = [days(value, 100.0, 1, 1, 1, 0.95) for value in POLICIES["hpa"].knob.values[:-2]]
    best = days(None, 900.0, 1, 1, 1, 0.955)
    assert chosen(*none_keeps, best, days(0.9, 50.0, 1, 1, 1, 0.9)) == 0.8


def test_chosen_knobs_are_what_the_stored_results_of_the_tuning_set_say() -> None:
    table = Table(read_results(RESULTS).records)

    found = {name: chosen_of(table, name) for name in POLICIES}
    assert {name: each.value for name, each in found.items() if each} == CHOSEN


def test_cost_of_who_serves_far_less_is_not_set_against_ours() -> None:
    page = updated(
        _EMPTY,
        results(
            record("slicewise", 1, 4000.0, slo_ratio=0.995),
            record(LOWER_BOUND, 1, 2000.0, slo_ratio=None),
            record("hpa", 1, 5000.0, slo_ratio=0.991),
            record("dynamo-planner", 1, 1000.0, slo_ratio=0.45),
        ),
    )

    assert "| hpa | 1 | 5,000 | 2.50 |  | 1.25 | 99.10% |" in page
    assert "| dynamo-planner | 1 | 1,000 | 0.50 |  | serves less | 45.00% |" in page


def test_cost_at_a_level_lies_between_neighbouring_points() -> None:
    points = [CurvePoint(1, 100.0, 0.98), CurvePoint(2, 200.0, 0.99), CurvePoint(3, 400.0, 0.999)]

    # Misses go from 2 to 1 %, and half of the way in their logarithm is 1.41 %.
    assert cost_at(points, 1 - 0.02 / 2**0.5) == pytest.approx(150.0)
    assert cost_at([CurvePoint(1, 100.0, 0.98), CurvePoint(2, 300.0, 1.0)], 0.99) < 120.0
    assert is_between(points, 0.985)
    assert not is_between(points, 0.97)
    assert cost_at(points, 0.97) == 100.0
    assert cost_at(points, 0.9995) is None
    # A point that costs less and serves better is what one would take.
    assert cost_at([*points, CurvePoint(4, 120.0, 0.995)], 0.985) == pytest.approx(110.0, abs=40)


def test_points_of_a_curve_are_means_over_its_days_and_only_of_what_was_run_on_all() -> None:
    def day(seed: int, value: float | None, cost_usd: float, slo_ratio: float) -> PolicyRecord:
        of_day = {"case": HELD_OUT, "value": value, "slo_ratio": slo_ratio}
        return record("hpa-ladder", seed, cost_usd, **of_day)

    cheap = [day(seed, None, 100.0 * seed, 0.98) for seed in (1, 2, 3)]
    dear = [day(seed, 0.5, 300.0 * seed, 0.99 + 0.002 * seed) for seed in (1, 2, 3)]
    table = Table([*cheap, *dear, day(1, 0.65, 150.0, 0.99)])

    dear_point, cheap_point = curve(table, HELD_OUT, "hpa-ladder", (1, 2, 3))
    assert (cheap_point.value, cheap_point.cost_usd) == (0.8, 200.0)
    assert (dear_point.value, dear_point.cost_usd) == (0.5, 600.0)
    assert dear_point.slo_ratio == pytest.approx(0.994)


def test_aim_at_equal_service_is_told_at_the_level_that_both_reach() -> None:
    def days(policy: str, cost_usd: float, slo_ratio: float) -> list[PolicyRecord]:
        return [
            record(policy, seed, cost_usd, case=HELD_OUT, slo_ratio=slo_ratio) for seed in (1, 2, 3)
        ]

    def found(ours: float, theirs: float) -> tuple[str, str]:
        table = Table([*days("slicewise", 70.0, ours), *days("hpa-ladder", 100.0, theirs)])
        row = next(each for each in aims(table) if each[0].startswith(f"`{HELD_OUT}`: cost"))
        return row[1], row[2]

    assert found(0.996, 0.996) == ("0.70 at 99.5%", "yes")
    assert found(0.992, 0.996) == ("0.70 at 99.0%", "no")
    assert found(0.98, 0.996)[0] == "not known"


def test_curves_are_drawn_for_policies_that_have_points() -> None:
    table = Table([record("hpa", 1, 5000.0), record("hpa", 1, 6000.0, value=0.65)])

    curves = {name: curve(table, HEADLINE, name, (1,)) for name in POLICIES}
    svg = drawn(curves, "policies", HEADLINE)

    assert "hpa" in svg
    assert "spothedge" not in svg


def test_records_go_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    first, second = record("slicewise", 1, 1.0), record("slicewise", 2, 2.0)
    append(lines, first)
    with lines.open("ab") as file:
        file.write(b'{"case": "azure-d')

    assert list(read_lines(lines)) == [first]
    append(lines, second)
    assert list(read_lines(lines)) == [first, second]


def test_records_of_other_code_are_not_taken_as_done() -> None:
    ours, theirs = record("slicewise", 1, 1.0, source="a"), record("hpa", 1, 1.0, source="b")
    now = {"slicewise": "a2", "hpa": "b"}

    assert of_code([ours, theirs], now.__getitem__) == {theirs.job: theirs}
    assert of_code([record("slicewise", 1, 1.0)], now.__getitem__) == {}


def test_what_is_said_of_code_is_no_part_of_its_fingerprint() -> None:
    assert syntax("x = 1  # one\n") == syntax('"""Words."""\n\nx  =  1\n')
    assert syntax('def f():\n    """Words."""\n    return 1') == syntax("def f():\n    return 1")
    assert syntax("x = 1") != syntax("x = 2")
    assert syntax("if a:\n    b()\nelse:\n    'no'") == syntax("if a:\n    b()\nelse:\n    'c'")


def test_policy_is_part_of_what_its_own_runs_come_from_and_not_of_others() -> None:
    ours, theirs = code_of(SLICEWISE), code_of("hpa")

    assert ours > theirs
    assert {each for each in ours - theirs if not each.startswith("autoscaling.policy.")} == set()
    yardsticks = {each for each in code_of(LOWER_BOUND) if "simulator.bounds." in each}
    assert yardsticks == code_of(LOWER_BOUND) - theirs
    assert "autoscaling.simulator.bounds.lower_bound" in yardsticks
    both = {"autoscaling.policy.rules", "autoscaling.simulator.world.kernel"}
    assert both | {"benchmarks.policies.cases", "serving.domain.capacity.slice_profile"} < theirs
    assert fingerprint("hpa") == fingerprint("spothedge") != fingerprint(SLICEWISE)
    assert fingerprint(LOWER_BOUND) not in (fingerprint("hpa"), fingerprint(SLICEWISE))


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = results(record("slicewise", 1, 1.0), record("hpa", 1, 2.0))

    write_results(tmp_path / "results.json", written)

    assert read_results(tmp_path / "results.json") == written


def test_first_seeds_of_all_parts_come_before_second_ones() -> None:
    jobs = in_order(parts())

    seeds = [job.seed for job in jobs]
    assert seeds == sorted(seeds)
    assert len(jobs) == len(set(jobs))
    assert jobs[0] == Job(HEADLINE, AS_BELIEVED, "slicewise", None, 1)


def test_unknown_part_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="no part nonsense; allowed: headline, curves"):
        chosen_parts("headline,nonsense")
    assert [part.name for part in chosen_parts("scale")] == ["scale"]
