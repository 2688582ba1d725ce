"""The index of caches knows what each engine has, whatever comes, goes, or is lost."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.domain.tokens.block_hashes import BlockContext, block_hashes, first_parent
from serving.domain.tokens.cached_blocks import CacheLayout, joined, key_of
from serving.domain.tokens.named_blocks import NamedBlocks
from serving.gateway.dispatch.choice.cache_index import CacheIndex

SMALL = CacheLayout(4, 8, first_parent())  # told of every second block
OTHER = CacheLayout(6, 6, first_parent())


def keys_of(tokens: list[int], layout: CacheLayout = SMALL) -> list[bytes]:
    names = list(block_hashes(tokens, layout.block_size, layout.root))
    return [key_of(name) for name in names[layout.blocks_of_unit - 1 :: layout.blocks_of_unit]]


def index_with(**contents: list[int]) -> CacheIndex:
    index = CacheIndex()
    for engine_id, tokens in contents.items():
        index.add_engine(engine_id, SMALL)
        index.take_all(engine_id, joined(keys_of(tokens)), is_first=True)
    return index


def cached_of(index: CacheIndex, blocks: NamedBlocks) -> dict[str, int] | None:
    found = index.find(blocks)
    if found is None:
        return None
    assert found.most == max(found.num_cached.values(), default=0)
    assert (found.beginning is None) == (not found.num_cached)
    return found.num_cached


TOKENS = list(range(100, 140))


def test_each_engine_is_known_by_how_far_its_cache_goes() -> None:
    index = index_with(all=TOKENS, half=TOKENS[:20], other=[1, *TOKENS], none=[])
    assert cached_of(index, NamedBlocks(TOKENS)) == {"all": 40, "half": 16}
    assert cached_of(index, NamedBlocks(TOKENS[:23])) == {"all": 16, "half": 16}
    assert cached_of(index, NamedBlocks([7, *TOKENS])) == {}
    assert cached_of(index, NamedBlocks([])) == {}


def test_longest_beginning_that_an_engine_has_is_named_by_its_last_block() -> None:
    index = index_with(more=TOKENS[:24], less=TOKENS[:8])
    found = index.find(NamedBlocks(TOKENS))
    assert found is not None
    assert (found.most, found.beginning) == (24, keys_of(TOKENS)[2])
    index.remove_engine("more")
    found = index.find(NamedBlocks(TOKENS))
    assert found is not None
    assert (found.most, found.beginning) == (8, keys_of(TOKENS)[0])


def test_what_came_and_what_went_is_taken_in() -> None:
    index = index_with(one=TOKENS, two=TOKENS)
    index.take_changes("one", b"", joined(keys_of(TOKENS)[1:2]))
    assert cached_of(index, NamedBlocks(TOKENS)) == {"one": 8, "two": 40}
    index.take_changes("one", joined(keys_of(TOKENS)[1:2]), b"")
    assert cached_of(index, NamedBlocks(TOKENS)) == {"one": 40, "two": 40}


def test_a_snapshot_takes_the_place_of_all_before_and_its_parts_add_up() -> None:
    index = index_with(one=TOKENS)
    keys = keys_of([5, *TOKENS])
    index.take_all("one", joined(keys[:2]), is_first=True)
    index.take_all("one", joined(keys[2:]), is_first=False)
    assert cached_of(index, NamedBlocks(TOKENS)) == {}
    assert cached_of(index, NamedBlocks([5, *TOKENS])) == {"one": 40}


def test_an_engine_that_left_is_forgotten_and_its_bit_is_used_again() -> None:
    index = index_with(one=TOKENS, two=TOKENS[:16])
    index.remove_engine("one")
    assert cached_of(index, NamedBlocks(TOKENS)) == {"two": 16}
    index.add_engine("three", SMALL)
    assert cached_of(index, NamedBlocks(TOKENS)) == {"two": 16}
    for engine_id in ("two", "three", "never-there"):
        index.remove_engine(engine_id)
    assert len(index) == 0


def test_engines_with_other_blocks_are_asked_by_their_own_names() -> None:
    index = index_with(small=TOKENS)
    index.add_engine("other", OTHER)
    index.take_all("other", joined(keys_of(TOKENS, OTHER)), is_first=True)
    assert cached_of(index, NamedBlocks(TOKENS)) == {"small": 40, "other": 36}


def test_a_salt_tells_tenants_apart() -> None:
    index = index_with(one=TOKENS)
    salted = NamedBlocks(TOKENS, BlockContext(salt="acme"))
    assert cached_of(index, salted) == {}


def adapted(*adapters: tuple[str, str]) -> CacheLayout:
    return CacheLayout(4, 8, first_parent(), adapters)


def test_an_adapter_is_known_by_where_its_engine_has_it() -> None:
    index = CacheIndex()
    layouts = {
        "here": adapted(("poet", "/a")),
        "there": adapted(("law", "/c"), ("poet", "/b")),
        "alike": adapted(("law", "/d"), ("poet", "/a")),
        "without": adapted(),
    }
    poet, law = (NamedBlocks(TOKENS, BlockContext(name)) for name in ("poet", "law"))
    for engine_id, layout in layouts.items():
        index.add_engine(engine_id, layout)
        keys = joined(poet.keys(layout))
        index.take_all(engine_id, keys, is_first=True)
    # All names that differ are computed, and no other ones.
    assert len(poet._known) == 2
    assert cached_of(index, poet) == {"here": 40, "there": 40, "alike": 40}
    index.take_all("here", joined(poet.keys(layouts["there"])), is_first=True)
    assert cached_of(index, poet) == {"there": 40, "alike": 40}
    assert cached_of(index, law) == cached_of(index, NamedBlocks(TOKENS)) == {}


def test_what_no_engine_can_name_is_not_known_and_nothing_is_expected() -> None:
    index = CacheIndex()
    poet = NamedBlocks(TOKENS, BlockContext("poet"))
    assert index.find(poet) is None
    index.add_engine("earlier", SMALL)
    assert index.find(poet) is None
    assert index.expect("earlier", poet) == []
    index.add_engine("present", adapted(("poet", "/a")))
    assert cached_of(index, poet) == {}
    index.expect("present", poet)
    assert cached_of(index, poet) == {"present": 40}


def test_names_are_computed_once_and_no_further_than_somebody_has_them() -> None:
    index = index_with(one=TOKENS[:8])
    blocks = NamedBlocks(TOKENS)
    assert cached_of(index, blocks) == cached_of(index, blocks) == {"one": 8}
    ((known, _),) = blocks._known.values()
    assert len(known) == 2  # the one that is there, and the one that is not


def test_names_go_on_over_what_was_emitted() -> None:
    index = index_with(one=TOKENS)
    assert cached_of(index, NamedBlocks(TOKENS[:30]).followed_by(TOKENS[30:])) == {"one": 40}


def test_no_more_than_so_many_blocks_are_named() -> None:
    tokens = list(range(20_000))
    index = index_with(one=tokens)
    assert cached_of(index, NamedBlocks(tokens)) == {"one": 4096}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "drop", "all", "leave", "send", "settle"]),
            st.integers(0, 5),
            st.integers(0, 30),
        ),
        max_size=60,
    )
)
@pytest.mark.parametrize("seed", [1])
def test_the_index_equals_what_engines_have(seed: int, script: list[tuple[str, int, int]]) -> None:
    chance = random.Random(seed)
    prompts = [[chance.randrange(3) for _ in range(8)] + TOKENS[:24] for _ in range(4)]
    pool = [key for prompt in prompts for key in keys_of(prompt)]
    index, there = CacheIndex(), dict[str, set[bytes]]()
    on_their_way: dict[str, list[list[bytes]]] = {}
    for what, number, size in script:
        name = f"e{number}"
        keys = chance.choices(pool, k=size)
        if name not in there:
            index.add_engine(name, SMALL)
            there[name], on_their_way[name] = set(), []
        if what == "add":
            index.take_changes(name, joined(set(keys)), b"")
            there[name] |= set(keys)
        elif what == "drop":
            index.take_changes(name, b"", joined(set(keys)))
            there[name] -= set(keys)
        elif what == "all":
            index.take_all(name, joined(set(keys)), is_first=True)
            there[name] = set(keys)
        elif what == "send":
            prompt = prompts[size % len(prompts)]
            sent = index.expect(name, NamedBlocks(prompt))
            assert sent == [key for key in keys_of(prompt) if key not in there[name]]
            on_their_way[name].append(sent)
        elif what == "settle" and on_their_way[name]:
            index.settle(name, on_their_way[name].pop(size % len(on_their_way[name])))
        elif what == "leave":
            index.remove_engine(name)
            del there[name], on_their_way[name]
    has = {name: there[name].union(*on_their_way[name]) for name in there}
    for prompt in prompts:
        expected = {}
        for name, held in has.items():
            chain = keys_of(prompt)
            count = next((n for n, key in enumerate(chain) if key not in held), len(chain))
            if count:
                expected[name] = count * SMALL.unit_tokens
        assert cached_of(index, NamedBlocks(prompt)) == (expected if there else None)
    assert len(index) == len(set[bytes]().union(*has.values()))


# -- what is on its way --


def test_a_prompt_on_its_way_counts_as_cached_until_its_engine_has_told() -> None:
    index = index_with(one=[], two=[])
    blocks = NamedBlocks(TOKENS)
    first, second = index.expect("one", blocks), index.expect("one", NamedBlocks(TOKENS))
    assert cached_of(index, blocks) == {"one": 40}
    index.settle("one", first)
    assert cached_of(index, blocks) == {"one": 40}
    index.settle("one", second)
    assert cached_of(index, blocks) == {}


def test_what_the_engine_has_told_stays_when_nothing_is_expected_any_more() -> None:
    index = index_with(one=[])
    keys = index.expect("one", NamedBlocks(TOKENS))
    index.take_changes("one", joined(keys_of(TOKENS[:16])), b"")
    index.settle("one", keys)
    assert cached_of(index, NamedBlocks(TOKENS)) == {"one": 16}


def test_nothing_is_expected_of_an_engine_that_left() -> None:
    index = index_with(one=[], two=[])
    keys = index.expect("one", NamedBlocks(TOKENS))
    index.remove_engine("one")
    index.settle("one", keys)
    assert index.expect("one", NamedBlocks(TOKENS)) == []
    index.add_engine("three", SMALL)  # it has the same bit
    assert cached_of(index, NamedBlocks(TOKENS)) == {}
