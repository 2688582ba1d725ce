"""The node reader: follows the Kubernetes node of one host, and tells the agents there of its end.

`python -m autoscaling.node_reader`, with `NODE_NAME` and `SLICEWISE_RUN_DIR` in the environment: a
container beside each host of a slice, with the only token of the pod. It lists and watches one node
and nothing else. Owns the way from the API server to the note. Does not own what a node's taints,
labels and conditions mean (`serving.slices.local.node_notices`).
"""

import asyncio
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from autoscaling.provisioning.errors import UnusableError
from autoscaling.provisioning.kubernetes import (
    HOST_VARIABLE,
    SERVICE_ACCOUNT,
    KubernetesAccess,
    KubernetesApi,
)
from autoscaling.provisioning.objects.collection import Collection
from autoscaling.provisioning.objects.wire import Selection
from serving.slices.local.node_notices import NodeSignals, read_node
from serving.slices.local.notes import tell
from serving.slices.notices import Notice, NoticeKind

logger = logging.getLogger(__name__)

NODE_VARIABLE = "NODE_NAME"
RUN_DIR_VARIABLE = "SLICEWISE_RUN_DIR"  # as in serving.config.slice_spec
NOTE = "node"
_GONE = Notice(NoticeKind.NODE_DRAINING, 0, None, "its node was deleted", "node deleted")
_UNUSABLE = 2


@dataclass(slots=True)
class NodeReader:
    """Follows the node `name` and keeps its note in `run_dir`. `chance` draws from 0 to 1."""

    api: KubernetesApi
    name: str
    run_dir: Path
    chance: Callable[[], float] = random.random
    _has_been_there: bool = False

    async def run(self) -> None:
        """Follows the node until it is cancelled. What fails is tried again.

        Raises:
            OSError: the run directory cannot be written.
        """
        nodes = Collection(
            self.api,
            Selection("api/v1", "nodes", name=self.name, is_namespaced=False),
            _signals_of,
            on_change=lambda: self._tell(nodes.current()),
            clock=time.monotonic,
            chance=self.chance,
            # What was last known stands, however old it is: a drain that was announced goes on.
            stale_after_s=float("inf"),
        )
        await nodes.follow()

    def _tell(self, found: tuple[NodeSignals, ...]) -> None:
        notices: tuple[Notice, ...] = ()
        if found:
            self._has_been_there = True
            notices = found[0].notices
            for signal_ in found[0].unreadable:
                logger.warning("node_signal_unreadable node=%s signal=%s", self.name, signal_)
        elif self._has_been_there:
            notices = (_GONE,)
        sources = ", ".join(notice.source for notice in notices)
        logger.info("node_signals node=%s sources=%r", self.name, sources)
        tell(self.run_dir, NOTE, [_told(notice) for notice in notices])


def _signals_of(text: msgspec.Raw) -> NodeSignals:
    try:
        return read_node(msgspec.json.decode(text, type=dict[str, Any]), 0)
    except (msgspec.MsgspecError, AttributeError, TypeError) as error:
        raise UnusableError(f"not a node as Kubernetes has it: {error!r}") from error


def _told(notice: Notice) -> dict[str, object]:
    """Returns a notice as it is told: the agent knows which host it is on."""
    return {
        "kind": notice.kind.value,
        "deadline_s": notice.deadline_s,
        "reason": notice.reason,
        "source": notice.source,
    }


async def follow_own_node(
    environment: Mapping[str, str], credentials: Path = SERVICE_ACCOUNT
) -> None:
    """Follows the node of this pod until a signal comes.

    Raises:
        KeyError: a variable is not set: this is not the pod that it is meant for.
        OSError: the run directory cannot be written.
    """
    access = KubernetesAccess.in_pod(environment, "", credentials)
    name, run_dir = environment[NODE_VARIABLE], Path(environment[RUN_DIR_VARIABLE])
    api = KubernetesApi(access)
    try:
        running = asyncio.create_task(NodeReader(api, name, run_dir).run(), name="read-node")
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, running.cancel)
        logger.info("node_reader node=%s run_dir=%s", name, run_dir)
        await asyncio.wait({running})
        if not running.cancelled():
            running.result()
    finally:
        await api.aclose()


def main() -> int:
    """Runs in a pod; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # Each of its requests would be a line.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for variable in (HOST_VARIABLE, NODE_VARIABLE, RUN_DIR_VARIABLE):
        if not os.environ.get(variable):
            sys.stderr.write(f"{variable} is not set: this runs in the pod of a slice's host\n")
            return _UNUSABLE
    asyncio.run(follow_own_node(os.environ))
    return 0


if __name__ == "__main__":
    sys.exit(main())
