"""From a node of a real API server to a slice that drains, under the rights that we render.

Everything on the way is the product's: the reader, the note, the agent's socket and stream, the
replica's watch. Nothing else announces anything here: there is no metadata server, no Ray and no
preStop hook.
"""

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from autoscaling.node_reader import NodeReader
from autoscaling.provisioning.errors import RefusedError
from autoscaling.provisioning.kubernetes import KubernetesAccess, KubernetesApi
from autoscaling.provisioning.objects.wire import Selection
from deployments.manifests.names import Component, service_account
from deployments.manifests.platform import NODE_READER_RULES, node_reader_rights
from deployments.manifests.values import Values
from serving.domain.slice_lifecycle import EndCause
from tests.slices.watched_host import DRAIN_S, WatchedHost

from .api import Api
from .kubelet import node
from .proxy import Proxy
from .server import ControlPlane
from .watching import until

pytestmark = pytest.mark.process

Json = dict[str, Any]
NODES = Selection("api/v1", "nodes", is_namespaced=False)
_numbers = itertools.count()


@pytest.fixture
def own_node(api: Api) -> Any:
    """A TPU host's node; gone afterwards."""
    made = api.create(node(f"tpu-read-{next(_numbers)}", chips=4))
    yield made
    if api.exists(made):
        api.delete(made)


@pytest.fixture
def granted(api: Api, namespace: Values) -> Any:
    """The reader's rights as rendered."""
    rights = node_reader_rights(namespace.cluster)
    for body in rights:
        api.apply(body)
    yield namespace
    for body in rights:
        api.delete(body)


@pytest.fixture
async def reader_api(
    control_plane: ControlPlane, proxy: Proxy, granted: Values, tmp_path: Path
) -> AsyncIterator[KubernetesApi]:
    """As the account of a slice's host, through the proxy."""
    name, token = granted.cluster.namespace, tmp_path / "token"
    account = service_account(granted.cluster, Component.ENGINE)
    token.write_text(control_plane.api.request_token(name, account))
    api = KubernetesApi(KubernetesAccess(proxy.url, "", token, proxy.ca_file))

    async def may_list() -> bool:
        return [page async for page in api.pages(NODES)] != []

    await until(may_list, lambda: "the account may list nodes")
    proxy.forget_requests()
    yield api
    await api.aclose()


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[WatchedHost]:
    host = WatchedHost(tmp_path / "run")
    await host.start()
    yield host
    await host.stop()


@pytest.fixture
async def reading(
    reader_api: KubernetesApi, own_node: Json, host: WatchedHost
) -> AsyncIterator[asyncio.Task[None]]:
    name = own_node["metadata"]["name"]
    task = asyncio.create_task(NodeReader(reader_api, name, host.run_dir).run())
    # It has read the node once, in which there is nothing.
    await until_note(host)
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until_note(host: WatchedHost) -> None:
    async def is_there() -> bool:
        return (host.run_dir / "notices" / "node.json").exists()

    await until(is_there, lambda: "the reader has written a note")


def tainted(key: str) -> Callable[[Api, Json], None]:
    def change(api: Api, body: Json) -> None:
        taints = [*body["spec"]["taints"], {"key": key, "effect": "NoSchedule"}]
        api.merge(body, {"spec": {"taints": taints}})

    return change


def labelled(name: str, value: Callable[[], str]) -> Callable[[Api, Json], None]:
    return lambda api, body: _discard(api.merge(body, {"metadata": {"labels": {name: value()}}}))


def annotated(name: str, value: Callable[[], str]) -> Callable[[Api, Json], None]:
    return lambda api, body: _discard(
        api.merge(body, {"metadata": {"annotations": {name: value()}}})
    )


def _discard(_: object) -> None:
    pass


def soon() -> float:
    return time.time() + 60


@pytest.mark.parametrize(
    ("change", "words", "cause", "within_s"),
    [
        (
            tainted("cloud.google.com/impending-node-termination"),
            "GKE is about to stop the node",
            EndCause.PREEMPTED,
            DRAIN_S,
        ),
        (
            tainted("ToBeDeletedByClusterAutoscaler"),
            "the cluster autoscaler removes the node",
            EndCause.PREEMPTED,
            DRAIN_S,
        ),
        (
            labelled("cloud.google.com/active-node-maintenance", lambda: "ONGOING"),
            "GKE stops it for maintenance",
            EndCause.PREEMPTED,
            DRAIN_S,
        ),
        (
            labelled("cloud.google.com/scheduled-maintenance-time", lambda: f"{soon():.0f}"),
            "maintenance is scheduled for",
            EndCause.PREEMPTED,
            61.0,
        ),
        (
            annotated(
                "node.gke.io/machine-termination-datetime",
                lambda: datetime.fromtimestamp(soon(), UTC).isoformat(),
            ),
            "the end of its run is scheduled for",
            EndCause.EXPIRED,
            61.0,
        ),
        (lambda api, body: api.delete(body), "its node was deleted", EndCause.PREEMPTED, DRAIN_S),
    ],
    ids=["taint", "autoscaler", "label", "date", "expiry", "deleted"],
)
async def test_signal_of_the_node_alone_drains_the_slice(
    api: Api,
    own_node: Json,
    host: WatchedHost,
    reading: asyncio.Task[None],
    change: Callable[[Api, Json], None],
    words: str,
    cause: EndCause,
    within_s: float,
) -> None:
    assert not host.left.done()
    at_s = time.time()
    await asyncio.to_thread(change, api, own_node)
    order = await host.order()
    sys.stdout.write(f"\n    {words}: ordered after {time.time() - at_s:.3f} s\n")
    assert words in order.reason
    assert order.cause == cause
    assert at_s < order.deadline_s <= time.time() + within_s
    assert not reading.done()


async def test_end_that_is_far_leaves_the_slice_at_work(
    api: Api, own_node: Json, host: WatchedHost, reading: asyncio.Task[None]
) -> None:
    change = annotated("node.gke.io/machine-termination-datetime", lambda: "2099-01-01T00:00:00Z")
    await asyncio.to_thread(change, api, own_node)

    async def is_told() -> bool:
        return "2099" in (host.run_dir / "notices" / "node.json").read_text()

    await until(is_told, lambda: "the note has it")
    host.watch.decide()
    assert not host.left.done()


async def test_signal_that_came_while_nobody_watched_is_heard_afterwards(
    api: Api, own_node: Json, host: WatchedHost, reading: asyncio.Task[None], proxy: Proxy
) -> None:
    proxy.go_down()
    change = labelled("cloud.google.com/active-node-maintenance", lambda: "ONGOING")
    await asyncio.to_thread(change, api, own_node)
    proxy.come_back()
    assert "GKE stops it for maintenance" in (await host.order()).reason


async def test_agent_that_comes_later_hears_it_too(
    api: Api, own_node: Json, reader_api: KubernetesApi, tmp_path: Path
) -> None:
    change = labelled("cloud.google.com/active-node-maintenance", lambda: "ONGOING")
    await asyncio.to_thread(change, api, own_node)
    late = WatchedHost(tmp_path / "late")
    name = own_node["metadata"]["name"]
    task = asyncio.create_task(NodeReader(reader_api, name, late.run_dir).run())
    await until_note(late)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await late.start()
    assert "GKE stops it for maintenance" in (await late.order()).reason
    await late.stop()


async def test_reader_may_read_nodes_and_nothing_else(
    own_node: Json, reader_api: KubernetesApi, proxy: Proxy, reading: asyncio.Task[None]
) -> None:
    name = own_node["metadata"]["name"]
    asked = [each.target for each in proxy.requests() if each.target.startswith("/api/v1/nodes?")]
    assert len(asked) >= 1
    assert len(asked) == len(proxy.requests())
    assert all(f"fieldSelector=metadata.name%3D{name}" in target for target in asked)
    assert NODE_READER_RULES[0]["verbs"] == ["list", "watch"]
    for selection in (
        Selection("api/v1", "pods", is_namespaced=False),
        Selection("api/v1", "secrets", is_namespaced=False),
        Selection("api/v1", "namespaces", is_namespaced=False),
    ):
        with pytest.raises(RefusedError, match="cannot list resource"):
            await anext(reader_api.pages(selection))


_PROGRAM = """
import asyncio, os, pathlib, sys
from autoscaling.node_reader import follow_own_node

asyncio.run(follow_own_node(os.environ, pathlib.Path(sys.argv[1])))
"""


async def test_program_reads_its_pods_credentials_and_ends_when_it_is_told(
    control_plane: ControlPlane, reader_api: KubernetesApi, own_node: Json, tmp_path: Path
) -> None:
    (tmp_path / "ca.crt").write_bytes(control_plane.ca_file.read_bytes())
    port = control_plane.url.rpartition(":")[2]
    environment = os.environ | {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT_HTTPS": port,
        "NODE_NAME": own_node["metadata"]["name"],
        "SLICEWISE_RUN_DIR": f"{tmp_path / 'run'}",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PROGRAM, f"{tmp_path}", env=environment
    )
    try:
        note = tmp_path / "run" / "notices" / "node.json"

        async def is_there() -> bool:
            return note.exists()

        await until(is_there, lambda: "it has written its note")
        resident = psutil.Process(process.pid).memory_info().rss
        sys.stdout.write(f"\n    node reader: {resident / 2**20:.0f} MiB resident\n")
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_program_outside_of_a_pod_says_what_is_missing() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "autoscaling.node_reader",
        env={"PATH": os.environ["PATH"]},
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert "KUBERNETES_SERVICE_HOST is not set" in said.decode()
