"""`slicewise order`: what is typed becomes an order, or a refusal that says what can be ordered."""

from dataclasses import dataclass, field

import pytest
from typer.testing import CliRunner

from autoscaling.orders.command import make_order_app
from serving.domain.supply.orders import OrderKind, StandingOrders, decode_orders
from serving.domain.supply.records import (
    SupplyRecord,
    SupplyReport,
    SupplyState,
    encode_supply,
)


def record(incarnation: str, name: str, state: SupplyState = SupplyState.FREE) -> SupplyRecord:
    return SupplyRecord(incarnation, name, state, "", 0.0, "spot", "v6e", "2x4", 8, ())


@dataclass
class Store:
    """Keeps what is stored, as Ray's head would, and the time."""

    orders: bytes | None = None
    now_s: float = 1_000.0
    supply: bytes | None = field(
        default_factory=lambda: encode_supply(
            SupplyReport(
                "v",
                (
                    record("pod-a", "spot-0"),
                    record("pod-b", "spot-1", SupplyState.CONDEMNED),
                    record("pod-c", "spot-1"),
                ),
            )
        )
    )

    def read_orders(self) -> bytes | None:
        return self.orders

    def read_supply(self) -> bytes | None:
        return self.supply

    def write_orders(self, text: bytes) -> None:
        self.orders = text

    @property
    def standing(self) -> StandingOrders:
        return decode_orders(self.orders)


def run(store: Store, *arguments: str) -> tuple[int, str]:
    app = make_order_app(lambda _address, _application: store, clock=lambda: store.now_s)
    result = CliRunner().invoke(app, [*arguments])
    return result.exit_code, result.output


def test_orders_are_given_listed_and_lifted() -> None:
    store = Store()
    assert run(store, "list") == (0, "no orders stand\n")
    assert run(store, "freeze", "--reason", "a drill", "--by", "ada", "--for", "2h")[0] == 0
    assert run(store, "pin", "spot", "--at", "3", "--model", "m", "--reason", "load test")[0] == 0
    store.now_s += 60.0
    code, said = run(store, "list")
    assert code == 0
    assert "freeze: a drill (by ada, 60 s ago, for another 7140 s)" in said
    assert "pin spot of m at 3: load test" in said
    assert store.standing.freeze is not None
    assert run(store, "thaw")[0] == 0
    assert run(store, "unpin", "spot")[0] == 0
    assert store.standing.orders == ()


@pytest.mark.parametrize(
    ("arguments", "kind", "about"),
    [
        (("condemn", "spot-0", "--reason", "hot"), OrderKind.CONDEMN, "pod-a"),
        (("condemn", "pod-c", "--reason", "hot"), OrderKind.CONDEMN, "pod-c"),
        (("quarantine", "spot-0", "--reason", "hot"), OrderKind.QUARANTINE, "pod-a"),
        (("release", "spot-0"), OrderKind.RELEASE, "pod-a"),
    ],
)
def test_slice_is_named_by_its_name_or_its_incarnation(
    arguments: tuple[str, ...], kind: OrderKind, about: str
) -> None:
    store = Store()
    assert run(store, *arguments)[0] == 0
    (order,) = store.standing.orders
    assert (order.kind, order.about) == (kind, about)
    assert (order.until_s is not None) == (kind == OrderKind.QUARANTINE)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("condemn", "spot-9", "--reason", "x"), "there is no slice 'spot-9'; there are: spot-0"),
        (
            ("condemn", "spot-1", "--reason", "x"),
            "2 slices have the name 'spot-1', name one by: pod-b is condemned; pod-c is free",
        ),
        (("freeze", "--reason", "  "), "--reason is empty"),
        (("freeze", "--reason", "x", "--for", "2 fortnights"), "such as 90s, 30m, 2h or 1d"),
        (("freeze", "--reason", "x", "--for", "0s"), "such as 90s, 30m, 2h or 1d"),
        (("thaw",), "no such freeze stands; what stands: no orders stand"),
        (("unpin", "spot"), "no such pin stands"),
    ],
)
def test_what_cannot_be_ordered_is_refused_in_words_and_changes_nothing(
    arguments: tuple[str, ...], words: str
) -> None:
    store = Store()
    code, said = run(store, *arguments)
    assert code == 2
    assert words in " ".join(said.split())
    assert store.orders is None


def test_orders_of_another_version_are_not_overwritten() -> None:
    store = Store(orders=b'{"orders": [{"kind": "dance"}]}')
    code, said = run(store, "freeze", "--reason", "x")
    assert code == 2
    assert "the orders of operators" in said
    assert store.orders == b'{"orders": [{"kind": "dance"}]}'


def test_without_a_report_no_slice_can_be_named() -> None:
    code, said = run(Store(supply=None), "condemn", "spot-0", "--reason", "x")
    assert code == 2
    assert "no directory has reported slices here" in said
