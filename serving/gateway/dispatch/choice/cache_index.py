"""Which engines of one version have which blocks in their prefix caches, as they tell it. Pure.

A prompt that was just sent to an engine counts as what that will have: requests that begin alike
and come together then meet on one engine, and do not compute their beginning on each.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from serving.domain.tokens.cached_blocks import CacheLayout, split
from serving.domain.tokens.named_blocks import NamedBlocks

# So many blocks of a prompt are counted before its engine tells of them: each has to be named.
_MOST_EXPECTED = 512


@dataclass(frozen=True, slots=True)
class Found:
    """What engines have of a row of blocks.

    `num_cached` is how many tokens each has, of those that have any. One has `most` of them, to the
    end of the block with the key `beginning`; `None` if none has any.
    """

    num_cached: dict[str, int]
    most: int
    beginning: bytes | None


class CacheIndex:
    """The keys of blocks that engines have, or will have. Each has a bit in the mask of each key.

    It has as many keys as engines tell of, so that its size is bounded by their caches: some 200
    bytes for 128 tokens of an engine's.
    """

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._keys: dict[str, set[bytes]] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}  # the engines by their bits
        self._layouts: dict[CacheLayout, int] = {}  # the bits of its engines
        # By engine and key, how many requests on their way will have it cached.
        self._expected: dict[str, dict[bytes, int]] = {}

    def __len__(self) -> int:
        """How many different blocks are known, those that are expected included."""
        return len(self._masks)

    @property
    def engine_ids(self) -> Collection[str]:
        """The engines that tell of their caches."""
        return self._bits.keys()

    def add_engine(self, engine_id: str, layout: CacheLayout) -> None:
        """Takes in an engine, of whose cache nothing is known yet."""
        taken = 0
        for bit in self._bits.values():
            taken |= bit
        bit = ~taken & (taken + 1)  # the lowest that is free
        self._bits[engine_id] = bit
        self._names[bit] = engine_id
        self._keys[engine_id] = set()
        self._expected[engine_id] = {}
        self._layouts[layout] = self._layouts.get(layout, 0) | bit

    def remove_engine(self, engine_id: str) -> None:
        """Forgets an engine; one that is not there is ignored."""
        if engine_id not in self._bits:
            return
        bit = self._bits.pop(engine_id)
        for key in self._keys.pop(engine_id) | self._expected.pop(engine_id).keys():
            _clear(self._masks, key, bit)
        del self._names[bit]
        for layout, mask in list(self._layouts.items()):
            if mask & ~bit:
                self._layouts[layout] = mask & ~bit
            else:
                del self._layouts[layout]

    def take_all(self, engine_id: str, keys: bytes, *, is_first: bool) -> None:
        """Takes in what an engine has; the first part takes the place of all before."""
        if engine_id not in self._bits:
            return
        if is_first:
            self._forget(engine_id, self._keys[engine_id])
            self._keys[engine_id] = set()
        self._store(engine_id, split(keys))

    def take_changes(self, engine_id: str, stored: bytes, removed: bytes) -> None:
        """Takes in what has come into an engine's cache, and what has gone."""
        if engine_id in self._bits:
            self._store(engine_id, split(stored))
            self._keys[engine_id].difference_update(split(removed))
            self._forget(engine_id, split(removed))

    def expect(self, engine_id: str, blocks: NamedBlocks) -> list[bytes]:
        """Counts the first blocks as those that an engine will have.

        Returns those of which it has not told, for `settle`.
        """
        bit = self._bits.get(engine_id)
        if bit is None:
            return []
        layout, told, masks = self._layout_of(engine_id), self._keys[engine_id], self._masks
        first = itertools.islice(blocks.keys(layout), _MOST_EXPECTED // layout.blocks_of_unit)
        keys = [key for key in first if key not in told]
        expected = self._expected[engine_id]
        for key in keys:
            count = expected.get(key, 0)
            expected[key] = count + 1
            if not count:  # else its bit is there
                masks[key] = masks.get(key, 0) | bit
        return keys

    def settle(self, engine_id: str, keys: Iterable[bytes]) -> None:
        """Expects no more what `expect` has returned: the engine has told, or will not have it."""
        expected = self._expected.get(engine_id)
        if expected is None:
            return
        bit, told = self._bits[engine_id], self._keys[engine_id]
        for key in keys:
            count = expected.pop(key, 1) - 1
            if count:
                expected[key] = count
            elif key not in told:
                _clear(self._masks, key, bit)

    def find(self, blocks: NamedBlocks) -> Found | None:
        """Returns what engines have of these blocks; `None` if none has told how it names them."""
        layouts = [pair for pair in self._layouts.items() if blocks.can_be_named(pair[0])]
        if not layouts:
            return None
        found: list[tuple[int, int]] = []  # engines by their bits, and what they have
        most, beginning, mask_of = 0, None, self._masks.get
        for layout, mask in layouts:
            num_tokens, last = 0, None
            for key in blocks.keys(layout):
                still = mask & mask_of(key, 0)
                if still != mask:
                    found.append((mask & ~still, num_tokens))
                    mask = still
                    if not mask:
                        break
                num_tokens += layout.unit_tokens
                last = key
            found.append((mask, num_tokens))
            if num_tokens > most:
                most, beginning = num_tokens, last
        return Found(self._by_engine(found), most, beginning)

    def _by_engine(self, found: Iterable[tuple[int, int]]) -> dict[str, int]:
        """Returns what each engine has, of those that have any."""
        by_engine: dict[str, int] = {}
        names = self._names
        for mask, num_tokens in found:
            if not num_tokens:
                continue
            if mask in names:  # it is one engine's
                by_engine[names[mask]] = num_tokens
                continue
            while mask:
                bit = mask & -mask
                by_engine[names[bit]] = num_tokens
                mask ^= bit
        return by_engine

    def _layout_of(self, engine_id: str) -> CacheLayout:
        bit = self._bits[engine_id]
        return next(layout for layout, mask in self._layouts.items() if mask & bit)

    def _store(self, engine_id: str, keys: Iterator[bytes]) -> None:
        masks, bit, own = self._masks, self._bits[engine_id], self._keys[engine_id]
        for key in keys:
            own.add(key)
            masks[key] = masks.get(key, 0) | bit

    def _forget(self, engine_id: str, keys: Iterable[bytes]) -> None:
        """Clears the engine's bit, but of what it will have again by what is on its way."""
        bit, expected = self._bits[engine_id], self._expected[engine_id]
        for key in keys:
            if key not in expected:
                _clear(self._masks, key, bit)


def _clear(masks: dict[bytes, int], key: bytes, bit: int) -> None:
    """Takes an engine's bit from a key's mask, and the key away with the last one."""
    mask = masks.get(key, 0) & ~bit
    if mask:
        masks[key] = mask
    else:
        masks.pop(key, None)
