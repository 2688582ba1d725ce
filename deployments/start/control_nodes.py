"""Waits until the nodes for control processes are in Ray; for a gateway's pod, before Ray starts.

    python -m deployments.start.control_nodes HOST:PORT COUNT PATIENCE_S

Ends with 0 in any case: a gateway without them serves as well.
"""

import sys
import time
from collections.abc import Callable, Iterable

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined] # compiled
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from serving.domain.names.gke_names import CONTROL_ROLE, ROLE_LABEL

_POLL_S, _CALL_S = 1.0, 5.0


def num_control_nodes(nodes: Iterable[GcsNodeInfo]) -> int:
    """Returns how many nodes for control processes live."""
    return sum(
        node.state == GcsNodeInfo.ALIVE and node.labels.get(ROLE_LABEL) == CONTROL_ROLE
        for node in nodes
    )


def wait_for(count: int, patience_s: float, look: Callable[[], int]) -> int:
    """Returns how many nodes `look` has found: at least `count`, unless patience is over."""
    until_s = time.monotonic() + patience_s
    while (found := look()) < count and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    return found


def main(address: str, count: int, patience_s: float) -> None:
    """Waits, and prints what came of it."""

    def look() -> int:
        try:
            nodes = GcsClient(address=address).get_all_node_info(timeout=_CALL_S)
        except (ray.exceptions.RayError, RuntimeError, ValueError) as error:
            sys.stdout.write(f"control_nodes_unknown error={error!r}\n")
            return 0
        return num_control_nodes(nodes.values())

    found = wait_for(count, patience_s, look)
    what = "control_nodes" if found >= count else "control_nodes_missing"
    sys.stdout.write(f"{what} found={found} wanted={count}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
