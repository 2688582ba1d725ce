"""`slicewise provision` as the process it is in production, killed in the midst of things.

It reads the product's own fleet directory, a deployment of a Serve application; it speaks with the
API server by token and CA. What it knows is gone with every kill.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from control_plane.on_call import series
from control_plane.proxy import Request
from control_plane.server import ControlPlane
from ray import serve
from ray.serve._private.router import SingletonThreadRouter

from deployments.start.ports import free_ports
from serving.config.application import LinkConfig
from serving.directory.deployment import FleetDirectory
from serving.domain.slice_records import LEASE_S, RENEWAL_S
from serving.domain.topology import slice_shape

from .cluster import PROVISIONER, EmulatedCluster
from .objects import raycluster, worker_group
from .replicas import Replica, Replicas, replicas, until
from .sidecar import APPLICATION, Sidecar
from .webhook_server import Webhook

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

SHAPE = slice_shape("v6e", "2x4", 4)
GROUP = "v6e-2x4-spot"
# Patient enough for replicas whose word is late on a busy machine: who is late for a lease is gone
# for the directory.
IMPATIENT = ("--interval", "0.5", "--idle", str(3 * LEASE_S), "--min-change-interval", "1")


@pytest.fixture(scope="module")
def cluster(control_plane: ControlPlane, webhook: Webhook) -> Iterator[EmulatedCluster]:
    group = worker_group(GROUP, SHAPE, "spot", max_replicas=4)
    made = raycluster(group, idle_timeout_s=5)
    with EmulatedCluster(control_plane, made, {GROUP: 0.5}) as running:
        yield running


@pytest.fixture(scope="module")
def directory(cluster: EmulatedCluster) -> Iterator[Any]:
    serve.start(proxy_location="Disabled")
    deployment = serve.deployment(FleetDirectory).options(
        name="directory", ray_actor_options={"num_cpus": 0}
    )
    yield serve.run(deployment.bind(LinkConfig()), name=APPLICATION, route_prefix=None)
    serve.shutdown()
    end_routers()


def end_routers() -> None:
    """Ends what this process's handles of Serve run on.

    Their long poll asks on after the controller's end (Ray 2.60), and whoever calls Ray in a
    process that has left it ends the process, with the summary of its tests unsaid.
    """
    loop, SingletonThreadRouter._asyncio_loop = SingletonThreadRouter._asyncio_loop, None
    assert loop is not None
    loop.call_soon_threadsafe(loop.stop)
    deadline_s = time.monotonic() + 60.0
    while loop.is_running():
        assert time.monotonic() < deadline_s, "the routers' loop does not end"
        time.sleep(0.01)


@contextlib.asynccontextmanager
async def registered(fleet: Replicas, directory: Any) -> AsyncIterator[None]:
    """The replicas say again and again what they do, as real ones."""

    async def renew() -> None:
        while True:
            for record in await fleet.records():
                await directory.renew.remote(record)
            await asyncio.sleep(RENEWAL_S / 2)

    renewing = asyncio.create_task(renew())
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)


async def leave(replica: Replica, directory: Any) -> None:
    await replica.leave()
    await directory.end.remote(replica.record)


async def test_killed_provisioner_goes_on_from_what_it_sees(
    cluster: EmulatedCluster, directory: Any
) -> None:
    (port,) = free_ports(1)
    sidecar = Sidecar(cluster, *IMPATIENT, "--metrics-port", str(port))
    async with replicas("spot", SHAPE) as fleet, registered(fleet, directory):
        first, second = fleet.start(), fleet.start()
        sidecar.start()
        await until(lambda: bool(first.slice_name and second.slice_name), "two slices are held")
        kept = [first.node_ids, second.node_ids]

        # Killed while the third slice has been asked for and does not come.
        cluster.cloud.delays_s[GROUP] = None
        third = fleet.start()
        await until(lambda: cluster.group(GROUP)["replicas"] == 3, "a third is asked for")
        sidecar.kill()
        num_patches = len(patches(cluster))
        sidecar.start()
        await sidecar.rounds(5)
        assert len(patches(cluster)) == num_patches
        # Its page is the whole process's: what is missing, and rounds that it has made since.
        page = await asyncio.to_thread(sidecar.page)
        machineless = series("slicewise_provisioning_machineless_pods", group=GROUP)
        assert page[machineless] == SHAPE.num_hosts
        assert page[series("slicewise_provisioning_rounds_total")] >= 1
        cluster.cloud.delays_s[GROUP] = 0.5
        await until(lambda: third.slice_name is not None, "the third comes")
        await until(lambda: sidecar.page()[machineless] == 0, "all pods have machines")

        # Away while a replica leaves.
        sidecar.kill()
        await leave(second, directory)
        sidecar.start()
        await until(lambda: cluster.group(GROUP)["replicas"] == 2, "the left slice is dropped")
        await until(lambda: len(cluster.whole_slices(GROUP)) == 2, "it is gone")
        assert [first.node_ids, third.lost, first.lost] == [kept[0], [], []]

        await leave(first, directory)
        await leave(third, directory)
        await until(lambda: not cluster.pods(GROUP), "no slice is left")
        assert await sidecar.terminate() == 0, sidecar.log()
    # A directory that has just started reports nothing for some seconds.
    failures = [line for line in sidecar.log().splitlines() if "provisioning_failed" in line]
    assert [line for line in failures if "no directory of slicewise has reported" not in line] == []


def patches(cluster: EmulatedCluster) -> list[Request]:
    return cluster.api.requests(PROVISIONER, "patch")
