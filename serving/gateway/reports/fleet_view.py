"""Builds the answer of `GET /fleet`: the directory's records and one gateway's links, as one JSON.

Owns the shape of that answer. `models` has this gateway's knowledge of the engines it serves from;
`slices` and `ended` have the directory's knowledge of the slices under them. Does not own the
records, nor who may read them. Pure: no clock, no I/O; `now_s` is wall-clock time.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from serving.domain.plan_report import STALE_AFTER_S, ModelPlan, PlanReport
from serving.domain.slice_lifecycle import WAITING, SliceLifecycle, SliceState
from serving.domain.slice_records import SliceRecord, Snapshot
from serving.domain.supply.orders import OperatorOrder
from serving.domain.supply.records import SupplyRecord
from serving.domain.usage.quotas import TenantUse, nearest_uses
from serving.link.messages import EngineLoad
from serving.telemetry.metric_names import MAX_TENANT_QUOTAS

# An answer has 15 KB more.
MAX_QUOTA_ROWS = MAX_TENANT_QUOTAS


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The status of one linked engine. `load` is `None` until its host has reported it."""

    engine_id: str
    compute_class: str
    is_draining: bool
    in_flight: int
    load: EngineLoad | None


@dataclass(frozen=True, slots=True)
class ModelView:
    """The status of one served model: its own description (with its `name`), and its links."""

    described: Mapping[str, Any]
    engines: tuple[EngineStatus, ...]


@dataclass(frozen=True, slots=True)
class GatewayView:
    """The gateway that answers; each sees its own load only."""

    gateway_id: str
    started_at_s: float


def describe_fleet(
    gateway: GatewayView,
    models: Iterable[ModelView],
    snapshot: Snapshot,
    now_s: float,
    autoscaling: Mapping[str, Any] | None = None,
    uses: Iterable[TenantUse] = (),
) -> dict[str, Any]:
    """Returns the answer of `GET /fleet`; see `docs/operate/fleet.md` for its keys.

    Slices come in the directory's order, ended ones latest first. `autoscaling` is the result of
    `describe_plans`; `None` means that nothing scales. Of the quotas' `uses` those that are nearest
    to their limits are shown, the nearest first.
    """
    models, uses = tuple(models), tuple(uses)
    engines = {engine.engine_id: engine for model in models for engine in model.engines}
    slices = [
        # An engine over a multislice is shown with the first of its slices.
        _slice_row(record, _linked_of(record, engines), now_s)
        for record in snapshot.records
    ]
    slices += [
        _unlisted_slice_row(model.described["name"], engine)
        for model in models
        for engine in model.engines
        if engine.engine_id in engines
    ]
    ended = sorted(snapshot.ended, key=lambda record: record.life.entered_at_s, reverse=True)
    return {
        "gateway": {"id": gateway.gateway_id, "uptime_s": _past(gateway.started_at_s, now_s)},
        "models": [_model_row(model, snapshot.records, now_s) for model in models],
        "slices": slices,
        "supply": [_supply_row(record, now_s) for record in snapshot.supply],
        "orders": [_order_row(order, now_s) for order in snapshot.orders],
        "ended": [
            _slice_row(record, (), now_s) | {"cause": str(record.life.cause)} for record in ended
        ],
        "quotas": [_quota_row(use) for use in nearest_uses(uses, MAX_QUOTA_ROWS)],
        "quotas_left_out": max(0, len(uses) - MAX_QUOTA_ROWS),
        "autoscaling": autoscaling,
    }


def describe_plans(board: PlanReport | None, now_s: float) -> dict[str, Any]:
    """Returns the last plan of every model, and what is wrong with it.

    `board` is `None` until a plan has been read.
    """
    if board is None:
        alert = "no plan was seen yet: is an autoscaling_policy bound in serve_config.yaml?"
        return {"age_s": None, "alerts": [alert], "models": []}
    age_s = _past(board.written_at_s, now_s)
    alerts = list(board.alerts)
    if age_s > STALE_AFTER_S:
        alerts.insert(0, f"the last plan is {age_s:.0f} s old: does Serve's controller run?")
    return {
        "age_s": age_s,
        "alerts": alerts,
        "models": [_plan_row(plan, now_s) for plan in board.models],
    }


def _plan_row(plan: ModelPlan, now_s: float) -> dict[str, Any]:
    changed_s = None if plan.changed_at_s is None else _past(plan.changed_at_s, now_s)
    next_s = None if plan.next_slice_at_s is None else _past(now_s, plan.next_slice_at_s)
    return {
        "model": plan.model,
        "age_s": _past(plan.decided_at_s, now_s),
        "changed_s": changed_s,
        "targets": plan.targets,
        "demand_slices": plan.demand_slices,
        "next_slice_in_s": next_s,
        "arithmetic": plan.arithmetic,
        "changes": [change.model_dump() for change in plan.changes],
        "refusals": [refusal.model_dump() for refusal in plan.refusals],
        "alerts": list(plan.alerts),
        "num_failures": plan.num_failures,
    }


def _model_row(model: ModelView, records: Iterable[SliceRecord], now_s: float) -> dict[str, Any]:
    engines = {engine.engine_id: engine for engine in model.engines}
    rows = [
        _engine_row(record, engines.pop(engine_id or "", None), now_s) | {"engine_id": engine_id}
        for record in records
        if record.model == model.described["name"] and record.has_engine
        # Before they have started they are one row, as the slice is.
        for engine_id in record.engine_ids or (None,)
    ]
    # Linked, but not listed: the directory has just restarted.
    rows += [_engine_row(None, engine, now_s) for engine in engines.values()]
    return {**model.described, "engines": rows}


def _linked_of(record: SliceRecord, engines: dict[str, EngineStatus]) -> list[EngineStatus]:
    """Takes out of `engines` those of a slice that are linked here."""
    return [engines.pop(engine_id) for engine_id in record.engine_ids if engine_id in engines]


def _engine_row(
    record: SliceRecord | None, engine: EngineStatus | None, now_s: float
) -> dict[str, Any]:
    row: dict[str, Any] = {"engine_id": None, "compute_class": None, "state": None, "since_s": None}
    if record is not None:
        row |= {
            "replica_id": record.replica_id,
            "engine_id": record.engine_id,
            "compute_class": record.compute_class,
            "version": record.version,
            "state": str(record.state),
            "since_s": _past(record.life.entered_at_s, now_s),
        }
    row["linked"] = engine is not None
    if engine is not None:
        row |= {"engine_id": engine.engine_id, "compute_class": engine.compute_class}
        row["state"] = str(SliceState.DRAINING) if engine.is_draining else str(SliceState.READY)
        row["in_flight"] = engine.in_flight
        if engine.load is not None:
            row |= {
                "num_running": engine.load.num_running,
                "num_waiting": engine.load.num_waiting,
                "kv_usage_ratio": _kv_usage_ratio(engine),
            }
    return row


def _slice_row(
    record: SliceRecord, engines: Sequence[EngineStatus], now_s: float
) -> dict[str, Any]:
    life = record.life
    # A waiting replica holds nothing, whatever it held in a life before.
    hosts = () if life.state in WAITING else record.hosts
    row: dict[str, Any] = {
        "name": life.slice_name,
        "replica_id": record.replica_id,
        "part": record.part,
        "engine_id": record.engine_id,
        "num_engines": record.num_engines,
        "model": record.model,
        "version": record.version,
        "compute_class": record.compute_class,
        "state": str(life.state),
        "since_s": _past(life.entered_at_s, now_s),
        "reason": life.reason,
        "generation": record.generation,
        "topology": record.topology,
        "hosts": [
            {
                "worker_id": host.worker_id,
                "node_id": host.node_id,
                "address": host.address,
                "num_chips": host.num_chips,
                "tpu_log_dir": host.tpu_log_dir,
            }
            for host in hosts
        ],
        "num_chips": sum(host.num_chips for host in hosts),
        "drain_deadline_s": _seconds_left(record, now_s),
        "in_flight": sum(engine.in_flight for engine in engines) if engines else None,
        "kv_usage_ratio": _mean_kv_usage_ratio(engines),
        "history": _history(life, now_s),
        "seconds_by_state": {
            str(state): round(seconds, 1) for state, seconds in life.seconds_by_state(now_s).items()
        },
    }
    if any(engine.is_draining for engine in engines) and life.state == SliceState.READY:
        # The link is the shorter way: the gateway stops giving it requests before the directory
        # knows, and does so without the directory too.
        row |= {
            "state": str(SliceState.DRAINING),
            "since_s": None,
            "reason": "its engine says that it drains",
        }
    return row


def _supply_row(record: SupplyRecord, now_s: float) -> dict[str, Any]:
    """Returns one incarnation of a slice, whoever has it."""
    return {
        "incarnation": record.incarnation,
        "name": record.name,
        "state": str(record.state),
        "since_s": _past(record.since_s, now_s),
        "reason": record.reason,
        "ends_in_s": None if record.until_s is None else _past(now_s, record.until_s),
        "run_ends_in_s": None if record.ends_at_s is None else _past(now_s, record.ends_at_s),
        "compute_class": record.compute_class,
        "generation": record.generation,
        "topology": record.topology,
        "zone": record.zone,
        "group": record.group,
        "num_chips": record.num_chips,
        "num_failures": record.num_failures,
        "replica_id": None if record.holder is None else record.holder.life_id,
        "hosts": [
            {
                "worker_id": host.worker_id,
                "pod": host.pod,
                "machine": host.machine,
                "node_id": host.node_id,
                "address": host.address,
                "num_chips": host.num_chips,
            }
            for host in record.hosts
        ],
    }


def _order_row(order: OperatorOrder, now_s: float) -> dict[str, Any]:
    """Returns one order of an operator that stands."""
    return {
        "kind": str(order.kind),
        "about": order.about,
        "name": order.name,
        "by": order.by,
        "reason": order.reason,
        "since_s": _past(order.at_s, now_s),
        "ends_in_s": None if order.until_s is None else _past(now_s, order.until_s),
        "model": order.model,
        "num_replicas": order.num_replicas,
    }


def _quota_row(use: TenantUse) -> dict[str, Any]:
    return {
        "tenant": use.tenant,
        "quota": str(use.quota),
        "limit": use.quota.limit,
        "used": round(use.used, 4),
        "refused": use.refused,
    }


def _unlisted_slice_row(model: str, engine: EngineStatus) -> dict[str, Any]:
    """Returns a row for a linked engine that the directory does not list, because it serves too."""
    return {
        "name": None,
        "replica_id": None,
        "part": 0,
        "engine_id": engine.engine_id,
        "num_engines": 1,
        "model": model,
        "version": None,
        "compute_class": engine.compute_class,
        "state": str(SliceState.DRAINING if engine.is_draining else SliceState.READY),
        "since_s": None,
        "reason": "linked to this gateway, but not listed in the directory",
        "generation": None,
        "topology": None,
        "hosts": [],
        "num_chips": 0,
        "drain_deadline_s": None,
        "in_flight": engine.in_flight,
        "kv_usage_ratio": _kv_usage_ratio(engine),
        "history": [],
        "seconds_by_state": {},
    }


def _history(life: SliceLifecycle, now_s: float) -> list[dict[str, Any]]:
    """Returns the life's transitions in order, each with its time so far. GONE takes none."""
    rows: list[dict[str, Any]] = []
    for position, transition in enumerate(life.transitions):
        if transition.state == SliceState.GONE:
            until_s = transition.at_s
        elif position + 1 < len(life.transitions):
            until_s = life.transitions[position + 1].at_s
        else:
            until_s = now_s
        rows.append(
            {
                "state": str(transition.state),
                "at_s": round(transition.at_s, 3),
                "for_s": _past(transition.at_s, until_s),
                "reason": transition.reason,
            }
        )
    return rows


def _seconds_left(record: SliceRecord, now_s: float) -> float | None:
    if record.drain_deadline_s is None or record.state == SliceState.GONE:
        return None
    return _past(now_s, record.drain_deadline_s)


def _mean_kv_usage_ratio(engines: Iterable[EngineStatus]) -> float | None:
    """Returns the mean of those that tell; engines on one slice have caches of one size."""
    told = [ratio for each in engines if (ratio := _kv_usage_ratio(each)) is not None]
    return round(fmean(told), 4) if told else None


def _kv_usage_ratio(engine: EngineStatus) -> float | None:
    return None if engine.load is None else round(engine.load.kv_usage_ratio, 4)


def _past(at_s: float, now_s: float) -> float:
    # Hosts' clocks differ by a little; what has just begun there did not begin in the future.
    return round(max(0.0, now_s - at_s), 1)
