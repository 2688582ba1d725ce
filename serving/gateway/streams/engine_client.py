"""Presents many engines to vLLM's frontend as the one engine core that it expects.

Owns vLLM's client interface (`EngineCoreClient`) and what is between it and the dispatcher: vLLM's
requests are encoded, outputs decoded, and the frontend takes all that is ready at once. Does not
own the requests in flight, nor which engine has one (`dispatcher`), nor which tokens wait and which
are joined (`streams`).

Above it, vLLM's detokenizer, stop strings, parsers and streams see one uninterrupted token stream.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from serving.domain.errors import GatewayFaultError, RequestError
from serving.domain.tokens.block_hashes import BlockContext, MediaItem
from serving.domain.tokens.named_blocks import NamedBlocks
from serving.gateway.dispatch.dispatcher import Dispatcher, Outputs
from serving.gateway.dispatch.requests import InFlightRequest
from serving.gateway.streams.connections import ClientConnection
from serving.gateway.streams.direct import DirectStream
from serving.gateway.streams.hold import TokenHold
from serving.gateway.streams.known.forms import LESSON
from serving.gateway.streams.known.stream import KnownStream
from serving.gateway.streams.merging import TokenMerge
from serving.gateway.streams.pace import HoldBounds
from serving.gateway.streams.unread import waiting_bytes
from serving.gateway.telemetry.request_telemetry import RequestTelemetry, present_context
from serving.link.messages import TokenOutput
from serving.link.vllm_codec import decode_output, encode_request, output_decoder

logger = logging.getLogger(__name__)

# Of one request with many answers, between which the loop sends what others wait for.
_REQUESTS_PER_TURN = 32
# Direct streams that are written in one turn of the loop: some 10 ms.
_WRITES_PER_TURN = 1024
# How soon a client that did not read is tried again.
_UNREAD_RETRY_S = 0.02


class FleetEngineClient:
    """Implements `EngineCoreClient` over a changing set of engines.

    Used from one event loop only.
    """

    engine_ranks_managed = (0,)

    def __init__(
        self,
        dispatcher: Dispatcher,
        supported_tasks: tuple[str, ...],
        *,
        separates_tenants: bool = False,
        adapters: Collection[str] = (),
        hold: TokenHold | None = None,
    ) -> None:
        """Makes a client without engines, which load all of `adapters` before they are linked.

        With `separates_tenants`, no tenant's prompts are found in a prefix cache by another's.
        Without `hold` no tokens wait for more.
        """
        self.dispatcher = dispatcher
        self._separates_tenants = separates_tenants
        self.supported_tasks = supported_tasks
        self.resources = SimpleNamespace(engine_dead=False)
        self._merge: TokenMerge[RequestTelemetry] = TokenMerge()
        self._hold = hold or TokenHold(HoldBounds())
        self._has_ready = asyncio.Event()
        self._direct: dict[str, DirectStream] = {}  # by request
        self._known: dict[str, KnownStream] = {}  # by request
        self._dirty: list[DirectStream] = []  # with tokens that are not written
        self._is_held = False  # they have waited for more
        self._num_since_turn = 0
        self._encoder = MsgpackEncoder()
        self._decoder = output_decoder()
        self._adapters = frozenset(adapters)
        self._adapter_ids: set[int] = set()
        self._on_failure: Callable[[str, RequestError], None] = _no_frontend
        dispatcher.attach(self)

    def set_failure_sink(self, on_failure: Callable[[str, RequestError], None]) -> None:
        """Sets the receiver of failures, which reports each to the request's caller."""
        self._on_failure = on_failure

    # -- what the dispatcher delivers --

    def deliver(self, outputs: Outputs) -> None:
        """Takes in one step of one engine, for the frontend to fetch or straight for clients."""
        now_s = time.monotonic()
        hold_s = self._hold.present_s(now_s)
        if self._known:
            outputs = [pair for pair in outputs if not self._takes_known(pair[1])]
        if self._direct:
            outputs = [pair for pair in outputs if not self._takes_direct(pair, now_s)]
        for telemetry, output in outputs:
            if (connection := telemetry.context.connection) is not None:
                _count_unread(connection, output)
        self._merge.take(outputs, now_s, holds=hold_s > 0)
        if self._merge.has_held or self._dirty:
            self._is_held = hold_s > 0
            self._hold.arm(self._release)
        if self._merge.has_ready:
            self._has_ready.set()

    def _takes_direct(self, pair: tuple[RequestTelemetry, TokenOutput], now_s: float) -> bool:
        """Gives an output to its direct stream, or ends that if the output is not plain."""
        telemetry, output = pair
        stream = self._direct.get(output.request_id)
        if stream is None:
            return False
        if output.finish is None and output.payload is None:
            stream.take(output.token_ids)
            self._mark(stream)
            return True
        del self._direct[output.request_id]
        left = stream.hand_back()
        if left:
            rest = TokenOutput(output.request_id, left)
            self._merge.take([(telemetry, rest)], now_s, holds=False)
        return False

    def _takes_known(self, output: TokenOutput) -> bool:
        """Gives an output to the answer of a known form that it belongs to, if there is one."""
        stream = self._known.get(output.request_id)
        if stream is None:
            return False
        if stream.take(output):
            self._mark(stream.direct)
        if output.finish is not None:
            del self._known[output.request_id]
        return True

    def _mark(self, stream: DirectStream) -> None:
        if not stream.is_dirty:
            stream.is_dirty = True
            self._dirty.append(stream)

    def _release(self) -> None:
        """Lets go of the tokens that have waited for more."""
        now_s = time.monotonic()
        for telemetry in self._merge.release(now_s):
            telemetry.released(now_s)
        if self._merge.has_ready:
            self._has_ready.set()
        if self._dirty:
            self._write_direct(now_s)

    def _write_direct(self, now_s: float) -> None:
        """Writes what direct streams have, of so many that the turn of the loop stays short."""
        due, self._dirty = self._dirty[:_WRITES_PER_TURN], self._dirty[_WRITES_PER_TURN:]
        are_left = bool(self._dirty)
        for stream in due:
            if self._flushed(stream, now_s):
                stream.is_dirty = False
            else:
                self._dirty.append(stream)
        if are_left:
            asyncio.get_running_loop().call_soon(self._release)
        elif self._dirty:
            self._hold.arm(self._release, _UNREAD_RETRY_S)

    def _flushed(self, stream: DirectStream, now_s: float) -> bool:
        """Writes what a stream has; returns `False` if its client does not read."""
        try:
            return stream.flush(now_s, is_held=self._is_held)
        except Exception as error:  # noqa: BLE001 - the tokenizer has no other class
            if stream.telemetry is not None:
                self.fail_unreadable(stream.telemetry.request_id, error)
            return True

    def attach(self, request_id: str, stream: DirectStream) -> bool:
        """Lets `stream` have the tokens of a request from now on, in place of the frontend.

        Returns `False` if some are on their way to the frontend; they have to go first.
        """
        telemetry = self.dispatcher.telemetry_of(request_id)
        num_known = stream.num_tokens_before + self._merge.num_waiting(request_id)
        if telemetry is None or num_known != self.dispatcher.num_emitted(request_id):
            return False
        stream.telemetry = telemetry
        self._direct[request_id] = stream
        waiting = self._merge.withdraw(request_id)
        if waiting:
            stream.take(waiting)
            self._mark(stream)
            self._hold.arm(self._release)
        return True

    def submit_known(self, request: EngineCoreRequest, stream: KnownStream) -> RequestTelemetry:
        """Takes a request of a known form, whose outputs are the stream's; the frontend has none.

        Raises:
            VLLMValidationError: it has a value that cannot be sent. The client gets a 400.
        """
        in_flight = self._in_flight(request)
        telemetry = in_flight.telemetry
        stream.direct.telemetry = telemetry
        self._known[request.request_id] = stream
        self.dispatcher.submit(in_flight)
        return telemetry

    def write_soon(self, stream: DirectStream) -> None:
        """Has a stream written with the next ones."""
        self._mark(stream)
        self._hold.arm(self._release)

    def fail_known(self, request_id: str, error: RequestError) -> bool:
        """Fails a request of a known form; returns `False` if it is none."""
        stream = self._known.pop(request_id, None)
        if stream is None:
            return False
        stream.fail(error)
        return True

    @property
    def num_known(self) -> int:
        """The number of requests of known forms, of which the frontend has nothing."""
        return len(self._known)

    @property
    def num_direct(self) -> int:
        """The number of streams that are written past the frontend."""
        return len(self._direct) + len(self._known)

    def fail(self, request_id: str, error: RequestError) -> None:
        """Reports a failure to the request's caller."""
        self._on_failure(request_id, error)

    @property
    def behind_s(self) -> float:
        """How late the gateway is with the tokens it has, in seconds.

        The oldest have waited for so long for the frontend, or what an engine sends now waits for
        so long in the sockets and in the loop. Tokens that are held for more are not late.
        """
        since_s = self._merge.ready_since_s
        waited_s = 0.0 if since_s is None else time.monotonic() - since_s
        return max(waited_s, self.dispatcher.late_s)

    # -- what vLLM's frontend calls --

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """Returns the tasks that the model supports; its configuration fixes them."""
        return self.supported_tasks

    async def get_output_async(self) -> EngineCoreOutputs:
        """Waits for outputs of any engines; returns all that are ready, those of a request joined.

        So a gateway that is behind sends fewer and longer chunks, and catches up.
        """
        while not self._merge.has_ready:
            self._has_ready.clear()
            await self._has_ready.wait()
        return EngineCoreOutputs(outputs=self._decoded(self._merge.drain()))

    def take_rest(self, request_ids: Collection[str]) -> list[EngineCoreOutput]:
        """Returns what has come of requests that fail and no client has had, in order."""
        rest = []
        for request_id in request_ids:
            stream = self._direct.pop(request_id, None)
            if stream is not None and stream.telemetry is not None:
                rest.append((stream.telemetry, TokenOutput(request_id, stream.hand_back())))
        return self._decoded([*rest, *self._merge.flush(request_ids)])

    def _decoded(
        self, pairs: Iterable[tuple[RequestTelemetry, TokenOutput]]
    ) -> list[EngineCoreOutput]:
        outputs: list[EngineCoreOutput] = []
        for telemetry, message in pairs:
            if message.token_ids:
                telemetry.numbers.output_chunks += 1
            if message.payload is None:
                outputs.append(decode_output(message, self._decoder))
                continue
            try:
                output = decode_output(message, self._decoder)
            except msgspec.MsgspecError as error:
                # An engine of another vLLM, which the link's version does not tell apart.
                self.fail_unreadable(message.request_id, error)
                continue
            outputs.append(output)
        return outputs

    def fail_unreadable(self, request_id: str, error: Exception) -> None:
        """Fails a request of which an engine sent what cannot be read, and frees it."""
        logger.error("output_unreadable request_id=%s error=%r", request_id, str(error))
        failure = GatewayFaultError()
        if not self.dispatcher.fail(request_id, failure):
            # It was the last one, behind which the dispatcher has nothing to do.
            self._on_failure(request_id, failure)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Takes one request; it is dispatched now, or waits until an engine is ready.

        Raises:
            VLLMValidationError: it has a value that cannot be sent. The client gets a 400.
        """
        await self._give_others_a_turn()
        if (lesson := LESSON.get()) is not None:
            # As it is before it gets its tenant's salt, and nobody's prompt is kept.
            lesson.core_request = msgspec.structs.replace(request, prompt_token_ids=None)
        in_flight = self._in_flight(request)
        params = request.sampling_params
        if params is not None and not params.stop:
            # A stop string is looked for here: an engine goes on until it is found.
            self._merge.allow_hold(request.request_id)
        self.dispatcher.submit(in_flight)

    def _in_flight(self, request: EngineCoreRequest) -> InFlightRequest:
        """Returns the record of a request that has just come."""
        params = request.sampling_params
        prompt_token_ids = request.prompt_token_ids or []
        payload = self._encoded(request)
        telemetry = self.dispatcher.telemetry.arrived(
            request.request_id, len(prompt_token_ids), time.monotonic()
        )
        context = telemetry.context
        in_flight = InFlightRequest(
            request_id=request.request_id,
            prompt_token_ids=prompt_token_ids,
            max_tokens=params.max_tokens if params is not None else None,
            payload=payload,
            telemetry=telemetry,
            is_resumable=request.prompt_embeds is None,
            tenant=context.tenant,
            batch_id=context.batch_id,
            weight=context.weight,
            service_class=context.service_class,
            patience_s=context.patience_s,
            waited_s=context.waited_s,
        )
        in_flight.blocks = _blocks_of(request)
        if params is not None and params.prompt_logprobs is not None:
            # They come with the first token only: a resumed request must not ask for them again.
            in_flight.resume_payload = self._payload_without_prompt_logprobs(request, params)
        if params is not None and params.structured_outputs is not None:
            in_flight.forbidding_fields = _forbidding_fields(params)
        return in_flight

    def _encoded(self, request: EngineCoreRequest) -> list[bytes]:
        """Returns the payload of a request that has just come, and gives it its tenant's salt."""
        try:
            if self._separates_tenants:
                tenant = present_context(time.monotonic()).tenant
                request.cache_salt = salt_of(tenant, request.cache_salt)
            return encode_request(request, self._encoder)
        except (OverflowError, UnicodeError) as error:
            # JSON has integers of any size and halves of characters; the link has neither.
            raise VLLMValidationError(
                f"a value of the request cannot be sent to an engine: {error}; "
                "allowed: integers of 64 bits, and text that UTF-8 can write"
            ) from error

    async def _give_others_a_turn(self) -> None:
        """Lets the loop turn among the many answers of one request, which come in one go."""
        self._num_since_turn += 1
        if self._num_since_turn >= _REQUESTS_PER_TURN:
            self._num_since_turn = 0
            await asyncio.sleep(0)

    def _payload_without_prompt_logprobs(
        self, request: EngineCoreRequest, params: SamplingParams
    ) -> list[bytes]:
        request.sampling_params = params.clone()
        request.sampling_params.prompt_logprobs = None
        try:
            return encode_request(request, self._encoder)
        finally:
            request.sampling_params = params

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        """Does what `abort` does."""
        self.abort(request_ids)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Frees these requests wherever they are; unknown ids are ignored."""
        self._merge.forget(request_ids)
        for request_id in request_ids:
            if (stream := self._direct.pop(request_id, None)) is not None:
                stream.hand_back()
            if (known := self._known.pop(request_id, None)) is not None:
                known.direct.hand_back()
        self.dispatcher.abort(request_ids)

    def dp_engines_running(self) -> bool:
        """Returns whether anything is in flight."""
        return self.dispatcher.num_in_flight > 0

    def get_kv_event_sources(self) -> dict[int, Any]:
        """Returns an empty dict: KV events do not travel over the link."""
        return {}

    def shutdown(self, timeout: float | None = None) -> None:  # noqa: ARG002 - vLLM's signature
        """Forgets everything. Connections are closed by their owner."""
        self._hold.disarm(self._release)
        self._merge = TokenMerge()
        self._direct.clear()
        self._known.clear()
        self._dirty.clear()
        self.dispatcher.shutdown()

    # -- adapters and caches: operations on every engine --

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        """Takes an adapter of the model: every engine has loaded it before it was linked.

        Raises:
            ValueError: it is none of the model's, and no engine has it.
        """
        if lora_request.lora_name not in self._adapters:
            known = ", ".join(sorted(self._adapters)) or "none"
            raise ValueError(
                f"adapter {lora_request.lora_name!r} is not in lora_adapters; there are: {known}"
            )
        self._adapter_ids.add(lora_request.lora_int_id)
        return True

    async def remove_lora_async(self, lora_id: int) -> bool:
        """Returns `False` always: adapters leave with their version of the model."""
        del lora_id
        return False

    async def list_loras_async(self) -> set[int]:
        """Returns the ids of the adapters, as this gateway's frontend counts them."""
        return set(self._adapter_ids)

    async def pin_lora_async(self, lora_id: int) -> bool:
        """Returns whether it is known: engines keep all of their adapters."""
        return lora_id in self._adapter_ids

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
        """Returns `False` always: an engine that should not run is released with its slice."""
        return False

    async def _call_all(self, method: str, *args: Any) -> list[Any]:
        replies = await self.dispatcher.call_all(method, msgspec.msgpack.encode(args))
        return [msgspec.msgpack.decode(reply) for reply in replies]


def _forbidding_fields(params: SamplingParams) -> list[str]:
    """Returns the fields that keep an engine from tokens that the request's grammar may need."""
    fields = ("allowed_token_ids", "bad_words", "min_tokens", "stop_token_ids")
    return [name for name in fields if getattr(params, name)]


def _blocks_of(request: EngineCoreRequest) -> NamedBlocks | None:
    """Returns the blocks of a prompt as engines name them; `None` where none is looked up.

    That is so for pooling, and for logprobs of a prompt. Embeddings are not named: it takes a
    digest of megabytes, and they seldom come twice.
    """
    params = request.sampling_params
    if params is None or params.prompt_logprobs is not None or not request.prompt_token_ids:
        return None
    if request.prompt_embeds is not None:
        return None
    adapter = request.lora_request
    media = [
        # A text of its own each, as in an engine: the names of two that are one are others.
        MediaItem(_copied(item.identifier), item.mm_position.offset, item.mm_position.length)
        for item in request.mm_features or ()
    ]
    name = None if adapter is None else adapter.lora_name
    context = BlockContext(name, request.cache_salt or None, tuple(media))
    return NamedBlocks(request.prompt_token_ids, context)


def _count_unread(connection: ClientConnection, output: TokenOutput) -> None:
    """Counts an output that vLLM will keep, if the client does not read what came before it."""
    if connection.is_full:
        size = sum(map(len, output.payload or ()))
        connection.waits(connection.num_waiting + waiting_bytes(len(output.token_ids), size))
    elif connection.num_waiting:
        connection.caught_up()


def _copied(text: str) -> str:
    return text.encode().decode()


def salt_of(tenant: str, own: str | None) -> str:
    """Returns the salt of a tenant's blocks in prefix caches; the same at every gateway.

    `own` is what the client sent; `None` if it sent none. It divides the tenant's blocks further,
    and whatever it is, the salt is none of another tenant.
    """
    parts = [tenant] if own is None else [tenant, own]
    # As JSON, because no two lists of texts have the same.
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def _no_frontend(request_id: str, error: RequestError) -> None:
    raise RuntimeError(f"request {request_id} failed before a frontend was attached") from error
