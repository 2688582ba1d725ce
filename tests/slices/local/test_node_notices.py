from typing import Any

import pytest

from serving.slices.local.node_notices import read_node
from serving.slices.notices import NoticeKind


def node(
    *,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    taints: tuple[str, ...] = (),
    conditions: tuple[dict[str, str], ...] = (),
    **metadata: Any,
) -> dict[str, Any]:
    return {
        "metadata": {"labels": labels, "annotations": annotations, **metadata},
        "spec": {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints] or None},
        "status": {"conditions": list(conditions)},
    }


@pytest.mark.parametrize("quiet", [{}, node(), node(taints=("google.com/tpu",))])
def test_node_without_signals_announces_nothing(quiet: dict[str, Any]) -> None:
    assert read_node(quiet, 0) == read_node({}, 0)
    assert not read_node(quiet, 0).notices


@pytest.mark.parametrize(
    ("tainted", "kind", "source"),
    [
        (
            node(taints=("google.com/tpu", "cloud.google.com/impending-node-termination")),
            NoticeKind.NODE_DRAINING,
            "node cloud.google.com/impending-node-termination",
        ),
        (
            node(taints=("ToBeDeletedByClusterAutoscaler",)),
            NoticeKind.NODE_DRAINING,
            "node ToBeDeletedByClusterAutoscaler",
        ),
        (
            node(taints=("cloud.google.com/maintenance-window-started",)),
            NoticeKind.MAINTENANCE,
            "node cloud.google.com/maintenance-window-started",
        ),
        (
            node(labels={"cloud.google.com/active-node-maintenance": "ONGOING"}),
            NoticeKind.NODE_DRAINING,
            "node cloud.google.com/active-node-maintenance",
        ),
        (
            node(deletionTimestamp="2026-11-21T08:00:00Z"),
            NoticeKind.NODE_DRAINING,
            "node deletionTimestamp",
        ),
        (
            node(
                conditions=(
                    {"type": "Ready", "status": "False", "message": "node is shutting down"},
                )
            ),
            NoticeKind.NODE_DRAINING,
            "node Ready",
        ),
    ],
)
def test_signal_of_the_end_is_a_notice_without_date(
    tainted: dict[str, Any], kind: NoticeKind, source: str
) -> None:
    signals = read_node(tainted, 3)
    (found,) = signals.notices
    assert (found.kind, found.source, found.worker_id) == (kind, source, 3)
    assert found.deadline_s is None
    assert signals.unreadable == ()


@pytest.mark.parametrize(
    ("dated", "kind"),
    [
        (
            node(labels={"cloud.google.com/scheduled-maintenance-time": "1797840000"}),
            NoticeKind.MAINTENANCE,
        ),
        (
            node(annotations={"node.gke.io/machine-termination-datetime": "2026-12-21T08:00:00Z"}),
            NoticeKind.EXPIRY,
        ),
        (
            node(
                annotations={
                    "node.gke.io/machine-termination-datetime": "2026-12-21T09:00:00+01:00"
                }
            ),
            NoticeKind.EXPIRY,
        ),
    ],
)
def test_scheduled_end_is_a_notice_with_its_date(dated: dict[str, Any], kind: NoticeKind) -> None:
    (found,) = read_node(dated, 0).notices
    assert (found.kind, found.deadline_s) == (kind, 1_797_840_000.0)
    assert "2026-12-21 08:00:00+00:00" in found.reason


@pytest.mark.parametrize("nonsense", ["", "soon", "1e9", "99999999999999999999"])
def test_unreadable_date_is_named_and_hides_nothing_else(nonsense: str) -> None:
    signals = read_node(
        node(
            labels={"cloud.google.com/scheduled-maintenance-time": nonsense},
            annotations={"node.gke.io/machine-termination-datetime": "2026-12-21T08:00:00Z"},
            taints=("cloud.google.com/impending-node-termination",),
        ),
        0,
    )
    assert {found.kind for found in signals.notices} == {
        NoticeKind.NODE_DRAINING,
        NoticeKind.EXPIRY,
    }
    assert signals.unreadable == (f"cloud.google.com/scheduled-maintenance-time={nonsense!r}",)
