"""The fleet directory: the engines that exist, their addresses and their states.

It is soft state. Nothing is stored: every slice replica reports again and again that it is there,
and is forgotten when it stops. After a restart of the directory, of a replica or of a gateway, in
any order, the picture is whole again within one lease. A gateway never drops an engine because the
directory forgot it; only its link reports the loss of an engine.

Ended lives are kept for a reader, not for a decision: the last ones, with their causes. A restart
of the directory loses them.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from pydantic import JsonValue

from serving.domain.slice_lifecycle import WAITING, EndCause, SliceLifecycle, SliceState
from serving.domain.supply.orders import OperatorOrder
from serving.domain.supply.records import SupplyRecord

# A replica that has not reported for this long is presumed gone.
LEASE_S = 5.0
RENEWAL_S = 1.0
# Of the lives that have ended, this many of the latest are kept: a bad night of a large fleet, and
# well below a megabyte in every snapshot.
MAX_ENDED = 200


def part_suffix(part: int) -> str:
    """Returns the suffix of the replica id of slice number `part`; empty for the first."""
    return f"+{part}" if part else ""


@dataclass(frozen=True, slots=True)
class HostRecord:
    """The record of one host of a held slice: a Ray node, its place in the slice and its id.

    `tpu_log_dir` is the folder of libtpu's logs there; `None` where libtpu writes none.
    `ends_at_s` is when its maximum run duration ends (wall clock), as its agent has it; `None`
    where there is no such end, or the host does not tell when it started.
    """

    worker_id: int
    node_id: str
    address: str
    num_chips: int
    tpu_log_dir: str | None = None
    ends_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """The record of one engine: where its link listens, and where it is commanded.

    `control` is `None` until it is ready to have another owner.
    """

    engine_id: str
    address: tuple[str, int]
    control: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class SliceRecord:
    """The record of one slice replica and the slice that it waits for or holds.

    A replica whose engine owns a multislice has one record for each slice. They differ in
    `replica_id` and `part`, the place of the slice among them. The first, `part` 0, stands for the
    engine: only it has an `address`.

    A slice that is divided has `num_engines` on it, all of them started together. `engine_id`,
    `address` and `control` are then those of the first, and `others` are the rest; `engines` has
    all.

    `generation` and `topology` are `None` on a compute class without slices (`local`). `hosts` is
    empty until a slice is reserved, and ordered by worker id. `engine_id` and `address` are `None`
    until the engine has started. `drain_deadline_s` is the wall-clock time at which a draining
    slice ends, `None` when it is not draining or nothing takes it away. `version` is that of the
    model's tokens (`serving.domain.models.model_version`), empty where none was reported.
    `zone` is the one that the slice has to be in; `None`: any.

    `fingerprint` is that of the engine (`EngineSpec`). `control` is where it is commanded, once it
    is ready to have another owner; `group_id` the placement group around it, once there is one. An
    orphan is served by an engine whose replica is gone, and waits for another one. `is_adopted`
    says that the engine was another replica's before.
    """

    replica_id: str
    model: str
    compute_class: str
    life: SliceLifecycle
    generation: str | None = None
    topology: str | None = None
    hosts: tuple[HostRecord, ...] = ()
    engine_id: str | None = None
    address: tuple[str, int] | None = None
    drain_deadline_s: float | None = None
    part: int = 0
    version: str = ""
    zone: str | None = None
    fingerprint: str = ""
    control: tuple[str, int] | None = None
    group_id: str | None = None
    is_orphan: bool = False
    is_adopted: bool = False
    num_engines: int = 1
    others: tuple[EngineRecord, ...] = ()

    @property
    def engines(self) -> tuple[EngineRecord, ...]:
        """The engines on the slice, in order; none before they have started.

        Of a multislice only the first slice has any.
        """
        if self.engine_id is None or self.address is None:
            return ()
        return (EngineRecord(self.engine_id, self.address, self.control), *self.others)

    @property
    def engine_ids(self) -> tuple[str, ...]:
        """The ids of the engines on the slice, in order; that of a multislice on its first only."""
        if self.engine_id is None or not self.has_engine:
            return ()
        return (self.engine_id, *(other.engine_id for other in self.others))

    @property
    def has_engine(self) -> bool:
        """True if the record stands for the engine; a multislice has one engine."""
        return self.part == 0

    @property
    def life_id(self) -> str:
        """The id that the records of a multislice share."""
        return self.replica_id.removesuffix(part_suffix(self.part))

    @property
    def state(self) -> SliceState:
        """The slice's state."""
        return self.life.state

    @property
    def engine_kind(self) -> tuple[str, str, str]:
        """What this replica's engine has in common with every one that may take its place."""
        return self.model, self.compute_class, self.fingerprint

    @property
    def may_go_on(self) -> bool:
        """Returns whether the engine serves without its replica, and another one may have it."""
        return self.state == SliceState.READY and self.control is not None

    @property
    def ends_at_s(self) -> float | None:
        """When the first of its hosts ends, as `HostRecord`; `None` if none is known to end."""
        return min(
            (host.ends_at_s for host in self.hosts if host.ends_at_s is not None), default=None
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The records at one moment. `version` changes whenever a record does.

    `ended` are the lives that have ended lately, in the order in which the directory learned it.
    `models` are the application's models as the configuration has them now, in its own form;
    `None` until Serve has sent them. `supply` has every slice that exists or is asked for, whoever
    has it. `orders` are those of operators that stand, the oldest first.
    """

    version: str
    records: tuple[SliceRecord, ...] = ()
    ended: tuple[SliceRecord, ...] = ()
    models: tuple[Mapping[str, JsonValue], ...] | None = None
    supply: tuple[SupplyRecord, ...] = ()
    orders: tuple[OperatorOrder, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """The directory's request to a replica to leave its slice, and why.

    `is_replaced` says that the slice goes: another one takes its place, or none does. Otherwise it
    stays and is given back.
    """

    reason: str
    is_replaced: bool


class HandOn(StrEnum):
    """What becomes of the engine of a replica that Serve ends."""

    ENDS = "ends"  # nobody is to have it
    WANTED = "wanted"  # another replica waits for one, or may come
    EXCHANGED = "exchanged"  # another replica gives its slice up for it


@dataclass(frozen=True, slots=True)
class _Lease:
    record: SliceRecord
    until_s: float  # monotonic
    is_remembered: bool = False


@dataclass(frozen=True, slots=True)
class _Ended:
    """The record of a life that is over. `is_presumed`: its replica only fell silent."""

    record: SliceRecord
    is_presumed: bool


class Directory:
    """The records under lease, and a way to wait for a change.

    It has no clock: callers pass `now_s`, monotonic, for leases, and `wall_s`, seconds since the
    epoch, for what is written into a life.
    """

    def __init__(self, instance_id: str) -> None:
        # Versions of different directories must differ, or a gateway would wait for a change that
        # happened before the restart.
        self._instance_id = instance_id
        self._counter = 0
        self._leases: dict[str, _Lease] = {}  # by replica id
        # Records of engines that go on though their replica is gone, by that replica's id.
        self._orphans: dict[str, SliceRecord] = {}
        # By replica and the start of its life: one replica may lose a slice and take another one.
        self._ended: dict[tuple[str, float], _Ended] = {}
        self._models: tuple[Mapping[str, JsonValue], ...] | None = None
        self._supply: tuple[SupplyRecord, ...] = ()
        self._orders: tuple[OperatorOrder, ...] = ()
        self._changed = asyncio.Event()

    def snapshot(self) -> Snapshot:
        """Returns the present snapshot."""
        return Snapshot(
            f"{self._instance_id}:{self._counter}",
            (*(lease.record for lease in self._leases.values()), *self._orphans.values()),
            tuple(ended.record for ended in self._ended.values()),
            self._models,
            self._supply,
            self._orders,
        )

    def set_models(self, models: Iterable[Mapping[str, JsonValue]]) -> None:
        """Takes in the models of the configuration."""
        if (new := tuple(models)) != self._models:
            self._models = new
            self._note_change()

    def set_supply(self, supply: tuple[SupplyRecord, ...]) -> None:
        """Takes in the records of all slices."""
        if supply != self._supply:
            self._supply = supply
            self._note_change()

    def set_orders(self, orders: tuple[OperatorOrder, ...]) -> None:
        """Takes in the operators' orders that stand."""
        if orders != self._orders:
            self._orders = orders
            self._note_change()

    def renew(self, record: SliceRecord, now_s: float) -> None:
        """Takes in a record, or keeps it for another lease.

        A life that was only presumed over goes on. A life that its replica itself reported as over
        stays so: such a renewal was sent before that report and arrived after it.
        """
        ended = self._ended.get(_life_of(record))
        if ended is not None:
            if not ended.is_presumed:
                return
            del self._ended[_life_of(record)]
        self._orphans.pop(record.replica_id, None)
        self._end_adopted(record)
        known = self._leases.get(record.replica_id)
        self._leases[record.replica_id] = _Lease(record, now_s + LEASE_S)
        if known is None or known.record != record:
            self._note_change()

    def remember(self, record: SliceRecord, now_s: float) -> None:
        """Takes in a record that a directory before this one knew; its replica has one lease.

        Until that renews it, it is late: whoever asks for a slice meanwhile may get its engine.
        """
        self.renew(record, now_s)
        lease = self._leases.get(record.replica_id)
        if lease is not None:
            self._leases[record.replica_id] = replace(lease, is_remembered=True)

    def late(self, now_s: float) -> tuple[SliceRecord, ...]:
        """Returns the records whose replicas are late: they renew them soon, or are gone."""
        late_s = now_s + LEASE_S - 2 * RENEWAL_S
        return tuple(
            each.record
            for each in self._leases.values()
            if each.is_remembered or each.until_s < late_s
        )

    def lives(self, now_s: float) -> tuple[SliceRecord, ...]:
        """Returns all records; engines of late replicas that somebody waits for are orphans there.

        A successor may be there before that lease has run out, and needs no other slice.
        """
        records = self.snapshot().records
        waiting = {record.engine_kind for record in records if record.state in WAITING}
        late = {
            each.replica_id
            for each in self.late(now_s)
            if each.may_go_on and each.engine_kind in waiting
        }
        return tuple(
            replace(record, is_orphan=True) if record.replica_id in late else record
            for record in records
        )

    def hand_on(self, replica_id: str) -> None:
        """Makes an orphan of an engine that its replica leaves to another one."""
        lives = [
            lease.record for lease in self._leases.values() if lease.record.life_id == replica_id
        ]
        for record in lives:
            del self._leases[record.replica_id]
            self._orphan(record, "its replica has left it to another one")
        self._note_change()

    def end_orphan(self, replica_id: str, cause: EndCause, reason: str, wall_s: float) -> None:
        """Ends an orphan's life; nothing if it has been adopted meanwhile."""
        orphan = self._orphans.pop(replica_id, None)
        if orphan is not None:
            life = orphan.life.end(cause, wall_s, reason)
            ended = replace(orphan, life=life, is_orphan=False)
            self._keep_ended(_Ended(ended, is_presumed=False))
            self._note_change()

    def forget(self, replica_id: str) -> None:
        """Drops a replica that leaves without a report on the end of its life."""
        if self._leases.pop(replica_id, None) or self._orphans.pop(replica_id, None):
            self._note_change()

    def end(self, record: SliceRecord) -> None:
        """Takes in a replica's last report on a life, which is GONE, and keeps it among the ended.

        Raises:
            ValueError: the life has not ended. The caller has to end it first.
        """
        if record.state != SliceState.GONE:
            raise ValueError(f"the life of {record.replica_id} is {record.state}, not gone")
        known = self._leases.get(record.replica_id)
        # A replica that already lives its next life keeps it.
        if known is not None and _life_of(known.record) == _life_of(record):
            del self._leases[record.replica_id]
        self._orphans.pop(record.replica_id, None)
        self._keep_ended(_Ended(record, is_presumed=False))
        self._note_change()

    def expire(self, now_s: float, wall_s: float) -> None:
        """Ends the lives of the replicas whose lease has run out; an engine may live on."""
        late = [lease.record for lease in self._leases.values() if lease.until_s <= now_s]
        for record in late:
            del self._leases[record.replica_id]
            reason = f"its replica was not heard of for {LEASE_S:g} s"
            if record.may_go_on:
                self._orphan(record, f"{reason}; the engine goes on")
                continue
            life = record.life.end(_presumed_cause(record, self._supply), wall_s, reason)
            self._keep_ended(_Ended(replace(record, life=life), is_presumed=True))
        if late:
            self._note_change()

    async def wait_change(self, version: str, timeout_s: float) -> Snapshot:
        """Returns the next snapshot that is not `version`; the present one if nothing changes."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.snapshot().version == version:
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self.snapshot()

    def _orphan(self, record: SliceRecord, reason: str) -> None:
        # The state stays, so no time is needed.
        life = record.life.enter(record.state, record.life.entered_at_s, reason)
        self._orphans[record.replica_id] = replace(record, life=life, is_orphan=True)

    def _end_adopted(self, record: SliceRecord) -> None:
        """Ends the lives of those whose engine this record has now."""
        if record.engine_id is None:
            return
        adopted = [
            orphan for orphan in self._orphans.values() if orphan.engine_id == record.engine_id
        ]
        for orphan in adopted:
            at_s = record.life.entered_at_s
            reason = f"{record.life_id} has taken it over"
            self.end_orphan(orphan.replica_id, EndCause.ADOPTED, reason, at_s)

    def _keep_ended(self, ended: _Ended) -> None:
        key = _life_of(ended.record)
        self._ended.pop(key, None)
        self._ended[key] = ended
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def _note_change(self) -> None:
        self._counter += 1
        self._changed.set()
        self._changed = asyncio.Event()


def _life_of(record: SliceRecord) -> tuple[str, float]:
    return record.replica_id, record.life.transitions[0].at_s


def _presumed_cause(record: SliceRecord, supply: Sequence[SupplyRecord]) -> EndCause:
    """Returns the likeliest cause of the end of a replica that fell silent.

    Replicas do not run on the hosts of slices, so silence alone takes no slice away: an end that
    was announced does, or hosts of which `supply` has none any more.
    """
    if record.state in WAITING:
        return EndCause.RELEASED  # it held nothing that could have been taken
    if not record.hosts:
        return EndCause.UNHEALTHY  # on this very machine (`local`), its process died or hung
    if record.drain_deadline_s is not None:
        return EndCause.PREEMPTED
    node_ids = {host.node_id for host in record.hosts}
    # Without a record of any slice nobody has looked yet.
    if supply and not any(each.node_ids & node_ids for each in supply):
        return EndCause.PREEMPTED
    return EndCause.REPLICA_LOST
