"""Gives each request of one version of a model to an engine, and to another when that one is lost.

Owns every request in flight of one version of one model at one gateway: its engine, its emitted
tokens, and its move to another engine. It knows engines of its own version only, so that no request
ever goes on with another model's tokens. Does not own those that wait (`line`), connections
(`membership`), the choice of an engine (`choice`), the blame for a loss (`requests`), nor the
contents of a request or an output (`engine_client`), which are opaque here. Imports no vLLM.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

from serving.domain.capacity.objectives import ttft_limit_s
from serving.domain.capacity.overdue import overdue_after_s
from serving.domain.errors import (
    CannotResumeError,
    DeadlineTooShortError,
    EngineRefusedError,
    MalformedRequestError,
    NoRoomInTimeError,
    NoTokenLeftError,
    OverloadedError,
    PoisonRequestError,
    RequestError,
    VersionRetiredError,
)
from serving.domain.limits import migrate_by_s
from serving.domain.models.request_fields.service_class import ServiceClass
from serving.domain.tokens.cached_blocks import joined
from serving.gateway.dispatch.admission import AdmissionQueue, FleetLimits
from serving.gateway.dispatch.batch_work import BatchWork, may_yield
from serving.gateway.dispatch.choice.engine_roster import EngineRoster
from serving.gateway.dispatch.choice.routing import to_migrate
from serving.gateway.dispatch.first_tokens import GAIN, MOST_TIMES, FirstTokenPace, Unbegun
from serving.gateway.dispatch.known_room import Need
from serving.gateway.dispatch.line import RequestLine
from serving.gateway.dispatch.requests import (
    Account,
    EngineConnection,
    EngineLink,
    InFlightRequest,
    count_loss,
)
from serving.gateway.telemetry.request_story import EngineChoice
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
        self._engines = EngineRoster(self.telemetry)
        self._connections = self._engines.connections
        self._requests: dict[str, InFlightRequest] = {}
        self._line = RequestLine(self.queue, self._engines, self)
        self._batch = BatchWork()
        self._leaving: set[str] = set()  # engines that drain, and are left before their end
        self._pace = FirstTokenPace()
        self._unbegun = Unbegun(self._look_after)

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
        """How late this gateway is with what its engines send, in seconds; see `EngineRoster`."""
        return self._engines.late_s

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for an engine."""
        return len(self._line)

    @property
    def num_waiting_of(self) -> dict[ServiceClass, int]:
        """The number of requests that wait for an engine, by class."""
        return self._line.num_of_class

    @property
    def num_waiting_of_account(self) -> dict[Account, int]:
        """The number of requests that wait for their tenants' turns, by class and tenant."""
        return self._line.num_of_account

    @property
    def num_promised(self) -> int:
        """The number of refused requests that were told when to come back, and have not yet."""
        return self._line.num_promised

    def telemetry_of(self, request_id: str) -> RequestTelemetry | None:
        """Returns the telemetry of a request in flight; `None` if it is not."""
        request = self._requests.get(request_id)
        return None if request is None else request.telemetry

    def num_emitted(self, request_id: str) -> int:
        """Returns how many tokens of a request in flight have come; 0 if it is not."""
        request = self._requests.get(request_id)
        return 0 if request is None else len(request.emitted)

    @property
    def num_batch_on_engines(self) -> int:
        """The number of requests of batch work that have an engine."""
        return len(self._batch)

    def full_ratio(self, now_s: float) -> float:
        """Returns the share of the last half minute in which engines were full and work waited.

        Batch work aside; 0 to 1. `now_s` is monotonic.
        """
        return self._line.full_ratio(now_s)

    def first_waiting_since_s(self, otherwise_s: float) -> float:
        """Returns since when the first request that waits for an engine has waited (monotonic).

        Batch work aside: it is `otherwise_s` if nothing else waits.
        """
        since_s = self._line.since_s()
        return otherwise_s if since_s is None else since_s

    @property
    def connections(self) -> tuple[EngineConnection, ...]:
        """The connected engines."""
        return tuple(self._connections.values())

    @property
    def num_ready(self) -> int:
        """The number of connected engines that take requests."""
        return self._engines.num_ready

    @property
    def has_engine(self) -> bool:
        """True if a request could be dispatched now."""
        return self._engines.has_engine

    # -- engines come and go --

    def add_engine(
        self, engine_id: str, compute_class: str, link: EngineLink, slice_name: str | None = None
    ) -> None:
        """Takes an engine into use, and gives it what has been waiting."""
        connection = EngineConnection(engine_id, compute_class, link, slice_name=slice_name)
        self._engines.add(connection)
        link.deliver_to(partial(self.take_step, engine_id))
        self._line.engine_came(connection)
        self.telemetry.metrics.of_class(compute_class)  # its series begin at zero
        logger.info(
            "engine_added model=%s engine_id=%s compute_class=%s slice=%s waiting=%d",
            self._model,
            engine_id,
            compute_class,
            slice_name,
            len(self._line),
        )
        self.queue.look_again()
        self._use_room()
        self._line.arm()

    def objectives_changed(self) -> None:
        """Has engines keep to the objectives of the model as they are now."""
        self._line.objectives_changed()

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
            self._engines.drain(connection)
            self._line.engine_went()
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
        self._leaving.add(engine_id)
        if connection.last_move is not None:
            connection.last_move.cancel()
        connection.last_move = loop.call_at(by_s, self._migrate, connection)
        self._migrate(connection)

    def _migrate(self, connection: EngineConnection) -> None:
        """Moves requests that will not finish on a draining engine, if another can take them.

        As long as it still works, those for which no other has room are better off where they are.
        """
        if connection.migrate_by_s is None or not self.has_engine:
            return
        now_s = asyncio.get_running_loop().time()
        unfinished = to_migrate(connection.requests.values(), now_s, connection.migrate_by_s)
        requests: Sequence[InFlightRequest] = unfinished
        if now_s < connection.migrate_by_s:
            # What waits comes before them.
            requests = [] if self._line else self._engines.first_with_room(unfinished)
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
        connection = self._engines.remove(engine_id)
        if connection is None:
            return
        self._leaving.discard(engine_id)
        self._batch.tell(engine_id, 0)
        self._pace.forget(engine_id)
        self._line.engine_went()
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
        loop_s = asyncio.get_running_loop().time()
        if step.outputs:
            connection.goes_on(loop_s)
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
            if request.expected_keys:
                self._expect_nothing(request)
            if request.is_unbegun and output.token_ids:
                took_s = loop_s - request.dispatched_at_s
                self._pace.took(engine_id, request.first_token_cost, took_s)
                self._line.first_tokens.took(request.first_token_cost, took_s, loop_s)
            request.emitted.extend(output.token_ids)
            if request.attempt:
                output.request_id = request.request_id
            if output.num_cached is not None:
                request.telemetry.found_cached(output.num_cached, now_s)
                if not request.num_emitted_at_dispatch:
                    request.num_cached = output.num_cached
            emitted.append((request.telemetry, output))
            if output.finish is not None:
                del connection.requests[wire_id]
                del self._requests[request.request_id]
                self._settle(request)
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
        if step.room is not None and connection.room is not None:
            connection.is_yielding = False
            self._engines.tell_room(connection, step.room)
            self._batch.tell(engine_id, step.room.num_batch_of_others)
            self._yield_to_others(connection, step.room.to_yield)
            self._use_room()

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
            self._line.serve()

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
        """Takes one request; it is dispatched now, or waits until an engine has room for it.

        It fails at once if its first token could not come before its client's time is over.
        """
        now_s = asyncio.get_running_loop().time()
        patience_s = request.patience_s
        if patience_s is None:
            patience_s = self._limits.patience_s(request.service_class)
            per_token_s = self.telemetry.objectives.ttft_per_prompt_token_s
            patience_s = ttft_limit_s(patience_s, per_token_s, len(request.prompt_token_ids))
        came_at_s = now_s - request.waited_s
        request.first_token_by_s = came_at_s + patience_s
        held = self.telemetry.held_objectives
        if held is not None and request.patience_s is None and not request.is_batch:
            ttft_s = held.ttft_of(len(request.prompt_token_ids))
            request.overdue_at_s = came_at_s + overdue_after_s(ttft_s)
        self._requests[request.request_id] = request
        if (refusal := request.telemetry.reserve(request.max_tokens)) is not None:
            self._fail(request, refusal)
            return
        try:
            in_s = self._line.come_back_in_s(request, now_s)
        except DeadlineTooShortError as error:
            self._fail(request, error)
            return
        if in_s is None:
            self._line.enter(request)
        else:
            self._fail(request, OverloadedError(self._model, self.num_waiting, in_s))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Frees these requests wherever they are; unknown ids are ignored."""
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is None:
                continue
            has_engine = request.engine_id is not None
            request.telemetry.aborted(time.monotonic(), has_engine=has_engine)
            self._settle(request)
            self._expect_nothing(request)
            self._free(request)
        self._line.look()

    def fail(self, request_id: str, error: RequestError) -> bool:
        """Ends a request with an error that its client reads, and frees it wherever it is.

        Returns `False` if there is no such request, or none any more.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._fail(request, error)
        self._free(request)
        self._line.look()
        return True

    def _free(self, request: InFlightRequest) -> None:
        """Takes a request that is over out of the line, or off its engine."""
        self._line.remove(request)
        connection = self._connections.get(request.engine_id or "")
        if connection is None or connection.requests.pop(request.wire_id, None) is None:
            return
        connection.link.abort([request.wire_id])
        if request.is_isolated:
            self._release(request)

    async def call_all(self, method: str, args: bytes) -> list[bytes]:
        """Runs a rare operation on every engine."""
        return await self._engines.call_all(method, args, self._limits.call_timeout_s)

    def shutdown(self) -> None:
        """Forgets everything. Connections are closed by their owner."""
        self._unbegun.stop()
        for request in self._requests.values():
            request.telemetry.dropped()
        self._requests.clear()
        self._batch.clear()
        self._line.stop()
        self._engines.clear()

    # -- dispatch --

    def make_way(self, num_waiting: int) -> None:
        """Has batch work leave engines for so many that cannot wait; see `LineOwner`."""
        for request in self._batch.to_yield(num_waiting, self._connections):
            connection = self._connections[request.engine_id or ""]
            connection.is_yielding = True
            self._yield(request, connection)
        for connection in self._batch.to_ask(num_waiting, self._connections):
            connection.ask_for_a_way()

    def _yield_to_others(self, connection: EngineConnection, wire_ids: Sequence[str]) -> None:
        """Has batch work leave an engine for what cannot wait at other gateways, as it asks."""
        for wire_id in wire_ids:
            request = connection.requests.get(wire_id)
            if request is not None and may_yield(request):
                self._yield(request, connection)

    def _yield(self, request: InFlightRequest, connection: EngineConnection) -> None:
        del connection.requests[request.wire_id]
        connection.link.abort([request.wire_id])
        request.num_yields += 1
        self._move([request], "yielded", "it makes way for others", connection.engine_id)

    def give(
        self,
        request: InFlightRequest,
        connection: EngineConnection,
        need: Need,
        choice: EngineChoice,
    ) -> None:
        """Sends a request to the engine that was chosen for it; see `LineOwner`."""
        request.is_isolated = request.needs_isolation
        connection.gets(request, asyncio.get_running_loop().time())
        self._batch.began(request)
        told = self._expect(request, connection.engine_id)
        num_named = 0 if request.blocks is None else request.blocks.take_num_named()
        request.telemetry.dispatched(connection, choice, num_named, time.monotonic())
        self._engines.sent(request)
        try:
            connection.link.submit(request.to_message(told))
        except LinkClosedError as error:
            # The link broke a moment ago; its owner is about to report the loss of all that was on
            # it. Until then nothing more goes there: what waits would have lost an engine by it.
            connection.has_no_room()
            logger.info("submit_failed engine_id=%s error=%r", connection.engine_id, str(error))
        except FrameError as error:
            del connection.requests[request.wire_id]
            self._fail(request, MalformedRequestError(str(error)))
        else:
            connection.takes(need)
            late_s = self._pace.late_after_s(request.first_token_cost)
            if late_s is not None and len(self._connections) > 1:
                self._unbegun.given(request.request_id, request.attempt, late_s)

    # -- engines that are late with a first token --

    def _look_after(self, request_id: str, attempt: int) -> float | None:
        """Takes a request back that its engine should have begun, if another begins it sooner.

        Returns in how many seconds to look again; `None` if that is not needed.
        """
        request = self._requests.get(request_id)
        if request is None or request.attempt != attempt or not request.is_unbegun:
            return None
        connection = self._connections.get(request.engine_id or "")
        is_bound = request.is_isolated or request.num_taken_back >= MOST_TIMES
        if connection is None or connection.is_draining or is_bound:
            return None
        now_s = asyncio.get_running_loop().time()
        waited_s = now_s - request.dispatched_at_s
        stands_still = connection.last_output_s <= request.dispatched_at_s
        if stands_still:
            connection.stands_still(request.dispatched_at_s, now_s)
        # Among those that wait it is one of the first, for it has had a place.
        may_wait = stands_still and self._engines.does_any_turn(now_s)
        if not (may_wait or self._begins_sooner(request, connection, waited_s)):
            return waited_s
        if not stands_still:  # standing still once is not being slow
            self._pace.took(connection.engine_id, request.first_token_cost, waited_s)
        request.num_taken_back += 1
        del connection.requests[request.wire_id]
        connection.link.abort([request.wire_id])
        self._move([request], "slow", "it was not begun in time", connection.engine_id)
        return None

    def _begins_sooner(
        self, request: InFlightRequest, connection: EngineConnection, waited_s: float
    ) -> bool:
        """Returns whether another engine has room, and most likely a first token much sooner."""
        if self._line:
            return False
        route, _ = self._engines.route(request, asyncio.get_running_loop().time())
        if route.engine_id in (None, connection.engine_id):
            return False
        expected_s = self._pace.expected_s(route.first_token_cost)
        return expected_s is not None and expected_s * GAIN <= waited_s

    def _expect(self, request: InFlightRequest, engine_id: str) -> bytes:
        """Notes what an engine will have cached by a request; what it has not told of, `joined`."""
        if request.blocks is None:
            return b""
        request.expected_keys = self._engines.index.expect(engine_id, request.blocks)
        return joined(request.expected_keys)

    def _expect_nothing(self, request: InFlightRequest) -> None:
        """Notes that its engine has told what it has of a request, or will have nothing."""
        if request.expected_keys and request.engine_id is not None:
            self._engines.index.settle(request.engine_id, request.expected_keys)
        request.expected_keys = []

    def _settle(self, request: InFlightRequest) -> None:
        """Puts right what was charged for a request that is over."""
        self._batch.left(request)
        self._line.settle(request)

    def _use_room(self) -> None:
        """Fills what engines have room for: with those that wait, then with those that move."""
        if self._line:
            self._line.serve()
        for engine_id in list(self._leaving):
            self._migrate(self._connections[engine_id])

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
            self._expect_nothing(request)
            self._batch.left(request)
            request.telemetry.moved(cause, reason, now_s)
            request.attempt += 1
            if request.blocks is not None and request.num_tokens > len(request.blocks):
                num_new = request.num_tokens - len(request.blocks)
                request.blocks = request.blocks.followed_by(request.emitted[-num_new:])
            request.engine_id = None
            request.is_isolated = False
            self._line.enter(request)
            request.telemetry.redispatched(cause, left_id, request.engine_id, request.num_losses)

    def _release(self, request: InFlightRequest) -> None:
        """Clears a suspect that does not kill engines, or is gone, and tries the next one."""
        request.is_isolated = False
        request.num_losses = 0
        self._line.serve()

    # -- deadlines and failures --

    def end_waiting(self, request: InFlightRequest) -> None:
        """Fails a request that has waited as long as it may; see `LineOwner`."""
        now_s = asyncio.get_running_loop().time()
        self._fail(request, self._too_late(request, now_s))

    def _too_late(self, request: InFlightRequest, now_s: float) -> RequestError:
        """Returns the refusal of a request that has waited as long as its client does."""
        since_s = request.waiting_since_s
        waited_s = 0.0 if since_s is None else now_s - since_s
        if not self.has_engine or request.needs_isolation:
            return self._no_engine(waited_s)
        in_s = self._line.wait_s(request) or self._limits.retry_after_s
        return NoRoomInTimeError(self._model, waited_s, max(1.0, in_s))

    def _no_engine(self, waited_s: float) -> RequestError:
        """Returns the refusal of an admitted request for which no engine was ready in time."""
        if self.is_retired:
            retry_after_s = self._limits.refused_retry_after_s
            return VersionRetiredError(self._model, self.version, retry_after_s)
        return self.queue.no_engine_in_time(waited_s)

    def _fail(self, request: InFlightRequest, error: RequestError) -> None:
        self._requests.pop(request.request_id, None)
        self._expect_nothing(request)
        self._settle(request)
        request.telemetry.failed(error, request.num_losses)
        self._sink.fail(request.request_id, error)


class _NoSink:
    """Stands where no sink is attached yet."""

    def deliver(self, outputs: Outputs) -> None:
        raise RuntimeError(f"{len(outputs)} outputs came before a sink was attached")

    def fail(self, request_id: str, error: RequestError) -> None:
        raise RuntimeError(f"request {request_id} failed before a sink was attached") from error
