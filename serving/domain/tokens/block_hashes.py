"""Names blocks of tokens as vLLM's prefix cache does, so that a gateway knows what an engine has.

The name of a block is a hash of the name of the block before it, its own tokens, and what else its
contents depend on. So a name stands for all tokens up to its block's end. Only full blocks have
one. Read in vLLM 0.32.0 (`vllm/v1/core/kv_cache_utils.py`); tests hold both equal. Pure.
"""

import hashlib
import pickle
from collections.abc import Iterator, Sequence

# What vLLM's names begin with by default, where `PYTHONHASHSEED` is not set.
DEFAULT_SEED = "vllm-none-hash"
# The protocol that vLLM pickles with; another one gives other bytes.
_PICKLE_PROTOCOL = 5

# What the contents of a block depend on besides tokens, as vLLM tags it: an adapter's name and
# path, an item of media and its offset, a salt. `None` if there is nothing.
ExtraKeys = tuple[tuple[object, ...], ...]


def first_parent(seed: str = DEFAULT_SEED) -> bytes:
    """Returns what stands in the place of a name before the first block."""
    return _digest(seed)


def block_hashes(
    token_ids: Sequence[int],
    block_size: int,
    parent: bytes,
    extra: ExtraKeys | None = None,
    first_extra: ExtraKeys | None = None,
) -> Iterator[bytes]:
    """Yields the names (32 bytes) of the full blocks of these tokens, the first one first.

    `parent` is the name of the block before the first of them. `extra` belongs to every block, and
    `first_extra`, where it is given, takes its place in the first one. Each name costs some 10 us
    (16 tokens), so whoever can stop early should.
    """
    keys = first_extra or extra
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = _digest((parent, tuple(token_ids[start : start + block_size]), keys))
        keys = extra
        yield parent


def _digest(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=_PICKLE_PROTOCOL)).digest()
