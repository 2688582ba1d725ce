"""A fleet and its cluster to be judged: pods as KubeRay makes them, records as the directory does.

Everything is well until a test changes it. The fleet passes through `/fleet`'s JSON.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import msgspec
from kuberay.objects import raycluster, replica_pods, worker_group
from supply_builders import host, life

from autoscaling.provisioning.raycluster import decode_worker_pod, read_groups
from autoscaling.provisioning.sidecar.readings import COMPONENT_LABEL, ClusterWish
from deployments.status.cluster.pods import read_pod
from deployments.status.cluster.reading import ClusterReading
from deployments.status.findings.finding import FleetFinding
from deployments.status.findings.join import PATIENCE_S, StatusReadings, find_faults
from deployments.status.reports import ReportedFleet, parse_fleet
from serving.directory.supply_book import SupplyBook
from serving.domain.inventory import ObservedHost
from serving.domain.slice_records import SliceRecord, Snapshot
from serving.domain.supply.faults import SliceFaults
from serving.domain.supply.orders import OperatorOrder, StandingOrders
from serving.domain.supply.pods import GroupPods
from serving.domain.topology import slice_shape
from serving.gateway.reports.fleet_view import (
    EngineStatus,
    GatewayView,
    ModelView,
    describe_fleet,
)

Json = dict[str, Any]

NOW_S = 1_795_226_400.0
LONG_S = 3600.0
GROUP = "v6e-2x4-spot"
SHAPE = slice_shape("v6e", "2x4", 4)
_ALL = object()


def instant(ago_s: float) -> str:
    """A time as Kubernetes writes it."""
    return datetime.fromtimestamp(NOW_S - ago_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def ready(value: str, ago_s: float = LONG_S) -> Json:
    """The condition that a pod is ready, or is not."""
    return {"type": "Ready", "status": value, "lastTransitionTime": instant(ago_s)}


def control_pod(name: str, labels: Mapping[str, str], **status: Any) -> Json:
    """A pod of the control plane, ready unless `status` says otherwise."""
    return {
        "metadata": {
            "name": name,
            "labels": {"ray.io/node-type": "worker", "ray.io/group": "gateways", **labels},
            "creationTimestamp": instant(LONG_S),
        },
        "status": {"phase": "Running", "conditions": [ready("True")], **status},
    }


def head_pod(name: str = "head-1", **status: Any) -> Json:
    """The head's."""
    return control_pod(name, {"ray.io/node-type": "head"}, **status)


def gateway_pod(name: str, **status: Any) -> Json:
    """A gateway's."""
    return control_pod(name, {COMPONENT_LABEL: "gateway"}, **status)


def pool_pod(name: str, **status: Any) -> Json:
    """One of control processes."""
    return control_pod(name, {COMPONENT_LABEL: "control"}, **status)


@dataclass
class StagedSlice:
    """A slice: the pods of its hosts, and the hosts in Ray."""

    pods: list[Json]
    hosts: list[ObservedHost]
    index: int

    @property
    def name(self) -> str:
        return f"{GROUP}-{self.index}"

    def pod_name(self, number: int) -> str:
        """The name of a host's pod."""
        return str(self.pods[number]["metadata"]["name"])


@dataclass
class Scene:
    """What there is. A slice is held by a replica with a ready engine, unless it was made free."""

    slices: list[StagedSlice] = field(default_factory=list)
    lives: list[SliceRecord] = field(default_factory=list)
    orders: tuple[OperatorOrder, ...] = ()
    faults: SliceFaults = field(default_factory=lambda: SliceFaults())
    control: list[Json] = field(
        default_factory=lambda: [head_pod(), gateway_pod("gateway-1"), gateway_pod("gateway-2")]
    )
    replicas: int | None = None
    waiting: int = 0
    looked_ago_s: float = LONG_S
    cluster_parts: dict[str, Any] = field(default_factory=dict)
    autoscaling: Json | None = None

    def add(self, *, is_held: bool = True) -> StagedSlice:
        """One more slice, whole and well."""
        index = len(self.slices)
        pods = replica_pods(self.group, index)
        for number, pod in enumerate(pods):
            pod["metadata"]["creationTimestamp"] = instant(LONG_S)
            pod["spec"]["nodeName"] = f"machine-{index}-{number}"
            address = f"10.0.{index}.{number}"
            pod["status"] = {"phase": "Running", "conditions": [ready("True")], "podIP": address}
        hosts = [host(pod["metadata"]["name"], number) for number, pod in enumerate(pods)]
        made = StagedSlice(pods, hosts, index)
        self.slices.append(made)
        if is_held:
            made.hosts = [replace(each, num_free_chips=0) for each in hosts]
            held = life(f"replica-{index}", made.hosts, at_s=NOW_S - LONG_S)
            self.lives.append(replace(held, engine_id=f"engine-{index}"))
        return made

    @property
    def group(self) -> Json:
        return worker_group(GROUP, SHAPE, "spot", max_replicas=9)

    def fleet(self) -> ReportedFleet:
        """As a gateway tells it: looked at `looked_ago_s` ago, and now."""
        book = SupplyBook(self.faults)
        book.orders = StandingOrders(self.orders)
        for at_s in (NOW_S - self.looked_ago_s, NOW_S):
            book.look(
                [each for one in self.slices for each in one.hosts], self.pods(), self.lives, at_s
            )
        snapshot = Snapshot("v", tuple(self.lives), (), None, book.records, self.orders)
        is_draining = False
        engines = tuple(
            EngineStatus(each.engine_id, "spot", is_draining, 1, None)
            for each in self.lives
            if each.engine_id is not None
        )
        model = ModelView({"name": "demo", "waiting": self.waiting}, engines)
        gateway = GatewayView("gw", NOW_S - LONG_S)
        answer = describe_fleet(gateway, [model], snapshot, NOW_S, self.autoscaling)
        return parse_fleet(json.dumps(answer))

    def pods(self) -> list[GroupPods]:
        """What the provisioner tells the directory."""
        (group,) = self._groups()
        kind = group.kind
        return [
            GroupPods(
                group.name, kind.compute_class, kind.generation, kind.topology, None,
                group.num_hosts, group.slices,
            )
        ]  # fmt: skip

    def _groups(self) -> Any:
        made = copy.deepcopy(self.group)
        made["replicas"] = len(self.slices) if self.replicas is None else self.replicas
        bodies = [pod for one in self.slices for pod in one.pods]
        workers = [decode_worker_pod(msgspec.json.encode(pod)) for pod in bodies]
        groups, _ = read_groups(raycluster(made), workers)
        return groups

    def cluster(self) -> ClusterReading:
        """As kubectl tells it."""
        bodies = [*self.control, *(pod for one in self.slices for pod in one.pods)]
        machines = {pod["spec"].get("nodeName") for one in self.slices for pod in one.pods}
        parts = {
            "machines": {name: True for name in machines if name is not None},
            "quotas": (),
            "classes": (),
            "warnings": (),
            "wish": ClusterWish({"head": 1, "gateway": 2}, frozenset({GROUP})),
        }
        return ClusterReading(
            target="RayService serving/llm",
            namespace="serving",
            name="llm-abcde",
            pods=tuple(map(read_pod, bodies)),
            groups=tuple(self._groups()),
            **(parts | self.cluster_parts),
        )

    def readings(self) -> StatusReadings:
        return StatusReadings(self.fleet(), self.cluster())

    def found(self, patience_s: float = PATIENCE_S) -> tuple[FleetFinding, ...]:
        """What is wrong."""
        return find_faults(self.readings(), NOW_S, patience_s)
