"""The control plane of a simulated cluster: its head node, and the Redis that holds its state.

Owns what a head is started with. To the other nodes a second head is the first one come back: it
has the same address and the same state. That state survives in Redis alone; without Redis a head
is started once. Does not own the other nodes.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import psutil
from ray.cluster_utils import Cluster

from deployments.simulation.node_processes import kill_all, node_pids, processes_below
from deployments.simulation.redis import RedisServer

logger = logging.getLogger(__name__)

# Of every simulated node.
OBJECT_STORE_BYTES = 80 * 1024 * 1024
_REDIS_VARIABLE = "RAY_REDIS_ADDRESS"
_END_TIMEOUT_S = 10.0


class HeadGoneError(ValueError):
    """Reports that there is no head to join the cluster by. Start one, or ask again later."""


class ControlPlane:
    """Runs head and nodes. Thread-safe; a method that adds a node holds `lock` meanwhile."""

    def __init__(
        self,
        num_cpus: float,
        dashboard_port: int,
        gcs_port: int | None = None,
        redis: RedisServer | None = None,
        node_address: str | None = None,
    ) -> None:
        """Needs a `gcs_port` with `redis`, which the caller starts and ends. `None`: any port.

        `node_address` is what other nodes reach this machine by, `None` where all are on it.
        """
        self.lock = threading.RLock()
        self._redis = redis
        self._place = {} if node_address is None else {"node_ip_address": node_address}
        self._arguments: dict[str, Any] = {
            "num_cpus": num_cpus,
            "include_dashboard": True,
            "dashboard_port": dashboard_port,
            "object_store_memory": OBJECT_STORE_BYTES,
            **self._place,
        }
        if gcs_port is not None:
            self._arguments["gcs_server_port"] = gcs_port
        self._cluster: Any = None
        self.address = ""
        self.dashboard_url = ""

    @property
    def is_head_running(self) -> bool:
        """Returns whether there is a head now."""
        return self._cluster is not None and self._cluster.head_node is not None

    @property
    def cluster(self) -> Any:
        """The `Cluster` of Ray to which nodes are added while there is a head.

        Raises:
            HeadGoneError: there is none.
        """
        if not self.is_head_running:
            raise HeadGoneError("the head is gone: no host can join")
        return self._cluster

    def start(self) -> None:
        """Starts the head.

        Ray takes its folder from `RAY_TMPDIR`, and its settings from this process's environment.
        """
        others = set(processes_below([os.getpid()]))
        try:
            with self.lock, _redis_named(self._redis):
                if self._cluster is None:
                    self._cluster = Cluster(
                        initialize_head=True, shutdown_at_exit=False, head_node_args=self._arguments
                    )
                else:
                    self._cluster.add_node(**self._arguments)
        except BaseException:
            # A head that did not come up in Ray's time leaves the half of it that did.
            kill_all(set(processes_below([os.getpid()])) - others)
            raise
        self.address = str(self._cluster.address)
        self.dashboard_url = f"http://{self._cluster.webui_url}"

    def stop(self) -> None:
        """Ends all processes of the head at once. Idempotent."""
        with self.lock:
            if not self.is_head_running:
                return
            node = self._cluster.head_node
            below = processes_below(node_pids(node))
            kill_all(below)
            psutil.wait_procs(below, timeout=_END_TIMEOUT_S)
            self.remove_node(node)

    def add_node(self, num_cpus: float, **arguments: Any) -> Any:
        """Starts one more node on this machine, and returns it before it has joined.

        Raises:
            HeadGoneError: there is no head to join.
        """
        return self.cluster.add_node(
            wait=False,
            num_cpus=num_cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            **self._place,
            **arguments,
        )

    def remove_node(self, node: Any) -> None:
        """Ends a node that was added to `cluster`, whether there is a head or not."""
        self._cluster.remove_node(node, allow_graceful=False)

    # What a user may do to it. All raise `ValueError` in a cluster that was started without Redis:
    # no other head could take the place of the first one.

    def kill_head(self) -> None:
        """Ends the head at once: Ray's GCS, dashboard, Serve's controller. Idempotent."""
        self._known_redis()
        self.stop()
        logger.info("simulated_head_killed")

    def start_head(self) -> None:
        """Starts a head in place of the killed one, from what is in Redis; a no-op where it runs.

        Raises:
            HeadGoneError: it did not come up in the 30 s that Ray gives it. Start it again.
        """
        self._known_redis()
        with self.lock:
            if self.is_head_running:
                return
            try:
                self.start()
            except Exception as error:  # Ray raises nothing narrower
                message = "the head did not come up, perhaps for want of time: start it again"
                raise HeadGoneError(message) from error
        logger.info("simulated_head_started")

    def kill_redis(self, *, lose: bool = False) -> None:
        """Ends Redis at once; with `lose` all that it has kept is gone too."""
        redis = self._known_redis()
        if lose:
            redis.lose()
        else:
            redis.kill()
        logger.info("simulated_redis_killed lose=%s", lose)

    def start_redis(self) -> None:
        """Starts it again on its port, with what its file holds; a no-op where it runs."""
        self._known_redis().start()
        logger.info("simulated_redis_started")

    def _known_redis(self) -> RedisServer:
        if self._redis is None:
            raise ValueError("this cluster keeps its state in its head; start it with --redis")
        return self._redis


@contextlib.contextmanager
def _redis_named(redis: RedisServer | None) -> Iterator[None]:
    # Ray reads it in the environment of the process that starts the head, and nowhere else.
    if redis is None:
        yield
        return
    before = os.environ.get(_REDIS_VARIABLE)
    os.environ[_REDIS_VARIABLE] = redis.address
    try:
        yield
    finally:
        if before is None:
            del os.environ[_REDIS_VARIABLE]
        else:
            os.environ[_REDIS_VARIABLE] = before
