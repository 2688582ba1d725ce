"""Both ends over loopback sockets, as they meet in production."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from serving.engine.paced.config import PacedConfig
from serving.link.errors import FrameError, HandshakeError, LinkCallError, LinkClosedError
from serving.link.heartbeat import HeartbeatConfig
from serving.link.messages import MAX_FRAME_BYTES, EngineLoad, Finish, TokenRequest
from serving.link.server import ServerLimits
from tests.noted_writes import NotedWrites

from .peers import (
    DEADLINE_S,
    PATIENT_HEARTBEAT,
    SECRET,
    SLOW,
    HeavyEngine,
    WatchedEngine,
    answer_to,
    connected,
    request,
    serving,
)


async def test_requests_of_many_gateways_each_get_exactly_their_tokens() -> None:
    engine = WatchedEngine(PacedConfig(max_num_seqs=7))
    async with (
        serving(engine) as server,
        connected(server.address, "one") as one,
        connected(server.address, "two") as two,
        connected(server.address, "three") as three,
    ):
        gateways = {"one": one, "two": two, "three": three}
        wanted = {name: [f"{name}-{i}" for i in range(10)] for name in gateways}
        for name, gateway in gateways.items():
            for number, request_id in enumerate(wanted[name]):
                gateway.client.submit(request(request_id, max_tokens=number + 1))
        for name, gateway in gateways.items():
            await gateway.until_ended(*wanted[name])
            assert gateway.tokens == {
                request_id: answer_to(request_id, number + 1)
                for number, request_id in enumerate(wanted[name])
            }
            assert {end.finish for end in gateway.ends.values()} == {Finish.LENGTH}
        assert server.num_requests == 0
        assert server.gateway_ids == set(gateways)


async def test_requests_of_one_turn_are_written_together_and_in_order() -> None:
    engine = WatchedEngine(PacedConfig())
    async with serving(engine) as server, connected(server.address) as gateway:
        link = gateway.client
        writes: list[bytes] = []
        link._transport = NotedWrites(link._transport, writes)  # type: ignore[assignment]
        ids = [f"r{i}" for i in range(50)]
        for request_id in ids:
            link.submit(request(request_id))
        link.abort(["nobody's"])
        assert writes == []
        await gateway.until_ended(*ids)
        assert engine.submitted == ids
        # Pings go by themselves.
        assert max(map(len, writes)) > len(ids) * 20
        assert sum(len(each) > 100 for each in writes) == 1


async def test_what_is_much_is_not_kept_for_the_end_of_a_turn() -> None:
    async with (
        serving(WatchedEngine(PacedConfig())) as server,
        connected(server.address) as gateway,
    ):
        link = gateway.client
        writes: list[bytes] = []
        link._transport = NotedWrites(link._transport, writes)  # type: ignore[assignment]
        long = [*range(1000, 21_000)]
        for number in range(4):
            link.submit(TokenRequest(f"r{number}", long, [], max_tokens=1))
        assert len(writes) == 2, "each of them is more than half of what is kept"
        await gateway.until_ended("r0", "r1", "r2", "r3")


async def test_what_was_sent_in_the_turn_in_which_a_link_ends_is_not_sent_after_it() -> None:
    engine = WatchedEngine(PacedConfig())
    engine.hang()
    async with serving(engine) as server, connected(server.address) as gateway:
        gateway.client.submit(request("before"))
        await engine.until(lambda: engine.submitted == ["before"])
        gateway.client.submit(request("with"))
        gateway.client.end("enough")
        await gateway.client.closed
        await engine.until(lambda: server.num_requests == 0)
        assert engine.submitted == ["before"]


async def test_one_engine_step_is_one_message() -> None:
    engine = WatchedEngine(PacedConfig())
    engine.hang()
    async with serving(engine) as server, connected(server.address) as gateway:
        ids = [f"r{i}" for i in range(50)]
        for request_id in ids:
            gateway.client.submit(request(request_id, max_tokens=4))
        await engine.until(lambda: len(engine.submitted) == len(ids))
        engine.unhang()
        await gateway.until_ended(*ids)
        assert gateway.num_steps == 4


async def test_resumed_request_continues_after_its_emitted_tokens() -> None:
    async with (
        serving(WatchedEngine(PacedConfig())) as server,
        connected(server.address) as gateway,
    ):
        whole = answer_to("r", 9)
        gateway.client.submit(TokenRequest("r", list(b"r"), whole[:4], max_tokens=9))
        await gateway.until_ended("r")
        assert gateway.tokens["r"] == whole[4:]


async def test_abort_frees_the_request_on_the_engine_and_spares_the_others() -> None:
    engine = WatchedEngine(SLOW)
    async with serving(engine) as server, connected(server.address) as gateway:
        gateway.client.submit(request("long", max_tokens=100_000))
        gateway.client.submit(request("short", max_tokens=5))
        await gateway.until(lambda heard: "long" in heard.tokens)
        gateway.client.abort(["long", "nobody's"])
        await engine.until(lambda: engine.aborted == ["long"])
        await gateway.until_ended("short")
        assert gateway.tokens["short"] == answer_to("short")
        assert server.num_requests == 0


async def test_gateway_cannot_abort_what_is_anothers() -> None:
    engine = WatchedEngine(PacedConfig())
    engine.hang()
    async with (
        serving(engine) as server,
        connected(server.address, "owner") as owner,
        connected(server.address, "other") as other,
    ):
        owner.client.submit(request("r"))
        await engine.until(lambda: engine.submitted == ["r"])
        other.client.abort(["r"])
        await other.client.call("reverse", b"", DEADLINE_S)  # the abort has been read by now
        engine.unhang()
        await owner.until_ended("r")
        assert owner.tokens["r"] == answer_to("r")


async def test_gateway_that_goes_takes_its_requests_with_it() -> None:
    engine = WatchedEngine(SLOW)
    async with serving(engine) as server, connected(server.address, "stays") as stays:
        stays.client.submit(request("stays"))
        async with connected(server.address, "goes") as goes:
            for request_id in ("goes-1", "goes-2"):
                goes.client.submit(request(request_id, max_tokens=100_000))
            await goes.until(lambda heard: len(heard.tokens) == 2)
        await engine.until(lambda: sorted(engine.aborted) == ["goes-1", "goes-2"])
        await stays.until_ended("stays")
        assert stays.tokens["stays"] == answer_to("stays")
        assert goes.lost == []
        assert server.gateway_ids == {"stays"}


async def test_new_link_of_a_gateway_replaces_its_old_one() -> None:
    engine = WatchedEngine(SLOW)
    async with serving(engine) as server, connected(server.address, "g") as old:
        old.client.submit(request("r", max_tokens=100_000))
        await old.until(lambda heard: "r" in heard.tokens)
        async with connected(server.address, "g") as new:
            await old.until_lost()
            new.client.submit(request("r"))
            await new.until_ended("r")
            assert new.tokens["r"] == answer_to("r")
            assert engine.aborted == ["r"]
            assert server.gateway_ids == {"g"}


async def test_call_returns_its_result_and_its_error() -> None:
    async with (
        serving(WatchedEngine(PacedConfig())) as server,
        connected(server.address) as gateway,
    ):
        client = gateway.client
        assert await client.call("reverse", b"abc", DEADLINE_S) == b"cba"
        with pytest.raises(LinkCallError, match="no_such"):
            await client.call("no_such", b"", DEADLINE_S)
        with pytest.raises(LinkCallError, match="a fault of the engine"):
            await client.call("explode", b"", DEADLINE_S)
        with pytest.raises(LinkCallError, match="at most"):
            await client.call("overflow", b"", DEADLINE_S)
        assert client.is_open


async def test_call_without_an_answer_in_time_is_given_up() -> None:
    async with (
        serving(WatchedEngine(PacedConfig())) as server,
        connected(server.address) as gateway,
    ):
        with pytest.raises(TimeoutError):
            await gateway.client.call("reverse", b"abc", 0.0)
        assert await gateway.client.call("reverse", b"abc", DEADLINE_S) == b"cba"


async def test_calls_at_once_get_each_their_own_answer() -> None:
    async with (
        serving(WatchedEngine(PacedConfig())) as server,
        connected(server.address) as gateway,
    ):
        arguments = [b"%d" % i for i in range(10, 60)]
        calls = [gateway.client.call("reverse", args, DEADLINE_S) for args in arguments]
        assert await asyncio.gather(*calls) == [args[::-1] for args in arguments]


async def test_request_the_engine_refuses_ends_with_its_reason() -> None:
    engine = WatchedEngine(PacedConfig())
    async with serving(engine) as server, connected(server.address) as gateway:
        engine.fail_submit("malformed payload")
        gateway.client.submit(request("bad"))
        gateway.client.submit(request("good"))
        await gateway.until_ended("bad", "good")
        assert gateway.ends["bad"].finish == Finish.ERROR
        assert gateway.ends["bad"].stop_reason == "malformed payload"
        assert gateway.tokens["good"] == answer_to("good")
        assert server.num_requests == 0


async def test_id_of_another_gateways_request_is_refused() -> None:
    engine = WatchedEngine(PacedConfig())
    engine.hang()
    async with (
        serving(engine) as server,
        connected(server.address, "first") as first,
        connected(server.address, "second") as second,
    ):
        first.client.submit(request("r"))
        await engine.until(lambda: engine.submitted == ["r"])
        second.client.submit(request("r"))
        await second.until_ended("r")
        assert second.ends["r"].finish == Finish.ERROR
        engine.unhang()
        await first.until_ended("r")
        assert first.tokens["r"] == answer_to("r")


async def test_id_submitted_twice_by_one_gateway_runs_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = WatchedEngine(PacedConfig())
    async with serving(engine) as server, connected(server.address) as gateway:
        gateway.client.submit(request("r"))
        gateway.client.submit(request("r"))
        await gateway.until_ended("r")
        assert gateway.tokens["r"] == answer_to("r")
        assert engine.submitted == ["r"]
        assert "duplicate request ignored request_id=r" in caplog.text


async def test_requests_beyond_the_bound_in_front_of_the_engine_are_refused() -> None:
    engine = WatchedEngine(PacedConfig())
    async with (
        serving(engine, limits=ServerLimits(max_waiting_messages=3)) as server,
        connected(server.address) as gateway,
    ):
        # One write, so that all are read before the engine is fed.
        ids = [f"r{i}" for i in range(10)]
        for request_id in ids:
            gateway.client.submit(request(request_id))
        await gateway.until_ended(*ids)
        refused = [end for end in gateway.ends.values() if end.finish == Finish.ERROR]
        assert all(end.stop_reason == "too many requests wait for the engine" for end in refused)
        served = set(ids) - {end.request_id for end in refused}
        assert served >= {"r0", "r1", "r2"}
        assert all(gateway.tokens[request_id] == answer_to(request_id) for request_id in served)


async def test_engine_death_is_told_once_to_every_gateway() -> None:
    engine = WatchedEngine(SLOW)
    async with (
        serving(engine) as server,
        connected(server.address, "one") as one,
        connected(server.address, "two") as two,
    ):
        for gateway, name in ((one, "one"), (two, "two")):
            gateway.client.submit(request(name, max_tokens=100_000))
            await gateway.until(lambda heard: bool(heard.tokens))
        engine.die("worker 3 lost its chips")
        async with asyncio.timeout(DEADLINE_S):
            assert await server.wait_died() == "worker 3 lost its chips"
        for gateway in (one, two):
            assert "worker 3 lost its chips" in await gateway.until_lost()
            await gateway.client.closed
            assert len(gateway.lost) == 1
            with pytest.raises(LinkClosedError, match="worker 3"):
                gateway.client.submit(request("late"))
            gateway.client.abort(["late"])
        assert server.num_requests == 0
        assert server.gateway_ids == set()


async def test_engine_that_dies_of_a_request_is_told_too() -> None:
    engine = WatchedEngine(PacedConfig())
    engine.poison(ord("!"))
    async with serving(engine) as server, connected(server.address) as gateway:
        gateway.client.submit(request("boom!"))
        assert "poisoned by request boom!" in await gateway.until_lost()


async def test_pending_call_fails_when_the_link_is_lost() -> None:
    engine = WatchedEngine(PacedConfig())
    async with serving(engine) as server, connected(server.address) as gateway:
        call = asyncio.create_task(gateway.client.call("reverse", b"", DEADLINE_S))
        await asyncio.sleep(0)
        engine.die("gone")
        await server.close()
        with pytest.raises((LinkClosedError, LinkCallError)):
            await call


async def test_close_of_the_server_loses_the_link_and_aborts() -> None:
    engine = WatchedEngine(SLOW)
    async with serving(engine) as server, connected(server.address) as gateway:
        gateway.client.submit(request("r", max_tokens=100_000))
        await gateway.until(lambda heard: "r" in heard.tokens)
        address = server.address
        await server.close("scaled down")
        assert "scaled down" in await gateway.until_lost()
        assert engine.aborted == ["r"]
        await server.close()
        with pytest.raises(LinkClosedError, match="no link to"):
            async with connected(address):
                pass


async def test_draining_reaches_present_and_later_gateways_and_finishes_requests() -> None:
    engine = WatchedEngine(PacedConfig())
    engine.hang()
    async with serving(engine) as server, connected(server.address, "present") as present:
        present.client.submit(request("r"))
        await engine.until(lambda: engine.submitted == ["r"])
        server.drain("preemption notice", grace_s=30.0)
        async with connected(server.address, "later") as later:
            for gateway in (present, later):
                await gateway.until(lambda heard: bool(heard.drainings))
                assert gateway.drainings[0].reason == "preemption notice"
                assert gateway.drainings[0].grace_s == 30.0
        engine.unhang()
        await present.until_ended("r")
        assert present.tokens["r"] == answer_to("r")


async def test_load_arrives_without_any_request() -> None:
    heartbeat = HeartbeatConfig(interval_s=0.02, timeout_s=DEADLINE_S)
    async with (
        serving(WatchedEngine(SLOW), heartbeat) as server,
        connected(server.address) as gateway,
        connected(server.address, "busy") as busy,
    ):
        busy.client.submit(request("r", max_tokens=100_000))
        async with asyncio.timeout(DEADLINE_S):
            while gateway.client.stats.load != EngineLoad(1, 0, 1 / SLOW.max_num_seqs):
                await busy.until(lambda heard, seen=busy.num_steps: heard.num_steps > seen)  # type: ignore[misc]


async def test_info_of_the_engine_is_known_once_connected() -> None:
    async with (
        serving(WatchedEngine(PacedConfig(max_model_len=123))) as server,
        connected(server.address) as gateway,
    ):
        assert gateway.client.engine_id == "engine-0"
        assert gateway.client.engine_info["max_model_len"] == 123


async def test_wrong_secret_is_refused_and_costs_the_others_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with (
        serving(WatchedEngine(PacedConfig())) as server,
        connected(server.address) as gateway,
    ):
        with pytest.raises(HandshakeError, match="different cluster secrets"):
            async with connected(server.address, "intruder", secret=b"a secret of another cluster"):
                pass
        gateway.client.submit(request("r"))
        await gateway.until_ended("r")
        assert server.gateway_ids == {"gateway-0"}
    assert SECRET.decode() not in caplog.text
    assert "another cluster" not in caplog.text


async def test_prompt_of_a_million_tokens_arrives() -> None:
    engine = WatchedEngine(PacedConfig(max_model_len=2_000_000))
    async with serving(engine) as server, connected(server.address) as gateway:
        prompt = [200] * 1_000_000
        gateway.client.submit(TokenRequest("r", prompt, max_tokens=2))
        await gateway.until_ended("r")
        assert gateway.ends["r"].finish == Finish.LENGTH


async def test_request_larger_than_a_frame_is_refused_by_the_client() -> None:
    async with (
        serving(WatchedEngine(PacedConfig())) as server,
        connected(server.address) as gateway,
    ):
        payload = [bytes(MAX_FRAME_BYTES)]
        with pytest.raises(FrameError, match="fit in a frame"):
            gateway.client.submit(TokenRequest("r", [1], payload=payload))
        assert gateway.client.is_open


async def test_step_larger_than_a_frame_arrives_in_several() -> None:
    engine = HeavyEngine(PacedConfig(), payload_bytes=MAX_FRAME_BYTES // 2)
    engine.hang()
    async with (
        serving(engine, PATIENT_HEARTBEAT) as server,
        connected(server.address, heartbeat=PATIENT_HEARTBEAT) as gateway,
    ):
        for request_id in ("a", "b"):
            gateway.client.submit(request(request_id, max_tokens=1))
        await engine.until(lambda: len(engine.submitted) == 2)
        engine.unhang()
        await gateway.until_ended("a", "b")
        assert gateway.tokens == {"a": answer_to("a", 1), "b": answer_to("b", 1)}


async def test_output_larger_than_a_frame_ends_its_request_only() -> None:
    engine = HeavyEngine(PacedConfig(), payload_bytes=MAX_FRAME_BYTES)
    async with serving(engine) as server, connected(server.address) as gateway:
        gateway.client.submit(request("r", max_tokens=3))
        await gateway.until_ended("r")
        assert gateway.ends["r"].finish == Finish.ERROR
        await engine.until(lambda: engine.aborted == ["r"])
        assert gateway.client.is_open


@contextmanager
def serving_in_a_thread(heartbeat: HeartbeatConfig) -> Iterator[tuple[str, int]]:
    """An engine host whose event loop turns while the test's own loop stands still."""
    addresses: list[tuple[str, int]] = []
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        async with serving(WatchedEngine(PacedConfig()), heartbeat) as server:
            addresses.append(server.address)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert started.wait(DEADLINE_S)
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(DEADLINE_S)
        loop.close()


async def test_link_survives_a_pause_of_our_own_loop_longer_than_the_timeout() -> None:
    with serving_in_a_thread(HeartbeatConfig(interval_s=0.05, timeout_s=DEADLINE_S)) as address:
        async with connected(address, heartbeat=HeartbeatConfig(0.1, 0.5)) as gateway:
            for _ in range(2):
                time.sleep(0.8)  # noqa: ASYNC251 - standing still is what is tested
                assert await gateway.client.call("reverse", b"ab", DEADLINE_S) == b"ba"
            assert gateway.lost == []


async def test_link_survives_a_pause_of_both_loops() -> None:
    heartbeat = HeartbeatConfig(0.05, 0.3)
    async with (
        serving(WatchedEngine(PacedConfig()), heartbeat) as server,
        connected(server.address, heartbeat=heartbeat) as gateway,
    ):
        time.sleep(0.5)  # noqa: ASYNC251 - standing still is what is tested
        assert await gateway.client.call("reverse", b"ab", DEADLINE_S) == b"ba"
        assert gateway.lost == []
