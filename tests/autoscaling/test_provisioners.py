"""One contract for every provisioner: what it shows, and what it makes of a plan.

KubeRay's is the real client, against a real control plane with an operator and a cloud that move
when told to.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from control_plane.server import ControlPlane
from kuberay.by_hand import ClusterByHand
from kuberay.cloud import Loss
from kuberay.listed import listing
from kuberay.objects import RAYCLUSTER, raycluster, worker_group
from kuberay.webhook_server import Webhook
from provisioning_builders import (
    RESERVED,
    SPOT,
    Entry,
    condemned,
    holding,
    leaving,
    no_fence,
    no_report,
    report_of,
    waiting,
)

from autoscaling.provisioning.errors import OutdatedError
from autoscaling.provisioning.groups import SliceKind
from autoscaling.provisioning.kubernetes import KubernetesApi
from autoscaling.provisioning.plan import Change, Drop, ProvisioningPlan, ProvisioningRules
from autoscaling.provisioning.protocol import Provisioner
from autoscaling.provisioning.reconcile import Reconciler
from serving.domain.supply.records import SupplyReport
from serving.domain.topology import slice_shape

pytestmark = pytest.mark.process

SHAPE = slice_shape("v6e", "2x4", 4)
GROUPS = {SPOT: "spot-group", RESERVED: "reserved-group"}
MAX_REPLICAS = 4


class World(ABC):
    """A provisioner and what stands behind it: one group per kind, without slices at first."""

    provisioner: Provisioner

    @abstractmethod
    def settle(self) -> None:
        """Everything that was asked for is there, everything dropped is gone."""

    @abstractmethod
    def slices(self, kind: SliceKind) -> set[str]:
        """The slices that are there, by name."""

    @abstractmethod
    def interfere(self, kind: SliceKind) -> None:
        """Somebody else asks for one slice more."""

    @abstractmethod
    def lose(self, kind: SliceKind, name: str) -> None:
        """A slice is taken away."""


class KubeRayWorld(World):
    def __init__(self, cluster: ClusterByHand, api: KubernetesApi) -> None:
        self._cluster = cluster
        self.provisioner = listing(api, RAYCLUSTER)

    def settle(self) -> None:
        self._cluster.settle()

    def slices(self, kind: SliceKind) -> set[str]:
        found = self._cluster.slices(GROUPS[kind])
        return {name for name, running in found.items() if running == SHAPE.num_hosts}

    def interfere(self, kind: SliceKind) -> None:
        with self._cluster.edit() as stored:
            for spec in stored["spec"]["workerGroupSpecs"]:
                spec["replicas"] += spec["groupName"] == GROUPS[kind]

    def lose(self, kind: SliceKind, name: str) -> None:
        self._cluster.lose(name, host=1, how=Loss.FAILED)


@asynccontextmanager
async def kuberay_world(plane: ControlPlane, folder: Path) -> AsyncIterator[World]:
    groups = [
        worker_group(name, SHAPE, kind.compute_class, max_replicas=MAX_REPLICAS)
        for kind, name in GROUPS.items()
    ]
    with ClusterByHand(plane, raycluster(*groups), folder) as cluster:
        api = KubernetesApi(cluster.access)
        yield KubeRayWorld(cluster, api)
        await api.aclose()


@pytest.fixture
async def world(
    control_plane: ControlPlane, webhook: Webhook, tmp_path: Path
) -> AsyncIterator[World]:
    async with kuberay_world(control_plane, tmp_path) as made:
        yield made


class Driver:
    """A reconciler whose clock stands until it is told the time."""

    def __init__(self, world: World) -> None:
        self._entries: tuple[Entry, ...] = ()
        self.now_s = 0.0
        self._world = world
        rules = ProvisioningRules(idle_s=60.0, min_change_interval_s=0.0)
        self._reconciler = Reconciler(
            self._read,
            world.provisioner,
            rules,
            fence=no_fence,
            report_pods=no_report,
            interval_s=1.0,
            clock=lambda: self.now_s,
        )

    async def round(self, *entries: Entry, at_s: float = 0.0) -> ProvisioningPlan:
        self._entries, self.now_s = entries, at_s
        plan = await self._reconciler.tick()
        self._world.settle()
        return plan

    async def _read(self) -> SupplyReport:
        return report_of(self._entries, (await self._world.provisioner.observe()).groups)


async def change_of(world: World, kind: SliceKind, replicas: int, *dropped: str) -> Change:
    """A change as planned on the present picture."""
    groups = {group.kind: group for group in (await world.provisioner.observe()).groups}
    drops = tuple(
        Drop(each, is_condemned=False, reason="unwanted")
        for each in groups[kind].slices
        if each.name in dropped
    )
    return Change(groups[kind], replicas, drops, "because")


async def apply(world: World, *changes: Change) -> None:
    await world.provisioner.apply(ProvisioningPlan(changes))
    world.settle()


async def test_observe_shows_every_group_with_its_kind_and_bounds(world: World) -> None:
    groups = (await world.provisioner.observe()).groups
    assert {group.kind for group in groups} == {SPOT, RESERVED}
    assert {(group.replicas, group.max_replicas) for group in groups} == {(0, MAX_REPLICAS)}


async def test_added_slices_are_there_and_shown_by_name(world: World) -> None:
    await apply(world, await change_of(world, SPOT, 2))
    assert world.slices(SPOT) == {"spot-group-0", "spot-group-1"}
    shown = (await world.provisioner.observe()).groups
    names = {each.name: each.is_running for group in shown for each in group.slices}
    assert names == {"spot-group-0": True, "spot-group-1": True}


async def test_slice_to_come_is_shown_and_does_not_run(world: World) -> None:
    await world.provisioner.apply(ProvisioningPlan((await change_of(world, SPOT, 1),)))
    shown = {group.kind: group for group in (await world.provisioner.observe()).groups}
    assert shown[SPOT].replicas == 1
    assert not any(each.is_running for each in shown[SPOT].slices)


async def test_dropped_slice_goes_and_no_other(world: World) -> None:
    await apply(world, await change_of(world, SPOT, 3), await change_of(world, RESERVED, 1))
    await apply(world, await change_of(world, SPOT, 2, "spot-group-1"))
    assert world.slices(SPOT) == {"spot-group-0", "spot-group-2"}
    assert world.slices(RESERVED) == {"reserved-group-0"}


async def test_several_slices_are_dropped_in_one_change(world: World) -> None:
    await apply(world, await change_of(world, SPOT, 4))
    await apply(
        world, await change_of(world, SPOT, 1, "spot-group-0", "spot-group-1", "spot-group-3")
    )
    assert world.slices(SPOT) == {"spot-group-2"}


async def test_change_planned_on_an_old_picture_is_refused_and_the_others_made(
    world: World,
) -> None:
    outdated = await change_of(world, SPOT, 2)
    other = await change_of(world, RESERVED, 1)
    world.interfere(SPOT)
    world.settle()
    with pytest.raises(OutdatedError):
        await world.provisioner.apply(ProvisioningPlan((outdated, other)))
    world.settle()
    assert world.slices(SPOT) == {"spot-group-0"}
    assert world.slices(RESERVED) == {"reserved-group-0"}


async def test_rounds_follow_the_replicas_up_and_down(world: World) -> None:
    driver = Driver(world)
    await driver.round(waiting(), waiting(), waiting())
    assert world.slices(SPOT) == {f"spot-group-{index}" for index in range(3)}

    held = [holding(f"spot-group-{index}") for index in (0, 2)]
    await driver.round(*held, at_s=10.0)
    await driver.round(*held, at_s=70.0)
    assert world.slices(SPOT) == {"spot-group-0", "spot-group-2"}
    assert (await driver.round(*held, at_s=500.0)).changes == ()

    await driver.round(at_s=600.0)
    await driver.round(at_s=660.0)
    assert world.slices(SPOT) == set()


async def test_rounds_replace_a_lost_slice(world: World) -> None:
    driver = Driver(world)
    await driver.round(waiting(), waiting())
    world.lose(SPOT, "spot-group-0")
    world.settle()
    for at_s in (1.0, 2.0):
        await driver.round(holding("spot-group-1"), waiting(), at_s=at_s)
    assert len(world.slices(SPOT)) == 2
    assert "spot-group-1" in world.slices(SPOT)


async def test_rounds_replace_a_leaving_slice_before_it_goes(world: World) -> None:
    driver = Driver(world)
    await driver.round(waiting())
    await driver.round(leaving("spot-group-0"), waiting(), at_s=1.0)
    assert world.slices(SPOT) == {"spot-group-0", "spot-group-1"}
    await driver.round(condemned("spot-group-0"), holding("spot-group-1"), at_s=2.0)
    assert world.slices(SPOT) == {"spot-group-1"}
