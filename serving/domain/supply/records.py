"""The record of a slice's incarnation: its hosts, its state as supply, and who has it.

One incarnation is one set of hosts, which come and go together. What replaces a lost slice is
another incarnation, also where it gets the name of the lost one. `SliceState` is the view of the
replica that holds it. Provisioner, allocator, policy, ledger, status and metrics read this record.

    pending → booting → free ⇄ held, leased
                 │        ⇅       │
                 │   quarantined  │
                 └─────→ condemned ←─ from every state; nothing leads back

Owns the words, and the form in which the directory publishes all records. Pure.
"""

from dataclasses import dataclass
from enum import StrEnum

from pydantic import TypeAdapter, ValidationError

from serving.domain.slice_lifecycle import SliceState


class SupplyState(StrEnum):
    """What an incarnation is to those who need slices."""

    PENDING = "pending"  # asked for; not every host has a machine
    BOOTING = "booting"  # its machines are there and paid for; not every host is in Ray, whole
    FREE = "free"  # a replica may take it
    HELD = "held"  # a replica has it
    LEASED = "leased"  # its chips are taken, and no replica is there that has them
    QUARANTINED = "quarantined"  # free, and kept from replicas for a while because it failed
    CONDEMNED = "condemned"  # it goes, or has to: never supply again


# What a waiting replica has, or may hope for, without another slice being made.
USABLE = frozenset(SupplyState) - {SupplyState.CONDEMNED}
# Nobody may drop these.
TAKEN = frozenset({SupplyState.HELD, SupplyState.LEASED})


@dataclass(frozen=True, slots=True)
class SupplyHost:
    """One host of an incarnation. What is not known, or not there yet, is `None`.

    `pod` and `machine` are Kubernetes' pod and node; `node_id` is Ray's node in that pod, and
    `num_chips` how many chips that has, as Ray counts them.
    """

    worker_id: int
    pod: str | None = None
    machine: str | None = None
    node_id: str | None = None
    address: str | None = None
    num_chips: int | None = None


@dataclass(frozen=True, slots=True)
class SliceHolder:
    """The replica that has a slice, and for how long. See `SliceRecord` for the fields."""

    life_id: str
    model: str
    compute_class: str
    state: SliceState
    drain_deadline_s: float | None = None
    part: int = 0
    is_orphan: bool = False

    @property
    def is_leaving(self) -> bool:
        """Returns whether the slice is being taken away from it."""
        return self.state == SliceState.DRAINING and self.drain_deadline_s is not None

    @property
    def is_handing_over(self) -> bool:
        """Returns whether it leaves a slice that stays, with its engine or without."""
        return self.is_orphan or (
            self.state == SliceState.DRAINING and self.drain_deadline_s is None
        )


@dataclass(frozen=True, slots=True)
class SupplyRecord:
    """The record of one incarnation. Times are wall-clock seconds since the epoch.

    `incarnation` is the name of its first pod, or stands for its Ray nodes where there are no pods.
    `name` is unique among the incarnations that live, except that what replaces a slice may have
    the name of the one that still ends. `compute_class` and `group` are `None` where hosts name
    none. `until_s` is the deadline of BOOTING and the end of QUARANTINED, and of LEASED the time
    until which a replica may be about to say that it has the slice; `None` in other states,
    afterwards, and where nobody could replace what does not boot. `holder` is `None` unless a
    replica has it, which it may in the state CONDEMNED too. `ends_at_s` is when its maximum run
    duration ends, once a replica that had it was told by its hosts; `None` where that is not known,
    or never.
    """

    incarnation: str
    name: str
    state: SupplyState
    reason: str
    since_s: float
    compute_class: str | None
    generation: str
    topology: str
    num_chips: int
    hosts: tuple[SupplyHost, ...]
    zone: str | None = None
    group: str | None = None
    until_s: float | None = None
    holder: SliceHolder | None = None
    num_failures: int = 0
    failed_at_s: float | None = None
    ends_at_s: float | None = None

    @property
    def is_taken(self) -> bool:
        """Returns whether an engine may be on it, so that nobody may drop it."""
        return self.state in TAKEN or self.holder is not None

    @property
    def is_changing_hands(self) -> bool:
        """Returns whether it is one that a replica takes or has left, and has not said so yet."""
        return self.state == SupplyState.LEASED and self.until_s is not None

    @property
    def node_ids(self) -> frozenset[str]:
        """Its nodes in Ray, as far as they are there."""
        return frozenset(host.node_id for host in self.hosts if host.node_id is not None)

    @property
    def pods(self) -> frozenset[str]:
        """Its pods; empty where there is no Kubernetes."""
        return frozenset(host.pod for host in self.hosts if host.pod is not None)


@dataclass(frozen=True, slots=True)
class WaitingReplica:
    """A replica without slices, and the kind that it waits for. `zone` of `None`: any.

    `num_slices` are joined: it gets all of them or none.
    """

    life_id: str
    model: str
    compute_class: str
    generation: str
    topology: str
    since_s: float
    zone: str | None = None
    num_slices: int = 1


@dataclass(frozen=True, slots=True)
class SupplyReport:
    """Everything that the directory knows of slices. `version` differs with every change.

    `frozen` says by whose order and why no slice may be dropped that somebody could want again;
    `None` where there is no such order.
    """

    version: str
    slices: tuple[SupplyRecord, ...] = ()
    waiting: tuple[WaitingReplica, ...] = ()
    frozen: str | None = None


class SupplyReportError(ValueError):
    """The report is not in this version's form, because another version wrote it."""


_REPORT = TypeAdapter(SupplyReport)


def encode_supply(report: SupplyReport) -> bytes:
    """Returns the report as it is stored."""
    return _REPORT.dump_json(report)


def decode_supply(text: bytes) -> SupplyReport:
    """Returns the stored report.

    Raises:
        SupplyReportError: another version wrote it.
    """
    try:
        return _REPORT.validate_json(text)
    except ValidationError as error:
        raise SupplyReportError(f"the report of slices: {error}") from error
