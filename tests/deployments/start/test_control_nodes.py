"""What a gateway's pod waits for before its Ray starts."""

import pytest
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from deployments.start.control_nodes import main, num_control_nodes, wait_for
from serving.domain.names.gke_names import CONTROL_ROLE, ROLE_LABEL


def node(role: str | None, state: int = GcsNodeInfo.ALIVE) -> GcsNodeInfo:
    return GcsNodeInfo(state=state, labels={} if role is None else {ROLE_LABEL: role})


def test_nodes_of_control_processes_count_while_they_live() -> None:
    nodes = [
        node(CONTROL_ROLE),
        node(CONTROL_ROLE, GcsNodeInfo.DEAD),
        node("other"),
        node(None),
        node(CONTROL_ROLE),
    ]
    assert num_control_nodes(nodes) == 2


def test_it_is_over_as_soon_as_there_are_enough() -> None:
    counts = iter([0, 1, 2])
    assert wait_for(2, 3600.0, lambda: next(counts)) == 2
    assert list(counts) == []


def test_it_is_over_when_patience_is() -> None:
    assert wait_for(2, 0.0, lambda: 1) == 1


def test_cluster_that_does_not_answer_holds_no_gateway_for_ever(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main("127.0.0.1:1", 2, 0.0)
    printed = capsys.readouterr().out
    assert "control_nodes_unknown" in printed
    assert "control_nodes_missing found=0 wanted=2" in printed
