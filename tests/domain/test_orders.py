"""What operators order: what an order replaces, how long it stands, what targets become."""

import pytest

from serving.domain.supply.orders import (
    NO_ORDERS,
    OperatorOrder,
    OrderKind,
    OrdersError,
    StandingOrders,
    decode_orders,
    ordered_targets,
)

HOUR_S = 3600.0


def order(kind: OrderKind, about: str = "", at_s: float = 0.0, **changes: object) -> OperatorOrder:
    return OperatorOrder(kind, "ada", "a drill", at_s, about, **changes)  # type: ignore[arg-type]


def test_orders_come_back_as_they_were_stored() -> None:
    orders = (
        NO_ORDERS.given(order(OrderKind.FREEZE, until_s=HOUR_S))
        .given(order(OrderKind.PIN, "spot", model="m", num_replicas=3))
        .given(order(OrderKind.CONDEMN, "s-0-pod-0", name="s-0"))
    )
    assert decode_orders(orders.encode()) == orders
    assert decode_orders(None) == NO_ORDERS
    with pytest.raises(OrdersError, match="the orders of operators"):
        decode_orders(b'{"orders": [{"kind": "dance"}]}')


def test_an_order_takes_the_place_of_what_it_contradicts_and_of_nothing_else() -> None:
    orders = (
        NO_ORDERS.given(order(OrderKind.CONDEMN, "a"))
        .given(order(OrderKind.QUARANTINE, "b"))
        .given(order(OrderKind.PIN, "a"))
        .given(order(OrderKind.PIN, "a", model="m"))
        .given(order(OrderKind.RELEASE, "a", at_s=5.0))
        .given(order(OrderKind.PIN, "a", at_s=6.0))
    )
    assert {each.kind for each in orders.of_slices.values()} == {
        OrderKind.RELEASE,
        OrderKind.QUARANTINE,
    }
    assert {(each.model, each.at_s) for each in orders.pins} == {(None, 6.0), ("m", 0.0)}
    assert orders.lifted(OrderKind.PIN, "a", "m").pins == (order(OrderKind.PIN, "a", at_s=6.0),)
    assert orders.lifted(OrderKind.PIN, "a").pins == ()
    assert orders.lifted(OrderKind.FREEZE) == orders


@pytest.mark.parametrize(
    ("kind", "until_s", "now_s", "stands"),
    [
        (OrderKind.FREEZE, None, 1000 * HOUR_S, True),
        (OrderKind.FREEZE, HOUR_S, HOUR_S - 1, True),
        (OrderKind.FREEZE, HOUR_S, HOUR_S, False),
        (OrderKind.PIN, None, 1000 * HOUR_S, True),
        # Of a slice that is gone since long, or has obeyed.
        (OrderKind.CONDEMN, None, 23 * HOUR_S, True),
        (OrderKind.CONDEMN, None, 24 * HOUR_S, False),
        (OrderKind.QUARANTINE, 48 * HOUR_S, 47 * HOUR_S, True),
    ],
)
def test_an_order_stands_for_its_time(
    kind: OrderKind, until_s: float | None, now_s: float, stands: bool
) -> None:
    given = StandingOrders((order(kind, "x", until_s=until_s),))
    assert bool(given.at(now_s).orders) == stands


@pytest.mark.parametrize(
    ("is_frozen", "pins", "expected"),
    [
        (False, (), {"reserved": 1, "spot": 6}),
        (True, (), {"reserved": 2, "spot": 6}),
        (False, (("spot", None, None),), {"reserved": 1, "spot": 4}),
        (False, (("spot", "m", 9),), {"reserved": 1, "spot": 9}),
        (False, (("spot", "other", 9),), {"reserved": 1, "spot": 6}),
        # One for this model goes before one for all, and a pin before a freeze.
        (True, (("spot", None, 5), ("reserved", "m", 0)), {"reserved": 0, "spot": 5}),
        (False, (("spot", "m", 7), ("spot", None, 5)), {"reserved": 1, "spot": 7}),
        # Bounds go before everything.
        (False, (("spot", None, 99),), {"reserved": 1, "spot": 10}),
    ],
)
def test_targets_are_as_ordered(
    is_frozen: bool,
    pins: tuple[tuple[str, str | None, int | None], ...],
    expected: dict[str, int],
) -> None:
    targets, notes = ordered_targets(
        "m",
        {"reserved": 1, "spot": 6},
        {"reserved": 2, "spot": 4},
        {"reserved": (0, 2), "spot": (0, 10)},
        is_frozen=is_frozen,
        pins=pins,
    )
    assert targets == expected
    changed = {
        name for name, count in {"reserved": 1, "spot": 6}.items() if expected[name] != count
    }
    assert len(notes) == len(changed)
    assert all("operator" in note and "the policy would have" in note for note in notes)
