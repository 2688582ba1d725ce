"""The fleet client: stands where vLLM's frontend expects one engine core, and is many.

Owns every request in flight of one version of one model at one gateway: which engine it is on, what
it has emitted, and its move to another engine when that one is lost. It knows engines of its own
version only, so that no request ever goes on with another model's tokens. Does not own connections
(`membership`), the choice of an engine (`routing`), or who is to blame for a loss (`flights`).

Above it, vLLM's detokenizer, stop strings, parsers and streams see one uninterrupted token stream.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import msgspec
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from serving.domain.errors import (
    CannotResumeError,
    EngineRefusedError,
    MalformedRequestError,
    PoisonRequestError,
    RequestError,
    VersionRetiredError,
)
from serving.domain.load_report import LoadSample
from serving.gateway.door import Door, FleetLimits
from serving.gateway.draining import leaving, stay_until_s
from serving.gateway.flights import Flight, count_loss
from serving.gateway.routing import EngineView, choose_engine
from serving.gateway.telemetry.request_metrics import RequestMeter, Stopwatch, asked_by
from serving.link.errors import FrameError, LinkClosedError
from serving.link.messages import EngineLoad, Finish, Step, TokenRequest
from serving.link.vllm_codec import decode_output, encode_request, output_decoder
from serving.telemetry.log_lines import note

logger = logging.getLogger(__name__)

_OUTCOMES = {int(finish): finish.name.lower() for finish in Finish}


class EngineLink(Protocol):
    """What the fleet client needs of a connection to an engine host."""

    @property
    def has_told_end(self) -> bool:
        """Whether the host has said that its engine is gone. One taken away says nothing."""
        ...

    def submit(self, request: TokenRequest) -> None:
        """Sends one request; raises `LinkClosedError` or, when it is too large, `FrameError`."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """Frees these requests; a no-op when the link is closed."""
        ...

    async def call(self, method: str, args: bytes, timeout_s: float) -> bytes:
        """Runs a rare engine operation."""
        ...


@dataclass(slots=True)
class EngineSeat:
    """One connected engine and the requests on it, by wire id."""

    engine_id: str
    compute_class: str
    link: EngineLink
    flights: dict[str, Flight] = field(default_factory=dict)
    num_dispatched: int = 0
    is_draining: bool = False
    # When the last request has to have left a draining engine; `None` while nobody has said.
    stay_until_s: float | None = None
    last_move: asyncio.TimerHandle | None = None
    load: EngineLoad | None = None
    slice_name: str | None = None  # `None` where the engine owns none

    @property
    def trace_attributes(self) -> dict[str, str]:
        """What a span says of the engine."""
        attributes = {
            "slicewise.engine_id": self.engine_id,
            "slicewise.compute_class": self.compute_class,
        }
        if self.slice_name is not None:
            attributes["slicewise.slice"] = self.slice_name
        return attributes

    def view(self, now_s: float) -> EngineView:
        """What routing may see. `now_s` is the event loop's time."""
        is_leaving = self.stay_until_s is not None and now_s >= self.stay_until_s
        return EngineView(
            engine_id=self.engine_id,
            num_in_flight=len(self.flights),
            num_dispatched=self.num_dispatched,
            is_draining=self.is_draining,
            is_leaving=is_leaving,
            has_trial=any(flight.is_on_trial for flight in self.flights.values()),
        )


class FleetCore:
    """An `EngineCoreClient` over a changing set of engines. Used from one event loop only."""

    engine_ranks_managed = (0,)

    def __init__(
        self,
        model: str,
        limits: FleetLimits,
        supported_tasks: tuple[str, ...],
        *,
        version: str = "",
        door: Door | None = None,
        request_meter: RequestMeter | None = None,
    ) -> None:
        """All versions of a model share its door and its request meter."""
        self.version = version
        # Its version is on the way out: no engine of it will come any more.
        self.is_retired = False
        self.door = door or Door(model, limits)
        self.resources = SimpleNamespace(engine_dead=False)
        self._model = model
        self._limits = limits
        self.supported_tasks = supported_tasks
        self._seats: dict[str, EngineSeat] = {}
        self._flights: dict[str, Flight] = {}
        self._waiting: deque[Flight] = deque()
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._unread_since_s: deque[float] = deque()  # of each of them, monotonic
        self._encoder = MsgpackEncoder()
        self._decoder = output_decoder()
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._adapters: dict[int, LoRARequest] = {}
        self._fail: Callable[[str, RequestError], None] = _no_frontend
        self._meter = self.door.meter
        self.request_meter = request_meter or RequestMeter()

    # -- what the gateway reads --

    @property
    def num_in_flight(self) -> int:
        """Requests taken and not finished, waiting ones included."""
        return len(self._flights)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an engine."""
        return sum(1 for flight in self._waiting if self._is_waiting(flight))

    @property
    def load(self) -> LoadSample:
        """The load of the last half minute."""
        return load_of([self], self.door, time.monotonic())

    def first_waiting_since_s(self, otherwise_s: float) -> float:
        """Since when the first of those waits that wait for an engine (monotonic)."""
        since_s = [flight.waiting_since_s for flight in self._waiting if self._is_waiting(flight)]
        return min((each for each in since_s if each is not None), default=otherwise_s)

    @property
    def behind_s(self) -> float:
        """For how long the oldest tokens have lain here that the frontend has not taken."""
        return time.monotonic() - self._unread_since_s[0] if self._unread_since_s else 0.0

    @property
    def seats(self) -> tuple[EngineSeat, ...]:
        """The connected engines."""
        return tuple(self._seats.values())

    @property
    def num_ready(self) -> int:
        """Connected engines that take requests."""
        return sum(not seat.is_draining for seat in self._seats.values())

    @property
    def has_engine(self) -> bool:
        """Whether a request could be dispatched now."""
        return any(not seat.is_draining for seat in self._seats.values())

    def _no_engine(self) -> RequestError:
        """The refusal of a request that has waited inside for its whole deadline."""
        if self.is_retired:
            retry_after_s = self._limits.refused_retry_after_s
            return VersionRetiredError(self._model, self.version, retry_after_s)
        return self.door.no_engine_in_time()

    def set_failure_sink(self, fail: Callable[[str, RequestError], None]) -> None:
        """Names the one who tells a request's caller that it failed: `fail(request_id, error)`."""
        self._fail = fail

    # -- engines come and go --

    def add_engine(
        self, engine_id: str, compute_class: str, link: EngineLink, slice_name: str | None = None
    ) -> None:
        """Takes an engine into use, and gives it what has been waiting."""
        seat = EngineSeat(engine_id, compute_class, link, slice_name=slice_name)
        self._seats[engine_id] = seat
        self.request_meter.of_class(compute_class)  # its series begin at zero
        logger.info(
            "engine_added model=%s engine_id=%s compute_class=%s slice=%s waiting=%d",
            self._model,
            engine_id,
            compute_class,
            slice_name,
            len(self._waiting),
        )
        self.door.open()
        self._dispatch_waiting()
        for seat in self.seats:
            self._move_off(seat)

    def drain_engine(self, engine_id: str, reason: str, grace_s: float | None) -> None:
        """Gives an engine that still works no more; it goes in `grace_s` seconds.

        Requests that can finish in time stay, the others move at once, and what has not finished
        after all moves before the end. Without another engine they stay: they may finish before it
        goes, and resume if not. `None` leaves open when it goes: nothing moves until that is said.
        """
        seat = self._seats.get(engine_id)
        if seat is None:
            return
        if not seat.is_draining:
            seat.is_draining = True
            logger.info(
                "engine_draining model=%s engine_id=%s in_flight=%d grace_s=%s reason=%r",
                self._model,
                engine_id,
                len(seat.flights),
                grace_s,
                reason,
            )
        if grace_s is None:
            return
        loop = asyncio.get_running_loop()
        until_s = stay_until_s(loop.time(), grace_s)
        if seat.stay_until_s is not None and seat.stay_until_s <= until_s:
            return
        seat.stay_until_s = until_s
        if seat.last_move is not None:
            seat.last_move.cancel()
        seat.last_move = loop.call_at(until_s, self._move_off, seat)
        self._move_off(seat)

    def _move_off(self, seat: EngineSeat) -> None:
        """Moves what will not finish on a draining engine, if there is somewhere to move it."""
        if seat.stay_until_s is None or not self.has_engine:
            return
        now_s = asyncio.get_running_loop().time()
        flights = leaving(seat.flights.values(), now_s, seat.stay_until_s)
        if not flights:
            return
        for flight in flights:
            del seat.flights[flight.wire_id]
        seat.link.abort([flight.wire_id for flight in flights])
        logger.info(
            "engine_left model=%s engine_id=%s moved=%d finishing=%d",
            self._model,
            seat.engine_id,
            len(flights),
            len(seat.flights),
        )
        self._move(flights, "draining", "it drains", seat.engine_id)

    def lose_engine(self, engine_id: str, reason: str) -> None:
        """Resumes elsewhere what was on an engine that is gone, and counts its death against it."""
        seat = self._seats.pop(engine_id, None)
        if seat is None:
            return
        if seat.last_move is not None:
            seat.last_move.cancel()
        flights = list(seat.flights.values())
        logger.warning(
            "engine_lost model=%s engine_id=%s in_flight=%d reason=%r",
            self._model,
            engine_id,
            len(flights),
            reason,
        )
        cause = "draining" if seat.is_draining else "lost"
        self.request_meter.link_lost(seat.compute_class, cause)
        if not seat.is_draining:  # it was meant to go: what stayed on it is no suspect
            count_loss(flights, is_told=seat.link.has_told_end)
        survivors = []
        for flight in flights:
            if flight.num_losses >= self._limits.max_engine_losses:
                self._fail_flight(flight, PoisonRequestError(flight.num_losses))
            else:
                survivors.append(flight)
        self._move(survivors, cause, reason, engine_id)

    def take_step(self, engine_id: str, step: Step) -> None:
        """Takes in what one step of one engine brought."""
        seat = self._seats.get(engine_id)
        if seat is None:
            return
        if step.load is not None:
            seat.load = step.load
        outputs: list[EngineCoreOutput] = []
        # For the meter, which takes a step at once because that is cheaper.
        emitted: list[tuple[Stopwatch, int]] = []
        ended: list[tuple[Stopwatch, str]] = []
        given_up: list[Flight] = []
        now_s = time.monotonic()
        for message in step.outputs:
            flight = seat.flights.get(message.request_id)
            if flight is None:
                continue
            if message.finish == Finish.ABORT:
                del seat.flights[message.request_id]
                given_up.append(flight)
                continue
            if message.finish == Finish.ERROR and isinstance(message.stop_reason, str):
                del seat.flights[message.request_id]
                error = EngineRefusedError(message.stop_reason, self._limits.refused_retry_after_s)
                self._fail_flight(flight, error)
                if flight.is_on_trial:
                    self._acquit(flight)
                continue
            flight.emitted.extend(message.token_ids)
            emitted.append((flight.stopwatch, len(message.token_ids)))
            if flight.trace is not None:
                flight.trace.emitted(len(message.token_ids))
            if message.finish is not None:
                del seat.flights[message.request_id]
                del self._flights[flight.request_id]
                self._meter.finished(now_s, len(flight.emitted))
            output = decode_output(message, self._decoder)
            output.request_id = flight.request_id
            # Of a resumed request the engine counts what was emitted as prompt, and may find it.
            if output.prefill_stats is not None and flight.attempt == 0:
                num_cached = output.prefill_stats.num_cached_tokens
                self._meter.found_cached(now_s, num_cached)
                self.request_meter.found_cached(flight.stopwatch, num_cached)
            if message.finish is not None:
                ended.append((flight.stopwatch, _OUTCOMES[message.finish]))
                if flight.trace is not None:
                    flight.trace.ended(_OUTCOMES[message.finish], len(flight.emitted))
            outputs.append(output)
            if flight.is_on_trial and (message.finish is not None or flight.has_cleared_itself):
                self._acquit(flight)
        self.request_meter.emitted(emitted, now_s)
        for stopwatch, outcome in ended:
            self.request_meter.ended(stopwatch, outcome)
        if outputs:
            self._outputs.put_nowait(EngineCoreOutputs(outputs=outputs))
            self._unread_since_s.append(time.monotonic())
        if given_up:
            self._take_back(seat, given_up)

    def _take_back(self, seat: EngineSeat, flights: list[Flight]) -> None:
        """Resumes elsewhere what an engine has given up though nobody aborted it.

        Whoever aborts a request here forgets it first, so the engine does it by itself: it is about
        to end, and takes no more. A host of this build says so itself; this is for all others.
        """
        reason = "it ends requests that nobody aborted"
        self.drain_engine(seat.engine_id, reason, 0.0)
        self._move(flights, "lost", reason, seat.engine_id)

    # -- what vLLM's frontend calls --

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """What the model can do; fixed by its configuration."""
        return self.supported_tasks

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next step's outputs, from whichever engine."""
        outputs = await self._outputs.get()
        self._unread_since_s.popleft()
        return outputs

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Takes one request; it is dispatched now, or waits until an engine is ready."""
        params = request.sampling_params
        prompt_token_ids = request.prompt_token_ids or []
        now_s = time.monotonic()
        flight = Flight(
            request_id=request.request_id,
            prompt_token_ids=prompt_token_ids,
            max_tokens=params.max_tokens if params is not None else None,
            payload=encode_request(request, self._encoder),
            arrived_at_s=asyncio.get_running_loop().time(),
            stopwatch=self.request_meter.taken(len(prompt_token_ids), now_s),
            is_resumable=request.prompt_embeds is None,
            tenant=asked_by(),
        )
        if params is not None and params.prompt_logprobs is not None:
            # Delivered with the first token and never again: a resumed request must not ask for
            # them.
            flight.resume_payload = self._payload_without_prompt_logprobs(request, params)
        self._flights[flight.request_id] = flight
        self._meter.arrived(now_s, len(prompt_token_ids))
        flight.trace = flight.stopwatch.trace(flight.request_id)
        self._dispatch(flight)

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        """Frees these requests wherever they are; unknown ids are ignored."""
        self.abort_requests(request_ids)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """`abort_requests_async`, which has nothing to wait for."""
        for request_id in request_ids:
            flight = self._flights.pop(request_id, None)
            if flight is None:
                continue
            self.request_meter.ended(flight.stopwatch, "aborted")
            if flight.trace is not None:
                flight.trace.ended("aborted", len(flight.emitted))
            if flight.engine_id is None:
                continue
            self._meter.finished(time.monotonic(), len(flight.emitted))
            seat = self._seats.get(flight.engine_id)
            if seat is not None and seat.flights.pop(flight.wire_id, None) is not None:
                seat.link.abort([flight.wire_id])
                if flight.is_on_trial:
                    self._acquit(flight)
        self._forget_aborted_waiters()

    def dp_engines_running(self) -> bool:
        """Whether anything is in flight."""
        return bool(self._flights)

    def get_kv_event_sources(self) -> dict[int, Any]:
        """None: KV events do not travel over the link."""
        return {}

    def shutdown(self, timeout: float | None = None) -> None:  # noqa: ARG002 - vLLM's signature
        """Forgets everything. Connections are closed by their owner."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        for flight in self._flights.values():
            if flight.trace is not None:
                flight.trace.ended("aborted", len(flight.emitted))
        self._flights.clear()
        self._waiting.clear()
        for seat in self._seats.values():
            if seat.last_move is not None:
                seat.last_move.cancel()
        self._seats.clear()

    # -- adapters and caches: told to every engine --

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        """Remembers the adapter. Engines load it with its first request, which names its path."""
        self._adapters[lora_request.lora_int_id] = lora_request
        return True

    async def remove_lora_async(self, lora_id: int) -> bool:
        """Unloads the adapter on every engine; `False` if none knew it."""
        known = self._adapters.pop(lora_id, None) is not None
        return any(await self._call_all("remove_lora", lora_id)) or known

    async def list_loras_async(self) -> set[int]:
        """The adapters of this gateway."""
        return set(self._adapters)

    async def pin_lora_async(self, lora_id: int) -> bool:
        """Keeps the adapter loaded on every engine."""
        return all(await self._call_all("pin_lora", lora_id))

    async def reset_prefix_cache_async(
        self,
        reset_running_requests: bool = False,  # noqa: FBT001, FBT002 - vLLM's signature
        reset_connector: bool = False,  # noqa: FBT001, FBT002
    ) -> bool:
        """Empties the prefix cache of every engine."""
        return all(
            await self._call_all("reset_prefix_cache", reset_running_requests, reset_connector)
        )

    async def reset_mm_cache_async(self) -> None:
        """Empties the multi-modal cache of every engine."""
        await self._call_all("reset_mm_cache")

    async def is_sleeping_async(self) -> bool:
        """Never: an engine that should not run is released with its slice."""
        return False

    async def _call_all(self, method: str, *args: Any) -> list[Any]:
        body = msgspec.msgpack.encode(args)
        timeout_s = self._limits.call_timeout_s
        calls = [seat.link.call(method, body, timeout_s) for seat in self._seats.values()]
        return [msgspec.msgpack.decode(reply) for reply in await asyncio.gather(*calls)]

    # -- dispatch --

    def _payload_without_prompt_logprobs(
        self, request: EngineCoreRequest, params: SamplingParams
    ) -> list[bytes]:
        request.sampling_params = params.clone()
        request.sampling_params.prompt_logprobs = None
        try:
            return encode_request(request, self._encoder)
        finally:
            request.sampling_params = params

    def _dispatch(self, flight: Flight) -> None:
        now_s = asyncio.get_running_loop().time()
        views = (seat.view(now_s) for seat in self._seats.values())
        route = choose_engine(views, needs_trial=flight.needs_trial)
        if route.engine_id is None:
            if flight.trace is not None:
                flight.trace.waits(route.reason)
            self._park(flight)
            return
        seat = self._seats[route.engine_id]
        if flight.trace is not None:
            flight.trace.dispatched(seat.trace_attributes, route.reason, len(self._seats))
        if logger.isEnabledFor(logging.DEBUG):
            note(
                logger, logging.DEBUG, flight.trace_id,
                "routed model=%s request_id=%s engine_id=%s engines=%d reason=%r",
                self._model, flight.request_id, seat.engine_id, len(self._seats), route.reason,
            )  # fmt: skip
        flight.engine_id = seat.engine_id
        flight.waiting_since_s = None
        flight.is_on_trial = flight.needs_trial
        flight.num_emitted_at_dispatch = len(flight.emitted)
        flight.dispatched_at_s = asyncio.get_running_loop().time()
        seat.flights[flight.wire_id] = flight
        seat.num_dispatched += 1
        self.request_meter.dispatched(flight.stopwatch, seat.compute_class, time.monotonic())
        try:
            seat.link.submit(flight.to_message())
        except LinkClosedError as error:
            # The link broke a moment ago; its owner is about to report the loss of all that was on
            # it.
            logger.info("submit_failed engine_id=%s error=%r", seat.engine_id, str(error))
        except FrameError as error:
            del seat.flights[flight.wire_id]
            self._fail_flight(flight, MalformedRequestError(str(error)))

    def _move(self, flights: Iterable[Flight], cause: str, reason: str, left_id: str) -> None:
        """Gives what was on the engine `left_id` to others, or lets it wait for one."""
        now_s = time.monotonic()
        for flight in flights:
            if self._flights.get(flight.request_id) is not flight:
                continue  # the failure of its sibling has ended it
            if flight.emitted and not flight.is_resumable:
                self._fail_flight(
                    flight, CannotResumeError("its prompt was given as embeddings, not as tokens")
                )
                continue
            self.request_meter.left(flight.stopwatch, cause, now_s)
            if flight.trace is not None:
                flight.trace.left(cause, reason, len(flight.emitted))
            flight.attempt += 1
            flight.engine_id = None
            flight.is_on_trial = False
            self._dispatch(flight)
            note(
                logger, logging.INFO, flight.trace_id,
                "request_resumed model=%s request_id=%s cause=%s from_engine=%s to_engine=%s"
                " attempt=%d emitted=%d losses=%d",
                self._model, flight.request_id, cause, left_id, flight.engine_id,
                flight.attempt + 1, len(flight.emitted), flight.num_losses,
            )  # fmt: skip

    def _park(self, flight: Flight) -> None:
        loop = asyncio.get_running_loop()
        flight.engine_id = None
        if flight.waiting_since_s is None:
            flight.waiting_since_s = loop.time()
        self._waiting.append(flight)
        self._arm_deadline()

    def _is_waiting(self, flight: Flight) -> bool:
        return flight.engine_id is None and self._flights.get(flight.request_id) is flight

    def _dispatch_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for flight in waiting:
            if self._is_waiting(flight):
                self._dispatch(flight)

    def _acquit(self, flight: Flight) -> None:
        """The suspect is not what kills engines, or is gone: the next one may be tried."""
        flight.is_on_trial = False
        flight.num_losses = 0
        self._dispatch_waiting()

    def _forget_aborted_waiters(self) -> None:
        while self._waiting and not self._is_waiting(self._waiting[0]):
            self._waiting.popleft()

    # -- deadlines and failures --

    def _arm_deadline(self) -> None:
        """One timer, for the request that has waited longest."""
        self._forget_aborted_waiters()
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        if self._waiting:
            since_s = min(flight.waiting_since_s or 0.0 for flight in self._waiting)
            loop = asyncio.get_running_loop()
            at_s = since_s + self._limits.request_deadline_s
            self._deadline_timer = loop.call_at(at_s, self._expire_waiting)

    def _expire_waiting(self) -> None:
        now_s = asyncio.get_running_loop().time()
        kept: deque[Flight] = deque()
        expired: list[Flight] = []
        for flight in self._waiting:
            if not self._is_waiting(flight):
                continue
            waited_s = now_s - (flight.waiting_since_s or now_s)
            (expired if waited_s >= self._limits.request_deadline_s else kept).append(flight)
        self._waiting = kept
        for flight in expired:
            self._fail_flight(flight, self._no_engine())
        self._arm_deadline()

    def _fail_flight(self, flight: Flight, error: RequestError) -> None:
        self._flights.pop(flight.request_id, None)
        code = error.code or "malformed"
        self.request_meter.ended(flight.stopwatch, code)
        if flight.trace is not None:
            flight.trace.failed(code, len(flight.emitted))
        note(
            logger, logging.WARNING, flight.trace_id,
            "request_failed model=%s request_id=%s emitted=%d losses=%d error=%s code=%s",
            self._model, flight.request_id, len(flight.emitted), flight.num_losses,
            type(error).__name__, code,
        )  # fmt: skip
        self._fail(flight.request_id, error)


def load_of(cores: Sequence[FleetCore], door: Door, now_s: float) -> LoadSample:
    """The load of one model over all its versions, which share the door. `now_s` is monotonic."""
    num_waiting = sum(core.num_waiting for core in cores)
    first_s = min((core.first_waiting_since_s(now_s) for core in cores), default=now_s)
    return door.meter.sample(
        now_s,
        num_waiting=num_waiting + door.num_waiting,
        # The first at the door has waited longest of those there.
        oldest_wait_s=now_s - min(first_s, door.first_since_s(now_s)),
        num_in_flight=sum(core.num_in_flight for core in cores) - num_waiting,
    )


def _no_frontend(request_id: str, error: RequestError) -> None:
    raise RuntimeError(f"request {request_id} failed before a frontend was attached") from error
