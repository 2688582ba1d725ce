"""The client against the simulated server, over real sockets; and the server by itself."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest

from deployments.simulation.metadata_server import SimulatedMetadata
from serving.slices.metadata_client import (
    MAINTENANCE_EVENT,
    PREEMPTED,
    UPCOMING_MAINTENANCE,
    MetadataClient,
    MetadataError,
    read_maintenance,
    watch_notices,
)
from serving.slices.notices import NoticeKind
from tests.slices.sinks import RecordingSink

GOOGLE = {"Metadata-Flavor": "Google"}
WINDOW_S = 1_797_840_000.0


@pytest.fixture
async def server() -> AsyncIterator[SimulatedMetadata]:
    server = SimulatedMetadata()
    await server.start()
    yield server
    await server.close()


@pytest.fixture
async def sink(server: SimulatedMetadata) -> AsyncIterator[RecordingSink]:
    """What a running watch over the server says. The first three answers are in."""
    sink = RecordingSink()
    client = MetadataClient(server.host)
    watch = asyncio.create_task(watch_notices(client, 2, sink, absent_retry_s=0.05))
    await sink.wait_for(lambda sink: len(sink.withdrawn) == 3)
    sink.withdrawn.clear()
    yield sink
    watch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watch


async def test_preemption_is_announced_with_its_deadline(
    server: SimulatedMetadata, sink: RecordingSink
) -> None:
    before_s = time.time()
    server.announce_preemption()
    await sink.wait_for(lambda sink: sink.now)
    (notice,) = sink.now.values()
    assert (notice.kind, notice.worker_id) == (NoticeKind.PREEMPTION, 2)
    assert notice.source == "metadata instance/preempted"
    assert notice.deadline_s is not None
    assert before_s + 30 <= notice.deadline_s <= time.time() + 30


async def test_maintenance_is_announced_moved_and_withdrawn(
    server: SimulatedMetadata, sink: RecordingSink
) -> None:
    for at_s in (WINDOW_S, WINDOW_S + 3600):
        server.announce_maintenance(at_s)
        await sink.wait_for(
            lambda sink, at_s=at_s: [n.deadline_s for n in sink.now.values()] == [at_s]
        )
    server.set(UPCOMING_MAINTENANCE, "NONE")
    await sink.wait_for(lambda sink: not sink.now)
    assert sink.withdrawn == [(2, "metadata instance/upcoming-maintenance")]
    assert {notice.kind for notice in sink.announced} == {NoticeKind.MAINTENANCE}


async def test_maintenance_event_that_terminates_has_no_date(
    server: SimulatedMetadata, sink: RecordingSink
) -> None:
    server.set(MAINTENANCE_EVENT, "TERMINATE_ON_HOST_MAINTENANCE")
    await sink.wait_for(lambda sink: sink.now)
    (notice,) = sink.now.values()
    assert (notice.kind, notice.deadline_s) == (NoticeKind.MAINTENANCE, None)


async def test_live_migration_is_no_notice(server: SimulatedMetadata, sink: RecordingSink) -> None:
    server.set(MAINTENANCE_EVENT, "MIGRATE_ON_HOST_MAINTENANCE")
    await sink.wait_for(lambda sink: sink.withdrawn)
    assert not sink.announced


async def test_failing_server_withdraws_nothing_and_is_asked_again(
    server: SimulatedMetadata, sink: RecordingSink
) -> None:
    server.announce_preemption()
    await sink.wait_for(lambda sink: sink.now)
    num_requests = server.num_requests
    server.fail(PREEMPTED, 503)
    async with asyncio.timeout(10):
        await server.wait_requests(num_requests + 3)
    assert sink.now
    assert not sink.withdrawn


async def test_path_that_comes_later_is_found(
    server: SimulatedMetadata, sink: RecordingSink
) -> None:
    server.remove(UPCOMING_MAINTENANCE)  # as on a VM that never had any: status 503, with a reason
    server.remove(PREEMPTED)  # as behind GKE's own metadata server: status 404
    await sink.wait_for(lambda sink: len(sink.withdrawn) == 2)
    server.announce_maintenance(WINDOW_S)
    server.announce_preemption()
    await sink.wait_for(lambda sink: len(sink.now) == 2)


async def test_concealed_path_counts_as_absent(
    server: SimulatedMetadata, sink: RecordingSink
) -> None:
    server.fail(PREEMPTED, 403)
    await sink.wait_for(lambda sink: sink.withdrawn == [(2, "metadata instance/preempted")])


async def test_watch_survives_a_server_that_restarts(sink: RecordingSink) -> None:
    first = SimulatedMetadata()
    await first.start()
    other = RecordingSink()
    watch = asyncio.create_task(watch_notices(MetadataClient(first.host), 0, other))
    await other.wait_for(lambda sink: len(sink.withdrawn) == 3)
    host, port = first.host.split(":")
    await first.close()
    second = SimulatedMetadata({PREEMPTED: "TRUE"})
    await second.start(host, int(port))
    await other.wait_for(lambda sink: sink.now)
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    await second.close()


async def test_server_that_is_not_there_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not once per path; and again when it was there and is gone."""
    caplog.set_level(logging.DEBUG, "serving.slices.metadata_client")
    server = SimulatedMetadata()
    await server.start()
    host, port = server.host.split(":")
    await server.close()
    sink = RecordingSink()
    watch = asyncio.create_task(watch_notices(MetadataClient(f"{host}:{port}"), 0, sink))

    async def levels(count: int) -> list[str]:
        async with asyncio.timeout(10):
            while len(caplog.records) < count:  # noqa: ASYNC110 - a log tells nobody
                await asyncio.sleep(0.01)
        return [record.levelname for record in caplog.records]

    assert await levels(3) == ["WARNING", "DEBUG", "DEBUG"]
    await server.start(host, int(port))
    await sink.wait_for(lambda sink: len(sink.withdrawn) == 3)
    await server.close()
    assert (await levels(4))[3] == "WARNING"
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)


async def test_watch_asks_once_per_path_and_change(
    server: SimulatedMetadata, sink: RecordingSink
) -> None:
    async with asyncio.timeout(10):
        await server.wait_requests(6)  # for three paths one that is answered, one that waits
        server.set("instance/attributes/other", "changes nothing")
        server.announce_preemption()
        await server.wait_requests(7)
    assert server.num_requests == 7
    assert len(sink.announced) == 1


async def test_server_that_closes_lets_nobody_wait(server: SimulatedMetadata) -> None:
    async with MetadataClient(server.host) as client, asyncio.timeout(10):
        value = await client.get(PREEMPTED)
        waiting = asyncio.create_task(client.get(PREEMPTED, other_than=value.etag))
        await server.wait_requests(2)
        await server.close()
        assert await waiting == value


async def test_answer_without_the_flavor_is_not_believed() -> None:
    from aiohttp import web

    async def anything(request: web.Request) -> web.Response:
        return web.Response(text="TRUE")

    application = web.Application()
    application.router.add_get("/{path:.*}", anything)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with MetadataClient(f"127.0.0.1:{runner.addresses[0][1]}") as client:
        with pytest.raises(MetadataError, match="not from a metadata server"):
            await client.get(PREEMPTED)
    await runner.cleanup()


async def test_nobody_there_is_an_error_with_a_name() -> None:
    async with MetadataClient("127.0.0.1:9") as client:
        with pytest.raises(MetadataError, match="ClientConnectorError"):
            await client.get(PREEMPTED)


@pytest.mark.parametrize(
    ("text", "begins_s"),
    [
        ("", None),
        ("NONE", None),
        ("{ }", None),
        ('{ "error": "no notifications have been received yet, try again later" }', None),
        ('{"maintenance_status": "COMPLETE", "window_start_time": "2026-12-21T08:00:00Z"}', None),
        ('{"window_start_time": "2026-12-21T08:00:00+00:00", "type": "SCHEDULED"}', WINDOW_S),
        ('{"windowStartTime": "2026-12-21T08:00:00Z", "canReschedule": true}', WINDOW_S),
        ('{"Upcoming maintenance": {"window_start_time": "2026-12-21T08:00:00Z"}}', WINDOW_S),
        ('{"upcomingMaintenance": {"windowStartTime": "2026-12-21T08:00:00Z"}}', WINDOW_S),
    ],
)
def test_upcoming_maintenance_is_understood_as_documented(
    text: str, begins_s: float | None
) -> None:
    assert read_maintenance(text) == begins_s


@pytest.mark.parametrize("text", ["soon", "[]", '{"type": "SCHEDULED"}', '{"windowStartTime": 5}'])
def test_unreadable_maintenance_is_an_error_not_none(text: str) -> None:
    with pytest.raises(MetadataError, match="unreadable"):
        read_maintenance(text)


@pytest.mark.parametrize(
    "headers", [{}, {"Metadata-Flavor": "Azure"}, {**GOOGLE, "X-Forwarded-For": "x"}]
)
async def test_server_refuses_who_does_not_ask_as_documented(
    server: SimulatedMetadata, headers: dict[str, str]
) -> None:
    url = f"http://{server.host}/computeMetadata/v1/instance/preempted"
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        assert answer.status == 403


async def test_server_answers_at_once_who_knows_another_value(server: SimulatedMetadata) -> None:
    async with MetadataClient(server.host) as client:
        value = await client.get(PREEMPTED)
        assert value.text == "FALSE"
        server.announce_preemption()
        assert value.etag is not None
        assert (await client.get(PREEMPTED, other_than=value.etag)).text == "TRUE"


async def test_server_gives_the_old_value_when_nothing_changes_in_time(
    server: SimulatedMetadata,
) -> None:
    async with MetadataClient(server.host) as client:
        value = await client.get(PREEMPTED)
        assert await client.get(PREEMPTED, other_than=value.etag, wait_s=0) == value
