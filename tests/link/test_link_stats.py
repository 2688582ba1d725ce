"""What heartbeats carry beside a sign of life: an engine's sums, tenants, round trips, traffic."""

import asyncio
from collections.abc import Callable

from serving.engine.paced.config import PacedConfig
from serving.link.heartbeat import HeartbeatConfig
from serving.link.messages import EngineStats, Ping, TokenRequest
from serving.link.server import ServerLimits

from .peers import (
    DEADLINE_S,
    SLOW,
    Gateway,
    RawPeer,
    WatchedEngine,
    connected,
    raw_engine_host,
    raw_gateway,
    serving,
)

BRISK = HeartbeatConfig(0.01, 5.0)
AT_ONCE = ServerLimits(stats_interval_s=0.0)


async def until(is_reached: Callable[[], bool]) -> None:
    # A client tells nobody of a heartbeat.
    async with asyncio.timeout(DEADLINE_S):
        while not is_reached():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def told(gateway: Gateway) -> EngineStats:
    return gateway.client.stats.engine_stats or EngineStats()


async def test_every_gateway_is_told_what_the_engine_did_for_all() -> None:
    async with (
        serving(WatchedEngine(PacedConfig()), BRISK, AT_ONCE) as server,
        connected(server.address, "one") as one,
        connected(server.address, "two") as two,
    ):
        one.client.submit(TokenRequest("a", [1, 2, 3], max_tokens=5, tenant="acme"))
        two.client.submit(TokenRequest("b", [1, 2], max_tokens=4, tenant="zeta"))
        await one.until_ended("a")
        await two.until_ended("b")
        of_tenants = {"acme": 5, "zeta": 4}
        for gateway in (one, two):
            # The engine counts a step before the host publishes it.
            await until(lambda seen=gateway: told(seen).tenant_tokens == of_tenants)  # type: ignore[misc]
            engine_stats = told(gateway)
            assert engine_stats.prompt_tokens == 5
            assert engine_stats.generation_tokens == 9
            assert engine_stats.iteration_tokens == 5 + 9
            assert 5 <= sum(engine_stats.iteration_counts) <= 9
            assert (engine_stats.prefix_cache, engine_stats.drafts) == (None, None)


async def test_every_gateway_is_told_what_lines_of_batches_had() -> None:
    async with (
        serving(WatchedEngine(SLOW), BRISK, AT_ONCE) as server,
        connected(server.address, "one") as one,
        connected(server.address, "two") as two,
    ):
        for name, batch_id, max_tokens in (("a", "b1", 2), ("b", "", 3), ("c", "b1", 500)):
            one.client.submit(
                TokenRequest(name, [1], max_tokens=max_tokens, tenant="acme", batch_id=batch_id)
            )
        await until(lambda: told(two).batch_sequences == {"acme": {"b1": 2}})
        await one.until_ended("a")
        await one.until_ended("b")
        one.client.abort(["c"])
        await until(lambda: told(two).tenant_sequences == {})
        assert told(two).batch_sequences == {}
        (of_tenant,) = told(two).tenant_tokens.values()
        assert told(two).batch_tokens == {"acme": {"b1": of_tenant - 3}}


async def test_one_gateway_at_a_time_is_to_show_the_engine() -> None:
    async with (
        serving(WatchedEngine(PacedConfig()), BRISK, AT_ONCE) as server,
        connected(server.address, "one") as one,
    ):
        await until(lambda: told(one).is_yours)
        async with connected(server.address, "two") as two:
            await until(lambda: two.client.stats.engine_stats is not None)
            await until(lambda: told(one).is_yours != told(two).is_yours)
        await until(lambda: told(one).is_yours)


async def test_sequences_are_told_by_tenant_while_they_are_there() -> None:
    async with (
        serving(WatchedEngine(SLOW), BRISK, AT_ONCE) as server,
        connected(server.address) as gateway,
    ):
        for name in ("a", "b"):
            gateway.client.submit(TokenRequest(name, [1], max_tokens=500, tenant="acme"))
        await until(lambda: told(gateway).tenant_sequences == {"acme": 2})
        gateway.client.abort(["a", "b"])
        await until(lambda: told(gateway).tenant_sequences == {})


async def test_stats_come_no_more_often_than_the_interval_says() -> None:
    limits = ServerLimits(stats_interval_s=3600.0)
    async with (
        serving(WatchedEngine(PacedConfig()), BRISK, limits) as server,
        raw_gateway(server.address) as peer,
    ):
        await peer.open_as_gateway("raw")
        pings = [await peer.receive() for _ in range(5)]
    assert [isinstance(ping, Ping) and ping.engine_stats is not None for ping in pings] == [
        True,
        *[False] * 4,
    ]


async def test_engine_host_sends_a_stamp_back_at_once() -> None:
    patient = HeartbeatConfig(4.0, 5.0)
    async with (
        serving(WatchedEngine(PacedConfig()), patient) as server,
        raw_gateway(server.address) as peer,
    ):
        await peer.open_as_gateway("raw")
        peer.send(Ping(stamp_us=42))
        answer = await peer.receive()
    assert isinstance(answer, Ping)
    assert (answer.echo_us, answer.load, answer.engine_stats) == (42, None, None)


async def test_round_trip_is_known_after_the_first_heartbeats() -> None:
    async with (
        serving(WatchedEngine(PacedConfig()), BRISK) as server,
        connected(server.address, heartbeat=BRISK) as gateway,
    ):
        assert gateway.client.stats.round_trip_s is None
        await until(lambda: gateway.client.stats.round_trip_s is not None)
        assert 0 <= (gateway.client.stats.round_trip_s or 0) < DEADLINE_S


async def test_heartbeat_that_does_not_come_back_is_as_late_as_it_is_away() -> None:
    may_answer = asyncio.Event()

    async def answer_late(peer: RawPeer) -> None:
        await peer.open_as_engine_host()
        ping = await peer.receive()
        assert isinstance(ping, Ping)
        await may_answer.wait()
        peer.send(Ping(echo_us=ping.stamp_us))

    async with (
        raw_engine_host(answer_late) as address,
        connected(address, heartbeat=HeartbeatConfig(0.02, 5.0)) as gateway,
    ):
        client = gateway.client
        await until(lambda: client.late_s > 0)
        first_s = client.late_s
        await until(lambda: client.late_s > first_s + 0.01)
        assert client.stats.round_trip_s is None
        may_answer.set()
        await until(lambda: client.stats.round_trip_s is not None)
        assert client.late_s == client.stats.round_trip_s


async def test_both_ends_count_the_same_traffic() -> None:
    patient = HeartbeatConfig(4.0, 5.0)
    async with (
        serving(WatchedEngine(PacedConfig()), patient) as server,
        connected(server.address, heartbeat=patient) as gateway,
    ):
        gateway.client.submit(TokenRequest("r", [1, 2, 3], max_tokens=3))
        await gateway.until_ended("r")
        traffic = gateway.client.traffic
        # Hello, proof, request; challenge, welcome, room, three steps.
        assert (traffic.messages_out, traffic.messages_in) == (3, 6)
        assert 0 < traffic.bytes_out < traffic.bytes_in


async def test_silence_is_the_time_since_the_peer_was_heard() -> None:
    async def say_nothing(peer: RawPeer) -> None:
        await peer.open_as_engine_host()

    async with (
        raw_engine_host(say_nothing) as address,
        connected(address, heartbeat=HeartbeatConfig(0.02, 5.0)) as gateway,
    ):
        first_s = gateway.client.silence_s
        await until(lambda: gateway.client.silence_s > first_s + 0.01)
        assert gateway.client.is_open
