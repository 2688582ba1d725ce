"""What a paced engine finds in its cache, and what becomes of requests that find no room in it."""

import asyncio
from dataclasses import replace

import pytest

from serving.domain.tokens.block_hashes import BlockContext
from serving.domain.tokens.paced import LETTERS, paced_tokens
from serving.engine.paced.config import PacedConfig
from serving.engine.paced.engine import PacedEngine
from serving.engine.paced.kv_blocks import KvBlocks
from serving.link.messages import Finish, TokenOutput, TokenRequest

from .simulated_time import run_simulated

BLOCK = 4
CACHED = PacedConfig(
    time_per_token_s=0.1,
    prefill_tokens_per_s=1000.0,
    max_model_len=64,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    kv_cache_tokens=64,
    block_size=BLOCK,
)


def request(
    request_id: str, prompt: list[int], max_tokens: int = 1, emitted: list[int] | None = None
) -> TokenRequest:
    return TokenRequest(request_id, prompt, emitted or [], max_tokens)


async def answers(engine: PacedEngine, *requests: TokenRequest) -> dict[str, list[TokenOutput]]:
    """All outputs of requests that come at once."""
    for each in requests:
        await engine.submit(each)
    outputs: dict[str, list[TokenOutput]] = {each.request_id: [] for each in requests}
    unfinished = set(outputs)
    while unfinished:
        for output in await engine.next_step():
            outputs[output.request_id].append(output)
            if output.finish is not None:
                unfinished.discard(output.request_id)
    return outputs


def found(outputs: dict[str, list[TokenOutput]]) -> dict[str, int | None]:
    assert all(output.num_cached is None for each in outputs.values() for output in each[1:])
    return {request_id: each[0].num_cached for request_id, each in outputs.items()}


def test_each_adapter_and_salt_finds_what_is_its_own() -> None:
    async def main() -> None:
        engine = PacedEngine(
            replace(CACHED, kv_cache_tokens=256), adapters=[("poet", "/a"), ("law", "/b")]
        )
        prompt = list(range(1, 14))
        contexts = [
            None,
            BlockContext("poet"),
            BlockContext("law"),
            BlockContext(salt="acme"),
            BlockContext("poet", "acme"),
        ]
        for expected in (0, 12):
            for number, context in enumerate(contexts):
                asked = TokenRequest(f"{number}-{expected}", prompt, [], 1, block_context=context)
                outputs = await answers(engine, asked)
                assert found(outputs) == {asked.request_id: expected}
        unknown = TokenRequest("x", prompt, [], 1, block_context=BlockContext("painter"))
        with pytest.raises(ValueError, match="adapter 'painter' is not one of this engine's"):
            await engine.submit(unknown)

    run_simulated(main())


def test_prompts_are_found_in_whole_blocks_and_never_to_their_last_token() -> None:
    async def main() -> None:
        engine = PacedEngine(CACHED)
        prompt = list(range(1, 13))
        assert found(await answers(engine, request("a", prompt))) == {"a": 0}
        # Of three whole blocks the last token has to be computed, so that block is.
        assert found(await answers(engine, request("b", prompt))) == {"b": 8}
        assert found(await answers(engine, request("c", [*prompt, 1]))) == {"c": 12}
        assert found(await answers(engine, request("d", [*prompt[:7], 99]))) == {"d": 4}
        assert found(await answers(engine, request("e", [99, *prompt]))) == {"e": 0}
        stats = engine.engine_stats
        assert stats.prefix_cache == (12 + 12 + 13 + 8 + 13, 24)
        assert (stats.prompt_tokens, stats.local_cached_tokens) == (58, 24)

    run_simulated(main())


def test_an_answer_is_found_by_who_goes_on_with_it() -> None:
    async def main() -> None:
        engine = PacedEngine(CACHED)
        prompt = [1, 2, 3, 4, 5]
        answer = paced_tokens(prompt, 8, LETTERS)
        await answers(engine, request("a", prompt, 8))
        # The last token of an answer is never computed: 12 of 13 are there.
        assert found(await answers(engine, request("b", [*prompt, *answer, 1]))) == {"b": 12}
        # A resumed request finds what it emitted itself. As vLLM does, its engine tells only who
        # looks at its cache: to a client it would be more than its prompt, and counted twice.
        before, began_s = engine.engine_stats, asyncio.get_running_loop().time()
        resumed = request("a~1", prompt, 9, answer)
        assert found(await answers(engine, resumed)) == {"a~1": None}
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(0.1 + 0.001, abs=1e-6)
        after = engine.engine_stats
        assert (after.prompt_tokens, after.local_cached_tokens) == (
            before.prompt_tokens,
            before.local_cached_tokens,
        )
        assert before.prefix_cache is not None
        looked, hits = before.prefix_cache
        assert after.prefix_cache == (looked + 13, hits + 12)

    run_simulated(main())


def test_cached_tokens_of_an_aborted_resume_are_no_other_requests() -> None:
    async def main() -> None:
        engine = PacedEngine(CACHED)
        prompt = [1, 2, 3, 4, 5]
        await engine.submit(request("a", prompt, 3, paced_tokens(prompt, 2, LETTERS)))
        await engine.abort(["a"])
        assert found(await answers(engine, request("a", prompt))) == {"a": 0}

    run_simulated(main())


def test_what_is_found_takes_no_time() -> None:
    async def took_s(engine: PacedEngine, each: TokenRequest) -> float:
        began_s = asyncio.get_running_loop().time()
        await answers(engine, each)
        return asyncio.get_running_loop().time() - began_s

    async def main() -> None:
        engine = PacedEngine(CACHED)
        prompt = list(range(1, 42))
        assert await took_s(engine, request("a", prompt)) == pytest.approx(0.1 + 0.041, abs=1e-6)
        assert await took_s(engine, request("b", prompt)) == pytest.approx(0.1 + 0.001, abs=1e-6)

    run_simulated(main())


def test_who_began_last_gives_up_its_room_and_begins_again_without_a_token_lost() -> None:
    async def main() -> None:
        engine = PacedEngine(CACHED)
        # Together they need 80 tokens at their ends, and there is room for 64.
        prompts = {name: [number] * 8 for number, name in enumerate("abcd", 1)}
        outputs = await answers(engine, *[request(*each, 12) for each in prompts.items()])
        for name, prompt in prompts.items():
            tokens = [token for output in outputs[name] for token in output.token_ids]
            assert tokens == paced_tokens(prompt, 12, LETTERS)
            assert outputs[name][-1].finish == Finish.LENGTH
        assert engine.engine_stats.num_preemptions >= 1
        assert engine.load.kv_usage_ratio == 0

    run_simulated(main())


def test_a_request_waits_until_all_of_it_has_room_and_nobody_passes_it() -> None:
    steps: list[set[str]] = []

    async def main() -> None:
        engine = PacedEngine(CACHED)
        await engine.submit(request("long", [1] * 40, 3))
        await engine.submit(request("longer", [2] * 44))
        await engine.submit(request("short", [3] * 4))
        while not steps or "short" not in steps[-1]:
            steps.append({output.request_id for output in await engine.next_step()})

    run_simulated(main())
    assert steps == [{"long"}, {"long"}, {"long"}, {"longer", "short"}]


def test_an_aborted_request_leaves_its_room() -> None:
    async def main() -> None:
        engine = PacedEngine(CACHED)
        await engine.submit(request("a", [1] * 40, 20))
        await engine.next_step()
        assert engine.load.kv_usage_ratio == pytest.approx(11 / 16)
        await engine.abort(["a"])
        assert engine.load.kv_usage_ratio == 0
        assert found(await answers(engine, request("b", [1] * 40))) == {"b": 36}

    run_simulated(main())


def test_engine_without_a_cache_says_nothing_of_one() -> None:
    async def main() -> None:
        engine = PacedEngine(PacedConfig(time_per_token_s=0.1))
        outputs = await answers(engine, request("a", [1] * 40))
        assert found(outputs) == {"a": None}
        assert engine.engine_stats.prefix_cache is None

    run_simulated(main())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prefill_tokens_per_s": None}, "needs prefill_tokens_per_s"),
        ({"block_size": 0}, "block_size=0 must be >= 1"),
        ({"kv_cache_tokens": 63}, "must have room for max_model_len=64"),
        ({"block_size": 24}, "in blocks of 24 must have room for max_model_len=64"),
    ],
)
def test_cache_that_cannot_be_is_refused(changes: dict[str, int | None], problem: str) -> None:
    fields = {name: getattr(CACHED, name) for name in CACHED.__slots__}
    with pytest.raises(ValueError, match=problem):
        PacedConfig(**{**fields, **changes})


def test_changes_are_of_contents_and_not_of_blocks() -> None:
    pool = KvBlocks(3)
    first, second = pool.take(2)
    pool.name(first, b"a")
    pool.name(second, b"a")
    assert pool.changes() == {b"a": True}
    pool.release([first])
    pool.take(2)
    assert pool.changes() == {}, "the other block still holds it"
    pool.release([second])
    pool.take(1)
    assert pool.changes() == {b"a": False}
    assert pool.names == frozenset()


def test_contents_are_forgotten_together_once_nobody_uses_a_block() -> None:
    pool = KvBlocks(2)
    (block,) = pool.take(1)
    pool.name(block, b"a")
    assert not pool.forget_all()
    pool.release([block])
    assert pool.forget_all()
    assert pool.found([b"a"]) == []
    assert pool.changes() == {b"a": False}
