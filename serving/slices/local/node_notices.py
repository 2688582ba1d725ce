"""Reads the end of a host from its Kubernetes node object.

Owns the meaning of GKE's taints, labels and annotations. Does not own reading the node from the API
server. Pure.

Sources, read 2026-11: GKE documentation "Manage disruption to GKE nodes that don't live migrate"
(`kubernetes-engine/docs/concepts/handle-disruption-gpu-tpu`) for the maintenance labels and the
termination taint; GKE's cluster autoscaler for `machine-termination-datetime`; Kubernetes'
cluster autoscaler for `ToBeDeletedByClusterAutoscaler`; kubelet for the messages of its shutdown.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from serving.slices.notices import Notice, NoticeKind

# GKE stops the pods of such a node; with graceful termination they have up to 60 minutes, otherwise
# nothing is promised, so no deadline is read out of it.
TERMINATION_TAINT = "cloud.google.com/impending-node-termination"
AUTOSCALER_TAINT = "ToBeDeletedByClusterAutoscaler"
# The window is open and pods still run. Seen 12 to 41 minutes before the pods were stopped, on GPU
# nodes (third-party runs of 2026-08); never observed by us on TPU nodes.
WINDOW_TAINT = "cloud.google.com/maintenance-window-started"
MAINTENANCE_LABEL = "cloud.google.com/active-node-maintenance"
MAINTENANCE_TIME_LABEL = "cloud.google.com/scheduled-maintenance-time"  # seconds since the epoch
TERMINATION_TIME_ANNOTATION = "node.gke.io/machine-termination-datetime"  # RFC 3339

_DRAINING_TAINTS = {
    TERMINATION_TAINT: "GKE is about to stop the node",
    AUTOSCALER_TAINT: "the cluster autoscaler removes the node",
}


@dataclass(frozen=True, slots=True)
class NodeSignals:
    """The notices of a node; `unreadable` names signals that exist but make no sense."""

    notices: tuple[Notice, ...]
    unreadable: tuple[str, ...]


def read_node(node: Mapping[str, Any], worker_id: int) -> NodeSignals:
    """Returns the notices in a node object, as the Kubernetes API returns it in JSON.

    A node that is only cordoned has no notice, because nobody has asked it to end yet.
    """
    metadata = node.get("metadata") or {}
    notices = list(_draining(node, worker_id))
    unreadable = []
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    dated = (
        (NoticeKind.MAINTENANCE, MAINTENANCE_TIME_LABEL, labels, _epoch_s),
        (NoticeKind.EXPIRY, TERMINATION_TIME_ANNOTATION, annotations, rfc3339_s),
    )
    for kind, name, values, parse in dated:
        if name not in values:
            continue
        try:
            deadline_s = parse(values[name])
        except (ValueError, OverflowError):
            unreadable.append(f"{name}={values[name]!r}")
            continue
        words = "maintenance" if kind == NoticeKind.MAINTENANCE else "the end of its run"
        reason = f"{words} is scheduled for {format_utc(deadline_s)}"
        notices.append(Notice(kind, worker_id, deadline_s, reason, f"node {name}"))
    return NodeSignals(tuple(notices), tuple(unreadable))


def _draining(node: Mapping[str, Any], worker_id: int) -> Iterator[Notice]:
    def notice(kind: NoticeKind, reason: str, source: str) -> Notice:
        return Notice(kind, worker_id, None, reason, f"node {source}")

    metadata = node.get("metadata") or {}
    for taint in (node.get("spec") or {}).get("taints") or ():
        key = taint.get("key")
        if key in _DRAINING_TAINTS:
            yield notice(NoticeKind.NODE_DRAINING, _DRAINING_TAINTS[key], key)
        elif key == WINDOW_TAINT:
            yield notice(NoticeKind.MAINTENANCE, "its maintenance window has opened", key)
    if (metadata.get("labels") or {}).get(MAINTENANCE_LABEL) == "ONGOING":
        yield notice(NoticeKind.NODE_DRAINING, "GKE stops it for maintenance", MAINTENANCE_LABEL)
    if metadata.get("deletionTimestamp"):
        yield notice(NoticeKind.NODE_DRAINING, "the node is being deleted", "deletionTimestamp")
    for condition in (node.get("status") or {}).get("conditions") or ():
        is_ready = condition.get("type") == "Ready" and condition.get("status") == "True"
        if not is_ready and "node is shutting down" in (condition.get("message") or ""):
            yield notice(NoticeKind.NODE_DRAINING, "its kubelet is shutting down", "Ready")


def rfc3339_s(text: str) -> float:
    """Returns seconds since the epoch; a time without a zone is UTC.

    Raises:
        ValueError: the text is no such time.
    """
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def format_utc(at_s: float) -> str:
    """Formats a wall-clock time for a reader."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(sep=" ", timespec="seconds")


def _epoch_s(text: str) -> float:
    at_s = float(int(text))
    # Raises for a time that cannot be formatted.
    format_utc(at_s)
    return at_s
