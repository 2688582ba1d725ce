"""Which Ray nodes are asked before a slice is dropped. No cluster: Ray's own records of nodes."""

import pytest
from ray.core.generated.autoscaler_pb2 import NodeState, NodeStatus

from autoscaling.provisioning.sidecar.fence import is_host_of
from serving.domain.supply.pods import ObservedPod, ObservedSlice, PodPhase

ALONE = ObservedSlice("g-2", (ObservedPod("pod-a", PodPhase.RUNNING, "10.0.0.7"),))
PENDING = ObservedSlice("g-2", (ObservedPod("pod-a", PodPhase.PENDING),))
OF_TWO = ObservedSlice(
    "g-2",
    (
        ObservedPod("pod-a", PodPhase.RUNNING, "10.0.0.7"),
        ObservedPod("pod-b", PodPhase.RUNNING, "10.0.0.8"),
    ),
)


def node(pod: str = "", address: str = "10.0.0.7", name: str = "g-2", **fields: int) -> NodeState:
    """A node that runs, unless said otherwise; KubeRay may have told it its pod's name."""
    found = NodeState(instance_id=pod, node_ip_address=address, **fields)
    found.labels["ray.io/tpu-slice-name"] = name
    return found


@pytest.mark.parametrize(
    ("asked", "each", "is_asked"),
    [
        pytest.param(node("pod-a"), ALONE, True, id="its pod"),
        pytest.param(node("pod-c"), ALONE, False, id="a namesake's pod"),
        pytest.param(node("pod-a", name="g-7"), ALONE, True, id="its pod, named otherwise"),
        pytest.param(node(), ALONE, True, id="its address"),
        pytest.param(node(address="10.0.0.9"), ALONE, False, id="a namesake's address"),
        pytest.param(node(name="g-7"), ALONE, True, id="its address, named otherwise"),
        pytest.param(node("pod-b"), OF_TWO, True, id="the second of two"),
        pytest.param(node(address="10.0.0.9"), OF_TWO, True, id="of several, the name"),
        pytest.param(node(name="g-7"), OF_TWO, False, id="of several, another name"),
        pytest.param(node(), PENDING, False, id="a namesake of one that is still to come"),
        pytest.param(node("pod-a", status=NodeStatus.DEAD), ALONE, False, id="dead"),
    ],
)
def test_hosts_of_a_slice_are_told_by_pod_then_address_then_name(
    asked: NodeState, each: ObservedSlice, is_asked: bool
) -> None:
    assert is_host_of(asked, each) == is_asked
