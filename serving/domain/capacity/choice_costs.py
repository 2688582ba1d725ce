"""What a request takes on an engine: by this gateways choose, and the simulator as they do. Pure.

Costs are in tokens of prompts that the engine could compute meanwhile. They are worked out alike
for one engine and for columns of all.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

# What a step takes of an engine besides its tokens of prompts, in as many of them as it could have
# computed meanwhile: always, and for each sequence. These are a chip's that computes 20,000 tokens
# of prompts a second, in steps of 12 ms and 0.2 ms more for each sequence.
STEP_TOKENS = 240
SEQUENCE_TOKENS = 4
# So much of prompts is in one step: vLLM's own default.
MOST_IN_STEP = 8192
# What is computed for a request counts so often again: as long as its engine is busy, those behind
# it wait for it as well, and what it takes in a full cache another will have to compute anew. With
# 1, engines near their limit kept on computing beginnings anew (docs/results/dispatch.md).
FOR_OTHERS = 2
# Engines that differ by less count as equal.
SAME_TOKENS = 64

# Of more engines than so many it is not the least that is chosen but one of those that are as good,
# another one for each request: gateways know nearly the same, and would else all choose alike. As
# good are those that differ by less than so many tokens. Of 64 engines behind sixteen gateways the
# slowest hundredth's first token came after 0.24 s, 0.31 where two drawn ones were compared, 0.32
# where each chose the least (docs/results/dispatch.md).
DRAWN_FROM = 8
AS_GOOD_TOKENS = 1024

_Amount = TypeVar("_Amount", int, NDArray[np.int64])


def first_token_cost(line_tokens: _Amount, num_sequences: _Amount, computed: _Amount) -> _Amount:
    """Returns how long a first token takes.

    These are the line before it, what of it has to be `computed`, and what the steps for both take
    besides.
    """
    line = line_tokens + computed
    num_steps = -(-line // MOST_IN_STEP)
    return line + num_steps * (STEP_TOKENS + SEQUENCE_TOKENS * num_sequences)


def whole_cost(
    to_first: _Amount, num_sequences: _Amount, computed: _Amount, num_expected: int
) -> _Amount:
    """Returns how long a request takes from its first to its last token, and from others.

    After its first token each step takes longer by the sequences that are there. And what is
    computed for it makes others wait.
    """
    return to_first + FOR_OTHERS * computed + num_expected * SEQUENCE_TOKENS * num_sequences


def busy_tokens(line_tokens: _Amount, num_sequences: _Amount, num_expected: int) -> _Amount:
    """Returns what an engine has to do besides a request, for as long as that is there.

    As far as it differs between engines: those that do not differ in it differ by their caches.
    """
    return line_tokens + num_expected * SEQUENCE_TOKENS * num_sequences
