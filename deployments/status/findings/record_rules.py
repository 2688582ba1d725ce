"""What the directory's record of a slice says to be wrong with it. Pure.

Some of it follows from pods that are ill, and then those are told instead (`EXPLAINED_RULES`).
"""

from collections.abc import Callable, Iterable

from deployments.status.durations import format_duration
from deployments.status.findings.finding import FleetFinding, Severity, runbook, short
from deployments.status.findings.slice_cases import SliceCase
from deployments.status.reports import ReportedSupply
from serving.domain.topology import TopologyError, shapes

# The slice, its record, and for how long something may be on its way.
RecordRule = Callable[[SliceCase, ReportedSupply, float], FleetFinding | None]


def _release(case: SliceCase) -> str:
    return f"slicewise order release {case.order_name}"


def _condemn(case: SliceCase) -> str:
    return f"slicewise order condemn {case.order_name}"


def ordered(case: SliceCase, record: ReportedSupply, _patience_s: float) -> FleetFinding | None:
    """An operator keeps replicas off it, or has it replaced."""
    order = case.order
    if order is None:
        return None
    until = ""
    if order.ends_in_s is not None:
        until = f" for another {format_duration(order.ends_in_s)}"
    who = f"ordered by {order.by}: {short(order.reason)}"
    if order.kind == "quarantine":
        words = f"is kept from replicas{until}, {who}"
    else:
        words = f"is to be replaced, {who}"
    if record.replica_id is not None:
        words += f"; {record.replica_id} still has it and leaves it first"
    return FleetFinding(
        Severity.NOTE,
        f"slice {case.name}",
        f"it {words}",
        f"once the reason is over: {_release(case)}",
        order.since_s,
    )


def doubled(case: SliceCase, record: ReportedSupply, _patience_s: float) -> FleetFinding | None:
    """Another living slice has its name, and this is rather the one too many."""
    twin = case.twin
    if twin is None or not _is_spare(case, twin):
        return None
    return FleetFinding(
        Severity.WARNING,
        f"slice {case.name}",
        f"two slices have this name: {case.incarnation} ({record.state}) and {twin.incarnation}",
        f"if one is too many: {_condemn(case)}",
        record.since_s,
    )


def _is_spare(case: SliceCase, twin: SliceCase) -> bool:
    """Returns whether a slice is rather too many than its twin: the one that nobody has."""

    def rank(each: SliceCase) -> tuple[bool, str]:
        is_held = each.record is not None and each.record.replica_id is not None
        return not is_held, each.incarnation

    return rank(case) > rank(twin)


def quarantined(case: SliceCase, record: ReportedSupply, _patience_s: float) -> FleetFinding | None:
    """It failed, and is kept from replicas for a while."""
    if record.state != "quarantined" or case.order is not None:
        return None
    until = ""
    if record.ends_in_s is not None:
        until = f" for another {format_duration(record.ends_in_s)}"
    return FleetFinding(
        Severity.WARNING,
        f"slice {case.name}",
        f"it is kept from replicas{until}: {short(record.reason)}",
        f"if it will not mend: {_condemn(case)}; if the cause is gone: {_release(case)}",
        record.since_s,
    )


def leased(case: SliceCase, record: ReportedSupply, patience_s: float) -> FleetFinding | None:
    """An engine has its chips, and nobody commands it."""
    if record.state != "leased" or record.ends_in_s is not None or record.since_s < patience_s:
        return None
    return FleetFinding(
        Severity.WARNING,
        f"slice {case.name}",
        f"its engine has nobody who commands it: {short(record.reason)}",
        "its streams go on, and the next replica of the model takes it over: is one missing in "
        f"`serve status`? If nothing should run there: {_condemn(case)}",
        record.since_s,
    )


def pod_gone(case: SliceCase, record: ReportedSupply, _patience_s: float) -> FleetFinding | None:
    """Ray lists a node, and the pod that it ran in is gone."""
    if case.pods is None:
        return None
    there = {pod.name for pod in case.pods}
    left = [host for host in record.hosts if host.node_id and host.pod and host.pod not in there]
    if not left:
        return None
    host = left[0]
    return FleetFinding(
        Severity.WARNING,
        f"slice {case.name}",
        f"Ray lists a node at {host.address} (host {host.worker_id}), and its pod {host.pod} "
        "is gone",
        "Ray drops it by itself within a minute; if it stays, the head is behind: "
        f"{runbook('HeadDown')}",
    )


def chipless(case: SliceCase, record: ReportedSupply, _patience_s: float) -> FleetFinding | None:
    """A host is in Ray and has fewer chips than its slice needs of it."""
    wanted = _chips_of_a_host(case, record)
    for host in record.hosts:
        if host.num_chips is not None and host.num_chips < wanted:
            where = f" (pod {host.pod}" + (f" on {host.machine})" if host.machine else ")")
            return FleetFinding(
                Severity.WARNING,
                f"slice {case.name}",
                f"host {host.worker_id}{where if host.pod else ''} has joined with "
                f"{host.num_chips} of {wanted} chips",
                f"{runbook('TpuChipMissing')}; to have it replaced: {_condemn(case)}",
                record.since_s,
            )
    return None


def _chips_of_a_host(case: SliceCase, record: ReportedSupply) -> int:
    """Returns how many chips each host has at least: of one topology there may be two sizes."""
    if case.num_hosts and record.num_chips is not None:
        return record.num_chips // case.num_hosts
    try:
        known = shapes(record.generation or "")
    except TopologyError:
        return 0
    of_topology = [each.chips_per_host for each in known if each.topology == record.topology]
    return min(of_topology, default=0)


def condemned(case: SliceCase, record: ReportedSupply, patience_s: float) -> FleetFinding | None:
    """It goes. That is wrong only if nobody has it and it does not go."""
    is_ordered = case.order is not None and case.order.kind == "condemn"
    if record.state != "condemned" or is_ordered:
        return None
    is_stuck = record.replica_id is None and record.since_s >= patience_s
    held = f"; {record.replica_id} leaves it first" if record.replica_id is not None else ""
    return FleetFinding(
        Severity.WARNING if is_stuck else Severity.NOTE,
        f"slice {case.name}",
        f"it has to go{' and is still there' if is_stuck else ''}: {short(record.reason)}{held}",
        f"{runbook('ChangesRefused')}, {runbook('ProvisionerFailing')}"
        if is_stuck
        else "nothing: it is replaced where it is wanted",
        record.since_s,
    )


def coming_late(case: SliceCase, record: ReportedSupply, patience_s: float) -> FleetFinding | None:
    """It is asked for and not whole for too long."""
    if record.state not in ("pending", "booting") or record.since_s < patience_s:
        return None
    page = "SlicePodsPending" if record.state == "pending" else "ChipsUnheld"
    deadline = ""
    if record.ends_in_s is not None:
        deadline = f"; it is given up in {format_duration(record.ends_in_s)}"
    return FleetFinding(
        Severity.WARNING,
        f"slice {case.name}",
        f"it is not whole: {short(record.reason)}{deadline}",
        f"{runbook(page)}; to have it replaced: {_condemn(case)}",
        record.since_s,
    )


def held_against(
    case: SliceCase, record: ReportedSupply, _patience_s: float
) -> FleetFinding | None:
    """It failed lately and has not served for long since."""
    if not record.num_failures or record.state not in ("free", "held"):
        return None
    times = "once" if record.num_failures == 1 else f"{record.num_failures} times in a row"
    return FleetFinding(
        Severity.NOTE,
        f"slice {case.name}",
        f"it failed {times} and is {record.state} again; three failures in a row condemn it",
        f"what failed: `ended` of --json; to have it replaced now: {_condemn(case)}",
    )


# True whatever the pods show.
OWN_RULES: tuple[RecordRule, ...] = (ordered, doubled, quarantined, leased)
# Not told where the pods already say what is wrong.
EXPLAINED_RULES: tuple[RecordRule, ...] = (pod_gone, chipless, condemned, coming_late, held_against)


def first_of_record(
    case: SliceCase, patience_s: float, rules: Iterable[RecordRule]
) -> FleetFinding | None:
    """Returns what the record of a slice says first by these rules; `None` if nothing."""
    record = case.record
    if record is None:
        return None
    return next(
        (found for rule in rules if (found := rule(case, record, patience_s)) is not None), None
    )
