"""`slicewise provision` as the process it is in production, killed in the midst of things.

It reads the product's own fleet directory, a deployment of a Serve application; it speaks with the
API server by token and CA. What it knows is gone with every kill.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import serve

from serving.directory.deployment import FleetDirectory
from serving.domain.slice_records import LEASE_S, RENEWAL_S
from serving.domain.topology import slice_shape

from .api_server import NAMESPACE, Request
from .cluster import PROVISIONER, EmulatedCluster
from .objects import RAYCLUSTER, raycluster, worker_group
from .replicas import Replica, Replicas, replicas, until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

SHAPE = slice_shape("v6e", "2x4", 4)
GROUP = "v6e-2x4-spot"
APPLICATION = "slicewise"
# Importing Ray and joining the cluster.
_START_S = 60.0
_STOP_S = 20.0


class Sidecar:
    """The command, started as often as a test likes."""

    def __init__(self, cluster: EmulatedCluster) -> None:
        self._cluster = cluster
        self._log = cluster.folder / "provisioner.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it; seconds until it looks at the cluster."""
        access = self._cluster.access
        command = [str(Path(sys.executable).with_name("slicewise")), "provision"]
        command += ["--ray-address", self._cluster.address, "--raycluster", RAYCLUSTER]
        command += ["--namespace", NAMESPACE, "--kubernetes-url", access.base_url]
        command += ["--token-file", str(access.token_file), "--ca-file", str(access.ca_file)]
        command += ["--interval", "0.5", "--idle", str(LEASE_S), "--min-change-interval", "1"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=os.environ.copy(), stdout=log, stderr=subprocess.STDOUT
            )

    async def rounds(self, count: int) -> None:
        """It looks this many times more."""
        seen = self._num_looks()

        def has_looked() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, f"it ended\n{self.log()}"
            return self._num_looks() >= seen + count

        await until(has_looked, f"{count} looks\n{self.log()}", _START_S)

    def kill(self) -> None:
        """Ends it without a word."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    async def terminate(self) -> int:
        """Ends it as Kubernetes does; its exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self._process.wait, _STOP_S)

    def log(self) -> str:
        """What it has printed, over all its lives."""
        return self._log.read_text(errors="replace")

    def _num_looks(self) -> int:
        return len(self._cluster.api.requests(PROVISIONER, "list"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmulatedCluster]:
    group = worker_group(GROUP, SHAPE, "spot", max_replicas=4)
    with EmulatedCluster(raycluster(group, idle_timeout_s=5), {GROUP: 0.5}) as running:
        yield running


@pytest.fixture(scope="module")
def directory(cluster: EmulatedCluster) -> Iterator[Any]:
    serve.start(proxy_location="Disabled")
    deployment = serve.deployment(FleetDirectory).options(
        name="directory", ray_actor_options={"num_cpus": 0}
    )
    yield serve.run(deployment.bind(), name=APPLICATION, route_prefix=None)
    serve.shutdown()


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
    sidecar = Sidecar(cluster)
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
        cluster.cloud.delays_s[GROUP] = 0.5
        await until(lambda: third.slice_name is not None, "the third comes")

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
    assert "provisioning_failed" not in sidecar.log()


def patches(cluster: EmulatedCluster) -> list[Request]:
    return cluster.api.requests(PROVISIONER, "patch")
