"""Decides who is admitted to a model, before anything is promised to a client.

Owns the bounds on the bodies of requests, the refusals in front of a model and the wait there until
an engine takes requests, and when the next engine is expected. Does not own the requests that have
been admitted (`dispatcher`), nor which engine takes one.

All versions of a model share one queue, because a request that waits has no version yet.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from starlette.types import Receive

from serving.config.application import GatewayConfig
from serving.domain.errors import (
    BodyTimeoutError,
    GatewayBehindError,
    MalformedRequestError,
    NoEngineInTimeError,
    NoRoomForBodyError,
    OverloadedError,
    RequestTooLargeError,
)
from serving.domain.limits import FLEX_DEADLINE_S, MAX_WAITING_REQUESTS, REQUEST_DEADLINE_S
from serving.domain.models.request_fields.service_class import ServiceClass
from serving.gateway.telemetry.request_telemetry import ModelTelemetry, present_context

# An engine whose link broke is linked again within a second or two, and a gateway that has just
# begun finds its engines in as long.
_BACK_SOON_S = 5.0


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """The facts of a request that the edge knows before rendering: enough to choose who takes it.

    `name` is its `model` field; `None` means that it gave none. `key` is its user, or its own id if
    it names no user. A request that `needs_engine` waits until an engine takes it. The others
    (counting tokens, for instance) are answered by the gateway alone. One that `is_prepared_apart`
    is read and rendered in a fork. Its client waits `patience_s` for a first token; `None` means as
    long as others of its class.
    """

    name: str | None
    key: str
    needs_engine: bool = True
    is_prepared_apart: bool = False
    service_class: ServiceClass = ServiceClass.STANDARD
    patience_s: float | None = None


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """The limits of a request: how long and how many may wait, how many engines one may take down.

    `max_behind_s` is how late the gateway may be with the tokens it has.
    """

    request_deadline_s: float = REQUEST_DEADLINE_S
    max_engine_losses: int = 3
    retry_after_s: float = 30.0
    refused_retry_after_s: float = 1.0
    call_timeout_s: float = 30.0
    max_waiting_requests: int = MAX_WAITING_REQUESTS
    max_behind_s: float = 2.0
    flex_deadline_s: float = FLEX_DEADLINE_S

    def patience_s(self, service_class: ServiceClass) -> float:
        """Returns how long a client waits for the first token, if it does not say."""
        is_batch = service_class is ServiceClass.BATCH
        return self.flex_deadline_s if is_batch else self.request_deadline_s

    @classmethod
    def of(cls, gateway: GatewayConfig) -> "FleetLimits":
        """Returns the limits of every model at this gateway."""
        return cls(
            request_deadline_s=gateway.request_deadline_s,
            max_engine_losses=gateway.max_engine_losses,
            max_waiting_requests=gateway.max_waiting_requests,
            max_behind_s=gateway.max_behind_s,
            flex_deadline_s=gateway.flex_deadline_s,
        )


@dataclass(frozen=True, slots=True)
class QueueState:
    """The state of the admitted requests at this moment.

    `behind_s` is how late the gateway is with the tokens it has; `num_waiting` are the admitted
    requests that wait for an engine.
    """

    behind_s: float
    num_waiting: int


class AdmissionQueue:
    """The requests that wait in front of one model at one gateway. Used from one event loop."""

    def __init__(
        self, model: str, limits: FleetLimits, telemetry: ModelTelemetry | None = None
    ) -> None:
        self.limits = limits
        self.telemetry = telemetry or ModelTelemetry(model, time.monotonic())
        self._model = model
        # Callers inside `wait`, in the order in which they came, since when, and their class.
        self._waiting: dict[object, tuple[float, ServiceClass]] = {}
        self._engine_came = asyncio.Event()
        self._next_engine_at_s: float | None = None  # monotonic

    @property
    def num_waiting(self) -> int:
        """The number of callers inside `wait`."""
        return len(self._waiting)

    @property
    def num_batch_waiting(self) -> int:
        """The number of those callers whose request is batch work."""
        return sum(each is ServiceClass.BATCH for _, each in self._waiting.values())

    def first_since_s(self, otherwise_s: float) -> float:
        """Returns since when the first request waits (monotonic), batch work aside.

        It is `otherwise_s` if none does.
        """
        urgent = (at_s for at_s, each in self._waiting.values() if each is not ServiceClass.BATCH)
        return next(urgent, otherwise_s)

    async def admit(
        self, state: QueueState, can_enter: Callable[[], bool], patience_s: float
    ) -> None:
        """Waits until `can_enter()` is true, which means that an engine takes requests.

        Its client waits for `patience_s`. It does not have to where the next engine is known to
        come later than that, unless one that was away for a moment is back soon.

        Raises:
            GatewayBehindError: this gateway does not keep up with the tokens it has.
            OverloadedError: too many requests wait already.
            NoEngineInTimeError: no engine came in its time, or will.
        """
        context = present_context(time.monotonic())
        if state.behind_s > self.limits.max_behind_s:
            self.reject(context.service_class)
            raise GatewayBehindError(self._model, state.behind_s)
        if can_enter():
            return
        num_waiting = state.num_waiting + self.num_waiting
        if num_waiting >= self.limits.max_waiting_requests:
            self.reject(context.service_class)
            raise OverloadedError(self._model, num_waiting, self.retry_after_s)
        began_at_s = time.monotonic()
        context.queued()
        caller = object()
        load = self.telemetry.load_of(context.service_class)
        self._waiting[caller] = began_at_s, context.service_class
        load.enqueued(began_at_s)
        try:
            await self._wait(can_enter, patience_s)
        finally:
            del self._waiting[caller]
            context.dequeued(time.monotonic() - began_at_s)
        load.admitted(time.monotonic())

    async def _wait(self, can_enter: Callable[[], bool], patience_s: float) -> None:
        soon_s = min(patience_s, _BACK_SOON_S)
        if await self._can_enter_within(soon_s, can_enter):
            return
        left_s = patience_s - soon_s
        if (self.next_engine_in_s or 0.0) > left_s:
            raise self.no_engine_in_time(soon_s)
        if not await self._can_enter_within(left_s, can_enter):
            raise self.no_engine_in_time(patience_s)

    async def _can_enter_within(self, timeout_s: float, can_enter: Callable[[], bool]) -> bool:
        """Waits until `can_enter()` is true, for new engines; returns `False` on a timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                while not can_enter():
                    self._engine_came.clear()
                    await self._engine_came.wait()
        except TimeoutError:
            return False
        return True

    def reject(self, service_class: ServiceClass) -> None:
        """Counts a request that is refused at once, because it is load all the same."""
        self.telemetry.load_of(service_class).enqueued(time.monotonic())

    def look_again(self) -> None:
        """Wakes those that wait, because an engine or a version has come."""
        self._engine_came.set()

    def expect_engine(self, in_s: float | None) -> None:
        """Sets when the next engine is expected to be ready; `None` means that nobody knows."""
        self._next_engine_at_s = None if in_s is None else time.monotonic() + in_s

    @property
    def next_engine_in_s(self) -> float | None:
        """The seconds until the next engine is due; `None` if none is known to come."""
        if self._next_engine_at_s is None:
            return None
        in_s = self._next_engine_at_s - time.monotonic()
        return in_s if in_s > 0 else None

    @property
    def retry_after_s(self) -> float:
        """The seconds until a refused client may try again, from when the next engine is due."""
        return self.next_engine_in_s or self.limits.retry_after_s

    def no_engine_in_time(self, waited_s: float) -> NoEngineInTimeError:
        """Returns the refusal of a request that has waited so long, or would in vain."""
        return NoEngineInTimeError(self._model, waited_s, self.retry_after_s)


# -- bodies, before anything else is known of a request --


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The bounds of bodies: bytes of one, bytes of all in flight, and seconds for one to come."""

    max_bytes: int
    max_bytes_of_all: int
    timeout_s: float


class BodyRoom:
    """Counts the bytes of all bodies that a gateway holds. Used from one event loop."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self.num_held = 0

    def hold(self) -> "HeldBody":
        """Returns the place of one body, which its request gives back when it ends."""
        return HeldBody(self, self._limits)

    def take(self, num_bytes: int) -> None:
        """Takes room for so many bytes. Raises `NoRoomForBodyError` if there is not so much."""
        if self.num_held + num_bytes > self._limits.max_bytes_of_all:
            raise NoRoomForBodyError(self._limits.max_bytes_of_all)
        self.num_held += num_bytes


class HeldBody:
    """The room of one body: what was declared, or what has come if that was not."""

    def __init__(self, room: BodyRoom, limits: BodyLimits) -> None:
        self._room, self._limits = room, limits
        self._num_bytes = 0

    async def read(self, receive: Receive, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Returns the whole body. What cannot be taken is refused before it is held.

        Raises:
            RequestTooLargeError: it is longer than one may be.
            NoRoomForBodyError: others hold too much.
            BodyTimeoutError: it did not come in time.
            MalformedRequestError: the client left before it was complete.
        """
        declared = _declared(headers)
        if declared > self._limits.max_bytes:
            raise RequestTooLargeError(self._limits.max_bytes)
        self._take(declared)
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                return await self._read(receive)
        except TimeoutError as error:
            raise BodyTimeoutError(self._limits.timeout_s) from error

    def give_back(self) -> None:
        """Gives the room back; the request has ended. Idempotent."""
        self._room.num_held -= self._num_bytes
        self._num_bytes = 0

    def _take(self, num_bytes: int) -> None:
        self._room.take(num_bytes)
        self._num_bytes += num_bytes

    async def _read(self, receive: Receive) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise MalformedRequestError("The client left before its request was complete.")
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > self._limits.max_bytes:
                raise RequestTooLargeError(self._limits.max_bytes)
            if size > self._num_bytes:
                self._take(size - self._num_bytes)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)


def _declared(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Returns the bytes that the client says it will send; 0 if it does not say."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0
