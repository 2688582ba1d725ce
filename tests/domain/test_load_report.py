"""What is told to Serve's controller comes out as it went in, and only while it counts."""

from dataclasses import replace

import pytest

from serving.domain.load_report import (
    ListedLoss,
    ListedSlice,
    LoadSample,
    StatsError,
    directory_stats,
    fleet_report_of_stats,
    load_of_stats,
    load_stats,
    misses_objectives,
)
from serving.domain.slice_lifecycle import EndCause, SliceLifecycle, SliceState
from serving.domain.slice_records import EngineRecord, SliceRecord, Snapshot
from serving.domain.supply.faults import SliceFaults
from serving.domain.supply.found import find_slices
from serving.domain.supply.orders import NO_ORDERS, OperatorOrder, OrderKind
from serving.domain.supply.survey import survey
from tests.supply_builders import group_of, hosts_of, life, pods_of

# As a model may be called and a life of a second slice is.
MODEL, LIFE = "google/gemma-3:27b-it@v1+x", "engine-a#b7~2"
SAMPLE = LoadSample(2.5, 3, 1.25, 7, 100.5, 20.0, 0.5, 4, 2, 0.75)
LOADING = (
    SliceLifecycle.begin(100.25)
    .enter(SliceState.RESERVED, 130.5, "held", slice_name="s")
    .enter(SliceState.LOADING, 140.125, "starts")
)


def test_load_comes_back_as_it_was() -> None:
    stats = load_stats(MODEL, SAMPLE) | load_stats("other", replace(SAMPLE, num_waiting=0))
    assert load_of_stats(MODEL, stats) == SAMPLE
    assert load_of_stats("nobody", stats) is None


def test_gateway_of_an_earlier_build_says_nothing_of_batch_work() -> None:
    stats = load_stats(MODEL, SAMPLE)
    earlier = {name: value for name, value in stats.items() if "batch" not in name}
    assert load_of_stats(MODEL, earlier) == replace(
        SAMPLE, batch_requests_per_s=0.0, num_batch_waiting=0, num_batch_in_flight=0
    )


def test_unknown_mean_is_left_out_and_stays_unknown() -> None:
    sample = replace(SAMPLE, output_tokens_mean=None)
    assert load_of_stats(MODEL, load_stats(MODEL, sample)) == sample


def test_slices_and_losses_come_back() -> None:
    waiting = SliceRecord("r-1", MODEL, "spot", SliceLifecycle.begin(50.0))
    lost = SliceRecord("r-0", MODEL, "spot", LOADING.end(EndCause.PREEMPTED, 190.0, "taken away"))
    engines = (EngineRecord("e-1", ("10.0.0.1", 2)),)
    adopted = SliceRecord(
        LIFE,
        MODEL,
        "spot",
        LOADING,
        engine_id="e-0",
        is_adopted=True,
        num_engines=2,
        others=engines,
    )
    snapshot = Snapshot("v", (waiting, adopted), (lost,))
    fleet_report = fleet_report_of_stats(directory_stats(snapshot, started_at_s=10.0, now_s=200.0))
    assert fleet_report is not None
    assert fleet_report.started_at_s == 10.0
    assert fleet_report.slices == (
        ListedSlice(MODEL, "spot", "r-1", SliceState.REQUESTED, 50.0, 50.0, None),
        ListedSlice(
            MODEL,
            "spot",
            LIFE,
            SliceState.LOADING,
            140.125,
            100.25,
            130.5,
            is_adopted=True,
            engine_ids=("e-0", "e-1"),
        ),
    )
    assert fleet_report.losses == (ListedLoss(MODEL, "spot", "r-0", EndCause.PREEMPTED, 190.0),)


def test_orders_come_back() -> None:
    orders = NO_ORDERS
    for kind, model, number in (
        (OrderKind.FREEZE, None, None),
        (OrderKind.PIN, MODEL, None),
        (OrderKind.PIN, None, 0),
    ):
        about = "spot" if kind == OrderKind.PIN else ""
        order = OperatorOrder(kind, "ada", "a | drill", 5.0, about)
        orders = orders.given(replace(order, model=model, num_replicas=number))
    report = fleet_report_of_stats(directory_stats(Snapshot("v"), 0.0, 10.0, orders))
    assert report is not None
    assert report.is_frozen
    assert set(report.pins) == {("spot", MODEL, None), ("spot", None, 0)}
    without = fleet_report_of_stats(directory_stats(Snapshot("v"), 0.0, 10.0))
    assert without is not None
    assert (without.is_frozen, without.pins) == (False, ())


@pytest.mark.parametrize("cause", list(EndCause))
def test_wished_and_expected_ends_are_no_losses(cause: EndCause) -> None:
    ended = SliceRecord("r", MODEL, "spot", LOADING.end(cause, 190.0, "over"))
    fleet_report = fleet_report_of_stats(
        directory_stats(Snapshot("v", (), (ended,)), 10.0, now_s=200.0)
    )
    assert fleet_report is not None
    assert bool(fleet_report.losses) == (
        cause not in (EndCause.RELEASED, EndCause.EXPIRED, EndCause.ADOPTED)
    )


def test_end_of_a_slice_and_what_comes_are_those_of_the_record_of_supply() -> None:
    hosts, booting = hosts_of("s-0"), pods_of("s-1")
    # The agents of the engine that has it now did not tell; those of the one before did.
    before = (replace(life("r-0", hosts, ends_at_s=9000.0), generation="v6e"),)
    lives = (life("r-1", hosts), life("r-2", at_s=5.0), life("r-3", at_s=6.0))
    found = find_slices(hosts, [group_of(pods_of("s-0"), booting)])
    known = survey(found, before, SliceFaults(), {}, 10.0)
    records = {record.incarnation: record for record in known}
    supply = survey(found, lives, SliceFaults(), records, 20.0)
    stats = directory_stats(Snapshot("v", lives, supply=supply), 0.0, now_s=30.0)
    fleet_report = fleet_report_of_stats(stats)
    assert fleet_report is not None
    told = {each.replica_id: (each.ends_at_s, each.coming_since_s) for each in fleet_report.slices}
    # One slice boots, and two wait: it is for the one that came first.
    assert told == {"r-1": (9000.0, None), "r-2": (None, 10.0), "r-3": (None, None)}


def test_old_loss_is_told_no_more() -> None:
    ended = SliceRecord("r", MODEL, "spot", LOADING.end(EndCause.PREEMPTED, 190.0, "over"))
    fleet_report = fleet_report_of_stats(
        directory_stats(Snapshot("v", (), (ended,)), 10.0, now_s=491.0)
    )
    assert fleet_report is not None
    assert fleet_report.losses == ()


def test_report_of_a_gateway_is_no_listing() -> None:
    assert fleet_report_of_stats(load_stats(MODEL, SAMPLE)) is None


@pytest.mark.parametrize(
    "name", ["slice|m|spot|r|ready", "slice|m|spot|r|asleep|1|", "lost|m|spot|r|bored"]
)
def test_stats_of_another_version_are_refused(name: str) -> None:
    with pytest.raises(StatsError, match="not in this version's form"):
        fleet_report_of_stats({"directory|started": 1.0, name: 2.0})


@pytest.mark.parametrize(
    ("met", "missed", "too_many"),
    [(19, 1, False), (18, 2, True), (0, 19, False), (95, 5, False), (94, 6, True), (0, 0, False)],
)
def test_misses_of_either_objective_are_too_many(met: int, missed: int, too_many: bool) -> None:
    assert misses_objectives(replace(SAMPLE, num_ttft_met=met, num_ttft_missed=missed)) == too_many
    assert misses_objectives(replace(SAMPLE, num_tpot_met=met, num_tpot_missed=missed)) == too_many
