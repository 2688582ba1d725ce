"""Notices about the end of a slice's hosts, and the drain order that follows from them.

Owns the kinds of notices, the rule that combines several, and the time at which a slice drains.
Does not own the sources of notices (`metadata_client`, `node_notices`, `host_heartbeat`). Pure:
callers pass `now_s`, wall-clock seconds since the epoch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from serving.domain.slice_lifecycle import EndCause


class NoticeKind(StrEnum):
    """The kinds of notices, the mildest first."""

    REPLACEMENT = "replacement"  # the slice is replaced, because its pods are of an older template
    EXPIRY = "expiry"  # the host's maximum run duration ends
    MAINTENANCE = "maintenance"  # the host will be stopped for maintenance
    NODE_DRAINING = "node_draining"  # Kubernetes or Ray is clearing the node
    TERMINATION_SIGNAL = "termination_signal"  # a process of ours on the host got a signal to end
    PREEMPTION = "preemption"  # the cloud takes the host back
    HOST_LOST = "host_lost"  # it is gone already


_SEVERITY = {kind: rank for rank, kind in enumerate(NoticeKind)}

# These are announced long before. With a date, they make a slice drain only shortly before it.
_SCHEDULED = frozenset({NoticeKind.EXPIRY, NoticeKind.MAINTENANCE})


@dataclass(frozen=True, slots=True)
class Notice:
    """The end of one host, announced by one source.

    `deadline_s` is the wall-clock time from which the host may be gone, `None` if the source gave
    none. `source` names the origin, such as `metadata instance/preempted`. A later notice of the
    same host and source replaces it.
    """

    kind: NoticeKind
    worker_id: int
    deadline_s: float | None
    reason: str
    source: str


class NoticeSink(Protocol):
    """The receiver of notices. Neither method blocks; a repeated call has no effect."""

    def announce(self, notice: Notice) -> None:
        """Adds the notice, in place of an earlier one from the same source for the same host."""

    def withdraw(self, worker_id: int, source: str) -> None:
        """Removes the notice of that source for that host."""


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """The slice takes no more requests, and is left for `cause` by `deadline_s` (wall clock).

    `deadline_s` is `None` if nothing takes it away. `is_lost` says that a host is gone already, as
    far as its own end of a connection tells.
    """

    deadline_s: float | None
    reason: str
    cause: EndCause
    is_lost: bool = False


def combine(notices: Iterable[Notice]) -> Notice | None:
    """Returns the most severe notice with the earliest deadline of any; `None` for none.

    Of several that are equally severe, the one with the earliest deadline gives the reason.
    """
    listed = list(notices)
    if not listed:
        return None
    first = min(listed, key=lambda each: (-_SEVERITY[each.kind], _or_never(each.deadline_s)))
    deadline_s = min(_or_never(each.deadline_s) for each in listed)
    return replace(first, deadline_s=None if deadline_s == _NEVER else deadline_s)


def plan_drain(notices: Iterable[Notice], drain_notice_s: float, now_s: float) -> DrainOrder | None:
    """Returns the drain order that a slice's notices demand now; `None` if they demand none.

    One host's end is the slice's. `drain_notice_s` belongs to the compute class. It is the time
    before a scheduled end at which the slice starts to drain, and the time that the slice has when
    no end was named.
    """
    due = [
        replace(each, deadline_s=_end_s(each, drain_notice_s, now_s))
        for each in notices
        if _is_due(each, drain_notice_s, now_s)
    ]
    worst = combine(due)
    if worst is None or worst.deadline_s is None:
        return None
    deadline_s = max(worst.deadline_s, now_s)
    is_lost = worst.kind == NoticeKind.HOST_LOST
    return DrainOrder(deadline_s, f"host {worst.worker_id}: {worst.reason}", _cause(due), is_lost)


def _is_due(notice: Notice, drain_notice_s: float, now_s: float) -> bool:
    if notice.kind not in _SCHEDULED or notice.deadline_s is None:
        return True
    return now_s >= notice.deadline_s - drain_notice_s


def _end_s(notice: Notice, drain_notice_s: float, now_s: float) -> float:
    if notice.kind == NoticeKind.HOST_LOST:
        return now_s
    return now_s + drain_notice_s if notice.deadline_s is None else notice.deadline_s


def _cause(due: list[Notice]) -> EndCause:
    """Returns the cause of an end: an expiry outranks the signals and drains that carry it out.

    What we replace ourselves nobody took away.
    """
    kinds = {each.kind for each in due}
    if kinds == {NoticeKind.REPLACEMENT}:
        return EndCause.RELEASED
    taken_away = {NoticeKind.PREEMPTION, NoticeKind.MAINTENANCE}
    if NoticeKind.EXPIRY in kinds and not kinds & taken_away:
        return EndCause.EXPIRED
    return EndCause.PREEMPTED


_NEVER = float("inf")


def _or_never(deadline_s: float | None) -> float:
    return _NEVER if deadline_s is None else deadline_s
