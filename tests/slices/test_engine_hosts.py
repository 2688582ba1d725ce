"""Engines that share a slice have one owner: over real control ports, without Ray."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from serving.link.engine_protocol import EngineDiedError
from serving.ownership.control_client import EngineControl, EngineGoneError, SupersededError
from serving.ownership.deed import DeedEngine, EngineDeed, encode_deed
from serving.ownership.lease import ClaimRefusedError
from serving.slices.engine_hosts import EngineHosts, in_time
from tests.ownership.test_control import SECRET, Host, host, left

LEASE_S = 3600.0
NUM_ENGINES = 3


@asynccontextmanager
async def shared_slice() -> AsyncIterator[list[Host]]:
    """Engine hosts that serve, with their deed; their owner `first` has gone."""
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(host()) for _ in range(NUM_ENGINES)]
        engines = tuple(
            DeedEngine(f"e-{number}", ("127.0.0.1", 7000 + number), each.address, "nobody")
            for number, each in enumerate(made)
        )
        deed = encode_deed(EngineDeed(engines, None, ()))
        for each in made:
            control = EngineControl(each.address, "first", SECRET)
            await control.claim()
            await control.store_deed(deed)
            await control.close()
            await left(each)
        yield made


def hosts_of(name: str) -> EngineHosts:
    return EngineHosts(name, lambda address: EngineControl(address, name, SECRET), LEASE_S)


def owners(made: Sequence[Host]) -> list[str]:
    return [each.server.lease.owner for each in made]


def closed(made: Sequence[Host]) -> list[bool]:
    return [each.engine.is_closed for each in made]


async def cut_off(of: Host) -> None:
    """The network breaks between the engine and its owner, and `second` claims it."""
    for connection in list(of.server._connections):
        connection.end("the network broke")
    await left(of)
    of.server.lease.claim("second")


async def test_successor_takes_all_over_and_commands_them_as_one() -> None:
    async with shared_slice() as made:
        hosts = hosts_of("second")
        deed = await hosts.adopt(made[0].address)
        assert owners(made) == ["second"] * NUM_ENGINES
        assert [each.engine_id for each in hosts.records] == ["e-0", "e-1", "e-2"]
        assert [each.control for each in hosts.records] == [each.address for each in made]
        assert len(deed.engines) == NUM_ENGINES
        await hosts.drain("it is time", 0.5, 2.0)
        assert [each.engine.drained for each in made] == [[("it is time", 0.5, 2.0)]] * NUM_ENGINES
        assert await hosts.end() is True
        assert closed(made) == [True] * NUM_ENGINES


async def test_last_owner_may_be_missed_by_one_engine_later_than_by_another() -> None:
    async with shared_slice() as made:
        late = EngineControl(made[2].address, "first", SECRET)
        await late.claim()
        hosts = hosts_of("second")
        adopting = asyncio.create_task(hosts.adopt(made[0].address))
        while owners(made)[1] != "second":  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        assert not adopting.done()
        await late.close()
        await adopting
        assert owners(made) == ["second"] * NUM_ENGINES
        await hosts.leave(LEASE_S)


async def test_engines_of_which_one_is_gone_are_not_taken_over_and_end() -> None:
    async with shared_slice() as made:
        await made[1].server.close()
        hosts = hosts_of("second")
        with pytest.raises(EngineGoneError):
            await hosts.adopt(made[0].address)
        assert made[0].engine.is_closed
        assert not hosts.are_there


async def test_owner_that_was_cut_off_ends_none_that_its_successor_has_a_right_to() -> None:
    """The successor has the first only, so far; the others still know the owner before."""
    async with shared_slice() as made:
        before = hosts_of("first")
        await before.adopt(made[0].address)
        waiting = asyncio.create_task(before.wait_end())
        await cut_off(made[0])
        with pytest.raises(SupersededError, match="second has it"):
            await waiting
        assert await before.end() is False
        assert closed(made) == [False] * NUM_ENGINES
        await left(made[1])
        await left(made[2])
        with pytest.raises(ClaimRefusedError):
            await hosts_of("third").adopt(made[0].address)


async def test_end_of_one_is_told_and_the_others_are_drained() -> None:
    async with shared_slice() as made:
        hosts = hosts_of("second")
        await hosts.adopt(made[0].address)
        ending = asyncio.create_task(hosts.wait_end())
        made[1].server.tell_lost("its chip is gone")
        reason, others_serve = await ending
        assert reason == "engine e-1 of 3 on the slice: engine lost: its chip is gone"
        assert others_serve
        await hosts.drain(reason, 5.0, 0.0)
        assert [len(each.engine.drained) for each in made] == [1, 0, 1]
        assert await hosts.end() is True
        assert closed(made) == [True, False, True]


async def test_no_engines_are_nobodys_to_keep() -> None:
    assert await hosts_of("first").end() is True


async def test_start_that_takes_too_long_is_cancelled_and_says_how_far_it_came() -> None:
    ended = asyncio.Event()

    async def starting() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(EngineDiedError) as caught:
        await in_time(starting(), 0.05, lambda: "it was getting its weights")
    assert str(caught.value) == "it was getting its weights"
    assert ended.is_set()


async def test_start_in_time_is_left_alone_and_its_own_timeout_is_its_own() -> None:
    async def runs_out() -> None:
        raise TimeoutError("a call of its own")

    await in_time(asyncio.sleep(0), 60.0, str)
    with pytest.raises(TimeoutError, match="a call of its own"):
        await in_time(runs_out(), 60.0, str)
