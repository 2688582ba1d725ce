"""Gives each request of one version of a model to an engine, and to another when that one is lost.

Owns every request in flight of one version of one model at one gateway: its engine, its emitted
tokens, its waiting time, and its move to another engine. It knows engines of its own version only,
so that no request ever goes on with another model's tokens. Does not own connections
(`membership`), the choice of an engine (`routing`), the blame for a loss (`requests`), nor the
contents of a request or an output (`engine_client`), which are opaque here. Imports no vLLM.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

from serving.domain.errors import (
    CannotResumeError,
    EngineRefusedError,
    MalformedRequestError,
    NoTokenLeftError,
    PoisonRequestError,
    RequestError,
    VersionRetiredError,
)
from serving.domain.limits import migrate_by_s
from serving.domain.load_report import LoadSample
from serving.gateway.admission import AdmissionQueue, FleetLimits
from serving.gateway.requests import EngineConnection, EngineLink, InFlightRequest, count_loss
from serving.gateway.routing import EngineView, choose_engine, to_migrate
from serving.gateway.telemetry.request_telemetry import RequestTelemetry
from serving.link.errors import FrameError, LinkClosedError
from serving.link.messages import Finish, Step, TokenOutput

logger = logging.getLogger(__name__)

_OUTCOMES = {int(finish): finish.name.lower() for finish in Finish}

# One step's outputs under the ids of their requests, each with the telemetry of its request.
Outputs = Sequence[tuple[RequestTelemetry, TokenOutput]]


class OutputSink(Protocol):
    """The receiver of outputs and failures; the engine client is one."""

    def deliver(self, outputs: Outputs) -> None:
        """Takes the outputs of one step of one engine. The step is not used afterwards."""
        ...

    def fail(self, request_id: str, error: RequestError) -> None:
        """Takes the failure of a request, which the dispatcher has forgotten."""
        ...


class Dispatcher:
    """The table of requests of one version of a model. Used from one event loop only."""

    def __init__(
        self,
        model: str,
        limits: FleetLimits,
        *,
        version: str = "",
        queue: AdmissionQueue | None = None,
    ) -> None:
        """Makes an empty table; all versions of a model share its queue and its telemetry."""
        self.version = version
        # Its version is on the way out: no engine of it will come any more.
        self.is_retired = False
        self.queue = queue or AdmissionQueue(model, limits)
        self.telemetry = self.queue.telemetry
        self._model = model
        self._limits = limits
        self._sink: OutputSink = _NoSink()
        self._connections: dict[str, EngineConnection] = {}
        self._requests: dict[str, InFlightRequest] = {}
        self._waiting: deque[InFlightRequest] = deque()
        self._deadline_timer: asyncio.TimerHandle | None = None

    def attach(self, sink: OutputSink) -> None:
        """Sets the receiver of outputs and failures from now on."""
        self._sink = sink

    # -- what the gateway reads --

    @property
    def num_in_flight(self) -> int:
        """The number of requests taken and not finished, waiting ones included."""
        return len(self._requests)

    @property
    def late_s(self) -> float:
        """How late this gateway is with what its engines send, in seconds; 0 without engines.

        A message to any of them and back takes as long: where only some are late, they are, or the
        network to them.
        """
        return min((each.link.late_s for each in self._connections.values()), default=0.0)

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for an engine."""
        return sum(1 for request in self._waiting if self._is_waiting(request))

    def telemetry_of(self, request_id: str) -> RequestTelemetry | None:
        """Returns the telemetry of a request in flight; `None` if it is not."""
        request = self._requests.get(request_id)
        return None if request is None else request.telemetry

    def num_emitted(self, request_id: str) -> int:
        """Returns how many tokens of a request in flight have come; 0 if it is not."""
        request = self._requests.get(request_id)
        return 0 if request is None else len(request.emitted)

    def first_waiting_since_s(self, otherwise_s: float) -> float:
        """Returns since when the first request that waits for an engine has waited (monotonic)."""
        waiting = (request for request in self._waiting if self._is_waiting(request))
        since_s = (request.waiting_since_s for request in waiting)
        return min((at_s for at_s in since_s if at_s is not None), default=otherwise_s)

    @property
    def connections(self) -> tuple[EngineConnection, ...]:
        """The connected engines."""
        return tuple(self._connections.values())

    @property
    def num_ready(self) -> int:
        """The number of connected engines that take requests."""
        return sum(not connection.is_draining for connection in self._connections.values())

    @property
    def has_engine(self) -> bool:
        """True if a request could be dispatched now."""
        return any(not connection.is_draining for connection in self._connections.values())

    # -- engines come and go --

    def add_engine(
        self, engine_id: str, compute_class: str, link: EngineLink, slice_name: str | None = None
    ) -> None:
        """Takes an engine into use, and gives it what has been waiting."""
        connection = EngineConnection(engine_id, compute_class, link, slice_name=slice_name)
        self._connections[engine_id] = connection
        link.deliver_to(partial(self.take_step, engine_id))
        self.telemetry.metrics.of_class(compute_class)  # its series begin at zero
        logger.info(
            "engine_added model=%s engine_id=%s compute_class=%s slice=%s waiting=%d",
            self._model,
            engine_id,
            compute_class,
            slice_name,
            len(self._waiting),
        )
        self.queue.look_again()
        self._dispatch_waiting()
        for connection in self.connections:
            self._migrate(connection)

    def drain_engine(self, engine_id: str, reason: str, grace_s: float | None) -> None:
        """Gives no more requests to an engine that still works; it goes in `grace_s` seconds.

        Requests that can finish in time stay, the others move at once. A request that stayed and
        has not finished moves before the end. Without another engine they all stay: they may finish
        before it goes, and resume if not. While `grace_s` is `None`, nobody knows when the engine
        goes, and nothing moves.
        """
        connection = self._connections.get(engine_id)
        if connection is None:
            return
        if not connection.is_draining:
            connection.is_draining = True
            logger.info(
                "engine_draining model=%s engine_id=%s in_flight=%d grace_s=%s reason=%r",
                self._model,
                engine_id,
                len(connection.requests),
                grace_s,
                reason,
            )
        if grace_s is None:
            return
        loop = asyncio.get_running_loop()
        by_s = migrate_by_s(loop.time(), grace_s)
        if connection.migrate_by_s is not None and connection.migrate_by_s <= by_s:
            return
        connection.migrate_by_s = by_s
        if connection.last_move is not None:
            connection.last_move.cancel()
        connection.last_move = loop.call_at(by_s, self._migrate, connection)
        self._migrate(connection)

    def _migrate(self, connection: EngineConnection) -> None:
        """Moves requests that will not finish on a draining engine, if another can take them."""
        if connection.migrate_by_s is None or not self.has_engine:
            return
        now_s = asyncio.get_running_loop().time()
        requests = to_migrate(connection.requests.values(), now_s, connection.migrate_by_s)
        if not requests:
            return
        for request in requests:
            del connection.requests[request.wire_id]
        connection.link.abort([request.wire_id for request in requests])
        logger.info(
            "engine_left model=%s engine_id=%s moved=%d finishing=%d",
            self._model,
            connection.engine_id,
            len(requests),
            len(connection.requests),
        )
        self._move(requests, "draining", "it drains", connection.engine_id)

    def lose_engine(self, engine_id: str, reason: str) -> None:
        """Resumes elsewhere the requests of a lost engine, and counts its death against them."""
        connection = self._connections.pop(engine_id, None)
        if connection is None:
            return
        if connection.last_move is not None:
            connection.last_move.cancel()
        requests = list(connection.requests.values())
        logger.warning(
            "engine_lost model=%s engine_id=%s in_flight=%d reason=%r",
            self._model,
            engine_id,
            len(requests),
            reason,
        )
        cause = "draining" if connection.is_draining else "lost"
        self.telemetry.metrics.link_lost(connection.compute_class, cause)
        if not connection.is_draining:  # it was meant to go: what stayed on it is no suspect
            count_loss(requests, connection.link.reported_end)
        self._move_or_give_up(requests, cause, reason, engine_id)

    def take_step(self, engine_id: str, step: Step) -> None:
        """Takes in the outputs of one step of one engine."""
        connection = self._connections.get(engine_id)
        if connection is None:
            return
        if step.load is not None:
            connection.load = step.load
        # For the telemetry and the sink, which take a step at once because that is cheaper.
        emitted: list[tuple[RequestTelemetry, TokenOutput]] = []
        ended: list[tuple[RequestTelemetry, str]] = []
        given_up: list[InFlightRequest] = []
        now_s = time.monotonic()
        for output in step.outputs:
            wire_id = output.request_id
            request = connection.requests.get(wire_id)
            if request is None:
                continue
            if output.finish == Finish.ABORT:
                del connection.requests[wire_id]
                given_up.append(request)
                continue
            if output.finish == Finish.ERROR:
                del connection.requests[wire_id]
                self._take_error(connection, request, output)
                continue
            request.emitted.extend(output.token_ids)
            if request.attempt:
                output.request_id = request.request_id
            if output.num_cached is not None:
                request.telemetry.found_cached(output.num_cached, now_s)
            emitted.append((request.telemetry, output))
            if output.finish is not None:
                del connection.requests[wire_id]
                del self._requests[request.request_id]
                ended.append((request.telemetry, _OUTCOMES[output.finish]))
            if request.is_isolated and (output.finish is not None or request.is_proven):
                self._release(request)
        self.telemetry.emitted(emitted, now_s)
        for telemetry, outcome in ended:
            telemetry.ended(outcome, now_s)
        if emitted:
            self._sink.deliver(emitted)
        if given_up:
            self._take_back(connection, given_up)

    def _take_error(
        self, connection: EngineConnection, request: InFlightRequest, output: TokenOutput
    ) -> None:
        """Ends a request that an engine cannot run, or tries it elsewhere.

        Its own fault are a refusal with a reason, and tokens that its grammar has no place for
        where it forbids others: none was left to the engine. Anything else may go well elsewhere.
        """
        was_isolated = request.is_isolated
        if isinstance(output.stop_reason, str):
            retry_after_s = self._limits.refused_retry_after_s
            self._fail(request, EngineRefusedError(output.stop_reason, retry_after_s))
        elif output.token_ids and request.forbidding_fields:
            error = NoTokenLeftError(request.forbidding_fields, len(request.emitted))
            self._fail(request, error)
        else:
            request.num_losses += 1
            reason = "it failed at the request"
            self._move_or_give_up([request], "lost", reason, connection.engine_id)
        if was_isolated:  # no suspect is on that engine now
            self._dispatch_waiting()

    def _take_back(self, connection: EngineConnection, requests: list[InFlightRequest]) -> None:
        """Resumes elsewhere the requests that an engine has given up though nobody aborted them.

        An abort here forgets the request first, so the engine gave it up by itself: it is about to
        end, and takes no more. A host of this build reports that itself; this is for all others.
        """
        reason = "it ends requests that nobody aborted"
        self.drain_engine(connection.engine_id, reason, 0.0)
        self._move(requests, "lost", reason, connection.engine_id)

    # -- requests come and go --

    def submit(self, request: InFlightRequest) -> None:
        """Takes one request; it is dispatched now, or waits until an engine is ready."""
        self._requests[request.request_id] = request
        self._dispatch(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Frees these requests wherever they are; unknown ids are ignored."""
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is None:
                continue
            has_engine = request.engine_id is not None
            request.telemetry.aborted(time.monotonic(), has_engine=has_engine)
            connection = self._connections.get(request.engine_id or "")
            if connection is None or connection.requests.pop(request.wire_id, None) is None:
                continue
            connection.link.abort([request.wire_id])
            if request.is_isolated:
                self._release(request)
        self._forget_aborted_waiters()

    async def call_all(self, method: str, args: bytes) -> list[bytes]:
        """Runs a rare operation on every engine."""
        timeout_s = self._limits.call_timeout_s
        links = [connection.link for connection in self._connections.values()]
        return await asyncio.gather(*(link.call(method, args, timeout_s) for link in links))

    def shutdown(self) -> None:
        """Forgets everything. Connections are closed by their owner."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        for request in self._requests.values():
            request.telemetry.dropped()
        self._requests.clear()
        self._waiting.clear()
        for connection in self._connections.values():
            if connection.last_move is not None:
                connection.last_move.cancel()
        self._connections.clear()

    # -- dispatch --

    def _dispatch(self, request: InFlightRequest) -> None:
        loop_s = asyncio.get_running_loop().time()
        is_suspect = request.needs_isolation
        views = (
            _view(connection, loop_s, of_suspect=is_suspect)
            for connection in self._connections.values()
        )
        route = choose_engine(views, needs_isolation=is_suspect)
        if route.engine_id is None:
            request.telemetry.queued(route.reason)
            self._park(request)
            return
        connection = self._connections[route.engine_id]
        request.engine_id = connection.engine_id
        request.waiting_since_s = None
        request.is_isolated = request.needs_isolation
        request.num_emitted_at_dispatch = len(request.emitted)
        request.dispatched_at_s = loop_s
        connection.requests[request.wire_id] = request
        connection.num_dispatched += 1
        num_engines = len(self._connections)
        request.telemetry.dispatched(connection, route.reason, num_engines, time.monotonic())
        try:
            connection.link.submit(request.to_message())
        except LinkClosedError as error:
            # The link broke a moment ago; its owner is about to report the loss of all that was on
            # it.
            logger.info("submit_failed engine_id=%s error=%r", connection.engine_id, str(error))
        except FrameError as error:
            del connection.requests[request.wire_id]
            self._fail(request, MalformedRequestError(str(error)))

    def _move_or_give_up(
        self, requests: Iterable[InFlightRequest], cause: str, reason: str, left_id: str
    ) -> None:
        """Fails the requests that have lost too many engines, and moves the others."""
        survivors = []
        for request in requests:
            if request.num_losses >= self._limits.max_engine_losses:
                self._fail(request, PoisonRequestError(request.num_losses))
            else:
                survivors.append(request)
        self._move(survivors, cause, reason, left_id)

    def _move(
        self, requests: Iterable[InFlightRequest], cause: str, reason: str, left_id: str
    ) -> None:
        """Gives the requests of the engine `left_id` to others, or lets them wait for one."""
        now_s = time.monotonic()
        for request in requests:
            if self._requests.get(request.request_id) is not request:
                continue  # the failure of its sibling has ended it
            if request.emitted and not request.is_resumable:
                self._fail(
                    request, CannotResumeError("its prompt was given as embeddings, not as tokens")
                )
                continue
            request.telemetry.moved(cause, reason, now_s)
            request.attempt += 1
            request.engine_id = None
            request.is_isolated = False
            self._dispatch(request)
            request.telemetry.redispatched(cause, left_id, request.engine_id, request.num_losses)

    def _park(self, request: InFlightRequest) -> None:
        request.engine_id = None
        if request.waiting_since_s is None:
            request.waiting_since_s = asyncio.get_running_loop().time()
        self._waiting.append(request)
        self._arm_deadline()

    def _is_waiting(self, request: InFlightRequest) -> bool:
        return request.engine_id is None and self._requests.get(request.request_id) is request

    def _dispatch_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            if self._is_waiting(request):
                self._dispatch(request)

    def _release(self, request: InFlightRequest) -> None:
        """Clears a suspect that does not kill engines, or is gone, and tries the next one."""
        request.is_isolated = False
        request.num_losses = 0
        self._dispatch_waiting()

    def _forget_aborted_waiters(self) -> None:
        while self._waiting and not self._is_waiting(self._waiting[0]):
            self._waiting.popleft()

    # -- deadlines and failures --

    def _arm_deadline(self) -> None:
        """Sets one timer, for the request that has waited longest: the first, as they came."""
        self._forget_aborted_waiters()
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        if self._waiting:
            loop = asyncio.get_running_loop()
            at_s = (self._waiting[0].waiting_since_s or 0.0) + self._limits.request_deadline_s
            self._deadline_timer = loop.call_at(at_s, self._expire_waiting)

    def _expire_waiting(self) -> None:
        now_s = asyncio.get_running_loop().time()
        kept: deque[InFlightRequest] = deque()
        expired: list[InFlightRequest] = []
        for request in self._waiting:
            if not self._is_waiting(request):
                continue
            waited_s = now_s - (request.waiting_since_s or now_s)
            (expired if waited_s >= self._limits.request_deadline_s else kept).append(request)
        self._waiting = kept
        for request in expired:
            self._fail(request, self._no_engine())
        self._arm_deadline()

    def _no_engine(self) -> RequestError:
        """Returns the refusal of an admitted request that has waited for its whole deadline."""
        if self.is_retired:
            retry_after_s = self._limits.refused_retry_after_s
            return VersionRetiredError(self._model, self.version, retry_after_s)
        return self.queue.no_engine_in_time()

    def _fail(self, request: InFlightRequest, error: RequestError) -> None:
        self._requests.pop(request.request_id, None)
        request.telemetry.failed(error, request.num_losses)
        self._sink.fail(request.request_id, error)


def _view(connection: EngineConnection, now_s: float, *, of_suspect: bool) -> EngineView:
    """Returns the facts that routing may use. `now_s` is the event loop's time.

    Only a suspect's routing asks for other suspects, and only for it are all requests looked
    through: there are thousands of them, and a view for each engine at each dispatch.
    """
    return EngineView(
        engine_id=connection.engine_id,
        num_in_flight=len(connection.requests),
        num_dispatched=connection.num_dispatched,
        is_draining=connection.is_draining,
        is_leaving=connection.migrate_by_s is not None and now_s >= connection.migrate_by_s,
        has_isolated=of_suspect
        and any(request.is_isolated for request in connection.requests.values()),
    )


class _NoSink:
    """Stands where no sink is attached yet."""

    def deliver(self, outputs: Outputs) -> None:
        raise RuntimeError(f"{len(outputs)} outputs came before a sink was attached")

    def fail(self, request_id: str, error: RequestError) -> None:
        raise RuntimeError(f"request {request_id} failed before a sink was attached") from error


def load_of(dispatchers: Sequence[Dispatcher], queue: AdmissionQueue, now_s: float) -> LoadSample:
    """Returns the load of one model over all its versions, which share `queue`.

    `now_s` is monotonic.
    """
    num_waiting = sum(dispatcher.num_waiting for dispatcher in dispatchers)
    first_s = min(
        (dispatcher.first_waiting_since_s(now_s) for dispatcher in dispatchers), default=now_s
    )
    return queue.telemetry.load.sample(
        now_s,
        num_waiting=num_waiting + queue.num_waiting,
        # The first in the queue has waited longest of those there.
        oldest_wait_s=now_s - min(first_s, queue.first_since_s(now_s)),
        num_in_flight=sum(dispatcher.num_in_flight for dispatcher in dispatchers) - num_waiting,
    )
