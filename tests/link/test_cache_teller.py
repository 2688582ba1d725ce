"""What a gateway hears of an engine's cache adds up to what the cache has, over real links."""

import random
from dataclasses import replace

import pytest

from serving.domain.tokens.block_hashes import BlockContext, MediaItem
from serving.domain.tokens.cached_blocks import joined, split
from serving.domain.tokens.named_blocks import NamedBlocks
from serving.engine.paced.config import PacedConfig
from serving.link import cache_teller
from serving.link.messages import CacheDelta, CacheSnapshot, Finish, TokenRequest

from .peers import Gateway, WatchedEngine, connected, raw_gateway, serving
from .test_link_stats import until

WITH_CACHE = PacedConfig(
    prefill_tokens_per_s=1e6,
    max_model_len=1024,
    max_num_batched_tokens=2048,
    kv_cache_tokens=4096,
    block_size=16,
)


class Known:
    """What a gateway knows of one engine's cache."""

    def __init__(self, gateway: Gateway) -> None:
        self.keys: set[bytes] = set()
        self.num_snapshots = self.num_deltas = 0
        gateway.client.watch_cache(self.take)

    def take(self, message: CacheSnapshot | CacheDelta) -> None:
        if isinstance(message, CacheSnapshot):
            self.num_snapshots += 1
            if message.is_first:
                self.keys.clear()
            self.keys |= set(split(message.keys))
        else:
            assert self.num_snapshots, "changes came before what they change"
            self.num_deltas += 1
            self.keys = (self.keys | set(split(message.stored))) - set(split(message.removed))


async def fill(gateway: Gateway, engine: WatchedEngine, chance: random.Random, count: int) -> None:
    for _ in range(count):
        name = f"r{len(engine.submitted)}"
        prompt = chance.choices(range(250), k=chance.randrange(130, 900))
        gateway.client.submit(TokenRequest(name, prompt, max_tokens=2))
        await gateway.until_ended(name)


def keys_in(engine: WatchedEngine) -> set[bytes]:
    assert engine.cached is not None
    return engine.cached.keys


async def test_gateways_know_what_comes_and_goes_from_whenever_they_watch() -> None:
    engine, chance = WatchedEngine(WITH_CACHE), random.Random(1)
    async with (
        serving(engine) as server,
        connected(server.address, "one") as one,
        connected(server.address, "two") as two,
        connected(server.address, "blind"),
    ):
        layout = one.client.cache_layout
        assert layout is not None
        assert (layout.block_size, layout.unit_tokens) == (16, 128)
        first = Known(one)
        await fill(one, engine, chance, 5)
        second = Known(two)
        for _ in range(4):
            await fill(two, engine, chance, 5)  # four times what the cache has room for
            await until(lambda: first.keys == second.keys == keys_in(engine))
        assert (first.num_snapshots, second.num_snapshots) == (1, 1)
        assert first.num_deltas > 0
        assert len(keys_in(engine)) > 10


async def test_blocks_of_adapters_salts_and_media_are_told_by_the_names_that_gateways_compute() -> (
    None
):
    engine = WatchedEngine(WITH_CACHE, adapters=[("poet", "/adapters/poet")])
    prompt = [each % 250 for each in range(600)]
    contexts = [
        BlockContext(),
        BlockContext("poet"),
        BlockContext("poet", "acme"),
        BlockContext("poet", "acme", (MediaItem("ab", 30, 60), MediaItem("cd", 200, 9))),
    ]
    async with serving(engine) as server, connected(server.address) as gateway:
        known, layout = Known(gateway), gateway.client.cache_layout
        assert layout is not None
        named = set[bytes]()
        for number, context in enumerate(contexts):
            request = TokenRequest(f"r{number}", prompt, max_tokens=1, block_context=context)
            gateway.client.submit(request)
            await gateway.until_ended(request.request_id)
            named |= set(NamedBlocks(prompt, context).keys(layout))
            await until(lambda: known.keys == keys_in(engine))
            assert known.keys == named
        assert len(named) == len(contexts) * 4


async def test_what_requests_in_line_will_bring_in_counts_as_there_until_they_end() -> None:
    """Whatever comes, ends or is given up: what is known adds up."""
    # It has a place for the first one, and nothing else has come into its cache.
    slow = replace(WITH_CACHE, max_num_seqs=1, time_per_token_s=1000.0)
    engine, chance = WatchedEngine(slow), random.Random(4)
    async with (
        serving(engine) as server,
        connected(server.address, "one") as one,
        connected(server.address, "two") as two,
        connected(server.address, "three") as three,
    ):
        early, layout = Known(two), one.client.cache_layout
        assert layout is not None
        one.client.submit(TokenRequest("before all", [1] * 300, max_tokens=2))
        shared = chance.choices(range(250), k=400)
        in_line: dict[str, set[bytes]] = {}

        def expected() -> set[bytes]:
            return keys_in(engine).union(*in_line.values())

        for number in range(30):
            if in_line and chance.random() < 0.4:
                name = chance.choice(list(in_line))
                del in_line[name]
                one.client.abort([name])
            else:
                prompt = [*shared, *chance.choices(range(250), k=300)]
                keys = list(NamedBlocks(prompt).keys(layout))
                in_line[f"r{number}"] = set(keys)
                one.client.submit(
                    TokenRequest(f"r{number}", prompt, max_tokens=2, expected_keys=joined(keys))
                )
            if number % 5 == 0:
                await until(lambda: early.keys == expected())
        assert len(keys_in(engine)) == 2
        assert len(expected()) > 10
        late = Known(three)
        await until(lambda: late.keys == expected())
        one.client.abort(list(in_line))
        await until(lambda: late.keys == keys_in(engine))


async def test_what_was_expected_and_is_cached_stays_known_when_its_request_ends() -> None:
    engine = WatchedEngine(WITH_CACHE)
    async with serving(engine) as server, connected(server.address) as gateway:
        known, layout = Known(gateway), gateway.client.cache_layout
        assert layout is not None
        prompt = [each % 250 for each in range(600)]
        keys = joined(NamedBlocks(prompt).keys(layout))
        gateway.client.submit(TokenRequest("a", prompt, max_tokens=3, expected_keys=keys))
        await gateway.until_ended("a")
        await until(lambda: known.keys == keys_in(engine) == set(split(keys)))
        await fill(gateway, engine, random.Random(5), 20)
        await until(lambda: known.keys == keys_in(engine))
        assert not known.keys & set(split(keys)), "gone with its blocks"


async def test_keys_that_are_not_whole_are_refused() -> None:
    engine = WatchedEngine(WITH_CACHE)
    async with serving(engine) as server, connected(server.address) as gateway:
        gateway.client.submit(TokenRequest("a", [1] * 300, max_tokens=2, expected_keys=b"1234567"))
        await gateway.until_ended("a")
        assert gateway.ends["a"].finish == Finish.ERROR
        assert "not whole keys" in str(gateway.ends["a"].stop_reason)


async def test_an_idle_engine_tells_that_its_cache_was_emptied() -> None:
    engine = WatchedEngine(WITH_CACHE)
    async with serving(engine) as server, connected(server.address) as gateway:
        known = Known(gateway)
        await fill(gateway, engine, random.Random(2), 3)
        await until(lambda: bool(known.keys))
        assert await gateway.client.call("reset_prefix_cache", b"", 5.0) == b"\xc3"
        await until(lambda: not known.keys)


async def test_a_large_cache_is_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_teller, "_PART_BYTES", 16)
    engine = WatchedEngine(WITH_CACHE)
    async with serving(engine) as server, connected(server.address) as gateway:
        await fill(gateway, engine, random.Random(3), 5)
        known = Known(gateway)
        await until(lambda: known.keys == keys_in(engine))
        assert known.num_snapshots == -(-len(known.keys) // 2)


async def test_who_does_not_watch_hears_nothing_and_an_engine_without_a_cache_says_so() -> None:
    engine = WatchedEngine(PacedConfig())
    async with serving(engine) as server, connected(server.address) as gateway:
        assert gateway.client.cache_layout is None
        known = Known(gateway)  # a gateway that asks all the same
        gateway.client.submit(TokenRequest("a", [1] * 300, max_tokens=2))
        await gateway.until_ended("a")
        assert known.num_snapshots == 0
    engine = WatchedEngine(WITH_CACHE)
    async with serving(engine) as server, raw_gateway(server.address) as peer:
        await peer.open_as_gateway("earlier build")
        peer.send(TokenRequest("a", [1] * 300, max_tokens=60))
        heard = [await peer.receive() for _ in range(40)]
        assert not any(isinstance(each, CacheSnapshot | CacheDelta) for each in heard)
