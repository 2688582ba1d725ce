"""Starts and ends the Ray nodes of a simulated cluster, and takes its slices away on command.

Ray's scheduler, placement groups and node death are real; only the chips are not there, and every
host runs on this machine. Does not own what the user orders (`control`), what plays a host
(`hosts`), nor the demand for more slices (the provisioner).
"""

import heapq
import itertools
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray._raylet import GcsClient  # type: ignore[attr-defined] # compiled
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from deployments.simulation.control_plane import ControlPlane, HeadGoneError
from deployments.simulation.hosts.namespaces import Hosts
from deployments.simulation.hosts.nodes import (
    START_TIMEOUT_S,
    HostNode,
    HostNodes,
    NodeStartError,
    SeparateHostNodes,
    SharedHostNodes,
)
from deployments.simulation.metadata import HostMetadata, MetadataServers
from deployments.simulation.node_processes import (
    engines_below,
    processes_below,
)
from deployments.simulation.off_slice_hosts import OffSliceHosts
from deployments.simulation.plan import (
    SimulatedSlices,
    SimulationPlan,
    UnknownSliceError,
    host_environment,
    host_labels,
    host_resources,
)
from deployments.simulation.redis import RedisServer
from deployments.simulation.throttle import Throttle
from serving.config.slice_spec import RUN_DIR_VARIABLE
from serving.slices.expiry import STARTED_AT_VARIABLE

logger = logging.getLogger(__name__)

_JOIN_POLL_S = 0.1
# GKE recreates a slice whole when a host of it fails; how long the others outlive it here.
_REST_GOES_AFTER_S = 3.0
# How often hosts are looked at that nobody ended.
_LOOK_EVERY_S = 5.0
# Hosts that come while the head is away join when it is back.
_HEAD_AWAY_RETRY_S = 1.0
# What a command may ask for: below the least factor nothing shows, above the greatest a process
# never gets to answer a heartbeat.
_FACTORS = (1.1, 50.0)
_LONGEST_S = 86_400.0


@dataclass(slots=True)
class SimulatedHost:
    """The Ray node that plays a host of a slice."""

    worker_id: int
    node: HostNode
    metadata: HostMetadata
    is_alive: bool = True


@dataclass(slots=True)
class SimulatedSlice:
    """The state of a slice that exists.

    `going_at_s` is when it will be taken away (monotonic), if known. `throttle` holds its processes
    back, or did; `None` if that never happened. `off_until_s` is when its hosts are put back on the
    network (monotonic); `None` while they are on it.
    """

    name: str
    kind: SimulatedSlices
    index: int
    hosts: list[SimulatedHost] = field(default_factory=list)
    going_at_s: float | None = None
    throttle: Throttle | None = None
    off_until_s: float | None = None


class SimulatedCluster:
    """Runs a head node and the hosts of the plan's slices. Thread-safe. A context manager.

    On a `network`, which this machine has joined, each host of a slice has namespaces of its own.
    Without one they share this machine's.
    """

    def __init__(
        self,
        plan: SimulationPlan,
        dashboard_port: int,
        *,
        gcs_port: int | None = None,
        redis: RedisServer | None = None,
        network: Hosts | None = None,
    ) -> None:
        """Needs `gcs_port` and `redis`, which the caller manages, for the head to be killed."""
        self._plan = plan
        address = None if network is None else network.machine_address
        self.control_plane = ControlPlane(plan.head_cpus, dashboard_port, gcs_port, redis, address)
        self._network = network
        self._host_nodes: HostNodes
        self._off_slice_hosts = OffSliceHosts(self.control_plane, plan)
        self._lock = threading.RLock()
        self._slices: dict[str, SimulatedSlice] = {}
        self._dry: set[str] = set()
        self._wanted_back: list[SimulatedSlices] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition(self._lock)
        self._faults = _faults(plan)
        self._stopping = False
        self._is_started = False
        self._metadata: MetadataServers
        self._thread = threading.Thread(target=self._run, name="simulated-cluster", daemon=True)

    # -- life --

    def __enter__(self) -> "SimulatedCluster":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the head and every slice that is there from the beginning; blocks meanwhile."""
        try:
            self._start_makers()
            self.control_plane.start()
        except BaseException:
            self._close_makers()
            raise
        self._is_started = True
        self._off_slice_hosts.start()
        self._thread.start()
        for kind in self._plan.slices:
            for _ in range(kind.count):
                if kind.appears_after_s > 0:
                    self._at(kind.appears_after_s, self._come, kind)
                else:
                    self.add(kind.name)
        self._wait_joined()
        self._at(_LOOK_EVERY_S, self._look_after_hosts)

    def stop(self) -> None:
        """Ends every process that was started. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(30)
        with self._lock:
            for slice_item in list(self._slices.values()):
                self._take(slice_item)
            if not self._is_started:
                return
            self._is_started = False
            self._off_slice_hosts.stop()
            self.control_plane.stop()
            self._close_makers()

    def _start_makers(self) -> None:
        if self._network is None:
            self._host_nodes = SharedHostNodes(self.control_plane)
        else:
            self._host_nodes = SeparateHostNodes(self._network, self.control_plane)
        self._metadata = MetadataServers(self._host_nodes.machine_address)

    def _close_makers(self) -> None:
        self._metadata.close()
        self._host_nodes.close()

    def _wait_joined(self) -> None:
        """Waits until Ray has every host that is there from the beginning.

        Raises:
            NodeStartError: one did not start, and did not when its slice was made again.
            TimeoutError: one did not join.
        """
        with self._lock:
            started = list(self._slices.values())
        nodes = [host.node for each in started for host in self._wait_started(each).hosts]
        wanted = {node.node_id for node in nodes}
        wanted |= self._off_slice_hosts.node_ids()
        client = GcsClient(address=self.address)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while missing := wanted - {key.hex() for key in client.get_all_node_info()}:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{len(missing)} hosts did not join in {START_TIMEOUT_S:g} s")
            time.sleep(_JOIN_POLL_S)

    def _wait_started(self, each: SimulatedSlice) -> SimulatedSlice:
        """Returns the slice when its hosts have started; one is made again if they do not.

        Ray gives a node 30 s to be known to the head, and a busy machine may need longer. A node
        pool tries again too. Once only: what never starts is to be seen.
        """
        try:
            _wait_hosts(each)
        except NodeStartError as error:
            logger.warning("simulated_slice_again slice=%s problem=%s", each.name, error)
            with self._lock:
                self._take(each)
                self._faults |= {
                    key: fault for key, fault in _faults(self._plan).items() if key[0] == each.name
                }
                each = self._slices[self.add(each.kind.name)]
            _wait_hosts(each)
        return each

    @property
    def address(self) -> str:
        """Returns what `RAY_ADDRESS` has to be."""
        return self.control_plane.address

    # -- what can be done to it --

    def names(self) -> list[str]:
        """The slices that exist."""
        with self._lock:
            return sorted(self._slices)

    def describe(self) -> dict[str, Any]:
        """Returns Ray's address, the classes out of stock, and the existing slices, for users."""
        now_s = time.monotonic()
        with self._lock:
            slices = [
                {
                    "name": simulated.name,
                    "compute_class": simulated.kind.compute_class,
                    "generation": simulated.kind.generation,
                    "topology": simulated.kind.topology,
                    "hosts": [host.worker_id for host in simulated.hosts if host.is_alive],
                    "goes_in_s": None
                    if simulated.going_at_s is None
                    else round(simulated.going_at_s - now_s, 1),
                }
                | _described(simulated, now_s)
                for _, simulated in sorted(self._slices.items())
            ]
            dry = sorted(self._dry)
            hosts = self._off_slice_hosts.describe()
        return {
            "ray_address": self.address,
            "dashboard_url": self.control_plane.dashboard_url,
            "is_head_running": self.control_plane.is_head_running,
            "stocked_out": dry,
            "hosts": hosts,
            "slices": slices,
        }

    def add(self, kind_name: str) -> str:
        """Adds one more slice of a kind, stock-out or not, and returns its name.

        Raises:
            UnknownSliceError: the plan has no such kind.
            HeadGoneError: there is no head that a host could join.
        """
        kind = self._kind(kind_name)
        with self._lock, self.control_plane.lock:
            _ = self.control_plane.cluster
            used = {
                slice_item.index for slice_item in self._slices.values() if slice_item.kind is kind
            }
            # KubeRay gives the lowest free index, and so a lost slice's name to its replacement.
            index = next(number for number in itertools.count() if number not in used)
            created = SimulatedSlice(kind.slice_name(index), kind, index)
            self._slices[created.name] = created
            for worker_id in range(kind.shape.num_hosts):
                created.hosts.append(self._start_host(created, worker_id))
            if kind.max_run_duration_s is not None:
                self._at(kind.max_run_duration_s, self._lose, created)
        logger.info("simulated_slice_added slice=%s hosts=%d", created.name, len(created.hosts))
        return created.name

    def add_host(self, role: str) -> str:
        """Adds one more host without chips, for `gateway` or `control`, and returns its name."""
        with self._lock:
            return self._off_slice_hosts.add(role)

    def kill_host(self, name: str) -> None:
        """Ends a host without chips and all that is on it, at once and for good."""
        with self._lock:
            self._off_slice_hosts.kill(name)

    def preempt(self, name: str, notice_s: float, worker_id: int = 0) -> None:
        """Notifies one host that it is preempted; the slice goes when the notice is over."""
        with self._lock:
            each = self._slice(name)
            self._host(each, worker_id).metadata.announce_preemption()
            self._lose_after(notice_s, each)
        logger.info("simulated_preemption slice=%s host=%d notice_s=%g", name, worker_id, notice_s)

    def maintain(self, name: str, notice_s: float, worker_id: int = 0) -> None:
        """Announces maintenance that ends one host; the slice goes when the notice is over."""
        with self._lock:
            each = self._slice(name)
            self._host(each, worker_id).metadata.announce_maintenance(time.time() + notice_s)
            self._lose_after(notice_s, each)

    def drain(self, name: str, notice_s: float, worker_id: int = 0) -> None:
        """Has Ray drain one host's node, as its autoscaler would; the slice goes afterwards."""
        with self._lock:
            each = self._slice(name)
            node_id = self._host(each, worker_id).node.node_id
            self._lose_after(notice_s, each)
        accepted, complaint = GcsClient(address=self.address).drain_node(
            node_id,
            DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
            "drained by the simulation",
            int((time.time() + notice_s) * 1000),
        )
        if not accepted:
            raise UnknownSliceError(f"Ray does not drain host {worker_id} of {name}: {complaint}")

    def kill(self, name: str, worker_id: int | None = None) -> None:
        """Ends one host, or all of them, at once and without notice."""
        with self._lock:
            each = self._slice(name)
            if worker_id is None:
                self._lose(each)
                return
            host = self._host(each, worker_id)
            self._end_host(host)
            self._lose_after(_REST_GOES_AFTER_S, each)
        logger.info("simulated_kill slice=%s host=%s", name, worker_id)

    def slow(self, name: str, factor: float, for_s: float) -> None:
        """Gives the engine of a slice 1/`factor` of the time, whatever engine it is.

        Its processes stand still and run by turns. Ray's own and our host agents are left alone, so
        that nothing is declared dead. A later `slow` or `partition` of the slice takes its place.

        Raises:
            UnknownSliceError: no such slice.
            ValueError: `factor` or `for_s` is out of range.
        """
        _check("factor", factor, *_FACTORS)
        self._throttle(name, factor, for_s)

    def partition(self, name: str, for_s: float) -> None:
        """Takes the hosts of a slice off the network, and puts them back on as they are then.

        Connections stay open and nothing comes over them; the hosts go on. Different from a real
        partition: the hosts of the slice do not reach each other either, nor their metadata server.

        Where hosts share this machine's network all their processes stand still instead. That is
        the same from outside, but they do no work meanwhile, notice no silence, their kernel still
        takes in connections and bytes, and the metadata server can be reached.

        A slice that Ray gave up in that time ends its own node when it comes back; it is then taken
        away, to be replaced.

        Raises:
            UnknownSliceError: no such slice.
            ValueError: `for_s` is out of range.
        """
        if not self._host_nodes.are_separate:
            self._throttle(name, None, for_s)
            return
        _check("for_s", for_s, 0.0, _LONGEST_S)
        with self._lock:
            each = self._slice(name)
            self._let_go(each)
            each.off_until_s = time.monotonic() + for_s
            _set_network(each, is_up=False)
        self._at(for_s, self._rejoin, each)
        logger.info("simulated_partition slice=%s for_s=%g", name, for_s)

    def remove(self, name: str) -> None:
        """Takes a slice away for good, as a provisioner does."""
        with self._lock:
            self._take(self._slice(name))

    def stock_out(self, compute_class: str, *, is_dry: bool = True) -> None:
        """Stops new slices of this class from now on, or permits them again."""
        with self._lock:
            if is_dry:
                self._dry.add(compute_class)
                return
            self._dry.discard(compute_class)
            back = [kind for kind in self._wanted_back if kind.compute_class == compute_class]
            self._wanted_back = [kind for kind in self._wanted_back if kind not in back]
        for kind in back:
            self._at(0.0, self._come, kind)

    # -- inside --

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and (not self._due or self._due[0][0] > time.monotonic()):
                    wait_s = self._due[0][0] - time.monotonic() if self._due else None
                    self._changed.wait(wait_s)
                if self._stopping:
                    return
                _, _, action = heapq.heappop(self._due)
            try:
                action()
            except Exception:
                logger.exception("simulated_event_failed")

    def _at(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        with self._changed:
            due_s = time.monotonic() + delay_s
            heapq.heappush(self._due, (due_s, next(self._numbers), lambda: action(*args)))
            self._changed.notify_all()

    def _come(self, kind: SimulatedSlices) -> None:
        with self._lock:
            if kind.compute_class in self._dry:
                self._wanted_back.append(kind)
                return
        try:
            self.add(kind.name)
        except HeadGoneError:
            self._at(_HEAD_AWAY_RETRY_S, self._come, kind)

    def _lose_after(self, delay_s: float, each: SimulatedSlice) -> None:
        each.going_at_s = time.monotonic() + delay_s
        self._at(delay_s, self._lose, each)

    def _lose(self, each: SimulatedSlice) -> None:
        """Takes the slice away; another replaces it later if its kind has `returns_after_s`."""
        with self._lock:
            if self._slices.get(each.name) is not each:
                return
            self._take(each)
            if each.kind.returns_after_s is not None:
                self._at(each.kind.returns_after_s, self._come, each.kind)

    def _throttle(self, name: str, factor: float | None, for_s: float) -> None:
        _check("for_s", for_s, 0.0, _LONGEST_S)
        find = processes_below if factor is None else engines_below
        with self._lock:
            each = self._slice(name)
            self._let_go(each)
            hosts = each.hosts
            each.throttle = Throttle(lambda: find(_root_pids(hosts)), factor, for_s)
            each.throttle.start()
        logger.info("simulated_throttle slice=%s factor=%s for_s=%g", name, factor, for_s)

    def _let_go(self, each: SimulatedSlice) -> None:
        """Ends what holds a slice back."""
        if each.throttle is not None:
            each.throttle.stop()
        if each.off_until_s is not None:
            each.off_until_s = None
            _set_network(each, is_up=True)

    def _rejoin(self, each: SimulatedSlice) -> None:
        with self._lock:
            is_there = self._slices.get(each.name) is each
            # A later partition of the slice may last longer.
            if is_there and each.off_until_s is not None and each.off_until_s <= time.monotonic():
                self._let_go(each)

    def _look_after_hosts(self) -> None:
        """Takes away slices of which a host ended though nobody asked for it, then looks again.

        A raylet ends itself when the head has given it up, as it does on a machine that stands
        still for long, and a start may fail. A node pool repairs that, so it is not for good here.
        """
        self._at(_LOOK_EVERY_S, self._look_after_hosts)
        with self._lock:
            for each in list(self._slices.values()):
                # What is off the network has its end when it is back, like its hosts' neighbours.
                if each.going_at_s is None and each.off_until_s is None and _has_died(each):
                    logger.warning("simulated_host_ended slice=%s", each.name)
                    self._lose(each)

    def _take(self, each: SimulatedSlice) -> None:
        try:
            for host in each.hosts:
                self._end_host(host)
                host.metadata.close()
        finally:
            # Only now: a slice that is cut off ends without another message.
            if each.throttle is not None:
                each.throttle.stop()
        self._slices.pop(each.name, None)
        logger.info("simulated_slice_gone slice=%s", each.name)

    def _start_host(self, owner: SimulatedSlice, worker_id: int) -> SimulatedHost:
        metadata = self._metadata.start()
        kind = owner.kind
        run_dir = _run_dir(owner.name, worker_id)
        # A new host has nothing of the one before under its name.
        shutil.rmtree(run_dir, ignore_errors=True)
        node = self._host_nodes.start(
            f"{owner.name}-{worker_id}",
            self._plan.cpus_per_host,
            host_resources(kind, owner.name, worker_id),
            host_labels(kind, owner.name, worker_id),
            host_environment(
                kind, owner.name, worker_id, self._faults.pop((owner.name, worker_id), None)
            )
            | metadata.environment
            | {
                STARTED_AT_VARIABLE: f"{time.time():.1f}",
                RUN_DIR_VARIABLE: f"{run_dir}",
            },
        )
        return SimulatedHost(worker_id, node, metadata)

    def _end_host(self, host: SimulatedHost) -> None:
        """Ends a host as a power cut does: the node reports nothing beforehand."""
        if not host.is_alive:
            return
        host.is_alive = False
        host.node.end()

    def _kind(self, name: str) -> SimulatedSlices:
        for kind in self._plan.slices:
            if kind.name == name:
                return kind
        known = ", ".join(kind.name for kind in self._plan.slices)
        raise UnknownSliceError(f"no slices called {name!r}; there are {known}")

    def _slice(self, name: str) -> SimulatedSlice:
        found = self._slices.get(name)
        if found is None:
            raise UnknownSliceError(f"no slice {name!r}; there are {', '.join(self.names())}")
        return found

    @staticmethod
    def _host(each: SimulatedSlice, worker_id: int) -> SimulatedHost:
        for host in each.hosts:
            if host.worker_id == worker_id and host.is_alive:
                return host
        alive = ", ".join(str(host.worker_id) for host in each.hosts if host.is_alive)
        raise UnknownSliceError(f"slice {each.name} has no host {worker_id}; it has {alive}")


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value:g}; allowed: {low:g} to {high:g}")


def _described(each: SimulatedSlice, now_s: float) -> dict[str, float | None]:
    """Returns what holds a slice back, and for how many seconds yet; `None` where nothing does."""
    throttle = each.throttle
    left_s = None if throttle is None else throttle.left_s
    left_s = None if left_s is None else round(left_s, 1)
    factor = None if throttle is None or left_s is None else throttle.factor
    stopped_for_s = left_s if factor is None else None
    off_for_s = None if each.off_until_s is None else max(0.0, round(each.off_until_s - now_s, 1))
    return {
        "slow_factor": factor,
        "slowed_for_s": None if factor is None else left_s,
        "partitioned_for_s": stopped_for_s if off_for_s is None else off_for_s,
    }


def _faults(plan: SimulationPlan) -> dict[tuple[str, int], str]:
    return {(each.slice, each.worker_id): each.fault for each in plan.faulty_hosts}


def _wait_hosts(each: SimulatedSlice) -> None:
    for host in each.hosts:
        host.node.wait_started()


def _has_died(each: SimulatedSlice) -> bool:
    return any(host.is_alive and not host.node.is_alive() for host in each.hosts)


def _root_pids(hosts: Iterable[SimulatedHost]) -> set[int]:
    return set().union(*(host.node.root_pids() for host in hosts if host.is_alive))


def _set_network(each: SimulatedSlice, *, is_up: bool) -> None:
    for host in each.hosts:
        if host.is_alive:
            host.node.set_network(is_up=is_up)


def _run_dir(slice_name: str, worker_id: int) -> Path:
    below = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return Path(below) / "slicewise-run" / f"{slice_name}-{worker_id}"
