"""vLLM's streams of chat and completions, of which the middle is written past vLLM if it is plain.

Owns which streams are plain and when, and the form of their events, which is made from vLLM's own
models. Does not own the writing (`direct`) nor the tokens (`engine_client`). The first chunks of a
stream, its end, its usage and its errors are written by vLLM's own code, which sees the tokens that
were written past it with the first output that comes after them.

Everything that is not plain takes vLLM's way from beginning to end.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import (
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.utils.api_utils import should_include_usage
from vllm.outputs import RequestOutput
from vllm.parser.abstract_parser import DelegatingParser, Parser
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor

from serving.gateway.streams.direct import DirectStream, EventTemplate
from serving.gateway.streams.engine_client import FleetEngineClient
from serving.gateway.streams.known.events import marked_chunk
from serving.gateway.streams.known.forms import LESSON
from serving.gateway.telemetry.request_telemetry import REQUEST_CONTEXT

# Where the text of an event goes; no tokenizer has to know it.
_MARK = "slicewise-mark"
_CREATED = re.compile(r'"created":(\d+)')

_Result = TypeVar("_Result")


class DirectLLM(Protocol):
    """The parts of `FleetLLM` that a stream is handed over between."""

    output_processor: OutputProcessor

    @property
    def client(self) -> FleetEngineClient:
        """The engine client below it."""
        ...


def chat_template(request_id: str, created: int, model: str, *, has_empty: bool) -> EventTemplate:
    """Returns the form of a chunk of chat, with whatever fields vLLM's has."""
    choice = ChatCompletionResponseStreamChoice(
        index=0,
        delta=DeltaMessage(content=_MARK),
        logprobs=None,
        finish_reason=None,
        token_ids=None,
    )
    chunk = ChatCompletionStreamResponse(
        id=request_id,
        object="chat.completion.chunk",
        created=created,
        choices=[choice],
        model=model,
    )
    return _template(chunk.model_dump_json(exclude_unset=True), has_empty=has_empty)


def completion_template(request_id: str, created: int, model: str) -> EventTemplate:
    """Returns the form of a chunk of a completion, with whatever fields vLLM's has."""
    choice = CompletionResponseStreamChoice(
        index=0,
        text=_MARK,
        logprobs=None,
        finish_reason=None,
        stop_reason=None,
        prompt_token_ids=None,
        token_ids=None,
    )
    chunk = CompletionStreamResponse(
        id=request_id, object="text_completion", created=created, model=model, choices=[choice]
    )
    return _template(chunk.model_dump_json(exclude_unset=True), has_empty=True)


def _template(marked: str, *, has_empty: bool) -> EventTemplate:
    # From the right: a model's name or a request's id may hold anything.
    head, _, tail = marked.rpartition(f'"{_MARK}"')
    return EventTemplate(f"data: {head}".encode(), f"{tail}\n\n".encode(), has_empty)


def passes_on(parser: Parser | None, request: Any) -> bool:
    """Returns whether a parser passes text on as content, now and to the end of the stream.

    That is so once the model has ended its thoughts, or had none to think, if the request has no
    tools. A parser that looks for tool calls in every answer never does.
    """
    if parser is None:
        return True
    if not _may_pass_on(parser, request):
        return False
    state = parser._stream_state
    has_thought = parser._reasoning_parser is None or state.reasoning_ended
    return has_thought and (parser._tool_parser is None or state.tool_call_text_started)


def starts_plain(parser: Parser | None, request: Any, prompt_token_ids: list[int] | None) -> bool:
    """Returns whether a parser passes text on from the first token of an answer to its end."""
    if parser is None:
        return True
    if not _may_pass_on(parser, request):
        return False
    return parser._reasoning_parser is None or parser.is_reasoning_end(prompt_token_ids or [])


def _may_pass_on(parser: Parser, request: Any) -> bool:
    """Returns whether a parser is as we know them, and has no tools to look for."""
    kind = type(parser)
    is_known = (
        kind.parse_delta is DelegatingParser.parse_delta
        and kind._extract_tool_calls_streaming is DelegatingParser._extract_tool_calls_streaming  # type: ignore[attr-defined]
    )
    if not is_known or not request.include_reasoning:
        return False
    is_off = request.tool_choice == "none" and not parser._engine_based
    return parser._tool_parser is None or is_off


def _is_plain(serving: Any, request: Any) -> bool:
    """Returns whether the middle of the answer is text and nothing else, as far as it was asked."""
    _, has_usage_in_each = should_include_usage(
        request.stream_options, serving.enable_force_include_usage
    )
    return not (
        (request.n or 1) != 1
        or (request.logprobs is not None and request.logprobs is not False)
        or request.return_token_ids
        or request.use_beam_search
        or has_usage_in_each
        or serving.enable_per_request_metrics
        or (getattr(serving, "enable_log_outputs", False) and serving.request_logger)
    )


class _PlainStream(Generic[_Result]):
    """One stream on its way: vLLM reads `results` and writes; what it is handed over by is here."""

    def __init__(self, llm: DirectLLM, sequence_id: str, request: Any) -> None:
        """Begins with vLLM. `sequence_id` is the id under which vLLM asked for the tokens."""
        self._llm = llm
        self._sequence_id = sequence_id
        self._request = request
        self._direct: DirectStream | None = None
        self.parser: Parser | None = None
        # Known with the first chunk, and made only if the stream is handed over.
        self.make_template: Callable[[], EventTemplate] | None = None

    async def results(self, results: AsyncIterator[_Result]) -> AsyncIterator[_Result]:
        """Yields what vLLM has to write, and hands the stream over when it has written it."""
        async for item in results:
            result: RequestOutput = item[1] if isinstance(item, tuple) else item  # type: ignore[assignment]
            if self._direct is not None:
                output = result.outputs[0]
                output.token_ids = [*self._direct.written_ids, *output.token_ids]
                self._direct = None
            if (lesson := LESSON.get()) is not None and not lesson.is_plain:
                lesson.is_plain = starts_plain(self.parser, self._request, result.prompt_token_ids)
            yield item
            # The reader asks for more when it has sent all that it made of this.
            if not result.finished:
                self._hand_over()

    def _hand_over(self) -> None:
        context = REQUEST_CONTEXT.get()
        connection = None if context is None else context.connection
        if self.make_template is None or connection is None or not connection.is_open:
            return
        if not passes_on(self.parser, self._request):
            return
        processor = self._llm.output_processor
        ids = processor.external_req_ids.get(self._sequence_id, ())
        state = processor.request_states.get(ids[0]) if len(ids) == 1 else None
        if state is None or state.queue is None or state.queue.output is not None:
            return
        detokenizer = state.detokenizer
        if (
            state.stream_interval > 1
            or state.stats is not None
            or type(detokenizer) is not FastIncrementalDetokenizer
            or detokenizer.stop
            or not detokenizer.spaces_between_special_tokens
        ):
            return
        stream = DirectStream(connection, detokenizer, self.make_template())
        if self._llm.client.attach(state.request_id, stream):
            self._direct = stream


class PlainChat(OpenAIServingChat):
    """Serves chat as vLLM does, plain streams past it."""

    # Of the streams that are being written, by the request's identity.
    _plain_streams: dict[int, _PlainStream[RequestOutput]]

    def _make_parser(self, request: Any, *args: Any, **kwargs: Any) -> Parser:
        parser = super()._make_parser(request, *args, **kwargs)
        if (stream := self._plain_streams.get(id(request))) is not None:
            stream.parser = parser
        return parser

    def chat_completion_stream_generator(  # type: ignore[override] # a generator either way
        self,
        request: Any,
        result_generator: AsyncIterator[RequestOutput],
        request_id: str,
        model_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[str, None]:
        """Does what vLLM's does."""
        is_plain = _is_plain(self, request)
        if (lesson := LESSON.get()) is not None:
            lesson.has_usage, _ = should_include_usage(
                request.stream_options, self.enable_force_include_usage
            )
        write = self._plain_chat if is_plain else super().chat_completion_stream_generator
        chunks: AsyncGenerator[str, None] = write(
            request, result_generator, request_id, model_name, *args, **kwargs
        )
        return chunks

    async def _plain_chat(
        self,
        request: Any,
        results: AsyncIterator[RequestOutput],
        request_id: str,
        model_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[str, None]:
        stream: _PlainStream[RequestOutput] = _PlainStream(
            self.engine_client,
            request_id,
            request,  # type: ignore[arg-type]
        )
        self._plain_streams[id(request)] = stream
        lesson = LESSON.get()
        chunks = super().chat_completion_stream_generator(
            request, stream.results(results), request_id, model_name, *args, **kwargs
        )
        try:
            async for chunk in chunks:
                if stream.make_template is None and (created := _CREATED.search(chunk)) is not None:
                    has_tools = stream.parser is not None and stream.parser.tool_parser is not None
                    if lesson is not None:
                        lesson.model_name = model_name
                        if stream.parser is not None and stream.parser.reasoning_parser is not None:
                            lesson.parser = stream.parser
                        lesson.has_empty = not has_tools
                        lesson.first_chunk = marked_chunk(chunk, request_id, created[1])
                    stream.make_template = partial(
                        chat_template,
                        request_id,
                        int(created[1]),
                        model_name,
                        has_empty=not has_tools,
                    )
                yield chunk
        finally:
            del self._plain_streams[id(request)]


class PlainCompletion(OpenAIServingCompletion):
    """Serves completions as vLLM does, plain streams past it."""

    def completion_stream_generator(  # type: ignore[override] # a generator either way
        self,
        request: Any,
        engine_inputs: Any,
        result_generator: AsyncIterator[tuple[int, RequestOutput]],
        request_id: str,
        created_time: int,
        model_name: str,
        num_prompts: int,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[str, None]:
        """Does what vLLM's does."""
        if num_prompts == 1 and _is_plain(self, request):
            stream: _PlainStream[tuple[int, RequestOutput]] = _PlainStream(
                self.engine_client,
                f"{request_id}-0",
                request,  # type: ignore[arg-type]
            )
            stream.make_template = partial(
                completion_template, request_id, created_time, model_name
            )
            result_generator = stream.results(result_generator)
        chunks: AsyncGenerator[str, None] = super().completion_stream_generator(
            request,
            engine_inputs,
            result_generator,
            request_id,
            created_time,
            model_name,
            num_prompts,
            *args,
            **kwargs,
        )
        return chunks


def write_plain_past(state: Any) -> None:
    """Lets vLLM's application with this `state` write plain streams past itself."""
    # A pooling model has neither.
    chat = getattr(state, "openai_serving_chat", None)
    if type(chat) is OpenAIServingChat:
        chat.__class__ = PlainChat
        chat._plain_streams = {}  # type: ignore[union-attr]
    completion = getattr(state, "openai_serving_completion", None)
    if type(completion) is OpenAIServingCompletion:
        completion.__class__ = PlainCompletion
