"""What an engine has room for.

Owns the bounds of an engine (sequences, prompt tokens in line, KV cache) and what is left of them.
Pure: no clock, no I/O.

An engine with more than this would let requests wait in a line of its own, where they can neither
time out nor go to another engine, and where nobody shares by anything but the time of arrival.
"""

from dataclasses import dataclass

from serving.link.messages import EngineLoad

# Of the KV cache, this share is left free for sequences that grow.
_KV_RESERVE = 0.05
# While others come who are to find room, of an engine's places so many are kept for them. Of its
# line of prompts so much is open to everybody, which is one prompt or two: what stands there is
# before theirs. Beside a flood of prompts of 500 tokens others' slowest hundredth waited 119 to 151
# ms for a first token, with an eighth 210 to 240, and the flood was no slower (in simulation).
KEPT_PLACES, OPEN_LINE = 1 / 8, 1 / 32


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """What an engine can have at once.

    `num_kv_tokens` are those of all sequences together; `None` where no bound is known.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    num_kv_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class FreeRoom:
    """What an engine has room for now. Less than none, where it has more than it should.

    The next request fits if there is a sequence free, some prefill and enough KV cache: one whose
    prompt is longer than a step has to begin at some time, and then others wait for it. What was on
    an engine before may be so many sequences as are `for_moved`.
    """

    sequences: int
    prefill_tokens: int
    kv_tokens: int | None
    for_moved: int = 0


def free_room(
    capacity: EngineCapacity, load: EngineLoad, num_sequences: int, num_places: int | None = None
) -> FreeRoom:
    """Returns the room of an engine that has `num_sequences`, those on their way to it included.

    It may have `num_places` for its steps to be short enough; `None`: as many as it can. A stream
    that was on an engine before goes on all the same: slower is better than not at all.

    The prompts in line are at most one step's: with more, a prompt waits longer in the engine, and
    hardly anything is gained.
    """
    kv_tokens = capacity.num_kv_tokens
    if kv_tokens is not None and num_sequences:
        kept = 1.0 - _KV_RESERVE - load.kv_usage_ratio
        kv_tokens = int(kept * kv_tokens) - load.backlog_tokens
    left = capacity.max_num_seqs - num_sequences
    return FreeRoom(
        left if num_places is None else min(left, num_places - num_sequences),
        capacity.max_num_batched_tokens - load.backlog_tokens,
        kv_tokens,
        left,
    )
