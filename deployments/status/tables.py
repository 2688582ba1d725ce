"""The tables of `slicewise status`: engines, slices, orders, quotas and plans."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from deployments.status.durations import format_duration
from deployments.status.reports import (
    ReportedAutoscaling,
    ReportedEngine,
    ReportedFleet,
    ReportedHost,
    ReportedModel,
    ReportedOrder,
    ReportedQuota,
    ReportedSlice,
    ReportedSupply,
)
from deployments.terminal import build_table, printable
from serving.domain.usage.quotas import format_amount

_HEADER = ("ENGINE", "COMPUTE CLASS", "STATE", "SINCE", "RUNNING", "WAITING", "KV", "IN FLIGHT")
_HELD = "held"
_MOST_LINES = 5  # of tenants, on one line
_SUPPLY_HEADER = (
    "SLICE", "COMPUTE CLASS", "STATE", "SINCE", "UNTIL", "SHAPE", "FAILURES", "REASON",
)  # fmt: skip
_SLICE_HEADER = (
    "SLICE", "COMPUTE CLASS", "STATE", "SINCE", "SHAPE", "HOSTS", "MODEL", "IN FLIGHT", "REASON",
)  # fmt: skip
# Of more than a few quotas those are shown that are used or have refused something, up to a most.
_FEW_QUOTAS, _MOST_QUOTAS = 10, 20
_QUOTA_HEADER = ("TENANT", "QUOTA", "USED", "SHARE", "REFUSED")
_ORDER_HEADER = ("ORDER", "ABOUT", "SINCE", "UNTIL", "BY", "REASON")


def gateway_line(fleet: ReportedFleet) -> str:
    """Returns which gateway has answered."""
    gateway = fleet.gateway
    return f"gateway {printable(gateway.id)}, running for {format_duration(gateway.uptime_s)}"


def fleet_report(fleet: ReportedFleet) -> Group:
    """Returns the fleet: engines per model, all slices, orders, quotas, and what is planned."""
    parts: list[RenderableType] = []
    for model in fleet.models:
        parts += [Text(), *map(_line, _model_lines(model))]
        if model.engines:
            table = build_table(_HEADER, map(_cells, model.engines), 8)
            parts.append(Padding.indent(table, 2))
        else:
            parts.append(_line("  no engines"))
    if fleet.slices is not None:
        parts += [Text(), _line(f"slices: {_counts(fleet.slices)}")]
        if fleet.slices:
            rows = map(_slice_cells, sorted(fleet.slices, key=_slice_order))
            parts.append(Padding.indent(build_table(_SLICE_HEADER, rows, 9), 2))
    # A slice that a replica has is above, with its engine.
    unheld = [row for row in fleet.supply if row.state != _HELD]
    if unheld:
        parts += [Text(), _line(f"not held: {_counts(unheld)}")]
        rows = map(_supply_cells, sorted(unheld, key=_supply_order))
        parts.append(Padding.indent(build_table(_SUPPLY_HEADER, rows, 8), 2))
    if fleet.orders:
        parts += [Text(), _line("standing orders:")]
        rows = map(_order_cells, fleet.orders)
        parts.append(Padding.indent(build_table(_ORDER_HEADER, rows, 6), 2))
    if fleet.quotas:
        parts += [Text(), *_quota_parts(fleet.quotas, fleet.quotas_left_out)]
    if fleet.autoscaling is not None:
        parts += [Text(), *map(_line, _plan_lines(fleet.autoscaling))]
    return Group(*parts)


def _model_lines(model: ReportedModel) -> Iterator[str]:
    promised = f", and {model.promised} refused ones may come back" if model.promised else ""
    yield f"{model.name}: {model.waiting} requests wait for an engine{promised}"
    shown = model.line_tenants[:_MOST_LINES]
    if shown:
        lines = (f"{line.tenant} {line.waiting} ({line.service_class})" for line in shown)
        yield f"  in line: {', '.join(lines)}"
    if waits := model.line_mean_wait_s:
        means = ", ".join(f"{name} {wait_s:.2f} s" for name, wait_s in waits.items())
        yield f"  mean wait for an engine in the last half minute: {means}"
    if model.refusals:
        counts = ", ".join(f"{code} {count}" for code, count in model.refusals.items())
        yield f"  refused since this gateway started: {counts}"
    forecast = model.cache_forecast
    if expected := forecast.found + forecast.missing:
        share = forecast.found / expected
        yield f"  of {expected} prompt tokens expected in prefix caches {share:.0%} were there"
    if num_sent := sum(model.dispatches.values()):
        told = sorted(model.dispatches.items(), key=lambda each: -each[1])
        shares = ", ".join(f"{reason} {count / num_sent:.0%}" for reason, count in told if count)
        yield f"  engines were chosen {num_sent} times: {shares}"


def _line(text: str) -> Text:
    return Text(printable(text))


def _plan_lines(autoscaling: ReportedAutoscaling) -> Iterator[str]:
    age = "" if autoscaling.age_s is None else f", planned {format_duration(autoscaling.age_s)} ago"
    yield f"autoscaling{age}"
    yield from (f"  ALERT {alert}" for alert in autoscaling.alerts)
    for plan in autoscaling.models:
        targets = ", ".join(f"{name} {count}" for name, count in sorted(plan.targets.items()))
        coming = ""
        if plan.next_slice_in_s is not None:
            coming = f"; next slice in {format_duration(plan.next_slice_in_s)}"
        yield f"  {plan.model}: {targets or 'no slices'}{coming}"
        yield from (f"    ALERT {alert}" for alert in plan.alerts)
        yield f"    {plan.arithmetic}"
        for refusal in plan.refusals:
            name = refusal.compute_class or "all classes"
            yield f"    refused: {name} {refusal.delta:+d}: {refusal.reason}"


def _cells(engine: ReportedEngine) -> tuple[object, ...]:
    since_s, usage = engine.since_s, engine.kv_usage_ratio
    return (
        engine.engine_id,
        engine.compute_class,
        engine.state,
        None if since_s is None else format_duration(since_s),
        engine.num_running,
        engine.num_waiting,
        None if usage is None else f"{usage:.0%}",
        engine.in_flight,
    )


def _slice_cells(row: ReportedSlice) -> tuple[object, ...]:
    shape = [word for word in (row.generation, row.topology) if word is not None]
    return (
        # What has no name is identified by its replica; a waiting one has nothing else.
        row.name or row.replica_id,
        row.compute_class,
        row.state,
        None if row.since_s is None else format_duration(row.since_s),
        " ".join(shape) or None,
        _format_hosts(row.hosts),
        row.model,
        row.in_flight,
        row.reason,
    )


def _format_hosts(hosts: tuple[ReportedHost, ...]) -> str | None:
    """Formats hosts as `4 x 4 chips`: hosts times chips each, or all chips where hosts differ."""
    if not hosts:
        return None
    chips = [host.num_chips for host in hosts]
    if len(set(chips)) == 1:
        return f"{len(hosts)} x {chips[0]} chips"
    return f"{len(hosts)}, {sum(chips)} chips"


def _slice_order(row: ReportedSlice) -> tuple[str, bool, str]:
    return row.compute_class or "", row.name is None, row.name or row.replica_id or ""


def _supply_cells(row: ReportedSupply) -> tuple[object, ...]:
    shape = [word for word in (row.generation, row.topology) if word is not None]
    return (
        row.name,
        row.compute_class,
        row.state,
        format_duration(row.since_s),
        None if row.ends_in_s is None else format_duration(row.ends_in_s),
        " ".join(shape) or None,
        row.num_failures or None,
        row.reason,
    )


def _order_cells(order: ReportedOrder) -> tuple[object, ...]:
    return (
        order.kind,
        describe_about(order),
        format_duration(order.since_s),
        None if order.ends_in_s is None else format_duration(order.ends_in_s),
        order.by,
        order.reason,
    )


def _quota_parts(quotas: tuple[ReportedQuota, ...], num_left_out: int) -> Iterator[RenderableType]:
    """Yields the quotas, and how many are not shown: of a long list those that nobody uses."""
    shown = quotas
    if len(quotas) > _FEW_QUOTAS:
        shown = tuple(row for row in quotas if row.used or row.refused)[:_MOST_QUOTAS]
    num_left_out += len(quotas) - len(shown)
    if not shown:
        yield _line(f"quotas: {num_left_out}, nothing used and nothing refused")
        return
    yield _line("quotas, nearest to their limits first:")
    yield Padding.indent(build_table(_QUOTA_HEADER, map(_quota_cells, shown), 2), 2)
    if num_left_out:
        yield _line(f"  {num_left_out} more are further from their limits")


def _quota_cells(row: ReportedQuota) -> tuple[object, ...]:
    return (
        row.tenant,
        row.quota,
        format_amount(row.used),
        f"{math.floor(100 * row.used / row.limit)}%",  # 100% is never told before it is so
        None if row.refused is None else format_amount(row.refused),
    )


def describe_about(order: ReportedOrder) -> str | None:
    """Returns what an order is about; `None` if it is about everything."""
    about = order.name or order.about
    if order.kind == "pin":
        about += f" of {order.model}" if order.model else " of every model"
        about += " as it is" if order.num_replicas is None else f" at {order.num_replicas}"
    return about or None


def _supply_order(row: ReportedSupply) -> tuple[str, str]:
    return row.compute_class or "", row.name


def _counts(slices: Iterable[ReportedSlice | ReportedSupply]) -> str:
    counts = Counter(row.state or "unknown" for row in slices)
    words = [f"{count} {state}" for state, count in sorted(counts.items())]
    return ", ".join(words) or "none"
