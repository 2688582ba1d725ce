"""What Serve was asked for and does not start is seen, and only that."""

from autoscaling.policy.classes.unseen_orders import UnseenOrders, unseen_words
from autoscaling.records import SliceView
from serving.domain.slice_lifecycle import SliceState


def replica(name: str, state: SliceState = SliceState.READY) -> SliceView:
    return SliceView(name, "spot", state, 0.0, 0.0)


def test_replicas_have_time_to_tell_of_themselves() -> None:
    orders = UnseenOrders()
    assert orders.look(0.0, {"spot": 2}, []) == ()
    assert orders.look(19.0, {"spot": 2}, []) == ()
    missing = orders.look(20.0, {"spot": 2}, [])
    assert [(each.state, each.requested_at_s) for each in missing] == [
        (SliceState.REQUESTED, 0.0)
    ] * 2
    (words,) = unseen_words(30.0, missing)
    assert "replicas of spot: the first one that is missing is 30 s late, of 2" in words


def test_new_replica_is_the_one_that_was_missing_for_longest() -> None:
    orders = UnseenOrders()
    for at_s in (0.0, 10.0):
        orders.look(at_s, {"spot": 1 + round(at_s / 10)}, [])
    (missing,) = orders.look(40.0, {"spot": 2}, [replica("a")])
    assert missing.requested_at_s == 10.0
    assert orders.look(50.0, {"spot": 2}, [replica("a"), replica("b")]) == ()


def test_orders_that_are_withdrawn_are_the_newest() -> None:
    orders = UnseenOrders()
    orders.look(0.0, {"spot": 1}, [])
    orders.look(10.0, {"spot": 3}, [])
    (missing,) = orders.look(60.0, {"spot": 1}, [])
    assert missing.requested_at_s == 0.0
    assert orders.look(70.0, {"spot": 0}, []) == ()
    assert orders.look(80.0, {"spot": 1}, []) == ()


def test_what_drains_is_no_part_of_a_target() -> None:
    orders = UnseenOrders()
    slices = [replica("a"), replica("b", SliceState.DRAINING)]
    assert orders.look(0.0, {"spot": 1}, slices) == ()
    assert orders.look(60.0, {"spot": 1}, slices) == ()
    orders.look(70.0, {"spot": 2}, slices)
    assert len(orders.look(100.0, {"spot": 2}, slices)) == 1


def test_clock_that_is_set_back_makes_no_order_younger_than_none() -> None:
    orders = UnseenOrders()
    orders.look(1000.0, {"spot": 1}, [])
    assert orders.look(500.0, {"spot": 1}, []) == ()
    (missing,) = orders.look(520.0, {"spot": 1}, [])
    assert missing.requested_at_s == 500.0
