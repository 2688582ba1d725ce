"""What is wrong with models, compute classes and plans, as a gateway tells it. Pure."""

from collections import Counter
from collections.abc import Iterator

from deployments.status.durations import format_duration
from deployments.status.findings.finding import FleetFinding, Severity, runbook, short
from deployments.status.reports import (
    ReportedAutoscaling,
    ReportedFleet,
    ReportedModel,
    ReportedOrder,
)
from serving.domain.plan_report import STALE_AFTER_S

_SERVING = ("ready", "draining")
_WAITING = ("requested", "provisioning")


def fleet_findings(fleet: ReportedFleet, patience_s: float) -> Iterator[FleetFinding]:
    """Yields what is wrong with models, then classes, plans, and which orders stand."""
    for model in fleet.models:
        yield from _model_findings(model, fleet, patience_s)
    yield from _waiting_findings(fleet, patience_s)
    if fleet.autoscaling is not None:
        yield from _plan_findings(fleet.autoscaling)
    for order in fleet.orders:
        yield from _order_findings(order)


def _model_findings(
    model: ReportedModel, fleet: ReportedFleet, patience_s: float
) -> Iterator[FleetFinding]:
    linked = [each for each in model.engines if each.linked is not False]
    if not any(each.state in _SERVING for each in linked) and _is_wanted(model, fleet):
        states = Counter(
            each.state or "unknown" for each in fleet.slices or () if each.model == model.name
        )
        replicas = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        requests = "1 request waits" if model.waiting == 1 else f"{model.waiting} requests wait"
        yield FleetFinding(
            Severity.CRITICAL,
            f"model {model.name}",
            f"no engine takes its requests, {requests}; "
            + (f"its replicas: {replicas}" if replicas else "no replica of it is there"),
            f"what follows says why its slices do not come; {runbook('NoSliceReady')}",
        )
    for each in model.engines:
        since_s = each.since_s
        if each.linked is False and each.state == "ready" and (since_s or 0.0) >= patience_s:
            yield FleetFinding(
                Severity.WARNING,
                f"engine {each.engine_id or 'without a name'}",
                f"it is ready for {model.name} on {each.compute_class}, and this gateway has no "
                "link to it",
                "the gateway's log says why (`link_refused`, `link_unreachable` or "
                "`engine_refused`); another gateway may have one",
                since_s,
            )


def _is_wanted(model: ReportedModel, fleet: ReportedFleet) -> bool:
    """Returns false for a model that is scaled to nothing on purpose, and that nobody asks for."""
    if model.waiting or model.engines:
        return True
    if any(each.model == model.name for each in fleet.slices or ()):
        return True
    plans = fleet.autoscaling.models if fleet.autoscaling is not None else ()
    return any(plan.model == model.name and any(plan.targets.values()) for plan in plans)


def _waiting_findings(fleet: ReportedFleet, patience_s: float) -> Iterator[FleetFinding]:
    """Yields the compute classes whose replicas wait for slices for too long, and why."""
    waiting: dict[str, list[tuple[float, str]]] = {}
    for row in fleet.slices or ():
        if row.state in _WAITING and row.since_s is not None and row.since_s >= patience_s:
            found = waiting.setdefault(row.compute_class or "of any kind", [])
            found.append((row.since_s, row.reason or "no reason is given"))
    for name, rows in sorted(waiting.items()):
        longest_s, reason = max(rows)
        words = "1 replica waits" if len(rows) == 1 else f"{len(rows)} replicas wait"
        yield FleetFinding(
            Severity.WARNING,
            f"class {name}",
            f"{words} for a slice: {short(reason)}",
            f"{runbook('SlicePodsPending')}; more of another class: {_RAISE}",
            longest_s,
        )


_RAISE = "docs/operate/operations.md#raise-or-lower-a-maximum"


def _plan_findings(autoscaling: ReportedAutoscaling) -> Iterator[FleetFinding]:
    age_s = autoscaling.age_s
    if age_s is not None and age_s > STALE_AFTER_S:
        # What an old plan complained of may be over.
        yield FleetFinding(
            Severity.CRITICAL,
            "autoscaling",
            "nobody plans any more: targets stand still, and Serve's controller may be away",
            runbook("AutoscalerPlanStale"),
            age_s,
        )
        return
    for alert in autoscaling.alerts:
        page = runbook("AutoscalerComplains")
        yield FleetFinding(Severity.WARNING, "autoscaling", short(alert), page)
    for plan in autoscaling.models:
        for alert in plan.alerts:
            page = runbook("AutoscalerComplains")
            yield FleetFinding(Severity.WARNING, f"plan of {plan.model}", short(alert), page)


def _order_findings(order: ReportedOrder) -> Iterator[FleetFinding]:
    """Yields the orders that are about more than one slice; the others are told with theirs."""
    until = "until it is lifted"
    if order.ends_in_s is not None:
        until = f"for another {format_duration(order.ends_in_s)}"
    who = f"{until}, ordered by {order.by}: {short(order.reason)}"
    if order.kind == "freeze":
        yield FleetFinding(
            Severity.NOTE,
            "fleet",
            f"nothing is scaled down {who}",
            "once the reason is over: slicewise order thaw",
            order.since_s,
        )
    if order.kind == "pin":
        where = f"its replicas of {order.model}" if order.model else "its replicas"
        at = "as many as they are" if order.num_replicas is None else f"at {order.num_replicas}"
        model = f" --model {order.model}" if order.model else ""
        yield FleetFinding(
            Severity.NOTE,
            f"class {order.about}",
            f"{where} stay {at} {who}",
            f"once the reason is over: slicewise order unpin {order.about}{model}",
            order.since_s,
        )
