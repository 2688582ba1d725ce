"""The events of a known form's answers, made from vLLM's own models and a lesson's first event.

Pure. A field that is new in vLLM's models comes along; what differs from answer to answer is put
in.
"""

from typing import Any, NamedTuple

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo, UsageInfo
from vllm.v1.engine import FinishReason

from serving.gateway.streams.direct import EventTemplate, escaped
from serving.gateway.streams.known.forms import KnownForm
from serving.link.messages import TokenOutput

DONE = b"data: [DONE]\n\n"
# What stands in a form's events where each answer has its own.
_ID, _CREATED, _TEXT = "slicewise-id", 1_000_000_007, "slicewise-text"
# Tokens of the prompt, of the answer, of both, and of the model's thoughts.
_NUMBERS = (900_000_001, 900_000_002, 900_000_003, 900_000_004)
# Of ends that differ, tokens that stop an answer among them.
_MOST_ENDS = 64


class AnswerCounts(NamedTuple):
    """The tokens of a prompt, of its answer, and of the answer's thoughts."""

    prompt: int
    answer: int
    thoughts: int


class _Event:
    """An event of a form: bytes around an answer's id, its time and its text."""

    def __init__(self, chunk: str, text: str | None) -> None:
        # From the left: the id and the time come first, and a model's name may hold anything.
        self._before_id, _, rest = f"data: {chunk}\n\n".partition(_ID)
        self._before_created, _, rest = rest.partition(str(_CREATED))
        self._head, self._tail = rest, ""
        if text is not None:
            self._head, _, self._tail = rest.rpartition(text)

    def head(self, answer_id: str, created: int) -> bytes:
        """The bytes before the text."""
        return f"{self._before_id}{answer_id}{self._before_created}{created}{self._head}".encode()

    @property
    def tail(self) -> bytes:
        """The bytes behind it."""
        return self._tail.encode()


class FormEvents:
    """The events of a form's answers, with whatever fields vLLM's have."""

    def __init__(
        self, form: KnownForm, fingerprint: str | None = None, *, counts_thoughts: bool = False
    ) -> None:
        """`fingerprint` is the system's, which vLLM puts on the last event of an answer."""
        self._counts_thoughts = counts_thoughts
        self._model_name, self._has_usage = form.model_name, form.has_usage
        self._has_empty, self._fingerprint = form.has_empty, fingerprint
        self._first = _Event(form.first_chunk.removeprefix("data: ").removesuffix("\n\n"), None)
        self._middle = _Event(self._chunk(_choice(_TEXT)), f'"{_TEXT}"')
        self._ends: dict[tuple[int, int | str | None, bool], _Event] = {}
        self._usage = self._usage_event()

    def first(self, answer_id: str, created: int) -> bytes:
        """The event before the first text."""
        return self._first.head(answer_id, created)

    def middle(self, answer_id: str, created: int) -> EventTemplate:
        """The form of an event with text."""
        event = self._middle
        return EventTemplate(event.head(answer_id, created), event.tail, self._has_empty)

    def last(
        self, answer_id: str, created: int, text: str, finish: TokenOutput, counts: AnswerCounts
    ) -> bytes:
        """The last events: the last text, why the answer ends, and its tokens if it has them."""
        assert finish.finish is not None
        has_text = bool(text) or self._has_empty
        key = (finish.finish, finish.stop_reason, has_text)
        event = self._ends.get(key)
        if event is None:
            if len(self._ends) >= _MOST_ENDS:
                self._ends.clear()
            event = self._ends[key] = self._end(*key)
        parts = [event.head(answer_id, created)]
        if has_text:
            parts += [escaped(text), event.tail]
        if self._has_usage:
            parts.append(self._counted(self._usage.head(answer_id, created), counts))
        return b"".join([*parts, DONE])

    def _end(self, finish: int, stop_reason: int | str | None, has_text: bool) -> _Event:  # noqa: FBT001
        choice = _choice(
            _TEXT if has_text else None,
            finish_reason=str(FinishReason(finish)),
            stop_reason=stop_reason,
        )
        own: dict[str, Any] = {}
        if not self._has_usage and self._fingerprint is not None:
            own["system_fingerprint"] = self._fingerprint
        return _Event(self._chunk(choice, **own), f'"{_TEXT}"' if has_text else None)

    def _usage_event(self) -> _Event:
        prompt, completion, total, thoughts = _NUMBERS
        usage = UsageInfo(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=total,
            completion_tokens_details=(
                CompletionTokenUsageInfo(reasoning_tokens=thoughts)
                if self._counts_thoughts
                else None
            ),
        )
        chunk = ChatCompletionStreamResponse(
            id=_ID,
            object="chat.completion.chunk",
            created=_CREATED,
            choices=[],
            model=self._model_name,
            usage=usage,
            system_fingerprint=self._fingerprint,
            metrics=None,
        )
        return _Event(chunk.model_dump_json(exclude_unset=True, exclude_none=True), None)

    @staticmethod
    def _counted(event: bytes, counts: AnswerCounts) -> bytes:
        head, mark, numbers = event.rpartition(b'"usage":')
        total = counts.prompt + counts.answer
        own = (counts.prompt, counts.answer, total, counts.thoughts)
        for placeholder, count in zip(_NUMBERS, own, strict=True):
            numbers = numbers.replace(b"%d" % placeholder, b"%d" % count)
        return head + mark + numbers

    def _chunk(self, choice: ChatCompletionResponseStreamChoice, **own: Any) -> str:
        chunk = ChatCompletionStreamResponse(
            id=_ID,
            object="chat.completion.chunk",
            created=_CREATED,
            choices=[choice],
            model=self._model_name,
            **own,
        )
        return str(chunk.model_dump_json(exclude_unset=True))


def _choice(text: str | None, **end: Any) -> ChatCompletionResponseStreamChoice:
    delta = DeltaMessage() if text is None else DeltaMessage(content=text)
    return ChatCompletionResponseStreamChoice(
        index=0, delta=delta, logprobs=None, token_ids=None, **({"finish_reason": None} | end)
    )


def marked_chunk(chunk: str, answer_id: str, created: str) -> str:
    """Returns a lesson's first chunk with marks for what each answer has of its own."""
    return chunk.replace(answer_id, _ID, 1).replace(f":{created}", f":{_CREATED}", 1)
