"""Reports of gateways and directory become load and slices; what is missing has a name."""

from dataclasses import dataclass, replace

import pytest

from autoscaling.observations import (
    SETTLING_S,
    GatewayWatch,
    Report,
    ReportMissingError,
    Tokens,
    fleet_report_of,
    latest_reports,
    load_of,
    losses_of,
    slices_of,
)
from autoscaling.records import ModelLoad, SliceLoss, SliceView
from serving.domain.capacity.batch_due import BatchDue, DueWork, due_stats
from serving.domain.capacity.engine_rates import EngineRate, rate_stats
from serving.domain.compute_class import ComputeClass
from serving.domain.load_report import (
    FleetReport,
    ListedSlice,
    LoadSample,
    directory_stats,
    load_stats,
)
from serving.domain.slice_lifecycle import EndCause, SliceLifecycle, SliceState
from serving.domain.slice_records import SliceRecord, Snapshot

NOW_S = 10_000.0
ASSUMED = Tokens(512.0, 256.0)
SAMPLE = LoadSample(3.0, 2, 1.5, 7, 100.0, 20.0)


@dataclass(frozen=True)
class Point:
    timestamp: float
    value: float


def gateway(at_s: float = NOW_S, sample: LoadSample = SAMPLE) -> Report:
    return Report(at_s, load_stats("m", sample))


def directory(*records: SliceRecord, started_at_s: float = 0.0, at_s: float = NOW_S) -> Report:
    ended = tuple(record for record in records if record.state == SliceState.GONE)
    live = tuple(record for record in records if record.state != SliceState.GONE)
    return Report(at_s, directory_stats(Snapshot("v", live, ended), started_at_s, at_s))


# -- the newest report --


def test_only_names_of_the_newest_report_count() -> None:
    raw = {
        "slice|old": {"d": [Point(1.0, 5.0)]},
        "slice|new": {"d": [Point(1.0, 6.0), Point(3.0, 7.0)], "e": [Point(2.0, 8.0)]},
        "slice|gone": {"d": []},
        "running_requests": {"d": [Point(9.0, 1.0)]},
    }
    assert latest_reports(raw) == {
        "d": Report(3.0, {"slice|new": 7.0}),
        "e": Report(2.0, {"slice|new": 8.0}),
    }


# -- load --


def summed(*reports: Report | None, ages_s: tuple[float, ...] = ()) -> ModelLoad:
    gateways = {str(number): report for number, report in enumerate(reports)}
    ages = dict(zip(gateways, ages_s or (0.0,) * len(reports), strict=True))
    heard_s = {name: NOW_S - age_s for name, age_s in ages.items()}
    return load_of("m", gateways, heard_s, NOW_S, 60.0, ASSUMED)


def test_load_of_one_gateway_is_its_sample() -> None:
    load = summed(gateway())
    assert (load.at_s, load.requests_per_s, load.num_waiting) == (NOW_S, 3.0, 2)
    assert (load.oldest_wait_s, load.num_in_flight) == (1.5, 7)
    assert (load.input_tokens_mean, load.output_tokens_mean) == (100.0, 20.0)
    assert (load.late, load.left_out) == ((), ())


def test_gateways_add_up_and_their_means_weigh_by_rate() -> None:
    other = LoadSample(1.0, 5, 4.0, 1, 500.0, None, 0.5, 3, 2, 0.75)
    load = summed(gateway(), gateway(sample=other), ages_s=(0.0, 3.0))
    assert load == summed(gateway(sample=other), gateway(), ages_s=(3.0, 0.0))
    assert (load.at_s, load.requests_per_s, load.num_waiting) == (NOW_S - 3, 4.0, 7)
    assert (load.oldest_wait_s, load.num_in_flight) == (4.0, 8)
    assert load.input_tokens_mean == pytest.approx((3 * 100 + 500) / 4)
    assert load.output_tokens_mean == 20.0
    assert (load.batch_requests_per_s, load.num_batch_waiting) == (0.5, 3)
    assert (load.num_batch_in_flight, load.full_ratio) == (2, 0.75)


def test_every_gateway_tells_of_all_batches_so_the_one_that_knows_most_is_believed() -> None:
    due = BatchDue((DueWork(NOW_S + 60.0, 9), DueWork(NOW_S + 3600.0, 50)), 30.0, 40.0)
    less = BatchDue((DueWork(NOW_S + 60.0, 12),))
    reports = [Report(NOW_S, gateway().stats | due_stats("m", each)) for each in (less, due)]
    assert summed(gateway(), *reports).batch_due == due
    assert summed(gateway()).batch_due == BatchDue()


def test_engines_of_all_gateways_are_known() -> None:
    rates = [EngineRate(name, "spot", 1.0, 2.0, 0.04) for name in "ab"]
    reports = [Report(NOW_S, gateway().stats | rate_stats("m", [rate])) for rate in rates]
    assert summed(*reports).engines == tuple(rates)


def test_mean_that_nobody_knows_is_assumed_and_one_known_without_load_is_kept() -> None:
    idle = replace(SAMPLE, requests_per_s=0.0, output_tokens_mean=None)
    load = summed(gateway(sample=idle))
    assert (load.input_tokens_mean, load.output_tokens_mean) == (100.0, 256.0)


def test_late_gateway_is_no_load_of_zero_and_those_that_told_are_the_least() -> None:
    load = summed(gateway(), gateway(), Report(NOW_S, {}), None, ages_s=(0.0, 21.0, 0.0, 5.0))
    assert load.requests_per_s == 3.0
    assert load.late == (
        "gateway 1 is late: its load is 21 s old",
        "gateway 2 is silent: it has told no load of m",
        "gateway 3 is silent: it has told no load of m",
    )


def test_where_all_are_late_what_they_told_last_is_the_least() -> None:
    load = summed(gateway(), gateway(), ages_s=(21.0, 59.0))
    assert (load.requests_per_s, load.at_s, len(load.late)) == (6.0, NOW_S - 59.0, 2)


def test_gateway_that_is_silent_for_long_is_left_out() -> None:
    load = summed(gateway(), gateway(), None, ages_s=(0.0, 61.0, 61.0))
    assert (load.requests_per_s, load.late) == (3.0, ())
    assert load.left_out == (
        "gateway 1 is left out: it has told no load for 61 s; allowed: 60 s",
        "gateway 2 is left out: it has told no load for 61 s; allowed: 60 s",
    )


@pytest.mark.parametrize(
    ("reports", "ages_s", "reason"),
    [
        ((), (), "no gateway runs"),
        ((None,), (1.0,), "gateway 0 is silent"),
        ((gateway(),), (61.0,), "gateway 0 is left out"),
    ],
)
def test_missing_load_is_no_load_of_zero(
    reports: tuple[Report | None, ...], ages_s: tuple[float, ...], reason: str
) -> None:
    with pytest.raises(ReportMissingError, match=reason):
        summed(*reports, ages_s=ages_s)


def test_gateway_is_heard_of_by_the_clock_of_who_decides() -> None:
    watch = GatewayWatch("m")
    first = {"a": gateway(90.0), "b": None, "ahead": gateway(999.0), "other": Report(99.0, {})}
    assert watch.look(100.0, first) == {"a": 90.0, "b": 100.0, "ahead": 100.0, "other": 100.0}
    later = {"a": gateway(90.0), "b": None, "ahead": gateway(1001.0), "other": Report(104.0, {})}
    assert watch.look(105.0, later) == {"a": 90.0, "b": 100.0, "ahead": 105.0, "other": 100.0}
    assert watch.look(110.0, {"a": gateway(91.0)}) == {"a": 110.0}
    assert watch.look(115.0, {"b": None}) == {"b": 115.0}, "it was gone, and is new"


def test_gateway_is_heard_of_whichever_clock_is_set_back() -> None:
    watch = GatewayWatch("m")
    assert watch.look(4000.0, {"a": gateway(4000.0), "b": gateway(4000.0)}) == {
        "a": 4000.0,
        "b": 4000.0,
    }
    # Both clocks go back by an hour, and `a` reports on.
    assert watch.look(405.0, {"a": gateway(404.0), "b": gateway(4000.0)}) == {
        "a": 405.0,
        "b": 405.0,
    }
    assert watch.look(500.0, {"a": gateway(499.0), "b": gateway(4000.0)}) == {
        "a": 500.0,
        "b": 405.0,
    }, "silent since then, and not for an hour less"


# -- slices --


def test_slices_are_those_of_model_and_classes_with_their_end() -> None:
    held = SliceLifecycle.begin(NOW_S - 50).enter(SliceState.RESERVED, NOW_S - 20, "held")
    report = fleet_report_of(
        [
            directory(
                SliceRecord("r-2", "m", "flex-start", SliceLifecycle.begin(NOW_S - 9)),
                SliceRecord("r-1", "m", "flex-start", held),
                SliceRecord("r-3", "other", "flex-start", held),
                SliceRecord("r-4", "m", "unknown", held),
            )
        ],
        NOW_S,
        max_age_s=60.0,
    )
    terms = {"flex-start": ComputeClass("flex-start", 1.0, max_run_s=3600.0)}
    assert slices_of("m", report, terms) == (
        SliceView(
            "r-1", "flex-start", SliceState.RESERVED, NOW_S - 20, NOW_S - 50,
            expires_at_s=NOW_S - 20 + 3600,
        ),
        SliceView("r-2", "flex-start", SliceState.REQUESTED, NOW_S - 9, NOW_S - 9),
    )  # fmt: skip


def test_end_that_hosts_tell_counts_before_the_one_that_is_reckoned() -> None:
    reckoned = ListedSlice("m", "flex", "r-1", SliceState.READY, NOW_S, NOW_S - 50, NOW_S - 20)
    told = replace(reckoned, replica_id="r-2", ends_at_s=NOW_S + 600)
    waits = ListedSlice("m", "flex", "r-3", SliceState.PROVISIONING, NOW_S, NOW_S, None, None, 7.0)
    terms = {"flex": ComputeClass("flex", 1.0, max_run_s=3600.0)}
    views = slices_of("m", FleetReport(0.0, (reckoned, told, waits), ()), terms)
    assert [each.expires_at_s for each in views] == [NOW_S - 20 + 3600, NOW_S + 600, None]
    assert [each.coming_since_s for each in views] == [None, None, 7.0]


def test_requests_on_a_slice_are_those_of_its_engines() -> None:
    one = ListedSlice(
        "m", "spot", "r-1", SliceState.READY, NOW_S, NOW_S, NOW_S, engine_ids=("e-1",)
    )
    two = replace(one, replica_id="r-2", engine_ids=("e-2", "e-3", "new"))
    untold = replace(one, replica_id="r-3", engine_ids=("e-4",))
    # What a whole slice does if all its engines do the same.
    engines = [
        EngineRate(name, "spot", 0.0, tokens_per_s, 0.02)
        for name, tokens_per_s in (("e-1", 500.0), ("e-2", 1000.0), ("e-3", 1500.0))
    ]
    report = FleetReport(0.0, (one, two, untold), ())
    views = slices_of("m", report, {"spot": ComputeClass("spot", 1.0)}, engines)
    assert [each.num_in_flight for each in views] == [10, 25, 0]


def test_losses_are_those_of_the_model() -> None:
    ended = SliceLifecycle.begin(NOW_S - 50).end(EndCause.PREEMPTED, NOW_S - 5, "taken away")
    report = directory(
        SliceRecord("r-1", "m", "spot", ended), SliceRecord("r-2", "other", "spot", ended)
    )
    report = fleet_report_of([report], NOW_S, max_age_s=60.0)
    assert losses_of("m", report) == (SliceLoss("r-1", "spot", NOW_S - 5, "preempted"),)


def test_newest_of_two_directories_counts() -> None:
    record = SliceRecord("r", "m", "spot", SliceLifecycle.begin(NOW_S - 50))
    old, new = directory(record, at_s=NOW_S - 4), directory(at_s=NOW_S)
    assert fleet_report_of([old, new], NOW_S, 60.0).slices == ()
    assert fleet_report_of([new, old], NOW_S, 60.0).slices == ()


@pytest.mark.parametrize(
    ("reports", "reason"),
    [
        ([], "tells no slices"),
        ([Report(NOW_S, {})], "tells no slices"),
        ([directory(at_s=NOW_S - 61)], "list is 61 s old; allowed: 60 s"),
        ([directory(started_at_s=NOW_S - SETTLING_S + 0.1)], "has just started"),
        ([Report(NOW_S, {"directory|started": 1.0, "slice|?": 1.0})], "this version's form"),
    ],
)
def test_unknown_slices_are_not_all_lost(reports: list[Report], reason: str) -> None:
    with pytest.raises(ReportMissingError, match=reason):
        fleet_report_of(reports, NOW_S, max_age_s=60.0)
