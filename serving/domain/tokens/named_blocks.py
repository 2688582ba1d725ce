"""The names of a request's blocks, computed as far as somebody asks for them. Pure."""

import itertools
from collections.abc import Iterator, Sequence

from serving.domain.tokens.block_hashes import NO_CONTEXT, BlockContext, block_hashes
from serving.domain.tokens.cached_blocks import CacheLayout, key_of

# A name costs 1.2 to 2.1 us on the event loop (16 tokens; docs/adr/0027). What a longer
# prompt has cached beyond these is not known.
_MAX_BLOCKS = 1024

# What names depend on at an engine: its block size, unit and root, and where it has the adapter.
_Naming = tuple[int, int, bytes, str | None]


class NamedBlocks:
    """The blocks of a row of tokens, and what else their contents depend on."""

    def __init__(self, token_ids: Sequence[int], context: BlockContext = NO_CONTEXT) -> None:
        """Takes the tokens, which must not change, and what else the blocks depend on."""
        self._token_ids = token_ids
        self.context = context
        self._known: dict[_Naming, tuple[list[bytes], Iterator[bytes]]] = {}
        self._num_named = 0

    def __len__(self) -> int:
        """How many tokens there are."""
        return len(self._token_ids)

    def take_num_named(self) -> int:
        """Returns how many blocks were named since it was asked last."""
        count, self._num_named = self._num_named, 0
        return count

    def followed_by(self, token_ids: Sequence[int]) -> "NamedBlocks":
        """Returns those of the same tokens with these behind them."""
        return NamedBlocks([*self._token_ids, *token_ids], self.context)

    def can_be_named(self, layout: CacheLayout) -> bool:
        """Returns whether it is known what engines with this layout call them."""
        adapter = self.context.adapter
        return adapter is None or layout.path_of(adapter) is not None

    def keys(self, layout: CacheLayout) -> Iterator[bytes]:
        """Returns the keys of the blocks that engines with this layout tell of, the first first.

        There are none if it is not known what they call them. Those that are not named yet are so
        when they are asked for.
        """
        if not self.can_be_named(layout):
            return iter(())
        adapter = self.context.adapter
        path = None if adapter is None else layout.path_of(adapter)
        # Engines that have other adapters besides call these the same.
        naming = layout.block_size, layout.unit_tokens, layout.root, path
        if naming not in self._known:
            self._known[naming] = [], self._fresh(layout, path)
        known, fresh = self._known[naming]
        # Each choice goes through all that are known: as a list, which takes less than a generator.
        return itertools.chain(known, _kept(fresh, known))

    def _fresh(self, layout: CacheLayout, adapter_path: str | None) -> Iterator[bytes]:
        tokens = self._token_ids[: _MAX_BLOCKS * layout.block_size]
        extra = self.context.extra_keys(layout.block_size, adapter_path)
        names = block_hashes(tokens, layout.block_size, layout.root, extra)
        for number, name in enumerate(names, 1):
            self._num_named += 1
            if number % layout.blocks_of_unit == 0:
                yield key_of(name)


def _kept(fresh: Iterator[bytes], known: list[bytes]) -> Iterator[bytes]:
    """Yields what is fresh, and adds it to what is known."""
    for key in fresh:
        known.append(key)
        yield key
