"""Defines `slicewise order`: what an operator orders against what the platform does by itself.

Runs where Ray's head can be reached: in the head pod, or with `--ray-address`. Who may do that may
order; no API key of a gateway can. Owns the words of the command line and the answers; what orders
mean is `serving.domain.supply.orders`'.
"""

import getpass
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Protocol

import typer

from autoscaling.orders.errors import OrdersUnusableError
from serving.domain.supply.orders import (
    OperatorOrder,
    OrderKind,
    OrdersError,
    StandingOrders,
    decode_orders,
)
from serving.domain.supply.records import SupplyRecord, SupplyReportError, decode_supply

_UNUSABLE = 2
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class OrderStore(Protocol):
    """Where orders are kept, and where the directory says which slices there are."""

    def read_orders(self) -> bytes | None:
        """Returns the stored orders; `None` if nobody ever gave one."""

    def read_supply(self) -> bytes | None:
        """Returns the directory's last report of slices; `None` if there is none."""

    def write_orders(self, text: bytes) -> None:
        """Stores the orders."""


OpenStore = Callable[[str, str], OrderStore]


def open_ray_store(ray_address: str, application: str) -> OrderStore:
    """Returns the store of an application in the head of a running Ray cluster."""
    # Ray takes seconds to import, and every `slicewise` command loads this module.
    from autoscaling.orders.store import RayOrderStore  # noqa: PLC0415

    return RayOrderStore(ray_address, application)


def parse_duration(text: str) -> float:
    """Returns the seconds of `90s`, `30m`, `2h` or `1d`.

    Raises:
        OrdersUnusableError: it is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None or float(found[1]) <= 0:
        raise OrdersUnusableError(f"--for {text!r}: a length such as 90s, 30m, 2h or 1d is needed")
    return float(found[1]) * _UNITS_S[found[2]]


def find_slice(name: str, text: bytes | None) -> SupplyRecord:
    """Returns the slice of that name or incarnation in the directory's report `text`.

    Raises:
        OrdersUnusableError: there is none, or more than one of that name.
    """
    if text is None:
        raise OrdersUnusableError("no directory has reported slices here; is the application up?")
    try:
        records = decode_supply(text).slices
    except SupplyReportError as error:
        raise OrdersUnusableError(str(error)) from error
    found = [each for each in records if name in (each.name, each.incarnation)]
    if len(found) == 1:
        return found[0]
    if not found:
        known = ", ".join(each.name for each in records) or "none"
        raise OrdersUnusableError(f"there is no slice {name!r}; there are: {known}")
    which = "; ".join(f"{each.incarnation} is {each.state}" for each in found)
    raise OrdersUnusableError(f"{len(found)} slices have the name {name!r}, name one by: {which}")


def listed(orders: StandingOrders, now_s: float) -> list[str]:
    """Returns a line for each order that stands."""
    return [_line(each, now_s) for each in orders.at(now_s).orders] or ["no orders stand"]


def _line(order: OperatorOrder, now_s: float) -> str:
    about = order.name or order.about
    if order.kind == OrderKind.PIN:
        about += f" of {order.model}" if order.model else " of every model"
        about += " as it is" if order.num_replicas is None else f" at {order.num_replicas}"
    words = " ".join(filter(None, (str(order.kind), about)))
    ago = f"{now_s - order.at_s:.0f} s ago"
    until = "" if order.until_s is None else f", for another {order.until_s - now_s:.0f} s"
    return f"{words}: {order.reason} (by {order.by}, {ago}{until})"


class _Desk:
    """One call of the command: reads the orders, changes them, says what stands."""

    def __init__(self, store: OrderStore, now_s: float) -> None:
        self.store = store
        self.now_s = now_s

    def standing(self) -> StandingOrders:
        try:
            return decode_orders(self.store.read_orders()).at(self.now_s)
        except OrdersError as error:
            raise OrdersUnusableError(str(error)) from error

    def give(self, order: OperatorOrder) -> None:
        self.store.write_orders(self.standing().given(order).encode())
        typer.echo(_line(order, self.now_s))

    def lift(self, kind: OrderKind, about: str = "", model: str | None = None) -> None:
        orders = self.standing()
        rest = orders.lifted(kind, about, model)
        if rest == orders:
            raise OrdersUnusableError(
                f"no such {kind} stands; what stands: {'; '.join(listed(orders, self.now_s))}"
            )
        self.store.write_orders(rest.encode())
        typer.echo(f"lifted: {kind} {about}".rstrip())


RayAddress = Annotated[str, typer.Option("--ray-address", help="Address of Ray's head.")]
Application = Annotated[str, typer.Option("--application", help="The Serve application.")]
Reason = Annotated[str, typer.Option("--reason", help="Why, for whoever reads it next.")]
By = Annotated[str | None, typer.Option("--by", help="Who. [default: the user's name]")]
For = Annotated[str | None, typer.Option("--for", help="How long: 90s, 30m, 2h, 1d.")]
ComputeClassName = Annotated[str, typer.Argument(help="A compute class.")]
Model = Annotated[str | None, typer.Option("--model", help="One model; left out: every model.")]
SliceName = Annotated[str, typer.Argument(help="The name or the incarnation of a slice.")]
_AUTO, _NAME = "auto", "slicewise"


def make_order_app(
    open_store: OpenStore = open_ray_store, clock: Callable[[], float] = time.time
) -> typer.Typer:
    """Returns the commands, on the stores that `open_store` opens; `clock` tells the time in s."""
    app = typer.Typer(
        help="Order the platform what it would not do by itself.", no_args_is_help=True
    )

    def desk(ray_address: str, application: str) -> _Desk:
        return _Desk(open_store(ray_address, application), clock())

    @app.command("list")
    def list_orders(ray_address: RayAddress = _AUTO, application: Application = _NAME) -> None:
        """Show the orders that stand."""
        with _refusing():
            at = desk(ray_address, application)
            for line in listed(at.standing(), at.now_s):
                typer.echo(line)

    @app.command()
    def freeze(
        reason: Reason,
        by: By = None,
        for_: For = None,
        ray_address: RayAddress = _AUTO,
        application: Application = _NAME,
    ) -> None:
        """Scale nothing down: no target falls, no unwanted slice is dropped."""
        with _refusing():
            at = desk(ray_address, application)
            at.give(_order(OrderKind.FREEZE, by, reason, at.now_s, for_))

    @app.command()
    def thaw(ray_address: RayAddress = _AUTO, application: Application = _NAME) -> None:
        """Lift the freeze."""
        with _refusing():
            desk(ray_address, application).lift(OrderKind.FREEZE)

    @app.command()
    def pin(
        compute_class: ComputeClassName,
        reason: Reason,
        num_replicas: Annotated[
            int | None, typer.Option("--at", min=0, help="Left out: as many as there are.")
        ] = None,
        model: Model = None,
        by: By = None,
        for_: For = None,
        ray_address: RayAddress = _AUTO,
        application: Application = _NAME,
    ) -> None:
        """Keep the replicas of a compute class at a number, within their bounds."""
        with _refusing():
            at = desk(ray_address, application)
            order = _order(OrderKind.PIN, by, reason, at.now_s, for_, about=compute_class)
            at.give(replace(order, model=model, num_replicas=num_replicas))

    @app.command()
    def unpin(
        compute_class: ComputeClassName,
        model: Model = None,
        ray_address: RayAddress = _AUTO,
        application: Application = _NAME,
    ) -> None:
        """Lift the pins of a compute class."""
        with _refusing():
            desk(ray_address, application).lift(OrderKind.PIN, compute_class, model)

    @app.command()
    def quarantine(
        name: SliceName,
        reason: Reason,
        for_: Annotated[str, typer.Option("--for", help="How long: 90s, 30m, 2h, 1d.")] = "1h",
        by: By = None,
        ray_address: RayAddress = _AUTO,
        application: Application = _NAME,
    ) -> None:
        """Keep replicas off a slice for a time; one that has it drains and leaves it."""
        with _refusing():
            _order_slice(
                desk(ray_address, application), OrderKind.QUARANTINE, name, by, reason, for_
            )

    @app.command()
    def condemn(
        name: SliceName,
        reason: Reason,
        by: By = None,
        ray_address: RayAddress = _AUTO,
        application: Application = _NAME,
    ) -> None:
        """Have a slice replaced; whoever has it drains and leaves it first."""
        with _refusing():
            _order_slice(desk(ray_address, application), OrderKind.CONDEMN, name, by, reason, None)

    @app.command()
    def release(
        name: SliceName,
        reason: Reason = "it may be used again",
        by: By = None,
        ray_address: RayAddress = _AUTO,
        application: Application = _NAME,
    ) -> None:
        """Forget what is held against a slice, by whom ever."""
        with _refusing():
            _order_slice(desk(ray_address, application), OrderKind.RELEASE, name, by, reason, None)

    return app


def _order(
    kind: OrderKind,
    by: str | None,
    reason: str,
    now_s: float,
    for_: str | None,
    about: str = "",
    name: str = "",
) -> OperatorOrder:
    until_s = None if for_ is None else now_s + parse_duration(for_)
    if not reason.strip():
        raise OrdersUnusableError("--reason is empty; whoever reads the order next needs one")
    return OperatorOrder(kind, by or getpass.getuser(), reason, now_s, about, name, until_s)


def _order_slice(
    at: _Desk, kind: OrderKind, name: str, by: str | None, reason: str, for_: str | None
) -> None:
    found = find_slice(name, at.store.read_supply())
    about, named = found.incarnation, found.name
    at.give(_order(kind, by, reason, at.now_s, for_, about, named))


@contextmanager
def _refusing() -> Iterator[None]:
    """Ends the command with what cannot be done, in words."""
    try:
        yield
    except OrdersUnusableError as error:
        typer.echo(f"slicewise order: {error}", err=True)
        raise typer.Exit(_UNUSABLE) from error


order = make_order_app()
