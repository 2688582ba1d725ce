"""Notes what comes into vLLM's prefix cache and what goes, where vLLM looks it up.

vLLM's own events count copies of a block and not its contents, and cost some ten times as much.
"""

from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from serving.domain.tokens.cached_blocks import KEY_BYTES, packed


class SpiedMap(BlockHashToBlockMap):
    """vLLM's map from hashes to blocks, of which it notes those that end after whole units.

    A hash is noted when its first block comes and when its last one goes.
    """

    def __init__(self, unit_tokens: int, changes: dict[bytes, bool]) -> None:
        super().__init__()
        self._unit_tokens = unit_tokens
        self._changes = changes

    def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        """See vLLM's."""
        if key not in self._cache and self._ends_unit(block):
            self._changes[key[:KEY_BYTES]] = True
        super().insert(key, block)

    def pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        """See vLLM's."""
        block = super().pop(key, block_id)
        if block is not None and key not in self._cache and self._ends_unit(block):
            self._changes[key[:KEY_BYTES]] = False
        return block

    def note_all_gone(self) -> None:
        """Notes that vLLM has thrown this map away."""
        for key in self._cache:
            self._changes[key[:KEY_BYTES]] = False

    def _ends_unit(self, block: KVCacheBlock) -> bool:
        num_tokens = block.block_hash_num_tokens
        return num_tokens is not None and num_tokens % self._unit_tokens == 0


class CacheSpy:
    """Keeps a `SpiedMap` in a block pool, and in the place of the new one after each reset."""

    def __init__(self, pool: BlockPool, unit_tokens: int) -> None:
        assert not len(pool.cached_block_hash_to_block), "the pool has blocks already"
        self._pool = pool
        self._unit_tokens = unit_tokens
        self._changes: dict[bytes, bool] = {}
        self._map = self._put_in()

    def was_reset(self) -> None:
        """Notes that all is gone, if the pool has a new map."""
        if self._pool.cached_block_hash_to_block is not self._map:
            self._map.note_all_gone()
            self._map = self._put_in()

    def take_changes(self) -> tuple[bytes, bytes]:
        """Returns the keys that have come since the last call, and those that have gone."""
        changes = packed(self._changes)
        self._changes.clear()
        return changes

    def _put_in(self) -> SpiedMap:
        spied = SpiedMap(self._unit_tokens, self._changes)
        self._pool.cached_block_hash_to_block = spied
        return spied
