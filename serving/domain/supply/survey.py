"""Makes the record of every slice from what is seen: pods, Ray's nodes, holders and faults.

Owns the states. Each has its reason, and the first rule that holds decides:

    condemned     it is taken away, has failed too often, or did not boot in time
    held          a replica reports that it has it
    leased        its chips are taken all the same: by an engine that goes on without a replica, or
                  by a replica that is about to say so
    quarantined   it is whole, and is kept from replicas for a while
    free          it is whole
    booting       it is not whole, and every one of its machines is there
    pending       not even that

Pure: no clock, no I/O. `before` are the records of the survey before, from which it knows for how
long a state has lasted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from serving.domain.slice_lifecycle import HELD_STATES, WAITING
from serving.domain.slice_records import SliceRecord
from serving.domain.supply.faults import FailedHosts, SliceFault, SliceFaults
from serving.domain.supply.found import FoundSlice, join_slices
from serving.domain.supply.pods import ObservedPod, PodPhase
from serving.domain.supply.records import (
    SliceHolder,
    SupplyHost,
    SupplyRecord,
    SupplyState,
    WaitingReplica,
)
from serving.domain.topology import slice_shape

# From when every machine of a slice is there until every host is in Ray: images of tens of
# gigabytes are fetched, and a TPU host of GKE takes minutes to become ready.
BOOT_S = 1200.0
_MAX_BOOT_DOUBLINGS = 5
# The longest that a replica has a slice before it says so: agents start on its hosts meanwhile.
REPORTED_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class _State:
    state: SupplyState
    reason: str
    until_s: float | None = None


def survey(
    slices: Iterable[FoundSlice],
    records: Sequence[SliceRecord],
    faults: SliceFaults,
    before: Mapping[str, SupplyRecord],
    now_s: float,
    *,
    boot_s: float = BOOT_S,
) -> tuple[SupplyRecord, ...]:
    """Returns the record of every incarnation, by name; `now_s` is wall-clock time.

    `records` are the replicas' own. What one replica has is one slice, also while the pods of a
    lost one go one after the other and Ray still shows the nodes in them. A slice that a replica
    reports to have and of which nothing is left stays listed with its holder, until that has
    noticed. `boot_s` is doubled for every failure in a row that is held against a slice, or against
    the machines that it has come back on.
    """
    found = []
    for each, life in _held_once(slices, _holders(records)):
        known = before.get(each.incarnation)
        found.append(_record(each, life, faults, known, now_s, boot_s))
    seen = {each.holder.life_id for each in found if each.holder is not None}
    # Of a life that has lost every host, and does not know it yet.
    lost = [record for record in records if _holds(record) and record.replica_id not in seen]
    found += [_lost(record, before, now_s) for record in lost]
    return tuple(sorted(found, key=lambda each: (each.name, each.incarnation)))


def waiting_replicas(records: Iterable[SliceRecord]) -> tuple[WaitingReplica, ...]:
    """Returns the replicas without slices, each once, those that have waited longest first."""
    parts: dict[str, list[SliceRecord]] = {}
    for record in records:
        if record.state in WAITING and record.generation is not None:
            parts.setdefault(record.life_id, []).append(record)
    waiting = [_waiting(of_life) for of_life in parts.values()]
    return tuple(sorted(waiting, key=lambda each: (each.since_s, each.life_id)))


def failed_hosts(record: SupplyRecord, suspects: frozenset[str] = frozenset()) -> FailedHosts:
    """Returns the hosts of a slice as faults remember them; `suspects` are Ray's nodes."""
    return FailedHosts(
        incarnation=record.incarnation,
        name=record.name,
        node_ids=record.node_ids,
        machines=frozenset(filter(None, (host.machine for host in record.hosts))),
        suspects=suspects & record.node_ids,
        suspect_machines=frozenset(
            filter(None, (host.machine for host in record.hosts if host.node_id in suspects))
        ),
    )


def _record(
    each: FoundSlice,
    life: SliceRecord | None,
    faults: SliceFaults,
    known: SupplyRecord | None,
    now_s: float,
    boot_s: float,
) -> SupplyRecord:
    holder = None if life is None else _holder(life)
    ends_at_s = None if life is None else life.ends_at_s
    if ends_at_s is None and known is not None:
        # Whoever has it next has it no longer, and is told of it only by its own agents.
        ends_at_s = known.ends_at_s
    hosts = _hosts(each)
    node_ids = frozenset(host.node_id for host in each.hosts)
    machines = frozenset(host.machine for host in hosts if host.machine is not None)
    fault = faults.of(each.incarnation, node_ids, machines)
    found = _state(each, holder, fault, known, now_s, boot_s)
    since_s = now_s if known is None or known.state != found.state else known.since_s
    return SupplyRecord(
        incarnation=each.incarnation,
        name=each.name,
        state=found.state,
        reason=found.reason,
        since_s=since_s,
        compute_class=each.compute_class,
        generation=str(each.shape.generation),
        topology=each.shape.topology,
        num_chips=each.shape.num_chips,
        hosts=hosts,
        zone=each.zone,
        group=None if each.group is None else each.group.group,
        until_s=found.until_s,
        holder=holder,
        num_failures=0 if fault is None else fault.count,
        failed_at_s=fault.at_s if fault is not None and fault.count else None,
        ends_at_s=ends_at_s,
    )


def _state(
    each: FoundSlice,
    holder: SliceHolder | None,
    fault: SliceFault | None,
    known: SupplyRecord | None,
    now_s: float,
    boot_s: float,
) -> _State:
    if fault is not None and fault.is_condemned and _is_final(each, fault):
        return _State(SupplyState.CONDEMNED, fault.reason)
    if each.pods is not None and each.pods.leave_reason is not None:
        return _State(SupplyState.CONDEMNED, each.pods.leave_reason)
    if holder is not None and holder.is_leaving:
        return _State(SupplyState.CONDEMNED, "it is taken away, and its replica leaves it")
    if holder is not None and holder.is_orphan:
        return _State(SupplyState.LEASED, f"{holder.life_id} is gone, and its engine goes on")
    if holder is not None:
        return _State(SupplyState.HELD, f"{holder.life_id} has it")
    draining = [host.worker_id for host in each.hosts if host.is_draining]
    if draining:
        return _State(SupplyState.CONDEMNED, f"Ray drains host {draining[0]}")
    if any(host.num_free_chips < host.num_chips for host in each.hosts):
        return _leased(known, now_s)
    why_not = each.why_not_whole()
    if why_not is None and fault is not None and now_s < fault.until_s:
        reason = f"it failed {fault.count} times, last: {fault.reason}"
        if fault.ordered_until_s is not None and now_s < fault.ordered_until_s:
            reason = fault.reason
        return _State(SupplyState.QUARANTINED, reason, fault.until_s)
    if why_not is None:
        return _State(SupplyState.FREE, "every host is in Ray, and free")
    return _coming(each, why_not, fault, known, now_s, boot_s)


def _leased(known: SupplyRecord | None, now_s: float) -> _State:
    """Returns the state of a slice whose chips are taken, by somebody who does not say so.

    It is being taken, or was given back a moment ago, until that has lasted for too long.
    """
    until_s: float | None = now_s + REPORTED_AFTER_S
    if known is not None and known.state == SupplyState.LEASED:
        until_s = known.until_s
    if until_s is not None and now_s < until_s:
        reason = "its chips are taken, and a replica may be about to say that it has it or had it"
        return _State(SupplyState.LEASED, reason, until_s)
    return _State(SupplyState.LEASED, "its chips are taken, and no replica says that it has it")


def _is_final(each: FoundSlice, fault: SliceFault) -> bool:
    """Returns whether a condemned slice goes: by an order, or as somebody takes or makes it."""
    has_way = fault.ends_at_s is not None or each.pods is not None
    return has_way or fault.ordered_at_s is not None


def _coming(
    each: FoundSlice,
    why_not: str,
    fault: SliceFault | None,
    known: SupplyRecord | None,
    now_s: float,
    boot_s: float,
) -> _State:
    """Returns the state of a slice that is not whole: it has not come yet, or a host is gone."""
    if each.pods is None:
        # Nobody makes slices here, so nobody could replace this one either.
        return _State(SupplyState.BOOTING, why_not)
    without = [index for index, pod in enumerate(each.pods.pods) if pod.machine is None]
    if without:
        return _State(SupplyState.PENDING, f"host {without[0]} has no machine yet")
    waiting = [pod.waiting for pod in each.pods.pods if pod.waiting is not None]
    ended = [pod for pod in each.pods.pods if pod.phase in (PodPhase.FAILED, PodPhase.SUCCEEDED)]
    detail = f"{why_not}; its container waits: {waiting[0]}" if waiting else why_not
    if ended:
        return _State(SupplyState.CONDEMNED, f"pod {ended[0].name} is {ended[0].phase}")
    failures = 0 if fault is None else fault.count
    until_s = now_s + boot_s * 2.0 ** min(failures, _MAX_BOOT_DOUBLINGS)
    if known is not None and known.state == SupplyState.BOOTING and known.until_s is not None:
        until_s = known.until_s
    if known is not None and known.state == SupplyState.CONDEMNED:
        return _State(SupplyState.CONDEMNED, known.reason)
    if now_s >= until_s:
        return _State(SupplyState.CONDEMNED, f"not usable within its time to boot: {detail}")
    return _State(SupplyState.BOOTING, detail, until_s)


def _hosts(each: FoundSlice) -> tuple[SupplyHost, ...]:
    nodes = {host.worker_id: host for host in reversed(each.hosts)}
    pods = _pods_by_worker(each)
    hosts = []
    for worker_id in sorted(nodes.keys() | pods.keys()):
        node, pod = nodes.get(worker_id), pods.get(worker_id)
        instance_id = node.instance_id if node is not None else ""
        address = node.address if node is not None else None
        hosts.append(
            SupplyHost(
                worker_id,
                pod=pod.name if pod is not None else instance_id or None,
                machine=pod.machine if pod is not None else None,
                node_id=node.node_id if node is not None else None,
                address=address or (pod.address if pod is not None else None),
                num_chips=node.num_chips if node is not None else None,
            )
        )
    return tuple(hosts)


def _pods_by_worker(each: FoundSlice) -> dict[int, ObservedPod]:
    """Returns the pods by worker id: that of the node in each, or else the next one in their order.

    Of a slice that has lost a pod the order alone would take one host's pod for another's.
    """
    if each.pods is None:
        return {}
    by_node = {host.instance_id or host.address: host.worker_id for host in each.hosts}
    found: dict[int, ObservedPod] = {}
    rest = []
    for pod in each.pods.pods:
        worker_id = by_node.get(pod.name, by_node.get(pod.address or ""))
        if worker_id is None or worker_id in found:
            rest.append(pod)
        else:
            found[worker_id] = pod
    free = (index for index in range(len(each.pods.pods) + len(each.hosts)) if index not in found)
    return found | dict(zip(free, rest, strict=False))


def _holds(record: SliceRecord) -> bool:
    return record.state in HELD_STATES and bool(record.hosts)


def _holders(records: Iterable[SliceRecord]) -> dict[str, SliceRecord]:
    """Returns the record of the replica that has a host, by Ray's node id.

    Two may name one host: the one that leaves it, and the one that has just taken it.
    """
    holders: dict[str, SliceRecord] = {}
    for record in sorted(filter(_holds, records), key=lambda each: each.life.transitions[0].at_s):
        for host in record.hosts:
            holders[host.node_id] = record
    return holders


def _held_once(
    slices: Iterable[FoundSlice], holders: Mapping[str, SliceRecord]
) -> list[tuple[FoundSlice, SliceRecord | None]]:
    """Returns each slice with the life that has it; what one life has of several is joined."""
    found: list[tuple[FoundSlice, SliceRecord | None]] = []
    of_life: dict[str, list[FoundSlice]] = {}
    for each in slices:
        of_hosts = (holders.get(host.node_id) for host in each.hosts)
        life = next(filter(None, of_hosts), None)
        if life is None:
            found.append((each, None))
            continue
        of_life.setdefault(life.replica_id, []).append(each)
        if len(of_life[life.replica_id]) == 1:
            found.append((each, life))
    return [
        (each if life is None else join_slices(of_life[life.replica_id]), life)
        for each, life in found
    ]


def _holder(record: SliceRecord) -> SliceHolder:
    return SliceHolder(
        life_id=record.replica_id,
        model=record.model,
        compute_class=record.compute_class,
        state=record.state,
        drain_deadline_s=record.drain_deadline_s,
        part=record.part,
        is_orphan=record.is_orphan,
    )


def _lost(record: SliceRecord, before: Mapping[str, SupplyRecord], now_s: float) -> SupplyRecord:
    """Returns the record of a slice that is gone, and whose replica has not noticed."""
    reason = "none of its hosts is in Ray any more, and its replica has not noticed"
    holder = _holder(record)
    for known in before.values():
        if known.holder is not None and known.holder.life_id == record.replica_id:
            since_s = known.since_s if known.state == SupplyState.CONDEMNED else now_s
            return replace(
                known, state=SupplyState.CONDEMNED, reason=reason, since_s=since_s, holder=holder
            )
    hosts = tuple(
        SupplyHost(host.worker_id, node_id=host.node_id, address=host.address)
        for host in record.hosts
    )
    num_chips = sum(host.num_chips for host in record.hosts)
    return SupplyRecord(
        incarnation=f"node-{record.hosts[0].node_id}",
        name=record.life.slice_name or record.replica_id,
        state=SupplyState.CONDEMNED,
        reason=reason,
        since_s=now_s,
        compute_class=record.compute_class,
        generation=str(record.generation),
        topology=str(record.topology),
        num_chips=num_chips,
        hosts=hosts,
        zone=record.zone,
        holder=holder,
    )


def _waiting(parts: Sequence[SliceRecord]) -> WaitingReplica:
    first = min(parts, key=lambda record: record.part)
    assert first.generation is not None  # its caller's condition
    assert first.topology is not None
    shape = slice_shape(first.generation, first.topology)
    return WaitingReplica(
        life_id=first.life_id,
        model=first.model,
        compute_class=first.compute_class,
        generation=str(shape.generation),
        topology=shape.topology,
        since_s=first.life.transitions[0].at_s,
        zone=first.zone,
        num_slices=len(parts),
    )
