"""The provisioner against KubeRay's rules, real raylets and Ray's real autoscaler, which is on.

Replicas hold slices by placement groups. Whatever the provisioner does, no slice that a replica
holds is lost to it; the only slice that is lost here is the one whose host is killed.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any

import pytest
import ray
from control_plane.server import ControlPlane
from ray._raylet import GcsClient
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autoscaling.provisioning.kubernetes import KubernetesApi
from autoscaling.provisioning.plan import ProvisioningRules
from autoscaling.provisioning.reconcile import Reconciler
from autoscaling.provisioning.sidecar.fence import RayFence
from serving.domain.slice_records import LEASE_S, SliceRecord
from serving.domain.supply.records import SupplyState
from serving.domain.topology import slice_shape

from .book_keeper import BookKeeper
from .cluster import AUTOSCALER, PROVISIONER, EmulatedCluster
from .listed import listing
from .objects import RAYCLUSTER, raycluster, rayservice, worker_group
from .replicas import Replica, replicas, until
from .webhook_server import Webhook

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

logger = logging.getLogger(__name__)

SHAPE = slice_shape("v6e", "2x4", 4)
SPOT, FLEX = "v6e-2x4-spot", "v6e-2x4-flex"
# As impatient as rules may be.
RULES = ProvisioningRules(idle_s=LEASE_S, min_change_interval_s=1.0)
# Ray finds a host dead that was killed after half a minute (`cluster`).
DEATH_S = 90.0


@pytest.fixture(scope="module")
def cluster(control_plane: ControlPlane, webhook: Webhook) -> Iterator[EmulatedCluster]:
    groups = (
        worker_group(SPOT, SHAPE, "spot", max_replicas=3),
        worker_group(FLEX, SHAPE, "flex-start", max_replicas=3),
    )
    # Whatever idles for 5 s would go, were the groups not exempt.
    made = raycluster(*groups, idle_timeout_s=5, is_of_service=True)
    delays: dict[str, float | None] = {SPOT: 1.0, FLEX: 1.0}
    with EmulatedCluster(control_plane, made, delays, service=rayservice(made)) as running:
        yield running


@contextlib.asynccontextmanager
async def provisioning(
    cluster: EmulatedCluster, read_records: Callable[[], Awaitable[Iterable[SliceRecord]]]
) -> AsyncIterator[BookKeeper]:
    """A provisioner that has just been started, and the directory that it asks."""
    api = KubernetesApi(cluster.access)
    keeper = BookKeeper(read_records)
    reconciler = Reconciler(
        keeper.read_supply,
        listing(api, RAYCLUSTER),
        RULES,
        fence=RayFence(GcsClient(address=cluster.address)),
        report_pods=keeper.report_pods,
        interval_s=0.5,
    )
    running = asyncio.create_task(reconciler.run())
    try:
        yield keeper
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await api.aclose()


def holds(*each: Replica) -> Callable[[], bool]:
    return lambda: all(replica.slice_name is not None for replica in each)


def settled(cluster: EmulatedCluster, group: str, names: set[str]) -> Callable[[], bool]:
    """Exactly these slices exist, and no more are asked for."""
    return lambda: (
        set(cluster.whole_slices(group)) == names and cluster.group(group)["replicas"] == len(names)
    )


def start_bystander(cluster: EmulatedCluster, group: str, worker_id: str) -> Any:
    """An actor without resources on one host of the group's only slice."""

    @ray.remote(num_cpus=0)
    class Bystander:
        def ping(self) -> str:
            return "here"

    node_id = next(
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"]
        and node["Labels"].get("ray.io/node-group") == group
        and node["Labels"]["ray.io/tpu-worker-id"] == worker_id
    )
    place = NodeAffinitySchedulingStrategy(node_id, soft=False)
    bystander = Bystander.options(scheduling_strategy=place).remote()
    assert ray.get(bystander.ping.remote(), timeout=30) == "here"
    return bystander


async def rounds(cluster: EmulatedCluster, count: int, user: str = PROVISIONER) -> None:
    """The provisioner, or who is named, looks this many times more."""
    seen = len(cluster.api.requests(user, "list"))
    await until(lambda: len(cluster.api.requests(user, "list")) > seen + count, "rounds")


async def test_held_slices_survive_every_change_around_them(cluster: EmulatedCluster) -> None:
    """Up to three, down by name, a host lost, down to zero."""
    async with replicas("spot", SHAPE) as fleet, provisioning(cluster, fleet.records):
        first, second, third = (fleet.start() for _ in range(3))
        up_s = await until(holds(first, second, third), "three slices are held")
        assert sorted(str(each.slice_name) for each in fleet.all) == [
            f"{SPOT}-{index}" for index in range(3)
        ]

        node_ids = (first.node_ids, third.node_ids)
        await second.leave()
        staying = {str(first.slice_name), str(third.slice_name)}
        down_s = await until(
            settled(cluster, SPOT, staying), "the slice that was left is gone, the others are not"
        )
        assert (first.node_ids, third.node_ids) == node_ids

        lost = str(third.slice_name)
        cluster.lose(lost, host=1)
        found_s = await until(lambda: third.lost == [lost], "the loss is noticed", DEATH_S)
        back_s = await until(holds(third), "the replacement is held")
        assert not third.node_ids & node_ids[1]
        assert first.node_ids == node_ids[0]

        await first.leave()
        await third.leave()
        zero_s = await until(settled(cluster, SPOT, set()), "no slice is left")

        assert (first.lost, second.lost, third.lost) == ([], [], [lost])
        logger.info(
            "measured up_s=%.1f down_s=%.1f loss_found_s=%.1f back_s=%.1f zero_s=%.1f",
            up_s, down_s, found_s, back_s, zero_s,
        )  # fmt: skip
    await rounds(cluster, 2, AUTOSCALER)
    # It may take out names whose pods are gone. It never names a pod, nor changes a count.
    tidied = [each.body for each in cluster.api.requests(AUTOSCALER, "patch")]
    for operations in tidied:
        assert [each["value"] for each in operations] == [{"workersToDelete": []}] * len(operations)


async def test_replacement_is_asked_for_at_the_notice(cluster: EmulatedCluster) -> None:
    """Not when the slice dies: it still stands, with its replica on it, when the next one comes."""
    async with replicas("flex-start", SHAPE) as fleet, provisioning(cluster, fleet.records):
        leaving = fleet.start()
        await until(holds(leaving), "a slice is held")
        old = str(leaving.slice_name)

        # A replica begins its next life at the notice.
        leaving.notice(in_s=300.0)
        successor = fleet.start()
        asked_s = await until(
            lambda: cluster.group(FLEX)["replicas"] == 2, "a replacement is asked for", 10.0
        )
        ready_s = await until(holds(successor), "the successor has the replacement")
        assert leaving.slice_name == old
        assert leaving.lost == []

        # Nothing more is bought while both are there.
        patches = len(cluster.api.requests(PROVISIONER, "patch"))
        await rounds(cluster, 5)
        assert len(cluster.api.requests(PROVISIONER, "patch")) == patches

        await leaving.leave()
        staying = {str(successor.slice_name)}
        gone_s = await until(settled(cluster, FLEX, staying), "the old one is gone")
        assert successor.lost == []
        logger.info("measured asked_s=%.1f ready_s=%.1f gone_s=%.1f", asked_s, ready_s, gone_s)
        # It was announced to go: nobody waits until it has been idle for long.
        assert gone_s < RULES.idle_s

    assert cluster.group(FLEX)["replicas"] == 1


async def test_slice_that_the_directory_forgot_is_kept(
    cluster: EmulatedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The hosts themselves say that somebody has it."""
    forgotten = False

    async with replicas("spot", SHAPE) as fleet:

        async def read_records() -> list[SliceRecord]:
            return [] if forgotten else await fleet.records()

        async with provisioning(cluster, read_records) as keeper:
            holder = fleet.start()
            await until(holds(holder), "a slice is held")
            name, node_ids = str(holder.slice_name), holder.node_ids
            forgotten = True

            def is_leased() -> bool:
                return [each.state for each in keeper.book.records] == [SupplyState.LEASED]

            await until(is_leased, "it is known that somebody has it")
            # Neither idle, however long, nor what another replica could have.
            await asyncio.sleep(2 * RULES.idle_s)
            await rounds(cluster, 5)
            assert cluster.whole_slices(SPOT) == {name: node_ids}
            assert cluster.group(SPOT)["replicas"] == 1

            # Anything at all on any host of it keeps it, whether or not it takes a chip.
            bystander = start_bystander(cluster, SPOT, worker_id="1")
            await holder.leave()
            refusal = f"{name} is not dropped: host 1 is in use"
            await until(lambda: refusal in caplog.text, "it would have been dropped")
            assert cluster.whole_slices(SPOT) == {name: node_ids}

            ray.kill(bystander)
            await until(settled(cluster, SPOT, set()), "it goes once nobody is there")
        assert holder.lost == []
