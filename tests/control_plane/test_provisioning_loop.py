"""The provisioner's loop over its watch, at a real API server: what it makes of what happens."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from autoscaling.provisioning.kuberay import KubeRayProvisioner
from autoscaling.provisioning.kubernetes import KubernetesAccess, KubernetesApi
from autoscaling.provisioning.objects.cluster import WatchedCluster
from autoscaling.provisioning.plan import ProvisioningRules
from autoscaling.provisioning.reconcile import Reconciler
from serving.domain.slice_records import LEASE_S
from serving.domain.supply.pods import GroupPods, ObservedSlice
from serving.domain.supply.records import SupplyReport, WaitingReplica

from .api import Api
from .proxy import Fault, Proxy
from .ray_objects import CLUSTER, FINALIZER, RESERVED, SPOT, make_slice, set_count
from .watching import until

pytestmark = pytest.mark.process

Json = dict[str, Any]
# So that nothing but what happens starts a round.
FOREVER_S = 1e6


def waiting(number: int, compute_class: str) -> WaitingReplica:
    """A replica without a slice."""
    return WaitingReplica(
        life_id=f"replica-{compute_class}-{number}",
        model="demo",
        compute_class=compute_class,
        generation="v6e",
        topology="2x4",
        since_s=0.0,
    )


class Loop:
    """A reconciler; the test holds what the directory says of replicas."""

    def __init__(self, access: KubernetesAccess) -> None:
        self.waiting: list[WaitingReplica] = []
        self.api = KubernetesApi(access)
        changed = asyncio.Event()
        self.watched = WatchedCluster(self.api, CLUSTER, changed.set)
        self.provisioner = KubeRayProvisioner(self.api, CLUSTER, self.watched)
        self.reconciler = Reconciler(
            self._read,
            self.provisioner,
            ProvisioningRules(idle_s=LEASE_S, min_change_interval_s=0.0),
            fence=self._fence,
            report_pods=self._report,
            interval_s=FOREVER_S,
            look_interval_s=0.05,
            changed=changed,
        )

    async def _read(self) -> SupplyReport:
        return SupplyReport("test:1", (), tuple(self.waiting))

    async def _report(self, groups: tuple[GroupPods, ...]) -> None:
        pass

    async def _fence(self, _: ObservedSlice) -> str | None:
        return None


@asynccontextmanager
async def looping(access: KubernetesAccess) -> AsyncIterator[Loop]:
    loop = Loop(access)
    async with loop.watched:
        task = asyncio.create_task(loop.reconciler.run())
        try:
            yield loop
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    await loop.api.aclose()


def count(api: Api, cluster: Json, group: str) -> int:
    """The slices that are asked for, as the server has it."""
    metadata = cluster["metadata"]
    found = api.get("RayCluster", metadata["namespace"], metadata["name"])
    specs = {spec["groupName"]: spec for spec in found["spec"]["workerGroupSpecs"]}
    number: int = specs[group]["replicas"]
    return number


async def until_count(api: Api, cluster: Json, group: str, expected: int) -> None:
    async def is_so() -> bool:
        return count(api, cluster, group) == expected

    await until(is_so, lambda: f"{group} is at {count(api, cluster, group)}, not {expected}")


async def test_wish_becomes_a_count_and_a_slice_in_replacement_holds_up_no_other_group(
    api: Api, cluster: Json, access: KubernetesAccess
) -> None:
    set_count(api, cluster, RESERVED, 1)
    # One slice lacks a host; another one was dropped, and its pods are still there.
    api.delete(make_slice(api, cluster, RESERVED, 0)[1])
    doomed = make_slice(api, cluster, RESERVED, 1, finalizers=[FINALIZER])
    specs = cluster["spec"]["workerGroupSpecs"]
    position = next(i for i, spec in enumerate(specs) if spec["groupName"] == RESERVED)
    strategy = {"workersToDelete": [doomed[0]["metadata"]["name"]]}
    path = f"/spec/workerGroupSpecs/{position}/scaleStrategy"
    api.patch(cluster, [{"op": "add", "path": path, "value": strategy}])
    async with looping(access) as loop:
        loop.waiting = [waiting(number, "reserved") for number in range(2)]
        loop.waiting += [waiting(0, "spot")]
        await until_count(api, cluster, SPOT, 1)
        assert count(api, cluster, RESERVED) == 1
        # Once they are gone, the group has its turn: the watch says so, and nothing else does.
        for pod in doomed:
            api.merge(pod, {"metadata": {"finalizers": None}})
            api.delete(pod)
        await until_count(api, cluster, RESERVED, 2)


async def test_wish_is_met_after_the_server_was_away(
    api: Api,
    cluster: Json,
    access: KubernetesAccess,
    proxy: Proxy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with looping(access) as loop:
        loop.waiting = [waiting(0, "spot")]
        await until_count(api, cluster, SPOT, 1)
        proxy.go_down()
        loop.waiting = [waiting(number, "spot") for number in range(2)]

        async def has_failed() -> bool:
            return "provisioning_failed" in caplog.text

        await until(has_failed, lambda: "the change is tried")
        assert count(api, cluster, SPOT) == 1
        proxy.come_back()
        await until_count(api, cluster, SPOT, 2)


@pytest.mark.parametrize(
    ("status", "how"),
    [(409, {}), (500, {}), (503, {"lands": True}), (429, {"retry_after_s": 1})],
)
async def test_wish_is_met_after_a_refused_or_lost_patch(
    api: Api,
    cluster: Json,
    access: KubernetesAccess,
    proxy: Proxy,
    caplog: pytest.LogCaptureFixture,
    status: int,
    how: Json,
) -> None:
    proxy.inject(Fault("patch", status, **how))
    async with looping(access) as loop:
        loop.waiting = [waiting(0, "spot")]
        await until_count(api, cluster, SPOT, 1)

        async def has_failed() -> bool:
            return f"{status}: injected" in caplog.text

        await until(has_failed, lambda: "the first attempt is reported")
        loop.waiting = [waiting(number, "spot") for number in range(2)]
        await until_count(api, cluster, SPOT, 2)


async def test_count_that_another_writer_set_is_made_right(
    api: Api, cluster: Json, access: KubernetesAccess
) -> None:
    async with looping(access) as loop:
        loop.waiting = [waiting(0, "spot")]
        await until_count(api, cluster, SPOT, 1)
        set_count(api, cluster, SPOT, 0)
        await until_count(api, cluster, SPOT, 1)
