"""What is held against slices: failures, the quarantine that follows, and who has to be replaced.

Owns the growing time of a quarantine, and the rule by which a slice is condemned. Does not own what
counts as a failure, nor who replaces what is condemned. Outlives its process: it is stored and read
again. Pure: callers pass `now_s`, wall-clock seconds since the epoch.

A failure is held against the hosts on which it happened, not against the slice's name, which the
replacement gets. Where the machines under the pods are known, it is held against those too: a slice
that is replaced may come back on the machine that failed.

A slice is condemned after `CONDEMN_AFTER` failures in a row that are its own. A probe that fails
and a host that falls silent are its own. An engine that fails may be the model's fault: it is the
slice's if the model's engine works on another slice, or has failed on no other one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pydantic import TypeAdapter, ValidationError

from serving.domain.supply.orders import OperatorOrder, OrderKind

FIRST_S = 30.0
LONGEST_S = 3600.0
# A slice that has not failed for so long starts anew. It also bounds how many are remembered.
FORGET_S = 24 * 3600.0
CONDEMN_AFTER = 3
# What is still there so long after it was to be taken away was not taken away.
REPRIEVE_AFTER_S = 600.0
# An engine that has served for so long clears its slice of what was held against it before.
ABSOLVE_AFTER_S = 600.0
# The exponent of a wait is bounded: a float cannot hold 2 ** 1024.
_MAX_DOUBLINGS = 16


class FaultCause(StrEnum):
    """What failed on a slice."""

    PROBE = "probe"  # its chips or its interconnect
    ENGINE = "engine"  # an engine did not start on it, or died on it
    HOST = "host"  # one of its hosts fell silent
    BOOT = "boot"  # it did not become usable in time


@dataclass(frozen=True, slots=True)
class FailedHosts:
    """The hosts of a slice on which something failed. `pods` and `machines` may be unknown: empty.

    The suspects are the hosts to blame, by Ray's node and by machine; empty where nobody knows.
    """

    incarnation: str
    name: str
    node_ids: frozenset[str] = frozenset()
    machines: frozenset[str] = frozenset()
    suspects: frozenset[str] = frozenset()
    suspect_machines: frozenset[str] = frozenset()

    def concern(self, incarnation: str, node_ids: frozenset[str], machines: frozenset[str]) -> bool:
        """Returns whether a slice is the one that failed, or still has a host that did."""
        if incarnation == self.incarnation:
            return True
        is_same = bool(node_ids) and node_ids == self.node_ids
        is_on_same = bool(machines) and machines == self.machines
        has_suspect = not self.suspects.isdisjoint(node_ids)
        return (
            is_same or is_on_same or has_suspect or not self.suspect_machines.isdisjoint(machines)
        )


@dataclass(frozen=True, slots=True)
class SliceFault:
    """What is held against one slice. Times are wall-clock seconds since the epoch.

    `count` failures came in a row; `reason` is that of the last, or of the condemnation. `model` is
    the last one whose engine failed; empty where none did. `life_ids` are the replicas' lives that
    ended with a failure here: each counts once, whoever reports it. `ends_at_s` is when a condemned
    slice is taken away; `None` if it is condemned for its failures. An operator's order of
    `ordered_at_s` keeps replicas off it until `ordered_until_s`.
    """

    hosts: FailedHosts
    count: int
    first_at_s: float
    at_s: float
    reason: str
    model: str = ""
    life_ids: frozenset[str] = field(default_factory=frozenset)
    is_condemned: bool = False
    ends_at_s: float | None = None
    ordered_until_s: float | None = None
    ordered_at_s: float | None = None

    @property
    def until_s(self) -> float:
        """The end of the quarantine."""
        doublings = min(self.count - 1, _MAX_DOUBLINGS)
        own_s = self.at_s + (min(LONGEST_S, FIRST_S * 2.0**doublings) if self.count else 0.0)
        return own_s if self.ordered_until_s is None else max(own_s, self.ordered_until_s)


class SliceFaults:
    """The faults of all slices. `is_dirty` says that they differ from what was stored last."""

    def __init__(self, faults: Iterable[SliceFault] = ()) -> None:
        self._faults = list(faults)
        self.is_dirty = False

    def all(self) -> tuple[SliceFault, ...]:
        """Returns everything that is held against anybody, the oldest first."""
        return tuple(self._faults)

    def of(
        self, incarnation: str, node_ids: frozenset[str], machines: frozenset[str]
    ) -> SliceFault | None:
        """Returns what is held against a slice or its hosts: the worst of it; `None` if nothing.

        Only the incarnation itself can be condemned: what replaces it on the same machines begins
        with its quarantine.
        """
        found = [
            fault if fault.hosts.incarnation == incarnation else replace(fault, is_condemned=False)
            for fault in self._faults
            if fault.hosts.concern(incarnation, node_ids, machines)
        ]
        return max(found, key=lambda fault: (fault.is_condemned, fault.until_s), default=None)

    def note_failure(
        self,
        hosts: FailedHosts,
        cause: FaultCause,
        reason: str,
        now_s: float,
        *,
        model: str = "",
        life_id: str = "",
        works_elsewhere: Callable[[str], bool] = lambda _: False,
    ) -> SliceFault:
        """Holds a failure against a slice and returns what is held against it now.

        It is in quarantine for 30 s, then twice as long each time, to an hour. A second report of
        one life only adds suspects. `works_elsewhere` says of a model whether an engine of it
        serves on another slice now.
        """
        self.forget(now_s)
        before = [each for each in self._faults if _concerns(each, hosts)]
        known = max(before, key=lambda fault: fault.count, default=None)
        if known is not None and life_id and life_id in known.life_ids:
            fault = replace(known, hosts=_with_suspects(known.hosts, hosts))
        else:
            count = 1 + (known.count if known else 0)
            fault = SliceFault(
                hosts=hosts if known is None else _with_suspects(hosts, known.hosts),
                count=count,
                first_at_s=known.first_at_s if known else now_s,
                at_s=now_s,
                reason=reason,
                model=model,
                life_ids=(known.life_ids if known else frozenset()) | ({life_id} - {""}),
                is_condemned=any(
                    each.is_condemned and each.hosts.incarnation == hosts.incarnation
                    for each in before
                ),
            )
            others = [each for each in self._faults if each not in before]
            if fault.count >= CONDEMN_AFTER and not fault.is_condemned:
                why = why_condemned(fault, cause, others, works_elsewhere)
                fault = replace(fault, is_condemned=why is not None, reason=why or reason)
        self._put(fault, before)
        return fault

    def condemn(
        self, hosts: FailedHosts, reason: str, now_s: float, ends_at_s: float | None = None
    ) -> None:
        """Condemns a slice: for good, or because it is taken away at `ends_at_s`.

        What is still there long after it was to be taken away is as good as before.
        """
        self.forget(now_s)
        before = [each for each in self._faults if each.hosts.incarnation == hosts.incarnation]
        if any(each.is_condemned and each.ends_at_s is None for each in before):
            return
        known = before[0] if before else SliceFault(hosts, 0, now_s, now_s, reason)
        fault = replace(known, reason=reason, is_condemned=True, ends_at_s=ends_at_s)
        self._put(fault, before)

    def obey(self, order: OperatorOrder, hosts: FailedHosts, now_s: float) -> bool:
        """Does what an operator has ordered of a slice; returns whether anything had to be done."""
        before = [each for each in self._faults if each.hosts.incarnation == hosts.incarnation]
        if order.kind == OrderKind.RELEASE:
            held = [each for each in self._faults if _concerns(each, hosts)]
            gone = [each for each in held if max(each.at_s, each.ordered_at_s or 0.0) < order.at_s]
            self._faults = [each for each in self._faults if each not in gone]
            self.is_dirty |= bool(gone)
            return bool(gone)
        if any(each.ordered_at_s == order.at_s for each in before):
            return False
        known = before[0] if before else SliceFault(hosts, 0, now_s, now_s, order.words)
        is_condemned = known.is_condemned or order.kind == OrderKind.CONDEMN
        fault = replace(
            known,
            reason=order.words,
            is_condemned=is_condemned,
            # One that was to be taken away goes by this order now.
            ends_at_s=None if order.kind == OrderKind.CONDEMN else known.ends_at_s,
            ordered_until_s=order.until_s,
            ordered_at_s=order.at_s,
        )
        self._put(fault, before)
        return True

    def absolve(self, node_ids: frozenset[str]) -> None:
        """Forgets the failures of a slice that has served; a condemned one stays condemned."""
        kept = [
            fault
            for fault in self._faults
            if fault.is_condemned
            or fault.ordered_at_s is not None
            or not fault.hosts.concern("", node_ids, frozenset())
        ]
        self.is_dirty |= len(kept) != len(self._faults)
        self._faults = kept

    def encode(self) -> bytes:
        """Returns the faults as they are stored."""
        return _FAULTS.dump_json(tuple(self._faults))

    def _put(self, fault: SliceFault, instead_of: list[SliceFault]) -> None:
        self._faults = [each for each in self._faults if each not in instead_of]
        self._faults.append(fault)
        self.is_dirty = True

    def forget(self, now_s: float) -> None:
        """Forgets what is too old to matter."""
        kept = [each for each in self._faults if not _is_over(each, now_s)]
        self.is_dirty |= len(kept) != len(self._faults)
        self._faults = kept


class FaultsError(ValueError):
    """The stored faults are not in this version's form, because another version wrote them."""


_FAULTS = TypeAdapter(tuple[SliceFault, ...])


def decode_faults(text: bytes) -> SliceFaults:
    """Returns the stored faults.

    Raises:
        FaultsError: another version wrote them.
    """
    try:
        return SliceFaults(_FAULTS.validate_json(text))
    except ValidationError as error:
        raise FaultsError(f"the faults of slices: {error}") from error


def why_condemned(
    fault: SliceFault,
    cause: FaultCause,
    others: Iterable[SliceFault],
    works_elsewhere: Callable[[str], bool],
) -> str | None:
    """Returns why a slice that has failed too often is to be replaced; `None` if it is not.

    `others` are held against other slices.
    """
    often = f"it failed {fault.count} times in a row, last: {fault.reason}"
    if cause != FaultCause.ENGINE:
        return often
    if works_elsewhere(fault.model):
        return f"{often}; {fault.model} serves on other slices"
    if all(each.model != fault.model for each in others):
        return f"{often}; {fault.model} has failed on no other slice"
    return None


def _is_over(fault: SliceFault, now_s: float) -> bool:
    if fault.ordered_until_s is not None and now_s < fault.ordered_until_s:
        return False
    if fault.ends_at_s is not None and fault.count == 0:
        return now_s >= fault.ends_at_s + REPRIEVE_AFTER_S
    return now_s - fault.at_s >= FORGET_S


def _concerns(fault: SliceFault, hosts: FailedHosts) -> bool:
    return fault.hosts.concern(hosts.incarnation, hosts.node_ids, hosts.machines)


def _with_suspects(hosts: FailedHosts, more: FailedHosts) -> FailedHosts:
    """Returns `hosts` with those of the suspects of `more` that are still among them."""
    return replace(
        hosts,
        suspects=hosts.suspects | (more.suspects & hosts.node_ids),
        suspect_machines=hosts.suspect_machines | (more.suspect_machines & hosts.machines),
    )
