"""The tokens that a paced engine emits: a function of the prompt and the position, nothing else.

A leaf, so that whoever checks answers knows them without an engine. Pure.
"""

import zlib
from array import array
from collections.abc import Sequence

# "a" to "z" of the shipped model's tokenizer; the end is excluded. Each is a character of its own:
# tokens that are half a character come out of a frontend late or never.
LETTERS = (67, 93)

# Odd 32-bit multipliers; the upper bits of a product are the mixed ones.
_SPREAD = 0x9E3779B1
_MIX = 0x85EBCA6B
_WORD = 0xFFFFFFFF


def prompt_seed(prompt_token_ids: Sequence[int], model_seed: int = 0) -> int:
    """Returns the value on which the tokens of an answer depend besides their position.

    Engines of another `model_seed`, 0 to 2^32 - 1, play another model and give other answers.
    """
    return zlib.crc32(array("q", prompt_token_ids).tobytes(), model_seed)


def seeded_token(seed: int, position: int, token_range: tuple[int, int]) -> int:
    """Returns the token at output `position` (0 is the first) of the prompt with this seed."""
    low, high = token_range
    mixed = ((seed ^ (position * _SPREAD)) * _MIX) & _WORD
    return low + (mixed >> 8) % (high - low)


def paced_token(
    prompt_token_ids: Sequence[int], position: int, token_range: tuple[int, int]
) -> int:
    """Returns the token at output `position` (0 is first); `token_range` excludes its end."""
    return seeded_token(prompt_seed(prompt_token_ids), position, token_range)


def paced_tokens(
    prompt_token_ids: Sequence[int],
    count: int,
    token_range: tuple[int, int],
    model_seed: int = 0,
) -> list[int]:
    """Returns the first `count` tokens of the answer to this prompt."""
    seed = prompt_seed(prompt_token_ids, model_seed)
    return [seeded_token(seed, position, token_range) for position in range(count)]
