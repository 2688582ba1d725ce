"""Links to whatever the directory lists, over real sockets, without vLLM."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from serving.domain.slice_lifecycle import SliceLifecycle, SliceState, Transition
from serving.domain.slice_records import EngineRecord, SliceRecord, Snapshot
from serving.engine.paced.config import PacedConfig
from serving.engine.paced.engine import PacedEngine
from serving.gateway.membership import LinkSettings, Membership
from serving.link.client import LinkClient
from serving.link.heartbeat import HeartbeatConfig
from serving.link.server import LinkServer

SECRET = b"the cluster secret of these tests"
DEADLINE_S = 15.0


class RecordingFleet:
    """A fleet, and its served model, that write down what membership does to them."""

    def __init__(self) -> None:
        self.linked: dict[str, str] = {}  # engine id -> compute class
        self.draining: set[str] = set()
        self.num_added = 0
        self.infos: list[dict[str, Any]] = []
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def register_engine(self, engine_info: Mapping[str, Any]) -> "RecordingFleet":
        self.infos.append(dict(engine_info))
        return self

    def add_engine(
        self, engine_id: str, compute_class: str, link: LinkClient, slice_name: str | None
    ) -> None:
        self.linked[engine_id] = compute_class
        self.num_added += 1
        self._note()

    def drain_engine(self, engine_id: str, reason: str, grace_s: float | None) -> None:
        self.draining.add(engine_id)
        self._note()

    def lose_engine(self, engine_id: str, reason: str) -> None:
        self.linked.pop(engine_id, None)
        self._note()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(holds)

    def _note(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.get_running_loop().create_task(notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@asynccontextmanager
async def engine_host(engine_id: str = "e1", port: int = 0) -> AsyncIterator[LinkServer]:
    engine = PacedEngine(PacedConfig())
    server = LinkServer(engine, engine_id=engine_id, secret=SECRET)
    await server.listen("127.0.0.1", port)
    try:
        yield server
    finally:
        await server.close("the test is over")
        await engine.close()


@asynccontextmanager
async def membership_of(fleet: RecordingFleet) -> AsyncIterator[Membership]:
    membership = Membership({"demo": fleet}, LinkSettings("gw", SECRET, HeartbeatConfig()))
    try:
        yield membership
    finally:
        await membership.close()


async def until_unlinked(server: LinkServer) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while server.gateway_ids:  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0.001)


def listing(
    *servers: LinkServer, version: str = "v", state: SliceState = SliceState.READY, **changes: Any
) -> Snapshot:
    records = tuple(
        SliceRecord(
            **{
                "replica_id": f"replica-{server.engine_id}",
                "model": "demo",
                "compute_class": "local",
                "life": SliceLifecycle((Transition(state, 0.0, "the test says so"),)),
                "engine_id": server.engine_id,
                "address": server.address,
                **changes,
            }
        )
        for server in servers
    )
    return Snapshot(version, records)


async def test_listed_engines_are_linked() -> None:
    fleet = RecordingFleet()
    async with engine_host("e1") as one, engine_host("e2") as two, membership_of(fleet) as members:
        members.apply(listing(one, two))
        await fleet.until(lambda: fleet.linked.keys() == {"e1", "e2"})
        assert fleet.linked == {"e1": "local", "e2": "local"}
        assert [info["engine"] for info in fleet.infos] == ["paced", "paced"]


async def test_every_engine_on_a_divided_slice_is_linked_and_drained_with_it() -> None:
    fleet = RecordingFleet()
    async with engine_host("e1") as one, engine_host("e2") as two, membership_of(fleet) as members:
        others = (EngineRecord("e2", two.address),)
        members.apply(listing(one, num_engines=2, others=others))
        await fleet.until(lambda: set(fleet.linked) == {"e1", "e2"})
        draining = listing(
            one, version="w", num_engines=2, others=others, state=SliceState.DRAINING
        )
        members.apply(draining)
        await fleet.until(lambda: fleet.draining == {"e1", "e2"})


async def test_engine_of_a_model_not_served_here_and_one_still_loading_are_left_alone() -> None:
    fleet = RecordingFleet()
    async with engine_host("e1") as one, engine_host("e2") as two, membership_of(fleet) as members:
        others = listing(one, model="another").records
        loading = listing(one, engine_id=None, address=None, replica_id="loading").records
        members.apply(Snapshot("v", others + loading + listing(two).records))
        await fleet.until(lambda: bool(fleet.linked))
        assert fleet.linked.keys() == {"e2"}
        assert one.gateway_ids == frozenset()


async def test_lost_link_is_reported_and_opened_again_while_the_engine_is_listed() -> None:
    fleet = RecordingFleet()
    async with membership_of(fleet) as members:
        async with engine_host("e1") as first:
            address = first.address
            members.apply(listing(first))
            await fleet.until(lambda: "e1" in fleet.linked)
        await fleet.until(lambda: not fleet.linked)
        async with engine_host("e1", address[1]):
            await fleet.until(lambda: fleet.num_added == 2)


async def test_engine_that_the_directory_forgot_keeps_its_link() -> None:
    fleet = RecordingFleet()
    async with engine_host("e1") as one, engine_host("e2") as two, membership_of(fleet) as members:
        members.apply(listing(one, version="1"))
        await fleet.until(lambda: "e1" in fleet.linked)
        members.apply(Snapshot("2"))
        members.apply(listing(two, version="3"))
        await fleet.until(lambda: "e2" in fleet.linked)
        assert fleet.linked.keys() == {"e1", "e2"}
        assert one.gateway_ids == {"gw"}


async def test_engine_listed_as_draining_is_drained() -> None:
    fleet = RecordingFleet()
    async with engine_host("e1") as one, membership_of(fleet) as members:
        members.apply(listing(one, version="1"))
        await fleet.until(lambda: "e1" in fleet.linked)
        members.apply(listing(one, version="2", state=SliceState.DRAINING))
        assert fleet.draining == {"e1"}


async def test_drain_told_over_the_link_is_passed_on() -> None:
    fleet = RecordingFleet()
    async with engine_host("e1") as one, membership_of(fleet) as members:
        members.apply(listing(one))
        await fleet.until(lambda: "e1" in fleet.linked)
        one.drain("leaving", 5.0)
        await fleet.until(lambda: fleet.draining == {"e1"})


async def test_another_engine_on_the_listed_port_is_not_taken_for_the_listed_one() -> None:
    fleet = RecordingFleet()
    async with engine_host("new") as new, engine_host("e2") as two, membership_of(fleet) as members:
        stale = listing(new, engine_id="old").records
        members.apply(Snapshot("v", stale + listing(two).records))
        await fleet.until(lambda: "e2" in fleet.linked)
        await until_unlinked(new)
        assert fleet.linked.keys() == {"e2"}


async def test_directory_that_fails_is_asked_again_with_the_version_known() -> None:
    fleet = RecordingFleet()
    asked: list[str] = []
    again = asyncio.Event()
    async with engine_host("e1") as one, membership_of(fleet) as members:

        async def watch(version: str, timeout_s: float) -> Snapshot:
            asked.append(version)
            if len(asked) == 1:
                return listing(one, version="first")
            if len(asked) == 2:
                raise ConnectionError("the directory restarts")
            again.set()
            await asyncio.Event().wait()
            raise AssertionError

        following = asyncio.create_task(members.follow(watch))
        try:
            await fleet.until(lambda: "e1" in fleet.linked)
            async with asyncio.timeout(DEADLINE_S):
                await again.wait()
        finally:
            following.cancel()
    assert asked == ["", "first", "first"]


async def test_closing_ends_every_link_and_says_so() -> None:
    fleet = RecordingFleet()
    async with engine_host("e1") as one:
        async with membership_of(fleet) as members:
            members.apply(listing(one))
            await fleet.until(lambda: "e1" in fleet.linked)
        assert fleet.linked == {}
        await until_unlinked(one)
