"""Answers streamed chats of known forms past vLLM, from the prompt to the end of the stream.

A prompt is rendered by vLLM's renderer and given to an engine with the form's own parameters; its
tokens are read by vLLM's detokenizer and written as events that are made from vLLM's own models,
first and last ones by the application and those between straight to the connection (`direct`).
Everything that vLLM would refuse or word in another way is left to vLLM before anything is sent.

Does not own what a form is (`forms`), nor the tokens on their way (`engine_client`).
"""

import copy
import random
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.types import Message, Send
from vllm.entrypoints.generate.base.serving import GenerationError
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, uses_fast_detokenizer

from serving.domain.errors import GatewayFaultError
from serving.gateway.streams.connections import ClientConnection
from serving.gateway.streams.detokenizing import start_at_tail
from serving.gateway.streams.direct import DirectStream
from serving.gateway.streams.failures import FleetRequestError
from serving.gateway.streams.known.events import DONE, AnswerCounts, FormEvents
from serving.gateway.streams.known.forms import KnownForm, Lesson, most_tokens_in
from serving.gateway.streams.known.prompts import FormPrompts, prompts_of
from serving.gateway.streams.known.stream import KnownStream
from serving.gateway.streams.plain import PlainChat
from serving.gateway.streams.turns import in_own_turn
from serving.gateway.telemetry.request_telemetry import REQUEST_CONTEXT, RequestTelemetry

_HEAD: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}
# Of each model.
MOST_FORMS = 256
# A client that sends another seed each time has as many forms as requests. So a form is learned
# when it comes again, among so many others.
_MOST_SEEN = 1024


class KnownClient(Protocol):
    """The parts of the engine client that known answers need."""

    def submit_known(self, request: EngineCoreRequest, stream: KnownStream) -> RequestTelemetry:
        """Takes a request whose outputs are the stream's; raises as `add_request_async`."""
        ...

    def write_soon(self, stream: DirectStream) -> None:
        """Has a stream written with the next ones."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """Frees requests wherever they are."""
        ...


class KnownLLM(Protocol):
    """The parts of `FleetLLM` that known answers need."""

    @property
    def errored(self) -> bool:
        """True if the frontend has died."""
        ...

    @property
    def client(self) -> KnownClient:
        """The engine client below it."""
        ...


@dataclass(frozen=True, slots=True)
class _Known:
    """A form, the events of its answers, and its prompts: `None` if vLLM's renderer makes them."""

    form: KnownForm
    events: FormEvents
    prompts: FormPrompts | None


class KnownAnswer:
    """One answer of a known form, ready to be sent; see `KnownChats.answer_to`."""

    def __init__(
        self,
        serving: Any,
        client: KnownClient,
        known: _Known,
        request: EngineCoreRequest,
        connection: ClientConnection,
        answer_id: str,
    ) -> None:
        self._form, self._events = known.form, known.events
        self._serving, self._client, self._request = serving, client, request
        self._answer_id, self._created = answer_id, int(time.time())
        tokenizer = serving.renderer.tokenizer
        self._detokenizer = FastIncrementalDetokenizer(tokenizer, request)
        start_at_tail(self._detokenizer, request.prompt_token_ids or [])
        self._middle = self._events.middle(answer_id, self._created)
        self._stream = KnownStream(DirectStream(connection, self._detokenizer, self._middle))

    def ask(self) -> None:
        """Asks an engine. `send` has to follow in the same turn of the loop.

        Raises:
            VLLMValidationError: a value cannot be sent to an engine.
        """
        self._telemetry = self._client.submit_known(self._request, self._stream)

    async def send(self, send: Send) -> None:
        """Sends the answer. A caller that is cancelled frees the request."""
        stream, telemetry = self._stream, self._telemetry
        try:
            await send(_HEAD)
            first = await stream.wait_first()
            if first:
                await send(_body(self._first_events(first)))
                telemetry.numbers.output_chunks += 1
            if not stream.is_over and stream.begin_direct():
                self._client.write_soon(stream.direct)
            left = await stream.wait_over()
            await self._send_end(send, left, telemetry, has_begun=bool(first))
        finally:
            if not stream.is_over:
                self._client.abort([self._request.request_id])

    def _first_events(self, token_ids: list[int]) -> bytes:
        text = self._text_of(token_ids, is_stopped=False)
        first = self._events.first(self._answer_id, self._created)
        return first + self._middle.event(text)

    async def _send_end(
        self, send: Send, left: list[int], telemetry: RequestTelemetry, *, has_begun: bool
    ) -> None:
        last, error = self._stream.last, self._stream.error
        first = b"" if has_begun else self._events.first(self._answer_id, self._created)
        if last is None:
            if left:
                text = self._text_of(left, is_stopped=False)
                await send(_body(first + self._middle.event(text)))
            fault = FleetRequestError(error or GatewayFaultError())
            await _send_error(send, self._serving.create_streaming_error_response(fault))
            return
        assert last.finish is not None
        reason = FinishReason(last.finish)
        try:
            self._serving._raise_if_error(str(reason), self._answer_id)
        except GenerationError as failed:
            told = self._serving._convert_generation_error_to_streaming_response(failed)
            await _send_error(send, told)
            return
        text = self._text_of(left + last.token_ids, is_stopped=reason is FinishReason.STOP)
        events = self._events.last(self._answer_id, self._created, text, last, self._counts())
        if left or last.token_ids:
            telemetry.numbers.output_chunks += 1
        await send(_body(first + events, is_last=True))

    def _counts(self) -> AnswerCounts:
        num_thoughts, parser = 0, self._form.parser
        if parser is not None and self._form.has_usage:
            num_thoughts = parser.count_reasoning_tokens(tuple(self._detokenizer.token_ids))
        num_prompt = len(self._request.prompt_token_ids or ())
        return AnswerCounts(num_prompt, self._stream.num_tokens, num_thoughts)

    def _text_of(self, token_ids: list[int], *, is_stopped: bool) -> str:
        detokenizer = self._detokenizer
        before = len(detokenizer.output_text)
        detokenizer.update(token_ids, is_stopped)
        text: str = detokenizer.output_text[before:]
        return text


async def _send_error(send: Send, told: str) -> None:
    """Ends a stream with an error in vLLM's words, which the edge replaces by ours."""
    await send(_body(f"data: {told}\n\n".encode()))
    await send(_body(DONE, is_last=True))


def _body(part: bytes, *, is_last: bool = False) -> Message:
    return {"type": "http.response.body", "body": part, "more_body": not is_last}


class KnownChats:
    """The streamed chats of one model whose forms are known, and how forms become known."""

    def __init__(self, serving: PlainChat, llm: KnownLLM) -> None:
        self._serving, self._llm = serving, llm
        self._known: OrderedDict[bytes, _Known | None] = OrderedDict()
        self._seen: OrderedDict[int, None] = OrderedDict()  # once, by a hash of each

    @classmethod
    def of(cls, state: Any, llm: Any) -> "KnownChats | None":
        """Returns those of vLLM's application with this `state`.

        `None` if its answers have more than the tokens that an engine sends, its requests are
        logged by vLLM, or plain streams are not written past it.
        """
        serving = getattr(state, "openai_serving_chat", None)
        if type(serving) is not PlainChat:
            return None
        has_more = (
            serving.enable_prompt_tokens_details
            or llm.vllm_config.speculative_config is not None
            or llm.log_stats
            or serving.request_logger is not None
            or llm.output_processor.stream_interval > 1
        )
        tokenizer = serving.renderer.tokenizer
        if has_more or tokenizer is None or not uses_fast_detokenizer(tokenizer):
            return None
        return cls(serving, llm)

    async def answer_to(self, key: bytes, body: Mapping[str, Any]) -> KnownAnswer | None:
        """Returns the answer to a body of a form; `None` if it is vLLM's to answer."""
        known, context = self._known.get(key), REQUEST_CONTEXT.get()
        if known is None or context is None or context.connection is None or self._llm.errored:
            return None
        self._known.move_to_end(key)
        token_ids = await self._prompt_of(known, body["messages"]) if context.is_short else None
        if token_ids is None:
            return None
        answer_id = f"chatcmpl-{context.request_id}"
        request = self._core_request(known.form, body, token_ids, answer_id)
        if request is None:
            return None
        client, connection = self._llm.client, context.connection
        return KnownAnswer(self._serving, client, known, request, connection, answer_id)

    async def _prompt_of(self, known: _Known, messages: list[Any]) -> list[int] | None:
        """Returns the tokens of a prompt, made on the loop; `None` if it is not as it was."""
        form = known.form
        try:
            if known.prompts is not None:
                token_ids = await in_own_turn(known.prompts.make, messages)
            else:
                arguments, named = form.render
                render = self._serving.renderer.render_chat_async
                _, (made,) = await render([messages], *arguments, **named)
                token_ids = made["prompt_token_ids"] if made.get("type") == "token" else []
        except Exception:  # noqa: BLE001 - whatever it is, vLLM meets and words it
            return None
        if not token_ids or (
            form.parser is not None and not form.parser.is_reasoning_end(token_ids)
        ):
            return None
        return token_ids

    def _core_request(
        self, form: KnownForm, body: Mapping[str, Any], token_ids: list[int], answer_id: str
    ) -> EngineCoreRequest | None:
        """Returns what an engine is given; `None` if vLLM refuses it."""
        serving = self._serving
        try:
            most = get_max_tokens(
                serving.model_config.max_model_len,
                most_tokens_in(body),
                len(token_ids),
                serving.default_sampling_params,
                serving.override_max_tokens,
            )
        except ValueError:
            return None
        params = form.core_request.sampling_params
        assert params is not None
        if most < 1:
            return None
        if most != params.max_tokens:
            # Nothing else of it is changed by anybody, so the rest is shared.
            params = copy.copy(params)
            params.max_tokens = most
        # As vLLM does it: so many characters behind the id that the client knows.
        return msgspec.structs.replace(
            form.core_request,
            request_id=f"{answer_id}-{random.getrandbits(32):08x}",
            external_req_id=answer_id,
            prompt_token_ids=token_ids,
            sampling_params=params,
            arrival_time=time.time(),
        )

    def begin_lesson(self, key: bytes) -> Lesson | None:
        """Returns what is to be filled while vLLM answers; `None` if nothing is to be learned.

        That is so of long requests, which are rendered elsewhere, and of the first of a form.
        """
        context = REQUEST_CONTEXT.get()
        is_short = context is not None and context.is_short
        return Lesson() if is_short and key not in self._known and self._comes_again(key) else None

    def _comes_again(self, key: bytes) -> bool:
        if hash(key) in self._seen:
            return True
        self._seen[hash(key)] = None
        if len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        return False

    def learn(self, key: bytes, lesson: Lesson) -> None:
        """Keeps what a lesson came to: that it came to nothing, too."""
        if lesson.core_request is None or lesson.first_chunk is None:
            return  # it was refused, or lost, or its client left: the next may come further
        form = lesson.form
        self._known[key] = None if form is None else self._what_is_known_of(form)
        if len(self._known) > MOST_FORMS:
            self._known.popitem(last=False)

    def _what_is_known_of(self, form: KnownForm) -> _Known:
        counts_thoughts = self._serving._include_reasoning_tokens_details
        fingerprint = self._serving.system_fingerprint
        events = FormEvents(form, fingerprint, counts_thoughts=counts_thoughts)
        arguments, named = form.render
        return _Known(form, events, prompts_of(self._serving.renderer, arguments, named))
