"""What hosts of a slice announce about their end, and what the slice has to do about it.

Owns the kinds of notices, how several become one, and when a notice makes a slice drain. Does not
own where notices come from (`metadata_client`, `node_notices`, `host_stream`). Pure: callers pass
`now_s`, wall-clock seconds since the epoch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from serving.domain.slice_lifecycle import EndCause


class NoticeKind(StrEnum):
    """What was announced, the mildest first."""

    EXPIRY = "expiry"  # the host's maximum run duration ends
    MAINTENANCE = "maintenance"  # the host will be stopped for maintenance
    NODE_DRAINING = "node_draining"  # Kubernetes or Ray is clearing the node
    TERMINATION_SIGNAL = "termination_signal"  # a process of ours on the host was told to end
    PREEMPTION = "preemption"  # the cloud takes the host back
    HOST_LOST = "host_lost"  # it is gone already


_SEVERITY = {kind: rank for rank, kind in enumerate(NoticeKind)}

# These are announced long before. With a date, they make a slice drain only shortly before it.
_SCHEDULED = frozenset({NoticeKind.EXPIRY, NoticeKind.MAINTENANCE})


@dataclass(frozen=True, slots=True)
class Notice:
    """One host's end, announced by one source.

    `deadline_s` is the wall-clock time from which the host may be gone, `None` if that was not
    said. `source` names where it comes from, such as `metadata instance/preempted`; a later notice
    of the same host and source replaces it.
    """

    kind: NoticeKind
    worker_id: int
    deadline_s: float | None
    reason: str
    source: str


class NoticeSink(Protocol):
    """Whoever takes in notices. Neither method blocks; both may be repeated without effect."""

    def announce(self, notice: Notice) -> None:
        """Takes it in, in place of what the same source said of the same host before."""

    def withdraw(self, worker_id: int, source: str) -> None:
        """That source no longer announces anything for that host."""


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """The slice takes no more requests and is left by `deadline_s` (wall clock).

    `cause` is how its life will have ended.
    """

    deadline_s: float
    reason: str
    cause: EndCause


def combine(notices: Iterable[Notice]) -> Notice | None:
    """One notice for all: the most severe, with the earliest deadline of any; `None` for none.

    Of several that are equally severe, the one that ends first speaks.
    """
    listed = list(notices)
    if not listed:
        return None
    first = min(listed, key=lambda each: (-_SEVERITY[each.kind], _or_never(each.deadline_s)))
    deadline_s = min(_or_never(each.deadline_s) for each in listed)
    return replace(first, deadline_s=None if deadline_s == _NEVER else deadline_s)


def plan_drain(notices: Iterable[Notice], drain_notice_s: float, now_s: float) -> DrainOrder | None:
    """What the notices of a slice's hosts demand as of now; `None` as long as that is nothing.

    One host's end is the slice's. `drain_notice_s` is the compute class's: how long before a
    scheduled end the slice starts to drain, and how long it has where no end was named.
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
    return DrainOrder(deadline_s, f"host {worst.worker_id}: {worst.reason}", _cause(due))


def _is_due(notice: Notice, drain_notice_s: float, now_s: float) -> bool:
    if notice.kind not in _SCHEDULED or notice.deadline_s is None:
        return True
    return now_s >= notice.deadline_s - drain_notice_s


def _end_s(notice: Notice, drain_notice_s: float, now_s: float) -> float:
    if notice.kind == NoticeKind.HOST_LOST:
        return now_s
    return now_s + drain_notice_s if notice.deadline_s is None else notice.deadline_s


def _cause(due: list[Notice]) -> EndCause:
    """An expiry is carried out by signals and drains; only what else takes a host outranks it."""
    kinds = {each.kind for each in due}
    taken_away = {NoticeKind.PREEMPTION, NoticeKind.MAINTENANCE}
    if NoticeKind.EXPIRY in kinds and not kinds & taken_away:
        return EndCause.EXPIRED
    return EndCause.PREEMPTED


_NEVER = float("inf")


def _or_never(deadline_s: float | None) -> float:
    return _NEVER if deadline_s is None else deadline_s
