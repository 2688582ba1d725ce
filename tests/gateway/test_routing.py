"""Which engine a request goes to, and the reason that is given."""

from hypothesis import given
from hypothesis import strategies as st

from serving.gateway.routing import EngineView, choose_engine

views = st.builds(
    EngineView,
    engine_id=st.text("abcdef", min_size=1, max_size=3),
    num_in_flight=st.integers(0, 3),
    num_dispatched=st.integers(0, 3),
    is_draining=st.booleans(),
    is_leaving=st.booleans(),
    has_isolated=st.booleans(),
)
fleets = st.lists(views, max_size=6, unique_by=lambda view: view.engine_id)


def test_request_goes_where_the_fewest_are_in_flight() -> None:
    route = choose_engine([EngineView("a", 3, 0), EngineView("b", 1, 9)], needs_isolation=False)
    assert (route.engine_id, route.reason) == ("b", "fewest in flight (1)")


def test_among_equals_the_least_used_takes_it() -> None:
    route = choose_engine([EngineView("a", 1, 5), EngineView("b", 1, 4)], needs_isolation=False)
    assert route.engine_id == "b"


def test_without_engines_the_request_waits_and_knows_why() -> None:
    route = choose_engine([], needs_isolation=False)
    assert (route.engine_id, route.reason) == (None, "no engine is ready")


def test_draining_engine_takes_only_what_has_nowhere_else_to_go() -> None:
    draining, other = EngineView("a", 0, 0, is_draining=True), EngineView("b", 9, 9)
    assert choose_engine([draining, other], needs_isolation=False).engine_id == "b"
    assert choose_engine([draining], needs_isolation=False).engine_id == "a"


def test_engine_that_is_leaving_takes_nothing() -> None:
    leaving = EngineView("a", 0, 0, is_draining=True, is_leaving=True)
    assert choose_engine([leaving], needs_isolation=False).engine_id is None


def test_suspect_does_not_join_another_suspect() -> None:
    engines = [EngineView("a", 0, 0, has_isolated=True), EngineView("b", 5, 5)]
    assert choose_engine(engines, needs_isolation=True).engine_id == "b"
    assert choose_engine(engines, needs_isolation=False).engine_id == "a"
    route = choose_engine(engines[:1], needs_isolation=True)
    assert (route.engine_id, route.reason) == (None, "every engine has an isolated request")


@given(fleets, st.booleans())
def test_choice_is_allowed_and_no_allowed_one_is_idler(
    fleet: list[EngineView], needs_isolation: bool
) -> None:
    taking = [view for view in fleet if not view.is_draining]
    taking = taking or [view for view in fleet if not view.is_leaving]
    allowed = {
        view.engine_id: view.num_in_flight
        for view in taking
        if not (needs_isolation and view.has_isolated)
    }
    route = choose_engine(fleet, needs_isolation=needs_isolation)
    assert route.reason
    if route.engine_id is None:
        assert not allowed
    else:
        assert allowed[route.engine_id] == min(allowed.values())


@given(fleets, st.randoms(use_true_random=False))
def test_choice_does_not_depend_on_the_order_of_engines(fleet: list[EngineView], random) -> None:
    shuffled = list(fleet)
    random.shuffle(shuffled)
    chosen = choose_engine(fleet, needs_isolation=False)
    assert choose_engine(shuffled, needs_isolation=False) == chosen
