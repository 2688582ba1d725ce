"""What operators order of slices: who leaves, who keeps off, and that it is done once. Pure."""

from serving.directory.supply_book import SupplyBook
from serving.domain.inventory import SliceRequest
from serving.domain.supply.faults import FaultCause, SliceFaults, decode_faults
from serving.domain.supply.orders import NO_ORDERS, OperatorOrder, OrderKind
from serving.domain.supply.records import SupplyState
from tests.supply_builders import group_of, hosts_of, life, pods_of

WANT = SliceRequest("spot", "v6e-8", "2x4", 2, 4)
GROUPS = (group_of(pods_of("s-0"), pods_of("s-1")),)
HOUR_S = 3600.0


def book_of(*lives: object, at_s: float = 100.0) -> SupplyBook:
    book = SupplyBook(SliceFaults())
    look(book, *lives, at_s=at_s)
    return book


def look(book: SupplyBook, *lives: object, at_s: float) -> None:
    book.look([*hosts_of("s-0"), *hosts_of("s-1")], GROUPS, lives, at_s)  # type: ignore[arg-type]


def give(book: SupplyBook, kind: OrderKind, at_s: float, until_s: float | None = None) -> None:
    (record,) = [each for each in book.records if each.name == "s-0"]
    given = OperatorOrder(
        kind, "ada", "its chips run hot", at_s, record.incarnation, "s-0", until_s
    )
    book.orders = book.orders.given(given)


def states(book: SupplyBook) -> dict[str, SupplyState]:
    return {each.name: each.state for each in book.records}


def test_quarantined_slice_is_offered_to_nobody_until_its_time_is_over() -> None:
    book = book_of()
    give(book, OrderKind.QUARANTINE, 100.0, until_s=100.0 + HOUR_S)
    look(book, at_s=101.0)
    assert states(book) == {"s-0": SupplyState.QUARANTINED, "s-1": SupplyState.FREE}
    (record,) = [each for each in book.records if each.name == "s-0"]
    assert record.reason == "quarantine ordered by ada: its chips run hot"
    assert record.until_s == 100.0 + HOUR_S
    assert [each.name for each in book.match(WANT, 101.0).free] == ["s-1"]
    book.orders = book.orders.at(101.0 + HOUR_S)
    look(book, at_s=101.0 + HOUR_S)
    assert states(book)["s-0"] == SupplyState.FREE


def test_condemned_slice_stays_condemned_after_the_directory_has_restarted() -> None:
    book = book_of()
    give(book, OrderKind.CONDEMN, 100.0)
    look(book, at_s=101.0)
    assert states(book)["s-0"] == SupplyState.CONDEMNED
    again = SupplyBook(decode_faults(book.faults.encode()))
    look(again, at_s=102.0)
    assert states(again)["s-0"] == SupplyState.CONDEMNED


def test_replica_on_a_slice_that_is_to_be_left_is_told_so() -> None:
    serving = life("r-1", hosts_of("s-0"))
    book = book_of(serving)
    assert book.leave_reason("r-1") is None
    give(book, OrderKind.CONDEMN, 100.0)
    look(book, serving, at_s=101.0)
    assert book.leave_reason("r-1") == "condemn ordered by ada: its chips run hot"
    assert book.leave_reasons() == {"r-1": "condemn ordered by ada: its chips run hot"}
    (record,) = [each for each in book.records if each.name == "s-0"]
    assert record.is_taken, "it must not be dropped under its replica"


def test_long_service_does_not_clear_what_an_operator_holds_against_a_slice() -> None:
    serving = life("r-1", hosts_of("s-0"), at_s=0.0)
    book = book_of(serving, at_s=2 * HOUR_S)
    give(book, OrderKind.CONDEMN, 2 * HOUR_S)
    look(book, serving, at_s=2 * HOUR_S + 1)
    look(book, serving, at_s=2 * HOUR_S + 2)
    assert states(book)["s-0"] == SupplyState.CONDEMNED


def test_release_forgets_what_was_before_and_nothing_that_comes_after() -> None:
    book = book_of()
    give(book, OrderKind.CONDEMN, 100.0)
    look(book, at_s=101.0)
    give(book, OrderKind.RELEASE, 102.0)
    look(book, at_s=103.0)
    assert states(book)["s-0"] == SupplyState.FREE
    whole = book.match(WANT, 103.0).free[0]
    book.note_failure(whole, frozenset(), FaultCause.PROBE, "no chips", 104.0)
    look(book, at_s=105.0)
    assert states(book)["s-0"] == SupplyState.QUARANTINED


def test_an_order_is_obeyed_once_and_written_once() -> None:
    book = book_of()
    give(book, OrderKind.QUARANTINE, 100.0, until_s=500.0)
    look(book, at_s=101.0)
    assert book.faults.is_dirty
    book.faults.is_dirty = False
    look(book, at_s=102.0)
    assert not book.faults.is_dirty


def test_without_kubernetes_a_condemned_slice_is_kept_from_replicas_too() -> None:
    book = SupplyBook(SliceFaults())
    book.look([*hosts_of("s-0")], (), (), 100.0)
    (record,) = book.records
    order = OperatorOrder(OrderKind.CONDEMN, "ada", "broken", 100.0, record.incarnation)
    book.orders = NO_ORDERS.given(order)
    book.look([*hosts_of("s-0")], (), (), 101.0)
    assert [each.state for each in book.records] == [SupplyState.CONDEMNED]
    assert book.match(WANT, 101.0).free == ()
