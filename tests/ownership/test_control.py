"""The control port over real sockets: who commands, who is refused, and how an end is told."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from serving.link.errors import HandshakeError, LinkCallError, LinkClosedError
from serving.link.messages import ProgramsMoved
from serving.ownership.control_client import (
    EngineControl,
    EngineGoneError,
    EngineSilentError,
    SupersededError,
)
from serving.ownership.control_server import EngineControlServer
from serving.ownership.lease import ClaimRefusedError, EngineLease

SECRET = b"the secret of this cluster"
DEADLINE_S = 20.0


class Engine:
    """What is commanded, as it was."""

    def __init__(self) -> None:
        self.drained: list[tuple[str, float, float]] = []
        self.moved: list[ProgramsMoved] = []
        self.is_closed = False

    async def status(self) -> dict[str, Any]:
        return {"num_requests": 3}

    async def drain(self, reason: str, grace_s: float, stay_s: float) -> None:
        self.drained.append((reason, grace_s, stay_s))

    def note_programs(self, moved: ProgramsMoved) -> None:
        self.moved.append(moved)

    async def close(self) -> None:
        self.is_closed = True


class Host:
    """A control port; its first owner is `first`."""

    def __init__(self, lease_s: float = 3600.0) -> None:
        self.engine = Engine()
        self.run_out: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        lease = EngineLease("first", lease_s)
        lease.leave(lease.number, asyncio.get_running_loop().time())
        self.server = EngineControlServer(
            "e-1", SECRET, self.engine, lease, self.run_out.set_result
        )
        self.address = ("", 0)


@asynccontextmanager
async def host(lease_s: float = 3600.0) -> AsyncIterator[Host]:
    made = Host(lease_s)
    async with asyncio.timeout(DEADLINE_S):
        made.address = await made.server.listen("127.0.0.1")
        try:
            yield made
        finally:
            await made.server.close()


@asynccontextmanager
async def owner(of: Host, name: str, secret: bytes = SECRET) -> AsyncIterator[EngineControl]:
    control = EngineControl(of.address, name, secret)
    try:
        yield control
    finally:
        await control.close()


async def left(of: Host) -> None:
    """Waits until the engine has no owner."""
    while of.server.lease.is_owner_there:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_owner_commands() -> None:
    async with host() as made, owner(made, "first") as control:
        assert await control.claim() == b""
        assert await control.status() == {"num_requests": 3}
        await control.drain("it is time", 0.5, 2.0)
        await control.note_programs(ProgramsMoved(pulled=2))
        assert made.engine.drained == [("it is time", 0.5, 2.0)]
        assert made.engine.moved == [ProgramsMoved(pulled=2)]


async def test_successor_gets_the_deed_and_the_one_before_can_do_nothing_more() -> None:
    async with host() as made, owner(made, "first") as first, owner(made, "second") as second:
        await first.claim()
        await first.store_deed(b'{"all": "that it has"}')
        with pytest.raises(ClaimRefusedError, match="first has it"):
            await second.claim()
        await first.close()
        await left(made)
        assert await second.claim() == b'{"all": "that it has"}'
        assert second.number > first.number
        # It was only cut off, and means to end what it holds for its own.
        with pytest.raises(SupersededError, match="second has it"):
            await first.end()
        assert not made.engine.is_closed
        assert await second.status() == {"num_requests": 3}


async def test_engine_that_has_not_started_is_left_to_its_first_owner() -> None:
    async with host() as made, owner(made, "second") as second:
        with pytest.raises(ClaimRefusedError, match="has not started yet"):
            await second.claim()
        async with owner(made, "first") as first:
            await first.claim()


async def test_calls_of_who_owns_nothing_are_refused() -> None:
    async with host() as made, owner(made, "first") as first, owner(made, "other") as other:
        await first.claim()
        await first.store_deed(b"{}")
        other._link = await other._open()
        for call in (other.status(), other.drain("", 0, 0), other.end(), other.leave(1.0)):
            with pytest.raises(LinkCallError, match="not the owner: first has the engine"):
                await call
        assert not made.engine.is_closed
        assert made.server.lease.is_owner_there


async def test_owner_that_is_cut_off_comes_back_by_itself() -> None:
    async with host() as made, owner(made, "first") as control:
        await control.claim()
        number = control.number
        for connection in list(made.server._connections):
            connection.end("the network broke")
        while control.number == number:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await control.status() == {"num_requests": 3}


async def test_owner_that_was_away_too_long_is_told_that_it_was_superseded() -> None:
    async with host() as made, owner(made, "first") as first, owner(made, "second") as second:
        await first.claim()
        await first.store_deed(b"{}")
        # As when its process stood still for seconds.
        lease = made.server.lease
        lease.leave(lease.number, 0.0)
        await second.claim()
        for connection, number in list(made.server._numbers.items()):
            if number != second.number:
                connection.end("heartbeat missed")
        with pytest.raises(SupersededError, match="second has it"):
            await first.wait_end()


async def test_end_of_the_engine_reaches_its_owner_and_whoever_asks_later() -> None:
    async with host() as made, owner(made, "first") as first, owner(made, "second") as second:
        await first.claim()
        await first.store_deed(b"{}")
        made.server.tell_lost("its core died")
        assert "its core died" in await first.wait_end()
        with pytest.raises(EngineGoneError, match="its core died"):
            await second.claim()
        with pytest.raises(EngineGoneError, match="its core died"):
            await second.touch()
        # What is left is the first one's to give back.
        await first.end()


async def test_process_that_is_gone_is_an_end() -> None:
    async with host() as made, owner(made, "first") as control:
        await control.claim()
        await made.server.close()
        assert "its process is gone" in await control.wait_end()
        await control.end()
        with pytest.raises(EngineGoneError):
            await control.touch()


async def test_end_is_done_once_and_nobody_can_claim_after_it() -> None:
    async with host() as made, owner(made, "first") as first, owner(made, "second") as second:
        await first.claim()
        await first.store_deed(b"{}")
        await first.end()
        assert made.engine.is_closed
        with pytest.raises(ClaimRefusedError, match="the engine ends"):
            await second.claim()


async def test_engine_that_was_left_ends_when_nobody_comes() -> None:
    async with host() as made, owner(made, "first") as first, owner(made, "second") as second:
        await first.claim()
        await first.store_deed(b"{}")
        await first.leave(within_s=0.0)
        assert "nobody has claimed it since first" in await made.run_out
        with pytest.raises(ClaimRefusedError, match="the engine ends"):
            await second.claim()


async def test_touch_claims_nothing() -> None:
    async with host() as made, owner(made, "first") as first, owner(made, "directory") as other:
        await first.claim()
        await other.touch()
        assert await first.status() == {"num_requests": 3}


async def test_stranger_without_the_secret_is_refused() -> None:
    async with host() as made, owner(made, "first", b"another secret altogether") as stranger:
        with pytest.raises(HandshakeError):
            await stranger.claim()
        assert not made.server.lease.is_owner_there


async def test_address_where_nobody_answers_is_no_end() -> None:
    # Connections are accepted by the kernel, and nobody says anything: a host that hangs.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        control = EngineControl(silent.getsockname(), "first", SECRET)
        with pytest.raises(LinkClosedError):
            await control.touch()


@pytest.mark.parametrize("is_ours", [True, False])
async def test_host_that_stands_still_is_given_up_by_who_may(is_ours: bool) -> None:
    asked = asyncio.Event()

    async def may_give_up() -> bool:
        asked.set()
        return is_ours

    async with host() as made:
        control = EngineControl(
            made.address, "first", SECRET, silence_s=0.1, may_give_up=may_give_up
        )
        await control.claim()
        # The kernel still takes connections, and nobody says anything on them.
        for connection in list(made.server._connections):
            connection.end("it stands still")
        listening = made.server._listener
        assert listening is not None
        listening.close()
        with socket.create_server(made.address, reuse_port=False):
            if is_ours:
                with pytest.raises(EngineSilentError, match="has not answered"):
                    await control.wait_end()
            else:
                await asked.wait()
                assert not control._ended.done()
        await control.close()
