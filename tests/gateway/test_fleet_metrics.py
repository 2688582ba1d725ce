"""Slice states, ends and plans are on the page under their registered names."""

from prometheus_client.registry import Collector

from serving.directory.supply_book import SupplyBook
from serving.domain.plan_report import ModelPlan, PlanChange, PlanReport
from serving.domain.slice_lifecycle import SliceLifecycle, SliceState, Transition
from serving.domain.slice_records import SliceRecord, Snapshot
from serving.domain.supply.faults import SliceFaults
from serving.gateway.metrics.fleet import PlanCollector, SliceCollector
from serving.ledger.endings import Endings
from tests.supply_builders import group_of, hosts_of, pods_of

NOW_S = 1000.0


def record(state: SliceState, at_s: float, slice_name: str | None = None) -> SliceRecord:
    life = SliceLifecycle((Transition(state, at_s, "the test says so"),), slice_name)
    return SliceRecord(f"{state}-{at_s}", "chat", "spot", life)


def plan(**changes: object) -> PlanReport:
    values: dict[str, object] = {
        "model": "chat",
        "decided_at_s": 990.0,
        "changed_at_s": None,
        "targets": {"spot": 3, "reserved": 1},
        "demand_slices": 4.0,
        "next_slice_at_s": None,
        "arithmetic": "",
        "changes": (),
        "refusals": (
            PlanChange(compute_class="spot", delta=2, reason="backs off"),
            PlanChange(compute_class="spot", delta=1, reason="at its maximum"),
        ),
        "alerts": (),
        "num_failures": 2,
    }
    model = ModelPlan.model_validate(values | changes)
    return PlanReport(written_at_s=995.0, models=(model,), alerts=("no log",))


def samples(collector: Collector, name: str) -> dict[tuple[str, ...], float]:
    """Values by the values of their labels, `model` and `gateway` left out."""
    return {
        tuple(value for label, value in sample.labels.items() if label != "model"): sample.value
        for family in collector.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_slice_says_how_long_it_is_in_its_state() -> None:
    records = (
        record(SliceState.READY, 400.0, "spot-0"),
        record(SliceState.LOADING, 1001.0, "spot-1"),  # its host's clock is ahead
    )
    endings = Endings(0.0)
    endings.observe(Snapshot("1", records))
    collector = SliceCollector(
        lambda: Snapshot("1", records), endings, {("chat", "spot"): 900.0}, lambda: NOW_S
    )
    assert samples(collector, "slicewise_slice_state_seconds") == {
        ("spot-0", "spot", "ready"): 600.0,
        ("spot-1", "spot", "loading"): 0.0,
    }
    assert samples(collector, "slicewise_slice_patience_seconds") == {("spot",): 900.0}
    ends = samples(collector, "slicewise_slices_ended_total")
    assert ends[("spot", "preempted")] == 0


def test_replicas_without_a_slice_show_the_longest_of_their_waits() -> None:
    waits = Snapshot(
        "1", tuple(record(SliceState.PROVISIONING, at_s) for at_s in (700.0, 300.0, 900.0))
    )
    collector = SliceCollector(lambda: waits, Endings(0.0), {}, lambda: NOW_S)
    assert samples(collector, "slicewise_slice_state_seconds") == {("spot", "provisioning"): 700.0}


def test_supply_is_counted_by_class_and_state_whoever_has_it() -> None:
    hosts = [*hosts_of("s-0"), *hosts_of("s-1", num_free_chips=0)]
    book = SupplyBook(SliceFaults())
    group = group_of(pods_of("s-0"), pods_of("s-1"), pods_of("s-2", machine=None))
    book.look(hosts, [group], [], 1.0)
    fleet = Snapshot("1", supply=book.records)
    collector = SliceCollector(lambda: fleet, Endings(0.0), {}, lambda: NOW_S)
    counts = samples(collector, "slicewise_supply_slices")
    assert {key: count for key, count in counts.items() if count} == {
        ("spot", "free"): 1,
        ("spot", "leased"): 1,
        ("spot", "pending"): 1,
    }
    # What is not there is at 0, for who alerts on it.
    assert counts["spot", "condemned"] == 0


def test_plan_is_shown_with_what_it_refuses_and_zero_where_it_refuses_nothing() -> None:
    collector = PlanCollector(plan)
    assert samples(collector, "slicewise_plan_target_slices") == {("spot",): 3, ("reserved",): 1}
    assert samples(collector, "slicewise_plan_refused_slices") == {("spot",): 3, ("reserved",): 0}
    assert samples(collector, "slicewise_plan_demand_slices") == {(): 4.0}
    assert samples(collector, "slicewise_plan_written_time_seconds") == {(): 995.0}
    assert samples(collector, "slicewise_plan_failures_total") == {(): 2}


def test_what_a_plan_does_not_know_is_absent() -> None:
    names = {family.name for family in PlanCollector(lambda: plan(demand_slices=None)).collect()}
    assert "slicewise_plan_demand_slices" not in names
    assert "slicewise_plan_next_slice_time_seconds" not in names
    assert list(PlanCollector(lambda: None).collect()) == []
