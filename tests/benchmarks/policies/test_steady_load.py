"""The fewest slices for a steady load are found, and the page is what its record says."""

import pytest

from benchmarks.policies.cases import prepared_case
from benchmarks.policies.steady import (
    CASES,
    IN_STEPS,
    LEVELS,
    REPORT,
    SEEDS,
    SteadyFleet,
    read_loads,
    steady_fleet,
    updated,
)


def test_page_is_what_its_record_says() -> None:
    page = REPORT.read_text(encoding="utf-8")
    assert updated(page, read_loads()) == page


def test_record_has_every_case_and_seed() -> None:
    found = [(each.case, each.seed) for each in read_loads().fleets]
    assert found == [
        (case, seed)
        for case in CASES
        for seed in SEEDS
        for _ in range(1 + len(IN_STEPS.get(case, ())))
    ]


def test_each_fleet_on_record_was_tried_from_what_its_work_takes_on() -> None:
    for each in read_loads().fleets:
        counts = [int(count) for count in each.slo_ratios]
        assert counts == list(range(counts[0], counts[-1] + 1))
        assert counts[0] - 1 < min(each.least_work.values())
        assert each.fewest(max(LEVELS)) == counts[-1]


def test_smallest_fleet_is_that_of_the_level() -> None:
    tried = {"3": 0.2, "4": 0.992, "5": 0.9949, "6": 0.997}
    fleet = SteadyFleet("a case", 1, 1024, 8.0, {"0.99": 2.5, "0.995": 2.0}, tried)
    assert (fleet.fewest(0.99), fleet.fewest(0.995)) == (4, 6)
    assert (fleet.over_work(0.99), fleet.over_work(0.995)) == (1.6, 3.0)


@pytest.mark.parametrize("case", ["azure-day", "azure-day-reserved"])
def test_fleet_of_one_slice_less_keeps_less(case: str) -> None:
    fleet = steady_fleet(case, prepared_case(case, 1, None), for_s=300.0)
    # A larger fleet may keep a hair less, by chance, once nearly all is kept.
    kept = list(fleet.slo_ratios.values())
    assert kept[-1] >= max(LEVELS) > max(kept[:-1])
    assert kept[0] < 0.9
    assert 1.0 < fleet.over_work(max(LEVELS)) < 2.0


def test_steps_without_room_for_the_prompts_take_more_slices() -> None:
    run = prepared_case("azure-day", 1, None)
    roomy, narrow = (steady_fleet("azure-day", run, 300.0, in_step) for in_step in (1024, 192))
    assert (roomy.in_step, narrow.in_step) == (1024, 192)
    assert narrow.fewest(0.99) > roomy.fewest(0.99)
