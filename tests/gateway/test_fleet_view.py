"""What `GET /fleet` says about records, ended lives and links."""

from dataclasses import replace
from typing import Any

import pytest

from serving.directory.supply_book import SupplyBook
from serving.domain.plan_report import ModelPlan, PlanChange, PlanReport
from serving.domain.slice_lifecycle import EndCause, SliceLifecycle, SliceState
from serving.domain.slice_records import (
    Directory,
    EngineRecord,
    HostRecord,
    SliceRecord,
    Snapshot,
)
from serving.domain.supply.faults import SliceFaults
from serving.domain.supply.orders import OperatorOrder, OrderKind
from serving.domain.usage.quotas import Period, Quota, QuotaKind, TenantUse
from serving.gateway.reports.fleet_view import (
    EngineStatus,
    GatewayView,
    ModelView,
    describe_fleet,
    describe_plans,
)
from serving.link.messages import EngineLoad
from tests.supply_builders import group_of, hosts_of, life, pods_of

NOW_S = 1000.0
HOSTS = tuple(
    HostRecord(worker, f"node-{worker}", f"10.0.0.{worker}", 4, "/tmp/tpu_logs" if worker else None)
    for worker in range(4)
)
LIFE = (
    SliceLifecycle.begin(NOW_S - 100.0)
    .enter(SliceState.RESERVED, NOW_S - 70.0, "holds every host of s-1", slice_name="s-1")
    .enter(SliceState.LOADING, NOW_S - 60.0, "the engine starts")
    .enter(SliceState.READY, NOW_S - 12.3, "the engine takes requests")
)
HELD = SliceRecord(
    "r-1",
    "demo",
    "spot",
    LIFE,
    "v6e",
    "4x4",
    HOSTS,
    "e-1",
    ("10.0.0.0", 7000),
    version="v2-0123456789ab",
)
ENGINE = EngineStatus(
    "e-1", "spot", is_draining=False, in_flight=3, load=EngineLoad(2, 1, 0.123456)
)
WAITING = SliceRecord("r-2", "demo", "spot", SliceLifecycle.begin(NOW_S - 7.0), "v6e", "4x4")


def described(
    *records: SliceRecord,
    engines: tuple[EngineStatus, ...] = (),
    ended: tuple[SliceRecord, ...] = (),
    now_s: float = NOW_S,
) -> dict[str, Any]:
    model = ModelView({"name": "demo", "waiting": 5, "in_flight": 8}, engines)
    gateway = GatewayView("gw", started_at_s=NOW_S - 600.0)
    return describe_fleet(gateway, [model], Snapshot("v", records, ended), now_s)


def only_slice(*records: SliceRecord, **given: Any) -> dict[str, Any]:
    (row,) = described(*records, **given)["slices"]
    return row


# -- as it has always been --


def test_gateway_and_model_say_who_they_are() -> None:
    fleet = described()
    assert fleet == {
        "gateway": {"id": "gw", "uptime_s": 600.0},
        "models": [{"name": "demo", "waiting": 5, "in_flight": 8, "engines": []}],
        "slices": [],
        "supply": [],
        "orders": [],
        "ended": [],
        "quotas": [],
        "quotas_left_out": 0,
        "autoscaling": None,
    }


def test_linked_engine_has_its_record_and_its_load() -> None:
    (model,) = described(HELD, engines=(ENGINE,))["models"]
    assert model["engines"] == [
        {
            "engine_id": "e-1",
            "replica_id": "r-1",
            "compute_class": "spot",
            "version": "v2-0123456789ab",
            "state": "ready",
            "since_s": 12.3,
            "linked": True,
            "in_flight": 3,
            "num_running": 2,
            "num_waiting": 1,
            "kv_usage_ratio": 0.1235,
        }
    ]


def test_divided_slice_is_one_row_with_the_sums_of_its_engines_and_a_row_for_each() -> None:
    others = (EngineRecord("e-2", ("10.0.0.0", 7001)), EngineRecord("e-3", ("10.0.0.0", 7002)))
    record = replace(HELD, num_engines=3, others=others)
    second = replace(ENGINE, engine_id="e-2", in_flight=4, load=EngineLoad(4, 0, 0.5))
    fleet = described(record, engines=(ENGINE, second))
    (row,) = fleet["slices"]
    assert (row["engine_id"], row["num_engines"], row["in_flight"]) == ("e-1", 3, 7)
    assert row["kv_usage_ratio"] == pytest.approx((0.1235 + 0.5) / 2, abs=1e-4)
    (model,) = fleet["models"]
    assert [(each["engine_id"], each["linked"]) for each in model["engines"]] == [
        ("e-1", True),
        ("e-2", True),
        ("e-3", False),
    ]


def test_engine_that_is_not_linked_has_no_load() -> None:
    (model,) = described(WAITING)["models"]
    assert model["engines"] == [
        {
            "engine_id": None,
            "replica_id": "r-2",
            "compute_class": "spot",
            "version": "",
            "state": "requested",
            "since_s": 7.0,
            "linked": False,
        }
    ]


def test_linked_engine_that_tells_no_load_yet_has_its_requests_only() -> None:
    (model,) = described(HELD, engines=(replace(ENGINE, load=None),))["models"]
    (engine,) = model["engines"]
    assert engine["in_flight"] == 3
    assert "kv_usage_ratio" not in engine


def test_record_of_a_model_that_is_not_served_here_is_a_slice_and_no_engine() -> None:
    fleet = described(replace(HELD, model="another"))
    assert fleet["models"][0]["engines"] == []
    assert [row["model"] for row in fleet["slices"]] == ["another"]


def test_engine_over_joined_slices_is_one_engine_and_its_slices_have_a_row_each() -> None:
    second = replace(HELD, replica_id="r-1+1", part=1, address=None)
    # The directory may have heard of the second first.
    fleet = described(second, HELD, engines=(ENGINE,))
    assert [row["replica_id"] for row in fleet["models"][0]["engines"]] == ["r-1"]
    rows = [(row["replica_id"], row["part"], row["in_flight"]) for row in fleet["slices"]]
    assert rows == [("r-1+1", 1, None), ("r-1", 0, 3)]


# -- slices --


def test_held_slice_is_described_whole() -> None:
    assert only_slice(HELD, engines=(ENGINE,)) == {
        "name": "s-1",
        "replica_id": "r-1",
        "part": 0,
        "engine_id": "e-1",
        "num_engines": 1,
        "model": "demo",
        "version": "v2-0123456789ab",
        "compute_class": "spot",
        "state": "ready",
        "since_s": 12.3,
        "reason": "the engine takes requests",
        "generation": "v6e",
        "topology": "4x4",
        "hosts": [
            {
                "worker_id": n,
                "node_id": f"node-{n}",
                "address": f"10.0.0.{n}",
                "num_chips": 4,
                "tpu_log_dir": "/tmp/tpu_logs" if n else None,
            }
            for n in range(4)
        ],
        "num_chips": 16,
        "drain_deadline_s": None,
        "in_flight": 3,
        "kv_usage_ratio": 0.1235,
        "history": [
            {
                "state": "requested",
                "at_s": 900.0,
                "for_s": 30.0,
                "reason": "a replica wants a slice",
            },
            {
                "state": "reserved",
                "at_s": 930.0,
                "for_s": 10.0,
                "reason": "holds every host of s-1",
            },
            {"state": "loading", "at_s": 940.0, "for_s": 47.7, "reason": "the engine starts"},
            {"state": "ready", "at_s": 987.7, "for_s": 12.3, "reason": "the engine takes requests"},
        ],
        "seconds_by_state": {"requested": 30.0, "reserved": 10.0, "loading": 47.7, "ready": 12.3},
    }


def test_waiting_replica_has_no_name_no_hosts_and_no_load() -> None:
    # What it held in a life before is still in its record.
    row = only_slice(replace(WAITING, hosts=HOSTS))
    assert (row["name"], row["hosts"], row["num_chips"]) == (None, [], 0)
    assert (row["in_flight"], row["kv_usage_ratio"]) == (None, None)
    assert (row["generation"], row["topology"], row["since_s"]) == ("v6e", "4x4", 7.0)


@pytest.mark.parametrize(
    ("deadline_s", "left_s"), [(None, None), (NOW_S + 20.04, 20.0), (NOW_S - 3.0, 0.0)]
)
def test_draining_slice_counts_down_to_its_deadline(
    deadline_s: float | None, left_s: float | None
) -> None:
    life = LIFE.enter(SliceState.DRAINING, NOW_S - 1.0, "preempted")
    row = only_slice(replace(HELD, life=life, drain_deadline_s=deadline_s), engines=(ENGINE,))
    assert (row["state"], row["drain_deadline_s"]) == ("draining", left_s)


def test_engine_that_drains_by_its_link_drains_before_the_directory_says_so() -> None:
    fleet = described(HELD, engines=(replace(ENGINE, is_draining=True),))
    assert fleet["models"][0]["engines"][0]["state"] == "draining"
    (row,) = fleet["slices"]
    assert (row["state"], row["since_s"]) == ("draining", None)
    assert row["reason"] == "its engine says that it drains"


def test_linked_engine_that_is_not_listed_is_shown_without_its_slice() -> None:
    fleet = described(engines=(ENGINE,))
    assert [engine["linked"] for engine in fleet["models"][0]["engines"]] == [True]
    (row,) = fleet["slices"]
    assert (row["engine_id"], row["model"], row["state"]) == ("e-1", "demo", "ready")
    assert (row["name"], row["replica_id"], row["history"]) == (None, None, [])
    assert row.keys() == only_slice(HELD).keys()
    assert "not listed" in row["reason"]


def test_clock_of_a_host_that_goes_ahead_makes_no_negative_time() -> None:
    row = only_slice(HELD, now_s=NOW_S - 50.0)
    assert row["since_s"] == row["history"][-1]["for_s"] == 0.0


# -- ended lives --


def test_ended_life_has_its_cause_and_stands_still() -> None:
    life = LIFE.end(EndCause.PREEMPTED, NOW_S - 2.3, "the cloud took it")
    (row,) = described(ended=(replace(HELD, life=life, drain_deadline_s=NOW_S + 9),))["ended"]
    assert (row["cause"], row["state"], row["name"]) == ("preempted", "gone", "s-1")
    assert (row["reason"], row["since_s"]) == ("the cloud took it", 2.3)
    assert row["seconds_by_state"]["ready"] == 10.0
    assert row["history"][-1]["for_s"] == 0.0
    assert row["drain_deadline_s"] is None
    assert row.keys() == only_slice(HELD).keys() | {"cause"}


def test_ended_lives_come_latest_first() -> None:
    ends = [
        replace(HELD, replica_id=f"r-{ago_s}", life=LIFE.end(EndCause.RELEASED, NOW_S - ago_s, ""))
        for ago_s in (5.0, 1.0, 9.0)
    ]
    rows = described(ended=tuple(ends))["ended"]
    assert [row["replica_id"] for row in rows] == ["r-1.0", "r-5.0", "r-9.0"]


# -- quotas --


def test_quotas_are_told_nearest_to_their_limits_first_and_a_hundred_at_most() -> None:
    quota = Quota(QuotaKind.TOKENS, 1000, Period.HOUR)
    uses = (TenantUse(f"t{number}", quota, number / 3, number % 2) for number in range(120))
    fleet = describe_fleet(GatewayView("gw", NOW_S), (), Snapshot("v"), NOW_S, uses=uses)
    assert fleet["quotas"][0] == {
        "tenant": "t119",
        "quota": "1,000 tokens per hour",
        "limit": 1000,
        "used": 39.6667,
        "refused": 1,
    }
    assert [row["tenant"] for row in fleet["quotas"]] == [f"t{n}" for n in range(119, 19, -1)]
    assert fleet["quotas_left_out"] == 20


# -- what is planned --


def plan(**changes: Any) -> ModelPlan:
    values: dict[str, Any] = {
        "model": "demo",
        "decided_at_s": NOW_S - 3.0,
        "changed_at_s": NOW_S - 40.0,
        "targets": {"spot": 2},
        "demand_slices": 2.0,
        "next_slice_at_s": NOW_S + 30.0,
        "arithmetic": "two are needed",
        "changes": (PlanChange(compute_class="spot", delta=1, reason="need 2"),),
        "refusals": (PlanChange(compute_class="", delta=1, reason="no room"),),
        "alerts": ("the load is old",),
        "num_failures": 1,
    }
    return ModelPlan(**(values | changes))


def test_plan_is_told_with_its_reasons_and_in_seconds_from_now() -> None:
    board = PlanReport(written_at_s=NOW_S - 2.0, models=(plan(),), alerts=("no log",))
    assert describe_plans(board, NOW_S) == {
        "age_s": 2.0,
        "alerts": ["no log"],
        "models": [
            {
                "model": "demo",
                "age_s": 3.0,
                "changed_s": 40.0,
                "targets": {"spot": 2},
                "demand_slices": 2.0,
                "next_slice_in_s": 30.0,
                "arithmetic": "two are needed",
                "changes": [{"compute_class": "spot", "delta": 1, "reason": "need 2"}],
                "refusals": [{"compute_class": "", "delta": 1, "reason": "no room"}],
                "alerts": ["the load is old"],
                "num_failures": 1,
            }
        ],
    }


def test_unknown_times_of_a_plan_are_none() -> None:
    board = PlanReport(written_at_s=NOW_S, models=(plan(changed_at_s=None, next_slice_at_s=None),))
    (row,) = describe_plans(board, NOW_S)["models"]
    assert (row["changed_s"], row["next_slice_in_s"]) == (None, None)


def test_old_plan_and_missing_plan_are_alerts() -> None:
    old = describe_plans(PlanReport(written_at_s=NOW_S - 75.0, models=(plan(),)), NOW_S)
    assert old["alerts"] == ["the last plan is 75 s old: does Serve's controller run?"]
    assert old["models"], "what was planned last is still shown"
    missing = describe_plans(None, NOW_S)
    assert (missing["age_s"], missing["models"]) == (None, [])
    assert "is an autoscaling_policy bound" in missing["alerts"][0]


def test_fleet_carries_what_is_planned() -> None:
    plans = describe_plans(None, NOW_S)
    fleet = describe_fleet(GatewayView("gw", NOW_S), [], Snapshot("v"), NOW_S, plans)
    assert fleet["autoscaling"] == plans


def test_standing_orders_are_shown_with_who_why_and_until_when() -> None:
    freeze = OperatorOrder(OrderKind.FREEZE, "anna", "a demo", NOW_S - 60.0, until_s=NOW_S + 600.0)
    pin = OperatorOrder(OrderKind.PIN, "bo", "paid for", NOW_S - 5.0, "spot", num_replicas=2)
    directory = Directory("d")
    directory.set_orders((freeze, pin))
    fleet = describe_fleet(GatewayView("gw", NOW_S), [], directory.snapshot(), NOW_S)
    assert fleet["orders"] == [
        {
            "kind": "freeze",
            "about": "",
            "name": "",
            "by": "anna",
            "reason": "a demo",
            "since_s": 60.0,
            "ends_in_s": 600.0,
            "model": None,
            "num_replicas": None,
        },
        {
            "kind": "pin",
            "about": "spot",
            "name": "",
            "by": "bo",
            "reason": "paid for",
            "since_s": 5.0,
            "ends_in_s": None,
            "model": None,
            "num_replicas": 2,
        },
    ]


def test_every_slice_that_exists_is_shown_whoever_has_it() -> None:
    held = hosts_of("s-0", num_free_chips=0)
    book = SupplyBook(SliceFaults())
    group = group_of(pods_of("s-0"), pods_of("s-1", machine=None))
    book.look(held, [group], [life("r1", held)], NOW_S - 5.0)
    gateway = GatewayView("g-1", NOW_S)
    snapshot = Snapshot("v", supply=book.records)
    first, second = describe_fleet(gateway, (), snapshot, NOW_S)["supply"]
    assert (first["name"], first["state"], first["replica_id"]) == ("s-0", "held", "r1")
    assert first["hosts"][1] == {
        "worker_id": 1,
        "pod": "s-0-pod-1",
        "machine": "machine-of-s-0-1",
        "node_id": "node-of-s-0-pod-1",
        "address": "address-of-s-0-pod-1",
        "num_chips": 4,
    }
    assert (second["state"], second["since_s"]) == ("pending", 5.0)
    assert second["reason"] == "host 0 has no machine yet"
