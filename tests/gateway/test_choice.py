"""Which version of a model takes a request, and whether its canary does."""

from hypothesis import given
from hypothesis import strategies as st

from serving.gateway.dispatch.choice.routing import (
    CanaryView,
    VersionView,
    choose_canary,
    choose_version,
)

versions = st.lists(
    st.builds(
        VersionView,
        version=st.text("abcdef", min_size=1, max_size=4),
        num_ready=st.integers(0, 5),
        num_in_flight=st.integers(0, 50),
        is_current=st.booleans(),
    ),
    max_size=4,
    unique_by=lambda view: view.version,
)
weights = st.floats(0, 1)


def canary(weight: float, version: str = "v2", num_ready: int = 1) -> CanaryView:
    return CanaryView("demo-next", version, weight, num_ready)


def test_version_takes_requests_in_proportion_to_its_engines() -> None:
    old, new = (
        VersionView("old", 3, 30, is_current=False),
        VersionView("new", 1, 9, is_current=True),
    )
    assert choose_version([old, new]).version == "new"
    busier = VersionView("new", 1, 11, is_current=True)
    choice = choose_version([old, busier])
    assert (choice.version, choice.reason) == ("old", "fewest in flight per ready engine (10.00)")


def test_among_equally_loaded_versions_the_current_takes_it() -> None:
    views = [VersionView("a", 3, 0, is_current=False), VersionView("b", 1, 0, is_current=True)]
    assert choose_version(views).version == "b"


def test_old_version_serves_while_the_current_has_no_engine() -> None:
    views = [VersionView("old", 1, 99, is_current=False), VersionView("new", 0, 0, is_current=True)]
    choice = choose_version(views)
    assert (choice.version, choice.reason) == ("old", "the only version with a ready engine")


def test_without_a_ready_engine_the_request_waits() -> None:
    choice = choose_version([VersionView("new", 0, 3, is_current=True)])
    assert (choice.version, choice.reason) == (None, "no version has a ready engine")


@given(versions, st.randoms(use_true_random=False))
def test_choice_of_a_version_is_ready_and_of_no_order(views: list[VersionView], random) -> None:
    choice = choose_version(views)
    ready = {view.version for view in views if view.num_ready}
    assert choice.reason
    assert (choice.version in ready) if ready else (choice.version is None)
    shuffled = list(views)
    random.shuffle(shuffled)
    assert choose_version(shuffled) == choice


def test_canary_takes_its_share_of_keys() -> None:
    taken = sum(choose_canary(f"user-{n}", canary(0.05)).is_taken for n in range(20_000))
    # A standard deviation is 31; the keys are fixed, so this cannot fail by chance.
    assert 900 < taken < 1100


def test_canary_of_another_version_draws_other_users() -> None:
    keys = [f"user-{n}" for n in range(2_000)]
    drawn = [
        {key for key in keys if choose_canary(key, canary(0.5, version)).is_taken}
        for version in ("v2", "v3")
    ]
    assert 400 < len(drawn[0] & drawn[1]) < 600


def test_canary_without_a_ready_engine_takes_nothing() -> None:
    choice = choose_canary("user", canary(1.0, num_ready=0))
    assert (choice.is_taken, choice.reason) == (False, "demo-next has no ready engine")


@given(st.text(max_size=20), weights, weights)
def test_user_of_a_canary_stays_when_its_weight_is_raised(key: str, one: float, two: float) -> None:
    less, more = sorted((one, two))
    if choose_canary(key, canary(less)).is_taken:
        assert choose_canary(key, canary(more)).is_taken


@given(st.text(max_size=20))
def test_weights_of_nothing_and_all_are_exact(key: str) -> None:
    assert not choose_canary(key, canary(0.0)).is_taken
    assert choose_canary(key, canary(1.0)).is_taken
