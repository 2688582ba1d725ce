"""Which blocks of tokens an engine's cache has, as engines tell it and gateways know it. Pure.

A block is known by the first bytes of its name (`block_hashes`). Two blocks with one key are one in
some 10^13 for an engine of a million; they cost a wrong guess, never a wrong token.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

KEY_BYTES = 8

# Of each chain of blocks those are told that end after so many tokens, and their multiples: with
# blocks of 16 that is every eighth. What is cached beyond the last of them is not known.
UNIT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How an engine cuts tokens into blocks, and names them.

    `root` stands in the place of a name before the first block. Blocks are told of that end after
    `unit_tokens`, and their multiples. `adapters` are the names of its LoRA adapters and where it
    has found them, which is part of their blocks' names.
    """

    block_size: int
    unit_tokens: int
    root: bytes
    adapters: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_blocks(
        cls, block_size: int, root: bytes, adapters: Iterable[tuple[str, str]] = ()
    ) -> "CacheLayout":
        """Returns the layout of an engine with blocks of this size."""
        unit_tokens = block_size * max(1, UNIT_TOKENS // block_size)
        return cls(block_size, unit_tokens, root, tuple(sorted(adapters)))

    def path_of(self, adapter: str) -> str | None:
        """Returns where the engine has found an adapter; `None` if it tells of no such."""
        return next((path for name, path in self.adapters if name == adapter), None)

    @property
    def blocks_of_unit(self) -> int:
        """How many blocks lie between two that are told of."""
        return self.unit_tokens // self.block_size

    def to_json(self) -> dict[str, object]:
        """Returns it as an engine's description has it."""
        return {
            "block_size": self.block_size,
            "unit_tokens": self.unit_tokens,
            "root": self.root.hex(),
            "adapters": dict(self.adapters),
        }

    @classmethod
    def from_json(cls, value: object) -> "CacheLayout | None":
        """Reads what `to_json` wrote; `None` if it is of another form, such as a later build's."""
        try:
            assert isinstance(value, Mapping)
            block_size, unit = int(value["block_size"]), int(value["unit_tokens"])
            adapters = dict(value.get("adapters", {}))  # an earlier build tells of none
            assert all(isinstance(text, str) for text in (*adapters, *adapters.values()))
            root = bytes.fromhex(str(value["root"]))
            layout = cls(block_size, unit, root, tuple(sorted(adapters.items())))
        except (AssertionError, KeyError, TypeError, ValueError):
            return None
        is_whole = block_size > 0 and unit > 0 and unit % block_size == 0
        return layout if is_whole else None


def key_of(name: bytes) -> bytes:
    """Returns the key of the block with this name."""
    return name[:KEY_BYTES]


def joined(keys: Iterable[bytes]) -> bytes:
    """Returns the keys one behind the other."""
    return b"".join(keys)


def split(keys: bytes) -> Iterator[bytes]:
    """Yields the keys of `joined`. Raises `ValueError` if they are not whole."""
    if len(keys) % KEY_BYTES:
        raise ValueError(f"{len(keys)} bytes are not whole keys of {KEY_BYTES}")
    return (keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES))


def packed(changes: Mapping[bytes, bool]) -> tuple[bytes, bytes]:
    """Returns the keys that have come (`True`), and those that have gone, each as `joined`."""
    stored = joined(key for key, is_there in changes.items() if is_there)
    return stored, joined(key for key, is_there in changes.items() if not is_there)


class CacheMirror:
    """What one engine's cache has, by the changes that it told."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.keys: set[bytes] = set()
        self._changes: dict[bytes, bool] = {}

    def change(self, changes: Mapping[bytes, bool]) -> None:
        """Takes in which blocks are there now (`True`) and which are not any more."""
        for key, is_there in changes.items():
            if is_there == (key in self.keys):
                continue
            if is_there:
                self.keys.add(key)
            else:
                self.keys.discard(key)
            # One that came and went since the last look is no change.
            if self._changes.pop(key, is_there) == is_there:
                self._changes[key] = is_there

    def take_in(self, stored: bytes, removed: bytes) -> None:
        """Takes in changes as they are `packed`. Raises `ValueError` if keys are not whole."""
        self.change(dict.fromkeys(split(removed), False))
        self.change(dict.fromkeys(split(stored), True))

    def forget_all(self) -> None:
        """Takes in that the cache was emptied."""
        self.change(dict.fromkeys(self.keys, False))

    @property
    def has_changes(self) -> bool:
        """True if something has changed since `take_changes`."""
        return bool(self._changes)

    def take_changes(self) -> tuple[bytes, bytes]:
        """Returns what has come and what has gone since the last call."""
        changes, self._changes = self._changes, {}
        return packed(changes)
