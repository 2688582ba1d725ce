import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client.sse import EventDecoder, parse_event
from loadtest.client.stream import Answer
from loadtest.errors import ErrorKind, RequestFailedError


def events_of(stream: bytes) -> list[bytes]:
    decoder = EventDecoder()
    fed = [decoder.feed(line) for line in stream.splitlines(keepends=True)]
    return [event for event in (*fed, decoder.finish()) if event is not None]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data:a\n\n", [b"a"]),
        (b"data:  a\n\n", [b" a"]),  # one space belongs to the format
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b": ping\n\ndata: a\n\n: ping\n\n", [b"a"]),
        (b"id: 7\nevent: message\nretry: 3\ndata: a\n\n", [b"a"]),
        (b"data: a\n\ndata: b\n", [b"a", b"b"]),  # ended without the blank line
        (b"data: a", [b"a"]),
        (b"\n\n\n", []),
    ],
)
def test_lines_become_events(stream: bytes, events: list[bytes]) -> None:
    assert events_of(stream) == events


@given(
    st.lists(
        st.binary(min_size=1).map(lambda data: data.replace(b"\r", b"r").replace(b"\n", b"n"))
    ),
    st.sampled_from([b"\n", b"\r\n"]),
)
def test_every_event_written_is_read(events: list[bytes], end: bytes) -> None:
    assert events_of(b"".join(b"data: " + event + end + end for event in events)) == events


def test_event_named_error_is_an_error_and_the_next_one_is_not() -> None:
    decoder = EventDecoder()
    decoder.feed(b"event: error\n")
    decoder.feed(b"data: it broke\n")
    with pytest.raises(RequestFailedError, match="it broke"):
        decoder.feed(b"\n")
    assert decoder.feed(b"data: a\n") is None
    assert decoder.feed(b"\n") == b"a"


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices": []}',
        b'{"choices": null, "usage": null, "error": null}',
        b'{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}',
        b'{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}',
        b'{"choices": [{"index": 0, "text": ""}]}',
        b'{"choices": [{"index": 0, "delta": {"tool_calls": []}}]}',
    ],
)
def test_event_without_tokens(data: bytes) -> None:
    choice = parse_event(data).choice
    assert choice is None or not choice.has_tokens


@pytest.mark.parametrize(
    "choice",
    [
        b'"delta": {"content": "a"}',
        b'"delta": {"content": null, "reasoning": "a"}',
        b'"delta": {"reasoning_content": "a"}',
        b'"delta": {"tool_calls": [{"index": 0}]}',
        b'"text": "a"',
        b'"delta": {"content": ""}, "token_ids": [7]',  # half a character
        b'"text": "", "token_ids": [7]',
    ],
)
def test_event_with_tokens(choice: bytes) -> None:
    event = parse_event(b'{"choices": [{"index": 0, ' + choice + b"}]}")
    assert event.choice is not None
    assert event.choice.has_tokens


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b'{"error": {"message": "no"}}', ErrorKind.STREAM_ERROR),
        (b'{"error": "no", "choices": []}', ErrorKind.STREAM_ERROR),
        (b"{]", ErrorKind.MALFORMED),
        (b'{"choices": 3}', ErrorKind.MALFORMED),
        (b'"text"', ErrorKind.MALFORMED),
    ],
)
def test_unusable_event_has_its_kind(data: bytes, kind: ErrorKind) -> None:
    with pytest.raises(RequestFailedError) as caught:
        parse_event(data)
    assert caught.value.kind == kind


def test_gaps_and_the_longest_of_them() -> None:
    answer = Answer(keeps_content=False)
    for at_s in (1.0, 1.02, 1.5, 1.52):
        answer.take_line(b'data: {"choices": [{"text": "a"}]}\n', at_s)
        answer.take_line(b"\n", at_s)
    assert (answer.first_s, answer.last_s, answer.num_chunks) == (1.0, 1.52, 4)
    assert answer.longest_gap_s == pytest.approx(0.48)
    assert answer.longest_gap_at_s == 1.02
    assert sorted(answer.gap_counts.values()) == [1, 2]
    assert answer.text == ""
