"""Step by step a paced engine with a cache does what vLLM's own scheduler does with one.

The real scheduler runs without a model: each step it is told the tokens that a paced engine emits.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

import pytest

from serving.domain.tokens.block_hashes import BlockContext
from serving.domain.tokens.cached_blocks import CacheLayout, CacheMirror
from serving.domain.tokens.paced import LETTERS, prompt_seed, seeded_token
from serving.engine.paced.batch import PacedBatch, PacedSequence
from serving.engine.paced.config import PacedConfig
from serving.engine.paced.kv_cache import CachedSequence

pytestmark = pytest.mark.imports_vllm

BLOCK = 16
ADAPTERS = [("poet", "/adapters/poet"), ("law", "/adapters/law")]
CONTEXTS = [
    BlockContext(),
    BlockContext("poet"),
    BlockContext("law"),
    BlockContext(salt="acme"),
    BlockContext("poet", "acme"),
]
NUM_REQUESTS = 500
# What a step emits: by request its token, how much was found, and whether it has ended.
Emitted = dict[str, tuple[int, int | None, bool]]


class MostOfOne(TypedDict, total=False):
    """What of one prompt is in a step, by vLLM's names."""

    long_prefill_token_threshold: int
    long_prefill_token_threshold_adaptive: bool


AT_MOST_20: MostOfOne = {"long_prefill_token_threshold": 20}
# A share of the step, where that is more.
A_SHARE: MostOfOne = {**AT_MOST_20, "long_prefill_token_threshold_adaptive": True}


@dataclass(frozen=True)
class Asked:
    """A request, the step before which it comes, and the tokens it has from elsewhere."""

    name: str
    step: int
    prompt: list[int]
    num_tokens: int
    emitted: list[int]
    context: BlockContext


def conversations(seed: int) -> Iterator[Asked]:
    """Requests that share beginnings, some moved here, some that go on with earlier answers.

    Some ask an adapter, some have a salt, and half of all neither.
    """
    chance = random.Random(seed)
    shared = [[chance.randrange(250) for _ in range(chance.randrange(20, 160))] for _ in range(8)]
    past: list[list[int]] = []
    step = 0
    for number in range(NUM_REQUESTS):
        step += chance.choice([0, 0, 0, 1, 2, 5, 40])
        begin = chance.choice(past[-20:] if past and chance.random() < 0.4 else shared)
        prompt = [*begin, *[chance.randrange(250) for _ in range(chance.randrange(1, 60))]][:400]
        num_tokens = chance.randrange(1, 60)
        answer = tokens_of(prompt, num_tokens)
        num_emitted = chance.randrange(num_tokens) if chance.random() < 0.15 else 0
        past.append([*prompt, *answer])
        context = chance.choice(CONTEXTS) if chance.random() < 0.5 else BlockContext()
        yield Asked(f"r{number}", step, prompt, num_tokens, answer[:num_emitted], context)


def tokens_of(prompt: list[int], count: int) -> list[int]:
    seed = prompt_seed(prompt)
    return [seeded_token(seed, position, LETTERS) for position in range(count)]


class Paced:
    """A paced engine's batch, turned step by step."""

    def __init__(
        self, num_blocks: int, most_tokens: int, most_requests: int, most_of_one: MostOfOne
    ) -> None:
        self.batch = PacedBatch(
            PacedConfig(
                time_per_token_s=1.0,
                prefill_tokens_per_s=1e9,
                max_num_seqs=most_requests,
                max_model_len=512,
                max_num_batched_tokens=most_tokens,
                kv_cache_tokens=num_blocks * BLOCK,
                block_size=BLOCK,
                **most_of_one,
            ),
            adapters=ADAPTERS,
        )
        self._now_s = 0.0

    def add(self, asked: Asked) -> None:
        tokens = [*asked.prompt, *asked.emitted]
        seed, position = prompt_seed(asked.prompt), len(asked.emitted)
        sequence = PacedSequence(
            *(asked.name, seed, position, asked.num_tokens, len(tokens), False),
            cached=CachedSequence(tokens, asked.context),
        )
        self.batch.add(sequence, self._now_s)

    def begin(self) -> None:
        """Lets an idle engine begin a step."""
        self.batch.step(self._now_s)

    def step(self) -> Emitted:
        """Ends the step under way, and begins the next one."""
        due_at_s = self.batch.due_at_s
        if due_at_s is None:
            return {}
        self._now_s = due_at_s
        return {
            output.request_id: (output.token_ids[0], output.num_cached, output.finish is not None)
            for output in self.batch.step(self._now_s)
        }


class Scheduled:
    """vLLM's scheduler, as our engines run it, told the tokens that it asks for."""

    def __init__(
        self, num_blocks: int, most_tokens: int, most_requests: int, most_of_one: MostOfOne
    ) -> None:
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from serving.engine.vllm.engine import engine_config
        from serving.engine.vllm.resume_scheduler import ResumingScheduler

        from .vllm_requests import ENGINE_ARGS, MODEL

        config = engine_config(
            MODEL,
            ENGINE_ARGS
            | {
                "max_model_len": 512,
                "max_num_seqs": most_requests,
                "max_num_batched_tokens": most_tokens,
                "block_size": BLOCK,
                "enable_prefix_caching": True,
                "async_scheduling": False,
            }
            | most_of_one,
        )
        # One more than we have: vLLM keeps its first block for what is nowhere.
        config.cache_config.num_gpu_blocks = num_blocks + 1
        kind = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], kind)]
        kv_cache = KVCacheConfig(num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups)
        manager = StructuredOutputManager(config)
        self._scheduler = ResumingScheduler(config, kv_cache, manager, BLOCK, log_stats=True)
        kv_cache_utils.init_none_hash(sha256)
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
        self._answers: dict[str, list[int]] = {}
        self.num_preemptions = 0
        self.mirror = CacheMirror(CacheLayout.of_blocks(BLOCK, b""))
        self.backlog_tokens = 0
        self._under_way: Any = None

    def add(self, asked: Asked) -> None:
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        from serving.link.vllm_codec import EMITTED_KEY

        own = {EMITTED_KEY: asked.emitted} if asked.emitted else None
        params = SamplingParams(max_tokens=asked.num_tokens, ignore_eos=True, extra_args=own)
        self._answers[asked.name] = tokens_of(asked.prompt, asked.num_tokens)
        name, adapter = asked.context.adapter, None
        if name is not None:
            adapter = LoRARequest(name, list(dict(ADAPTERS)).index(name) + 1, dict(ADAPTERS)[name])
        self._scheduler.add_request(
            Request(
                asked.name,
                asked.prompt,
                params,
                None,
                lora_request=adapter,
                cache_salt=asked.context.salt,
                block_hasher=self._hasher,
            )
        )

    def begin(self) -> None:
        """Lets an idle engine begin a step."""
        if self._under_way is None or not self._under_way.num_scheduled_tokens:
            self._under_way = self._scheduler.schedule()
            self.num_preemptions += len(self._under_way.preempted_req_ids or ())

    def step(self) -> Emitted:
        """Ends the step under way, and begins the next one."""
        from vllm.v1.outputs import ModelRunnerOutput

        scheduled, self._under_way = self._under_way, None
        names = list(scheduled.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name in names:
            request = self._scheduler.requests[name]
            is_whole = request.num_computed_tokens == request.num_tokens
            sampled.append([self._answers[name][request.num_output_tokens]] if is_whole else [])
        places = {name: place for place, name in enumerate(names)}
        told = ModelRunnerOutput(names, places, sampled)
        outputs = self._scheduler.update_from_output(scheduled, told)
        for each in outputs.values():
            self._take(each.scheduler_stats)
        self.begin()
        self._take(self._scheduler.make_stats())
        return {
            output.request_id: (
                output.new_token_ids[0],
                None if output.prefill_stats is None else output.prefill_stats.num_cached_tokens,
                output.finish_reason is not None,
            )
            for each in outputs.values()
            for output in each.outputs
        }

    def reset_cache(self) -> bool:
        """Empties its cache, if no request is there."""
        was_reset = self._scheduler.reset_prefix_cache()
        self._take(self._scheduler.make_stats())
        return was_reset

    def _take(self, stats: Any) -> None:
        """Takes in what our part of the scheduler tells."""
        from serving.engine.vllm.resume_scheduler import CACHE_STATS, LINE_STATS

        if stats is None:
            return
        told = stats.kv_connector_stats
        begun, waiting, _ = told[LINE_STATS]
        self.backlog_tokens = begun + waiting
        self.mirror.take_in(*told.get(CACHE_STATS, (b"", b"")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_blocks", "most_tokens", "most_requests", "most_of_one"),
    [
        *[(32, 64, 8, {}), (60, 128, 16, {}), (200, 512, 32, {}), (2000, 512, 64, {})],
        *[(32, 64, 8, AT_MOST_20), (60, 128, 16, AT_MOST_20), (2000, 64, 64, AT_MOST_20)],
        *[(32, 64, 8, A_SHARE), (60, 128, 16, A_SHARE), (2000, 512, 64, A_SHARE)],
    ],
)
def test_500_requests_have_the_same_steps_and_find_the_same(
    num_blocks: int, most_tokens: int, most_requests: int, most_of_one: MostOfOne
) -> None:
    ours = Paced(num_blocks, most_tokens, most_requests, most_of_one)
    theirs = Scheduled(num_blocks, most_tokens, most_requests, most_of_one)
    waiting = list(conversations(seed=num_blocks))
    resumed = {asked.name for asked in waiting if asked.emitted}
    unfinished = {asked.name for asked in waiting}
    num_found, step, most_keys = 0, 0, 0
    while unfinished:
        while waiting and (waiting[0].step <= step or len(unfinished) == len(waiting)):
            asked = waiting.pop(0)
            ours.add(asked)
            theirs.add(asked)
        ours.begin()
        theirs.begin()
        expected, emitted = theirs.step(), ours.step()
        for name, (_, found, has_ended) in emitted.items():
            num_found += found or 0
            if has_ended:
                unfinished.discard(name)
        # vLLM says of a request that was moved here nothing.
        comparable = {
            name: (token, None if name in resumed else found, has_ended)
            for name, (token, found, has_ended) in emitted.items()
        }
        assert comparable == expected, f"step {step}"
        assert ours.batch.cache is not None
        assert ours.batch.cache.mirror.keys == theirs.mirror.keys, f"step {step}"
        most_keys = max(most_keys, len(theirs.mirror.keys))
        if ours.batch.num_admitted or ours.batch.num_waiting:  # else vLLM has not been asked
            # One token left of a prompt looks like one that decodes: several, if they are bounded.
            most_hidden = ours.batch.num_admitted if most_of_one else 1
            num_hidden = ours.batch.backlog_tokens(1.0) - theirs.backlog_tokens
            assert 0 <= num_hidden <= most_hidden, f"step {step}"
        step += 1
    assert num_found > 0
    assert ours.batch.num_preemptions == theirs.num_preemptions
    if num_blocks < 100:
        assert theirs.num_preemptions > 0, "there was always room"
    assert most_keys > 0
    assert ours.batch.cache is not None
    assert theirs.reset_cache()
    assert ours.batch.cache.forget_all()
    assert ours.batch.cache.mirror.keys == theirs.mirror.keys == set()
