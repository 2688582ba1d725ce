"""A beginning is wanted on as many engines as its share of the requests is worth."""

from serving.gateway.dispatch.choice.cache_index import Found
from serving.gateway.dispatch.choice.popular import PopularBeginnings

HOT, COLD = b"hot", b"cold"


def found(beginning: bytes | None, num_cached: list[int]) -> Found:
    by_engine = {f"e{number}": each for number, each in enumerate(num_cached)}
    return Found(by_engine, max(num_cached), beginning)


def after(*came: bytes | None, times: int) -> PopularBeginnings:
    popular = PopularBeginnings()
    for _ in range(times):
        for beginning in came:
            popular.came(beginning)
    return popular


def test_share_of_requests_decides_how_many_engines_ought_to_have_it() -> None:
    popular = after(HOT, None, None, COLD, None, None, None, None, HOT, HOT, times=20)
    # Three of ten requests are worth 2.4 of eight engines, one of ten is worth 0.8.
    assert popular.is_copy_wanted(found(HOT, [6000]), 8)
    assert popular.is_copy_wanted(found(HOT, [6000, 6000]), 8)
    assert not popular.is_copy_wanted(found(HOT, [6000] * 3), 8)
    assert not popular.is_copy_wanted(found(COLD, [6000]), 8)
    assert popular.is_copy_wanted(found(COLD, [6000]), 11)
    assert not popular.is_copy_wanted(found(b"never seen", [6000]), 8)


def test_engine_that_has_little_of_it_has_no_copy() -> None:
    popular = after(HOT, times=100)
    assert popular.is_copy_wanted(found(HOT, [6000, 2999]), 2)
    assert not popular.is_copy_wanted(found(HOT, [6000, 3000]), 2)


def test_what_nobody_has_is_not_spread() -> None:
    nothing = Found({}, 0, None)
    assert not after(None, times=100).is_copy_wanted(nothing, 8)


def test_few_requests_say_nothing() -> None:
    assert not after(HOT, times=63).is_copy_wanted(found(HOT, [6000]), 8)
    assert after(HOT, times=64).is_copy_wanted(found(HOT, [6000]), 8)


def test_what_was_popular_long_ago_is_forgotten() -> None:
    popular = after(HOT, times=600)
    for number in range(512):
        popular.came(b"%d" % number)
    assert not popular.is_copy_wanted(found(HOT, [6000]), 8)
