"""The days of one fleet are what they are said to be, and the page is what its record says."""

from benchmarks.one_fleet import quota_days, report, shape_days
from benchmarks.one_fleet.records import REPORT, read_record
from serving.domain.capacity.slice_profile import CapacityProfile


def test_page_is_what_its_record_says() -> None:
    page = REPORT.read_text(encoding="utf-8")
    assert report.updated(page, read_record()) == page


def test_record_has_every_day_of_every_seed() -> None:
    record = read_record()
    quotas = [(each.case, each.way, each.seed) for each in record.quotas.runs]
    assert quotas == [
        (case.name, way.name, seed)
        for case in quota_days.CASES
        for way in quota_days.WAYS
        for seed in quota_days.SEEDS
    ]
    shapes = [(each.case, each.way, each.seed) for each in record.shapes.runs]
    assert shapes == [
        (case.name, way.name, seed)
        for case in shape_days.CASES
        for way in shape_days.WAYS
        for seed in shape_days.SEEDS
    ]


def test_all_ways_of_a_case_have_the_same_requests() -> None:
    record = read_record()
    for runs in (record.quotas.runs, record.shapes.runs):
        counts: dict[tuple[str, int, str], set[int]] = {}
        for run in runs:
            for model, day in run.models.items():
                counts.setdefault((run.case, run.seed, model), set()).add(day.num_requests)
        assert all(len(each) == 1 for each in counts.values())


def test_small_slice_has_half_of_the_chips_and_none_of_their_overhead() -> None:
    large = CapacityProfile.model_validate(
        {
            "model": "m",
            "engine": "paced",
            "generation": "v6e",
            "topology": "2x4",
            "base_s": 0.03,
            "per_sequence_s": 0.0005,
            "per_prompt_token_s": 0.00012,
            "max_num_seqs": 256,
            "measured_on": "2026-11-28",
            "source": "made up",
        }
    )
    small = shape_days.small_profile(large)
    assert (small.topology, small.per_sequence_s) == ("2x2", 0.001)
    assert large.base_s < small.base_s < 2 * large.base_s
