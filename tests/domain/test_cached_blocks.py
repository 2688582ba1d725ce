"""What an engine tells of its cache adds up to what the cache has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.domain.tokens.block_hashes import first_parent
from serving.domain.tokens.cached_blocks import CacheLayout, CacheMirror, joined, split

LAYOUT = CacheLayout.of_blocks(16, first_parent())
keys = st.integers(0, 9).map(lambda number: bytes([number] * 8))
changes = st.dictionaries(keys, st.booleans())


@given(st.lists(st.tuples(changes, st.booleans())))
def test_changes_that_were_taken_add_up_to_what_is_there(
    told: list[tuple[dict[bytes, bool], bool]],
) -> None:
    mirror, there, known = CacheMirror(LAYOUT), set[bytes](), set[bytes]()
    for each, is_taken in told:
        mirror.change(each)
        there = (there | {key for key, is_there in each.items() if is_there}) - {
            key for key, is_there in each.items() if not is_there
        }
        if is_taken:
            stored, removed = mirror.take_changes()
            assert not known & set(split(stored)), "told twice"
            assert set(split(removed)) <= known, "gone before it came"
            known = (known | set(split(stored))) - set(split(removed))
            assert known == there
            assert not mirror.has_changes
        assert mirror.keys == there


def test_an_emptied_cache_is_told_of_block_by_block() -> None:
    mirror = CacheMirror(LAYOUT)
    mirror.change({b"a" * 8: True})
    mirror.take_changes()
    mirror.change({b"b" * 8: True})
    mirror.forget_all()
    assert mirror.take_changes() == (b"", b"a" * 8)


def test_keys_that_are_not_whole_are_refused() -> None:
    assert list(split(joined([b"a" * 8, b"b" * 8]))) == [b"a" * 8, b"b" * 8]
    with pytest.raises(ValueError, match="15 bytes"):
        split(b"a" * 15)


@pytest.mark.parametrize(
    ("block_size", "unit"), [(1, 128), (16, 128), (48, 96), (128, 128), (256, 256)]
)
def test_a_unit_is_whole_blocks(block_size: int, unit: int) -> None:
    layout = CacheLayout.of_blocks(block_size, first_parent())
    assert layout.unit_tokens == unit == layout.blocks_of_unit * block_size
    assert CacheLayout.from_json(layout.to_json()) == layout


def test_a_layout_tells_where_adapters_are_and_one_of_an_earlier_build_tells_of_none() -> None:
    layout = CacheLayout.of_blocks(16, first_parent(), [("poet", "/b"), ("law", "/a")])
    told = layout.to_json()
    assert CacheLayout.from_json(told) == layout
    assert (layout.path_of("poet"), layout.path_of("law"), layout.path_of("x")) == (
        "/b",
        "/a",
        None,
    )
    assert layout == CacheLayout.of_blocks(16, first_parent(), [("law", "/a"), ("poet", "/b")])
    del told["adapters"]
    assert CacheLayout.from_json(told) == CacheLayout.of_blocks(16, first_parent())


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"block_size": 0, "unit_tokens": 16, "root": ""},
        {"block_size": 16, "unit_tokens": 24, "root": ""},
        {"block_size": 16, "unit_tokens": 32, "root": "xyz"},
        {"block_size": [], "unit_tokens": 32, "root": ""},
        {"block_size": 16, "unit_tokens": 32, "root": "", "adapters": ["poet"]},
        {"block_size": 16, "unit_tokens": 32, "root": "", "adapters": {"poet": 1}},
    ],
)
def test_a_layout_of_another_form_is_none(value: object) -> None:
    assert CacheLayout.from_json(value) is None
