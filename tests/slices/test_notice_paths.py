"""Each way in which a host hears of its end, with the others switched off: to the order to leave.

The ways over the node object need an API server: `tests/control_plane/test_node_reader.py`.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deployments.simulation.metadata_server import SimulatedMetadata
from serving.domain.limits import LinkEncryption
from serving.domain.slice_lifecycle import EndCause
from serving.slices.host_agent import preemption_notice_s
from serving.slices.local.notes import END_WITHIN_VARIABLE, tell
from serving.slices.metadata_client import MetadataClient, watch_notices
from tests.slices.watched_host import WatchedHost

pytestmark = pytest.mark.process

HOOK = [sys.executable, "-I", "-m", "serving.slices.local.tell_agent"]


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[WatchedHost]:
    host = WatchedHost(tmp_path / "run")
    await host.start()
    yield host
    await host.stop()


@pytest.fixture
async def metadata(host: WatchedHost) -> AsyncIterator[SimulatedMetadata]:
    """The host's metadata server, and the agent's watch over it."""
    server = SimulatedMetadata()
    await server.start()
    watching = asyncio.create_task(watch_notices(MetadataClient(server.host), 0, host.stream))
    yield server
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await server.close()


async def hook(host: WatchedHost, within: str) -> asyncio.subprocess.Process:
    environment = {"SLICEWISE_RUN_DIR": f"{host.run_dir}", END_WITHIN_VARIABLE: within}
    return await asyncio.create_subprocess_exec(*HOOK, env=environment)


async def test_hook_of_the_pod_alone_drains_the_slice_and_waits_until_it_is_left(
    host: WatchedHost,
) -> None:
    at_s = time.time()
    process = await hook(host, "25")
    order = await host.order()
    assert at_s + 25 <= order.deadline_s <= time.time() + 25
    assert (order.reason, order.cause) == ("host 0: its pod ends within 25 s", EndCause.PREEMPTED)
    assert process.returncode is None
    # As the replica does before it gives the slice back.
    host.watch.tell_left()
    await host.watch.stop()
    async with asyncio.timeout(60):
        assert await process.wait() == 0
    assert time.time() < order.deadline_s


async def test_hook_of_the_pod_drains_the_slice_over_a_stream_in_tls(tmp_path: Path) -> None:
    host = WatchedHost(tmp_path / "run", LinkEncryption.TLS)
    await host.start()
    process = await hook(host, "25")
    assert (await host.order()).reason == "host 0: its pod ends within 25 s"
    host.watch.tell_left()
    await host.watch.stop()
    async with asyncio.timeout(60):
        assert await process.wait() == 0
    await host.stop()


async def test_slice_is_left_with_the_reason_when_an_agent_cannot_prove_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = WatchedHost(tmp_path / "run", LinkEncryption.TLS, b"another cluster secret than that")
    tell(host.run_dir, "node", [{"kind": "expiry", "reason": "believe me", "source": "node"}])
    await host.start()
    order = await host.order()
    assert order.is_lost
    assert order.reason.startswith(
        "host 0: the host is lost: its agent cannot prove itself: "
        "the peer's certificate is not of this cluster's secret, role and time"
    )
    assert any("slice_notice" in line and order.reason[8:] in line for line in caplog.messages)
    assert not any("believe me" in line for line in caplog.messages)
    await host.stop()


async def test_metadata_server_alone_drains_the_slice(
    host: WatchedHost, metadata: SimulatedMetadata
) -> None:
    at_s = time.time()
    metadata.announce_preemption()
    order = await host.order()
    assert "the host is preempted" in order.reason
    assert at_s + 30 <= order.deadline_s <= time.time() + 30


async def test_note_alone_drains_the_slice(host: WatchedHost) -> None:
    notice = {"kind": "node_draining", "reason": "it is taken away", "source": "node taint"}
    tell(host.run_dir, "node", [notice])
    assert (await host.order()).reason == "host 0: it is taken away"


async def test_first_that_is_due_gives_the_order_whatever_else_was_announced(
    host: WatchedHost, metadata: SimulatedMetadata
) -> None:
    metadata.announce_maintenance(time.time() + 3600)
    far = {"kind": "expiry", "reason": "in a week", "source": "node end"}
    tell(host.run_dir, "node", [far | {"deadline_s": time.time() + 7 * 86_400}])
    process = await hook(host, "15")
    order = await host.order()
    assert "its pod ends within 15 s" in order.reason
    assert order.deadline_s <= time.time() + 15
    process.kill()
    await process.wait()


@pytest.mark.parametrize(
    ("given", "drain_notice_s", "expected_s"),
    [
        # A VM, whose class may reckon with less than every spot VM gets.
        (None, 15.0, 15.0),
        (None, 120.0, 30.0),
        # A pod, of a node that is given 120 s or that is not.
        ("105", 15.0, 105.0),
        ("15", 120.0, 15.0),
    ],
)
def test_preemption_leaves_a_pod_what_its_hook_is_told(
    given: str | None, drain_notice_s: float, expected_s: float
) -> None:
    environment = dict(os.environ) if given is None else {END_WITHIN_VARIABLE: given}
    assert preemption_notice_s(environment, drain_notice_s) == expected_s
