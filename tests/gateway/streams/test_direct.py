"""A direct stream by itself: the bytes and the text of vLLM's, and a client that does not read."""

import itertools
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
)
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from serving.artifacts.model_source import resolve_source
from serving.gateway.streams.direct import DirectStream, EventTemplate
from serving.gateway.streams.plain import chat_template
from tests.gateway.core_requests import core_request

pytestmark = pytest.mark.imports_vllm

TOKENIZER = get_tokenizer(resolve_source("models/slicewise-demo"))
BARE = EventTemplate(b"", b"", has_empty=False)
WITH_EMPTY = EventTemplate(b"", b"", has_empty=True)


@dataclass
class Client:
    """A connection that writes down what it gets. Implements `Connection`."""

    parts: list[bytes] = field(default_factory=list)
    is_full: bool = False
    has_left: bool = False
    num_waiting: int = 0

    def waits(self, num_bytes: int) -> None:
        assert self.is_full
        assert num_bytes > self.num_waiting
        self.num_waiting = num_bytes

    def caught_up(self) -> None:
        assert not self.is_full
        self.num_waiting = 0

    def write(self, part: bytes) -> None:
        assert not self.is_full
        self.parts.append(part)

    @property
    def text(self) -> str:
        return b"".join(self.parts).decode().replace('"', "")


def detokenizer(**params: object) -> FastIncrementalDetokenizer:
    request = core_request("r", prompt=TOKENIZER.encode("A slice"), **params)
    return FastIncrementalDetokenizer(TOKENIZER, request)


def words(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


# As JSON has it, without halves of characters: no tokenizer makes any.
@given(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.text(st.characters(exclude_categories=["Cs"])),
)
def test_event_is_vllms_whatever_its_text(text: str, model: str) -> None:
    template = chat_template("chatcmpl-1", 5, model, has_empty=True)
    choice = ChatCompletionResponseStreamChoice(
        index=0,
        delta=DeltaMessage(content=text),
        logprobs=None,
        finish_reason=None,
        token_ids=None,
    )
    chunk = ChatCompletionStreamResponse(
        id="chatcmpl-1", object="chat.completion.chunk", created=5, choices=[choice], model=model
    )
    client = Client()
    stream = DirectStream(client, _Says(text), template)
    stream.take([1])
    assert stream.flush(0.0, is_held=False)
    wanted = f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
    assert client.parts == [wanted.encode()]


class _Says:
    """A detokenizer of which every token is one text. Implements `Detokenizer`."""

    def __init__(self, text: str) -> None:
        self.token_ids: list[int] = []
        self._text = text

    def decode_next(self, _token_id: int) -> str:
        return self._text


@given(
    st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30),
    st.lists(st.integers(1, 5)),
    st.booleans(),
)
def test_text_is_vllms_however_its_tokens_are_divided(
    token_ids: list[int], sizes: list[int], skips_special: bool
) -> None:
    usual = detokenizer(skip_special_tokens=skips_special)
    for token_id in token_ids:
        usual.update([token_id], stop_terminated=False)
    ours, client = detokenizer(skip_special_tokens=skips_special), Client()
    stream = DirectStream(client, ours, BARE)
    left, lengths = list(token_ids), itertools.chain(sizes, itertools.repeat(1))
    texts = []
    while left:
        size = next(lengths)
        stream.take(left[:size])
        left = left[size:]
        num_before = len(client.parts)
        stream.flush(0.0, is_held=False)
        texts += client.parts[num_before:]

    assert "".join(msgspec.json.decode(text) for text in texts) == usual.output_text
    assert stream.written_ids == usual.token_ids == ours.token_ids


def test_tokens_of_one_flush_are_one_event() -> None:
    client = Client()
    stream = DirectStream(client, detokenizer(), BARE)
    stream.take(words(" of four"))
    stream.take(words(" chips"))
    stream.flush(0.0, is_held=False)
    stream.flush(0.0, is_held=False)
    assert client.parts == [b'" of four chips"']


def test_half_a_character_is_sent_if_vllm_sends_it() -> None:
    whole = words("é" if len(words("é")) > 1 else "好")
    assert len(whole) > 1, "the tokenizer has a token for it"
    for template, parts in ((BARE, []), (WITH_EMPTY, [b'""'])):
        client = Client()
        stream = DirectStream(client, detokenizer(), template)
        stream.take(whole[:1])
        stream.flush(0.0, is_held=False)
        assert client.parts == parts
        stream.take(whole[1:])
        stream.flush(0.0, is_held=False)
        assert client.text == TOKENIZER.decode(whole)


def test_client_that_does_not_read_gets_fewer_and_longer_events_and_all_tokens() -> None:
    client = Client(is_full=True)
    stream = DirectStream(client, detokenizer(), BARE)
    for word in (" one", " two", " three"):
        stream.take(words(word))
        assert not stream.flush(0.0, is_held=False)
    assert stream.written_ids == []
    assert client.num_waiting > 0
    client.is_full = False
    assert stream.flush(0.0, is_held=False)
    assert client.num_waiting == 0
    assert client.parts == [b'" one two three"']


def test_nothing_is_written_to_a_client_that_has_left() -> None:
    client = Client(is_full=True, has_left=True)
    stream = DirectStream(client, detokenizer(), BARE)
    stream.take(words(" one"))
    assert stream.flush(0.0, is_held=False)
    assert (client.parts, stream.hand_back()) == ([], [])


def test_tokens_that_are_not_written_are_handed_back_once() -> None:
    client = Client()
    stream = DirectStream(client, detokenizer(), BARE)
    stream.take(words(" one"))
    stream.flush(0.0, is_held=False)
    stream.take(words(" two"))
    assert stream.hand_back() == words(" two")
    assert stream.hand_back() == []
    assert stream.flush(0.0, is_held=False)
    assert (client.parts, stream.written_ids) == ([b'" one"'], words(" one"))


def test_token_that_the_tokenizer_does_not_know_costs_no_other_text() -> None:
    client, usual = Client(), detokenizer()
    token_ids = [*words(" one"), 2**40, *words(" two")]
    for token_id in token_ids:
        usual.update([token_id], stop_terminated=False)
    stream = DirectStream(client, detokenizer(), BARE)
    stream.take(token_ids)
    stream.flush(0.0, is_held=False)
    assert client.text == usual.output_text
