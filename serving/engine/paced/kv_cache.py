"""What each sequence of an engine holds of its KV cache, and what it finds there already.

Plays what vLLM's scheduler and KV cache manager decide for one kind of attention (0.32.0). Blocks
are known by their contents once they are in a step, not when it has ended. A sequence begins only
if all of its tokens have room now; a later step may find none, and then the caller has to take it
from another. Pure.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from serving.domain.tokens.block_hashes import NO_CONTEXT, BlockContext, block_hashes, first_parent
from serving.domain.tokens.cached_blocks import CacheLayout, CacheMirror, key_of
from serving.engine.paced.kv_blocks import KvBlocks


@dataclass(slots=True)
class CachedSequence:
    """The tokens of one sequence, prompt and output, and the blocks that it holds for them.

    What the blocks hold depends on `context` too. `num_computed` of the tokens are in the cache, at
    the end of the step under way. `num_found` were in it when the sequence began for the first
    time; `None` before that, and once it has been told.
    """

    token_ids: list[int]
    context: BlockContext = NO_CONTEXT
    num_computed: int = 0
    num_found: int | None = None
    has_begun: bool = False
    blocks: list[int] = field(default_factory=list)
    num_known: int = 0  # of the blocks, those that others can find
    names: list[bytes] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        """How many tokens are not computed."""
        return len(self.token_ids) - self.num_computed


class KvCache:
    """The cache of one engine: as many whole blocks as so many tokens have."""

    def __init__(
        self, num_tokens: int, block_size: int, adapters: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Makes an empty cache; `adapters` are the names of the engine's, and where they are."""
        self._block_size = block_size
        self._pool = KvBlocks(num_tokens // block_size)
        self._root = first_parent()
        self._layout = CacheLayout.of_blocks(block_size, self._root, adapters)
        self._mirror = CacheMirror(self._layout)

    @property
    def usage_ratio(self) -> float:
        """The share of blocks that sequences use, 0 to 1."""
        return 1 - self._pool.num_free / self._pool.num_blocks

    @property
    def mirror(self) -> CacheMirror:
        """What blocks hold now, of those that are told of."""
        changes = self._pool.changes()
        if changes:
            self._mirror.change({key_of(name): is_there for name, is_there in changes.items()})
        return self._mirror

    def forget_all(self) -> bool:
        """Forgets what all blocks hold; does nothing and returns `False` while one is used."""
        return self._pool.forget_all()

    def begin(self, sequence: CachedSequence, most: int, *, looks: bool = True) -> int | None:
        """Begins a sequence that holds nothing: finds what it can, and computes at most `most`.

        Returns how many tokens the step computes, `None` if there is no room for all of it. It
        looks for nothing unless `looks`. The last token is computed in any case: the next one
        follows from it.
        """
        num_tokens = len(sequence.token_ids)
        findable = (num_tokens - 1) // self._block_size if looks else 0
        found = self._pool.found(self._names(sequence, findable))
        num_blocks = -(-num_tokens // self._block_size)
        if self._pool.num_needed(found, num_blocks - len(found)) > self._pool.num_free:
            return None
        self._pool.use(found)
        sequence.blocks = found
        sequence.num_known = len(found)
        sequence.num_computed = len(found) * self._block_size
        if not sequence.has_begun:
            sequence.num_found = sequence.num_computed
            sequence.has_begun = True
        num_new = min(most, sequence.num_left)
        has_room = self.go_on(sequence, num_new)
        assert has_room, "there was room for all of it"
        return num_new

    def go_on(self, sequence: CachedSequence, num_new: int) -> bool:
        """Computes so many more of its tokens; does nothing and returns `False` without room."""
        num_computed = sequence.num_computed + num_new
        num_more = -(-num_computed // self._block_size) - len(sequence.blocks)
        if num_more > self._pool.num_free:
            return False
        if num_more > 0:
            sequence.blocks += self._pool.take(num_more)
        sequence.num_computed = num_computed
        num_full = num_computed // self._block_size
        if sequence.num_known < num_full:
            names = list(self._names(sequence, num_full))
            blocks_of_unit = self._layout.blocks_of_unit
            for place in range(sequence.num_known, num_full):
                is_told = (place + 1) % blocks_of_unit == 0
                self._pool.name(sequence.blocks[place], names[place], is_told=is_told)
            sequence.num_known = num_full
        return True

    def release(self, sequence: CachedSequence) -> None:
        """Takes all of its blocks from a sequence. What they hold can be found until it is lost."""
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_known = sequence.num_computed = 0

    def _names(self, sequence: CachedSequence, count: int) -> Iterator[bytes]:
        """Yields the names of the first blocks, and computes no more of them than are asked for."""
        names, size = sequence.names, self._block_size
        yield from names[:count]
        if count <= len(names):
            return
        rest = sequence.token_ids[len(names) * size : count * size]
        adapter = sequence.context.adapter
        path = None if adapter is None else self._layout.path_of(adapter)
        extra = sequence.context.extra_keys(size, path, first=len(names))
        for name in block_hashes(rest, size, names[-1] if names else self._root, extra):
            names.append(name)
            yield name
