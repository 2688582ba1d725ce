"""The page of policies is what its results say, and figures and records are what they should be."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.policies.command import chosen_parts
from benchmarks.policies.curves import drawn
from benchmarks.policies.figures import CurvePoint, Table, cost_at
from benchmarks.policies.jobs import HEADLINE, HINDSIGHT, LOWER_BOUND, Job, in_order, parts
from benchmarks.policies.records import (
    PolicyRecord,
    PolicyResults,
    append,
    of_commit,
    read_lines,
    read_results,
    write_results,
)
from benchmarks.policies.report import REPORT, RESULTS, updated
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


def test_results_are_of_one_commit_and_of_jobs_that_there_are() -> None:
    stored = read_results(RESULTS)
    known = set(in_order(parts()))

    assert stored.records
    for each in stored.records:
        assert each.commit == stored.commit
        assert "dirty" not in each.commit
        assert each.job in known


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
    assert "- headline: 135 of 140 runs" in page
    assert page.startswith("before\n")
    assert page.endswith("\nafter")


def test_cost_at_a_level_lies_between_neighbouring_points() -> None:
    points = [CurvePoint(1, 100.0, 0.98), CurvePoint(2, 200.0, 0.99), CurvePoint(3, 400.0, 0.999)]

    assert cost_at(points, 0.985) == pytest.approx(150.0)
    assert cost_at(points, 0.97) == 100.0
    assert cost_at(points, 0.9995) is None
    # A point that costs less and serves better is what one would take.
    assert cost_at([*points, CurvePoint(4, 120.0, 0.995)], 0.985) == pytest.approx(110.0, abs=40)


def test_curves_are_drawn_for_policies_that_have_points() -> None:
    table = Table([record("hpa", 1, 5000.0), record("hpa", 1, 6000.0, value=0.65)])

    svg = drawn(table, HEADLINE, 1)

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


def test_records_of_another_commit_are_not_taken_as_done(tmp_path: Path) -> None:
    old = msgspec.structs.replace(record("slicewise", 1, 1.0), commit="old")

    assert of_commit([old], "abc") == {}
    assert of_commit([old], "old") == {old.job: old}


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
