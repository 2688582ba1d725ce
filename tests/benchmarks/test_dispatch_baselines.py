"""The ways to choose that the product is compared with do what they are said to do."""

from benchmarks.dispatch_baselines import (
    Asked,
    ConsistentHash,
    PrefixTree,
    SessionAffinity,
    num_found,
    pooled_ratio,
    sessions_of,
    uncached_at_least,
)

IDLE = (0, 0, 0, 0)


def test_a_session_stays_where_it_began() -> None:
    baseline = SessionAffinity()
    assert baseline.choose(Asked(1, [1]), (1, 0, 2, 3)) == 1
    assert baseline.choose(Asked(1, [1, 2]), (0, 9, 0, 0)) == 1
    assert baseline.choose(Asked(2, [5]), (0, 9, 0, 0)) == 0


def test_a_hash_is_the_same_at_every_gateway_and_passes_what_is_too_full() -> None:
    first, second = ConsistentHash(4), ConsistentHash(4)
    chosen = {session: first.choose(Asked(session, []), IDLE) for session in range(100)}
    assert all(second.choose(Asked(s, []), IDLE) == engine for s, engine in chosen.items())
    assert set(chosen.values()) == {0, 1, 2, 3}
    full = [9 if engine == chosen[7] else 0 for engine in range(4)]
    assert first.choose(Asked(7, []), full) != chosen[7]


def test_a_tree_finds_what_was_sent_while_loads_are_alike() -> None:
    tree = PrefixTree(4)
    here = tree.choose(Asked(0, [1, 2, 3]), IDLE)
    assert tree.choose(Asked(1, [1, 2, 9]), IDLE) == here
    assert tree.choose(Asked(2, [7, 8]), IDLE) != here
    apart = [40 if engine == here else 0 for engine in range(4)]
    assert tree.choose(Asked(3, [1, 2, 3]), apart) != here


def test_conversations_are_told_apart_behind_what_all_begin_with() -> None:
    prompts = [[0, number] for number in range(1, 400)]
    prompts += [[0, 5, 500], [0, 7, 700], [0, 5, 500, 501]]
    sessions = sessions_of(prompts)
    assert len(set(sessions)) == 399
    assert sessions[399] == sessions[401] == sessions[4]
    assert sessions[400] == sessions[6]


def test_one_cache_finds_what_has_come_and_is_still_there() -> None:
    assert num_found([1, 2, 3], {1, 2}) == 2
    assert num_found([1, 2], {2}) == 0
    # The last token of a prompt is always computed.
    assert pooled_ratio([[1, 2], [1, 2], [3]], [1024, 1024, 512], 1) == 1023 / 2560


def test_what_has_to_be_computed_is_what_never_came_before() -> None:
    prompts = [[1, 2], [1, 2, 3], [4, 1], [1, 2]]

    assert uncached_at_least(prompts, [1000, 1536, 1024, 1024]) == [1000, 512, 1024, 1]
