"""The same conversations, one request after the other, at an engine and at a paced one.

How much each finds in its cache is a matter of its blocks, and of which of them it gives up first.
What an engine has told of them is what a gateway forecasts by.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

from serving.domain.tokens.cached_blocks import joined
from serving.domain.tokens.named_blocks import NamedBlocks
from serving.domain.tokens.paced import LETTERS, paced_tokens, prompt_seed
from serving.engine.paced.batch import PacedBatch, PacedSequence
from serving.engine.paced.config import PacedConfig
from serving.engine.paced.kv_cache import CachedSequence
from serving.engine.vllm.engine import VllmEngine
from serving.gateway.dispatch.choice.cache_index import CacheIndex
from serving.link.messages import TokenRequest

NUM_REQUESTS = 500
LONGEST_PROMPT = 400
LONGEST_ANSWER = 8
_NUM_SHARED = 8
_ANSWER_S = 300.0


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that goes on with an earlier one, by its number, or with a shared beginning."""

    shared: int
    earlier: int | None
    added: Sequence[int]
    num_tokens: int


class Conversations:
    """Turns, and their prompts as their answers become known: engines answer differently."""

    def __init__(self, seed: int, token_range: tuple[int, int]) -> None:
        chance = random.Random(seed)

        def tokens(least: int, most: int) -> list[int]:
            return [chance.randrange(*token_range) for _ in range(chance.randrange(least, most))]

        self._shared = [tokens(20, 160) for _ in range(_NUM_SHARED)]
        self.turns = [
            Turn(
                chance.randrange(_NUM_SHARED),
                chance.randrange(max(0, number - 20), number)
                if number and chance.random() < 0.4
                else None,
                tokens(1, 60),
                chance.randrange(1, LONGEST_ANSWER + 1),
            )
            for number in range(NUM_REQUESTS)
        ]

    def prompts(self, answers: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yields each prompt; the answers before it are in `answers` by then."""
        prompts: list[list[int]] = []
        for turn in self.turns:
            begin = self._shared[turn.shared]
            if turn.earlier is not None:
                begin = [*prompts[turn.earlier], *answers[turn.earlier]]
            prompts.append([*begin, *turn.added][:LONGEST_PROMPT])
            yield prompts[-1]


async def found_by(
    engine: VllmEngine,
    conversations: Conversations,
    make: Callable[[str, list[int], int], TokenRequest],
) -> AsyncIterator[int]:
    """Yields how many tokens of each request an engine has in its cache.

    A gateway that had heard all that the engine has told would have known it, in whole units.
    """
    answers: list[list[int]] = []
    for number, prompt in enumerate(conversations.prompts(answers)):
        num_cached, answer = 0, []
        foreseen, unit = _foreseen(engine, prompt)
        async with asyncio.timeout(_ANSWER_S):
            await engine.submit(make(f"r{number}", prompt, conversations.turns[number].num_tokens))
            is_over = False
            while not is_over:
                for output in await engine.next_step():
                    answer += output.token_ids
                    num_cached += output.num_cached or 0
                    is_over = output.finish is not None
        answers.append(answer)
        assert num_cached // unit == foreseen // unit, (number, num_cached, foreseen)
        yield num_cached


def _foreseen(engine: VllmEngine, prompt: Sequence[int]) -> tuple[int, int]:
    """Returns how much of a prompt is cached, by what the engine told, and the unit it tells in."""
    mirror = engine.cached
    assert mirror is not None
    index = CacheIndex()
    index.add_engine("it", mirror.layout)
    index.take_all("it", joined(mirror.keys), is_first=True)
    found = index.find(NamedBlocks(prompt))
    # The last token of a prompt is always computed.
    most = len(prompt) - 1
    return min(found.most if found is not None else 0, most), mirror.layout.unit_tokens


def found_by_paced(conversations: Conversations, num_blocks: int, block_size: int) -> Iterator[int]:
    """Yields how many a paced engine has."""
    batch = PacedBatch(
        PacedConfig(
            time_per_token_s=1.0,
            prefill_tokens_per_s=1e9,
            max_model_len=LONGEST_PROMPT + LONGEST_ANSWER,
            kv_cache_tokens=num_blocks * block_size,
            block_size=block_size,
        )
    )
    answers: list[list[int]] = []
    now_s = 0.0
    for number, prompt in enumerate(conversations.prompts(answers)):
        num_tokens = conversations.turns[number].num_tokens
        sequence = PacedSequence(
            *(f"r{number}", prompt_seed(prompt), 0, num_tokens, len(prompt), False),
            cached=CachedSequence(list(prompt)),
        )
        batch.add(sequence, now_s)
        batch.step(now_s)
        num_cached, is_over = 0, False
        while not is_over:
            assert batch.due_at_s is not None
            now_s = batch.due_at_s
            for output in batch.step(now_s):
                num_cached += output.num_cached or 0
                is_over = output.finish is not None
        answers.append(paced_tokens(prompt, num_tokens, LETTERS))
        yield num_cached
