"""The names of a request's blocks, computed as far as somebody asks for them. Pure."""

from collections.abc import Iterator, Sequence

from serving.domain.tokens.block_hashes import ExtraKeys, block_hashes
from serving.domain.tokens.cached_blocks import CacheLayout, key_of

# A block's name costs some 10 us on the event loop. What a longer prompt has cached beyond these
# is not known.
_MAX_BLOCKS = 1024


class NamedBlocks:
    """The blocks of a row of tokens, and what else their contents depend on."""

    def __init__(
        self,
        token_ids: Sequence[int],
        extra: ExtraKeys | None = None,
        first_extra: ExtraKeys | None = None,
    ) -> None:
        """Takes the tokens, which must not change, and what `block_hashes` takes."""
        self._token_ids = token_ids
        self._extra, self._first_extra = extra, first_extra
        self._known: dict[CacheLayout, tuple[list[bytes], Iterator[bytes]]] = {}

    def __len__(self) -> int:
        """How many tokens there are."""
        return len(self._token_ids)

    def followed_by(self, token_ids: Sequence[int]) -> "NamedBlocks":
        """Returns those of the same tokens with these behind them."""
        return NamedBlocks([*self._token_ids, *token_ids], self._extra, self._first_extra)

    def keys(self, layout: CacheLayout) -> Iterator[bytes]:
        """Yields the keys of the blocks that engines with this layout tell of, the first first."""
        if layout not in self._known:
            self._known[layout] = [], self._fresh(layout)
        known, fresh = self._known[layout]
        yield from known
        for key in fresh:
            known.append(key)
            yield key

    def _fresh(self, layout: CacheLayout) -> Iterator[bytes]:
        tokens = self._token_ids[: _MAX_BLOCKS * layout.block_size]
        chain = (layout.root, self._extra, self._first_extra)
        names = block_hashes(tokens, layout.block_size, *chain)
        for number, name in enumerate(names, 1):
            if number % layout.blocks_of_unit == 0:
                yield key_of(name)
