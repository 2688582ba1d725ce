"""The blocks of an engine's KV cache: which are free, and what those hold that have been computed.

Plays vLLM's block pool for one kind of attention (`vllm/v1/core/block_pool.py`, 0.32.0): a block
keeps its contents until it is taken for others; of the free ones those without known contents go
first, then the one that was freed longest ago. Tests hold both equal. Pure.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence


class KvBlocks:
    """A fixed number of blocks, numbered from 0. Names say what a full one holds."""

    def __init__(self, num_blocks: int) -> None:
        self._num_users = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        # Two sequences may compute the same at once; the block that was first is found.
        self._holders: dict[bytes, dict[int, None]] = {}
        # Of those that are told of: whether any block holds this now, and so did not before.
        self._changes: dict[bytes, bool] = {}
        self._told: set[bytes] = set()

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self._names)

    @property
    def num_free(self) -> int:
        """How many blocks no sequence uses, whatever they hold."""
        return len(self._free)

    @property
    def names(self) -> frozenset[bytes]:
        """What blocks hold now, whether a sequence uses them or not."""
        return frozenset(self._holders)

    def found(self, names: Iterable[bytes]) -> list[int]:
        """Returns the blocks that hold these, up to the first that none holds."""
        return list(self._holding(names))

    def _holding(self, names: Iterable[bytes]) -> Iterator[int]:
        for name in names:
            holders = self._holders.get(name)
            if holders is None:
                return
            yield next(iter(holders))

    def num_needed(self, found: Sequence[int], num_new: int) -> int:
        """Returns how many free blocks it takes to use the found ones, and so many new ones."""
        return num_new + sum(1 for block in found if block in self._free)

    def use(self, blocks: Iterable[int]) -> None:
        """Counts one more sequence that uses these."""
        for block in blocks:
            self._num_users[block] += 1
            self._free.pop(block, None)

    def take(self, count: int) -> list[int]:
        """Returns so many free blocks, which lose what they held. There have to be so many."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._forget(block)
            self._num_users[block] = 1
        return taken

    def name(self, block: int, name: bytes, *, is_told: bool = True) -> None:
        """Notes what a block, which has no name yet, holds from now on.

        What comes and goes of this name is among the `changes` if it `is_told` of.
        """
        self._names[block] = name
        holders = self._holders.setdefault(name, {})
        if not holders and is_told:
            self._told.add(name)
            self._changes[name] = True
        holders[block] = None

    def release(self, blocks: Sequence[int]) -> None:
        """Gives back the blocks of a sequence, in its own order: its end is taken first."""
        last: list[int] = []
        first: list[int] = []
        for block in reversed(blocks):
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                (first if self._names[block] is None else last).append(block)
        for block in last:
            self._free[block] = None
        for block in reversed(first):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def forget_all(self) -> bool:
        """Forgets what all blocks hold; does nothing and returns `False` while one is used."""
        if self.num_free < self.num_blocks:
            return False
        for name in self._holders:
            self._gone(name)
        self._holders.clear()
        self._names = [None] * self.num_blocks
        return True

    def changes(self) -> dict[bytes, bool]:
        """Returns what has come (`True`) or gone since the last call, and begins anew."""
        changes, self._changes = self._changes, {}
        return changes

    def _forget(self, block: int) -> None:
        name, self._names[block] = self._names[block], None
        if name is None:
            return
        holders = self._holders[name]
        del holders[block]
        if not holders:
            del self._holders[name]
            self._gone(name)

    def _gone(self, name: bytes) -> None:
        if name in self._told:
            self._told.remove(name)
            self._changes[name] = False
