"""A fleet in which many things go wrong at once, and the gateway that shows it.

Real: etcd, API server, admission, quotas, scheduler, the product's directory, provisioner, orders,
view of the fleet and edge. KubeRay is emulated, KWOK runs pods, Ray's nodes and replicas are stood
in for (`ray_by_hand`, `fleet_by_hand`). Once it has begun, operator and cloud stand still: nobody
repairs.
"""

import asyncio
import contextlib
import copy
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from control_plane.api import Api, RefusedByServerError, reference
from control_plane.operated import Operated, operated
from control_plane.ray_objects import FINALIZER, service_account
from control_plane.server import ControlPlane
from dashboard.fleet_stage import serving
from typer.testing import CliRunner

from autoscaling.orders.command import OrderStore, make_order_app
from autoscaling.provisioning.kubernetes import KubernetesAccess
from autoscaling.provisioning.raycluster import (
    GROUP_LABEL,
    REPLICA_INDEX_LABEL,
    REPLICA_NAME_LABEL,
)
from deployments.manifests.names import Component
from serving.domain.dashboard_messages import PageAnswer, PageRequest
from serving.domain.errors import DashboardUnavailableError
from serving.domain.names.gke_names import GKE_CHIPS, HOST_INDEX_LABEL
from serving.domain.plan_report import PlanReport
from serving.domain.slice_lifecycle import SliceState
from serving.domain.slice_records import Snapshot
from serving.domain.supply.keys import SupplyKeys
from serving.domain.topology import slice_shape
from serving.gateway.edge.auth import ApiKeys
from serving.gateway.edge.http import EdgeRules, HttpEdge
from serving.gateway.edge.readiness import Readiness
from serving.gateway.reports.fleet_view import (
    EngineStatus,
    GatewayView,
    ModelView,
    describe_fleet,
    describe_plans,
)
from serving.link.messages import EngineLoad
from tests.deployments.manifests.examples import raw_values

from .cloud import Cloud, Loss
from .fleet_by_hand import APPLICATION, FleetByHand, fleet_on
from .ray_by_hand import RayByHand
from .replicas import until

Json = dict[str, Any]

SHAPE = slice_shape("v6e", "2x4", 4)
SPOT, RESERVED = "v6e-2x4-4t-spot", "v6e-2x4-4t-reserved"
CLASSES = [
    {"compute_class": "reserved", "reservation": "ours", "max_slices": 4},
    {"compute_class": "spot", "max_slices": 16},
]
_STEP_S = 0.1


class StormGateway:
    """A gateway as far as `/fleet` goes: the edge, over the directory's snapshot of before.

    It has a link to every engine that is ready. The policy planned `planned_ago_s` ago.
    """

    def __init__(self) -> None:
        self.snapshot = Snapshot("none")
        self.planned_ago_s = 1.0
        self.edge = HttpEdge(
            {},
            EdgeRules(ApiKeys(()), max_body_bytes=1000),
            render_metrics=lambda _accept: asyncio.sleep(0, (b"", "text/plain")),
            describe_fleet=self._describe,
            ask_dashboard=self._ask_dashboard,
            readiness=lambda: Readiness(is_ready=True, reason="engines take requests"),
        )

    async def _ask_dashboard(self, _request: PageRequest) -> PageAnswer:
        raise DashboardUnavailableError("there is none here")

    def _describe(self) -> Json:
        now_s = time.time()
        records, is_draining = self.snapshot.records, False
        models = [
            ModelView(
                {"name": name, "waiting": 0 if name.endswith("spot") else 3},
                tuple(
                    EngineStatus(
                        str(each.engine_id),
                        each.compute_class,
                        is_draining,
                        2,
                        EngineLoad(2, 0, 0.1),
                    )
                    for each in records
                    if (each.model, each.state) == (name, SliceState.READY)
                ),
            )
            for name in sorted({each.model for each in records})
        ]
        board = PlanReport(written_at_s=now_s - self.planned_ago_s, models=())
        plans = describe_plans(board, now_s)
        return describe_fleet(GatewayView("gw-storm", now_s), models, self.snapshot, now_s, plans)


class _RayStore:
    """Ray's key-value store, as `slicewise order` has it."""

    def __init__(self, ray: RayByHand) -> None:
        self._ray = ray
        self._keys = SupplyKeys(APPLICATION)

    def read_orders(self) -> bytes | None:
        """See `OrderStore`."""
        return self._ray.internal_kv_get(self._keys.orders)

    def read_supply(self) -> bytes | None:
        """See `OrderStore`."""
        return self._ray.internal_kv_get(self._keys.supply)

    def write_orders(self, text: bytes) -> None:
        """See `OrderStore`."""
        self._ray.internal_kv_put(self._keys.orders, text, overwrite=True)


@dataclass
class Storm:
    """An installation with slices, and what can be done to it. `slices` are their names."""

    made: Operated
    ray: RayByHand
    fleet: FleetByHand
    gateway: StormGateway
    url: str
    slices: list[str] = field(default_factory=list)

    @property
    def api(self) -> Api:
        """An administrator's."""
        return self.made.api

    @property
    def namespace(self) -> str:
        """Where it is installed."""
        return self.made.namespace

    async def grow(self, count: int) -> None:
        """So many replicas have a spot slice each."""
        self.fleet.start(SHAPE, count)
        await self.move_until(lambda: len(self.fleet.holding()) == count, "all have slices")
        await self.known(lambda snapshot: _num_ready(snapshot) == count)
        self.slices = sorted(record.name for record in await self.fleet.supply())

    async def move_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Operator and cloud move until it is so."""

        def move() -> None:
            self.made.hand.operator.step()
            self.made.hand.cloud.step(time.monotonic())

        async def look() -> bool:
            await asyncio.to_thread(move)
            await asyncio.sleep(_STEP_S)
            return is_so()

        await until(look, what, 180.0)

    async def known(self, is_so: Callable[[Snapshot], bool], timeout_s: float = 60.0) -> None:
        """Waits until the directory has it so; the gateway shows that from then on."""

        async def look() -> bool:
            self.gateway.snapshot = await self.fleet.snapshot()
            return is_so(self.gateway.snapshot)

        await until(look, "the directory knows", timeout_s)

    def pod(self, slice_name: str, host: int = 0) -> Json:
        """The pod of a host."""
        for pod in self.made.hand.pods():
            labels = pod["metadata"]["labels"]
            name = f"{labels.get(GROUP_LABEL)}-{labels.get(REPLICA_INDEX_LABEL)}"
            if (name, labels.get(HOST_INDEX_LABEL)) == (slice_name, f"{host}"):
                return pod
        raise LookupError(f"there is no host {host} of {slice_name}")

    def pods_of(self, group: str) -> list[Json]:
        """The pods of a worker group."""
        return self.made.hand.pods(group)

    async def order(self, *words: str) -> None:
        """An operator orders it."""

        def open_store(_address: str, _application: str) -> OrderStore:
            return _RayStore(self.ray)

        said = await asyncio.to_thread(CliRunner().invoke, make_order_app(open_store), [*words])
        assert said.exit_code == 0, said.output

    # -- what goes wrong --

    def hold_back(self, pod: Json) -> None:
        """A pod is deleted, and a finalizer keeps it."""
        self.api.merge(pod, {"metadata": {"finalizers": [FINALIZER]}})
        self.api.delete(pod)

    def keep(self, slice_name: str) -> None:
        """Its pods stay when they are deleted, as pods do whose containers take time to end."""
        for host in range(SHAPE.num_hosts):
            self.api.merge(self.pod(slice_name, host), {"metadata": {"finalizers": [FINALIZER]}})

    def fail(self, slice_name: str) -> str:
        """A host's container ends for good, and its Ray node with it; the pod."""
        pod = self.pod(slice_name)
        self.made.hand.cloud.lose_pod(pod, Loss.FAILED)
        return name_of(pod)

    def set_status(self, pod: Json, *, ready: bool, **status: Any) -> None:
        """What a kubelet says of it."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": now}
        self.api.merge(pod, {"status": {"conditions": [condition], **status}}, "status")

    def double(self, slice_name: str) -> str:
        """Somebody has made a second slice of this name; its first pod."""
        for host in range(SHAPE.num_hosts):
            pod = copy.deepcopy(self.pod(slice_name, host))
            kept = ("namespace", "labels", "annotations", "ownerReferences")
            metadata = {key: pod["metadata"][key] for key in kept} | {"name": f"twin-{host}"}
            metadata["labels"][REPLICA_NAME_LABEL] = "twin"
            # It asks for nothing, so no quota is in its way.
            spec = {"schedulerName": "nobody", "containers": [{"name": "one", "image": "none"}]}
            body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
            self.api.create(body)
        return "twin-0"

    def suspend(self, compute_class: str) -> None:
        """GKE makes no machines by any rule of a class."""
        condition = {
            "type": "ProvisioningSuspended",
            "status": "True",
            "reason": "OutOfResources",
            "message": "no v6e is left in us-east5-b",
            "lastTransitionTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        rules = [{"identifier": "0", "conditions": [condition]}]
        body = reference("ComputeClass", None, compute_class)
        self.api.merge(body, {"status": {"priorityStatuses": rules}}, "status")

    async def use_up_quota(self) -> None:
        """A quota allows the chips that are in use, and no more."""
        used = sum(
            int(each["spec"]["containers"][0]["resources"].get("limits", {}).get(GKE_CHIPS, 0))
            for each in (*self.pods_of(SPOT), *self.pods_of(RESERVED))
        )
        quota = reference("ResourceQuota", self.namespace, "few")
        quota["spec"] = {"hard": {f"requests.{GKE_CHIPS}": f"{used}"}}
        self.api.create(quota)

        def is_counted() -> bool:
            found = self.api.get("ResourceQuota", self.namespace, "few")
            counted = found.get("status", {}).get("used", {}).get(f"requests.{GKE_CHIPS}")
            return counted == f"{used}"

        await until(is_counted, "the quota is counted", 60.0)

    def is_refused(self) -> bool:
        """Whether the operator has said that it may make no more pods."""
        events = self.api.list("Event", self.namespace)
        return any("exceeded quota" in each.get("message", "") for each in events)

    def gateways(self) -> list[Json]:
        """The gateways' pods."""
        return self.made.pods(Component.GATEWAY)

    def head(self) -> Json:
        """The head's pod."""
        (found,) = self.made.pods(Component.HEAD)
        return found


def name_of(body: Json) -> str:
    """The name of an object."""
    return str(body["metadata"]["name"])


def _num_ready(snapshot: Snapshot) -> int:
    return sum(record.state == SliceState.READY for record in snapshot.records)


@contextlib.asynccontextmanager
async def storm_on(plane: ControlPlane, folder: Path, num_slices: int) -> AsyncIterator[Storm]:
    """An installation in which everything is well, with so many spot slices that are held."""
    raw = raw_values((SHAPE, "reserved"), (SHAPE, "spot"), classes=copy.deepcopy(CLASSES))
    raw["applications"][0]["args"]["gateway"] = {"replicas": 2}
    with operated(plane.api, raw) as made:
        ray = RayByHand(random.Random(1))
        made.hand.cloud = Cloud(plane.api, made.namespace, {RESERVED: None}, ray)
        (cluster,) = plane.api.list("RayCluster", made.namespace)
        account = service_account(made.values.cluster)
        token = folder / "token"
        token.write_text(plane.api.request_token(made.namespace, account))
        access = KubernetesAccess(plane.url, made.namespace, token, plane.ca_file)
        dice = random.Random(2)
        gateway = StormGateway()
        async with (
            fleet_on(access, ray, dice, raycluster=name_of(cluster)) as fleet,
            serving(gateway) as url,
        ):
            storm = Storm(made, ray, fleet, gateway, url)
            await storm.grow(num_slices)
            try:
                yield storm
            finally:
                for pod in made.hand.pods():
                    if pod["metadata"].get("finalizers"):
                        with contextlib.suppress(RefusedByServerError):
                            plane.api.merge(pod, {"metadata": {"finalizers": None}})
