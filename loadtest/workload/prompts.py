"""Makes prompts of exact lengths from blocks: as token ids, or as a text of as many tokens.

Owns the tokens of a block, which follow from its content id alone (by SHAKE, never `hash`),
and what a chat template adds. Does not own how a vocabulary is found (`discovery`). Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import shake_128

import numpy as np
import numpy.typing as npt

from loadtest.errors import LoadTestError
from loadtest.planned_request import PromptBlock

_BYTES_PER_DRAW = 4


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The material of prompts.

    `token_ids` are those that may be used. `words` are texts that are one token each in the middle
    of a text, after a space, and `openers` those of them that are one token at a text's beginning
    as well; both are empty where only ids are known.
    """

    token_ids: Sequence[int]
    words: tuple[str, ...] = ()
    openers: tuple[str, ...] = ()


def prompt_token_ids(blocks: Sequence[PromptBlock], vocabulary: Vocabulary) -> list[int]:
    """The ids of the blocks one after another, as many as they state."""
    ids = np.asarray(vocabulary.token_ids, dtype=np.int64)
    parts = [ids[_draws(block) % len(ids)] for block in blocks]
    return [token for part in parts for token in part.tolist()]


def prompt_text(blocks: Sequence[PromptBlock], vocabulary: Vocabulary) -> str:
    """Returns a text of as many tokens as the blocks have, equal for equal blocks.

    Raises:
        LoadTestError: the vocabulary has no words.
    """
    if not vocabulary.openers:
        raise LoadTestError("a text was asked of a vocabulary without words; allowed: token ids")
    return " ".join(word for block in blocks for word in _block_words(block, vocabulary))


def first_tokens(blocks: Sequence[PromptBlock], num_tokens: int) -> tuple[PromptBlock, ...]:
    """The blocks up to `num_tokens`; all of them if they are no more."""
    kept = []
    for block in blocks:
        if num_tokens <= 0:
            break
        kept.append(PromptBlock(block.content_id, min(block.num_tokens, num_tokens)))
        num_tokens -= block.num_tokens
    return tuple(kept)


def template_overhead(
    tokenize_messages: Callable[[list[dict[str, str]]], list[int]], vocabulary: Vocabulary
) -> int:
    """The tokens that a chat template adds to one user message, from prompts of several lengths.

    `tokenize_messages` is the server's: with the template and the prompt of the answer, as a chat
    request is.

    Raises:
        LoadTestError: the overhead is not the same for all, so no length can be promised.
    """
    found: dict[int, int] = {}
    for count in (1, 2, 17, 64):
        text = prompt_text([PromptBlock(f"probe {count}", count)], vocabulary)
        found[count] = len(tokenize_messages([{"role": "user", "content": text}])) - count
    if len(set(found.values())) > 1 or min(found.values()) < 0:
        seen = ", ".join(f"{extra} for {count}" for count, extra in found.items())
        raise LoadTestError(
            f"the chat template adds {seen} tokens; allowed: the same for every length"
        )
    return found[1]


def within_template(blocks: Sequence[PromptBlock], overhead_tokens: int) -> tuple[PromptBlock, ...]:
    """The blocks cut at their end so that the templated prompt is as long as they state.

    One token stays in any case: a prompt is at least the overhead and one token long.
    """
    wanted = sum(block.num_tokens for block in blocks)
    return first_tokens(blocks, max(wanted - overhead_tokens, 1))


def _draws(block: PromptBlock) -> npt.NDArray[np.int64]:
    """Returns uniform numbers below 2 ** 32; a longer block of the content begins with them."""
    stream = shake_128(block.content_id.encode()).digest(_BYTES_PER_DRAW * block.num_tokens)
    return np.frombuffer(stream, dtype="<u4").astype(np.int64)


def _block_words(block: PromptBlock, vocabulary: Vocabulary) -> list[str]:
    """The block's words. Any block may come first, so each begins with an opener."""
    first, *others = _draws(block).tolist()
    words, openers = vocabulary.words, vocabulary.openers
    return [openers[first % len(openers)], *(words[draw % len(words)] for draw in others)]
