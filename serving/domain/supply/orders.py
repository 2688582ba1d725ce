"""What an operator has ordered, against what the platform would do by itself.

    freeze        nothing is scaled down: no target falls, and no slice that is unwanted is dropped
    pin           the replicas of a compute class stay as many as they are, or as many as named
    quarantine    replicas keep off a slice for a time; one that has it leaves it
    condemn       the slice goes and is replaced; a replica that has it leaves it first
    release       what is held against a slice is forgotten

An order stands until it is lifted, or its time is over; the orders of a slice replace each other.
They are kept in Ray's own key-value store beside what is held against slices, so they outlive
directory and head. The directory obeys those of slices, and tells provisioner and policy of the
others. Owns the words, what replaces what, and the stored form. Pure: callers pass `now_s`,
wall-clock seconds since the epoch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pydantic import TypeAdapter, ValidationError


class OrderKind(StrEnum):
    """The kinds of orders."""

    FREEZE = "freeze"
    PIN = "pin"
    QUARANTINE = "quarantine"
    CONDEMN = "condemn"
    RELEASE = "release"


OF_SLICES = frozenset({OrderKind.QUARANTINE, OrderKind.CONDEMN, OrderKind.RELEASE})
# Long after any slice that it could be about has obeyed it, or has gone.
_OF_SLICE_KEPT_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class OperatorOrder:
    """One order. `at_s` and `until_s` are wall-clock seconds; `until_s` of `None`: until lifted.

    `about` is empty for a freeze, a compute class for a pin, and the incarnation of a slice
    otherwise; `name` is that slice's. `model` and `num_replicas` belong to a pin: without a model
    it is for every model, without a number for as many replicas as there are.
    """

    kind: OrderKind
    by: str
    reason: str
    at_s: float
    about: str = ""
    name: str = ""
    until_s: float | None = None
    model: str | None = None
    num_replicas: int | None = None

    @property
    def words(self) -> str:
        """Who ordered it and why, for a log line or a table."""
        return f"{self.kind} ordered by {self.by}: {self.reason}"

    def stands(self, now_s: float) -> bool:
        """Returns whether it is to be obeyed now."""
        if self.until_s is not None:
            return now_s < self.until_s
        return self.kind not in OF_SLICES or now_s < self.at_s + _OF_SLICE_KEPT_S


@dataclass(frozen=True, slots=True)
class StandingOrders:
    """All orders, the oldest first."""

    orders: tuple[OperatorOrder, ...] = ()

    @property
    def freeze(self) -> OperatorOrder | None:
        """The order that nothing is scaled down; `None` without one."""
        return next((each for each in self.orders if each.kind == OrderKind.FREEZE), None)

    @property
    def of_slices(self) -> Mapping[str, OperatorOrder]:
        """The orders of slices, by incarnation."""
        return {each.about: each for each in self.orders if each.kind in OF_SLICES}

    @property
    def pins(self) -> tuple[OperatorOrder, ...]:
        """The pins."""
        return tuple(each for each in self.orders if each.kind == OrderKind.PIN)

    def at(self, now_s: float) -> "StandingOrders":
        """Returns those that stand now."""
        return StandingOrders(tuple(each for each in self.orders if each.stands(now_s)))

    def given(self, order: OperatorOrder) -> "StandingOrders":
        """Returns the orders with one more, in place of what it contradicts."""
        rest = (each for each in self.orders if not _is_about_the_same(each, order))
        return StandingOrders((*rest, order))

    def lifted(
        self, kind: OrderKind, about: str = "", model: str | None = None
    ) -> "StandingOrders":
        """Returns the orders without those of this kind about this; all models' with `None`."""
        return StandingOrders(
            tuple(
                each
                for each in self.orders
                if (each.kind, each.about) != (kind, about) or (model not in (None, each.model))
            )
        )

    def encode(self) -> bytes:
        """Returns the orders as they are stored."""
        return _ORDERS.dump_json(self)


NO_ORDERS = StandingOrders()


class OrdersError(ValueError):
    """The stored orders are not in this version's form, because another version wrote them."""


_ORDERS = TypeAdapter(StandingOrders)


def decode_orders(text: bytes | None) -> StandingOrders:
    """Returns the stored orders; `None` is what is found where nobody ever gave one.

    Raises:
        OrdersError: another version wrote them.
    """
    if text is None:
        return NO_ORDERS
    try:
        return _ORDERS.validate_json(text)
    except ValidationError as error:
        raise OrdersError(f"the orders of operators: {error}") from error


# A compute class, the model or all, and the number of replicas or as many as there are.
Pin = tuple[str, str | None, int | None]


def pinned_targets(
    model: str,
    present: Mapping[str, int],
    bounds: Mapping[str, tuple[int, int]],
    pins: Iterable[Pin],
) -> dict[str, int]:
    """Returns the targets that orders set, of the classes of `present` that are pinned.

    The arguments are those of `ordered_targets`.
    """
    pins = list(pins)
    pinned = {}
    for compute_class, now in present.items():
        of_class = [each for each in pins if each[0] == compute_class and each[1] in (None, model)]
        # One for this model goes before one for all.
        pin = max(of_class, key=lambda each: each[1] is not None, default=None)
        if pin is not None:
            least, most = bounds.get(compute_class, (now, now))
            wanted = now if pin[2] is None else pin[2]
            pinned[compute_class] = min(max(wanted, least), most)
    return pinned


def ordered_targets(
    model: str,
    targets: Mapping[str, int],
    present: Mapping[str, int],
    bounds: Mapping[str, tuple[int, int]],
    *,
    is_frozen: bool,
    pins: Iterable[Pin],
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Returns what becomes of a policy's targets under orders, and what differs, in words.

    `present` are the targets that stand, `bounds` the least and the most replicas, all by compute
    class. `pins` are of a class, for a model or all, and at a number or as many as there are. A pin
    goes before a freeze. What is pinned beyond the bounds gets what they allow.
    """
    ordered = dict(targets)
    notes = []
    standing = {name: present.get(name, target) for name, target in targets.items()}
    pinned = pinned_targets(model, standing, bounds, pins)
    for compute_class, target in targets.items():
        now = standing[compute_class]
        if compute_class in pinned:
            ordered[compute_class] = pinned[compute_class]
            why = f"{compute_class} is pinned at {ordered[compute_class]}"
        elif is_frozen and target < now:
            ordered[compute_class] = now
            why = f"scaling down is frozen: {compute_class} stays at {now}"
        else:
            continue
        if ordered[compute_class] != target:
            notes.append(f"by an operator's order {why}; the policy would have {target}")
    return ordered, tuple(notes)


def _is_about_the_same(one: OperatorOrder, other: OperatorOrder) -> bool:
    if one.kind in OF_SLICES and other.kind in OF_SLICES:
        return one.about == other.about
    return (one.kind, one.about, one.model) == (other.kind, other.about, other.model)
