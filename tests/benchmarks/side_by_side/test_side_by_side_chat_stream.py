"""How one answer is read off a connection, wherever its bytes are cut."""

import pytest

from benchmarks.side_by_side.chat_stream import ChatStream, WrongAnswerError

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"a\\"content"}}]}\n\n'
LAST = b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":"length"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":64,"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


ANSWER = HEAD + b"".join(map(chunk, (ROLE, TOKEN, TOKEN, LAST, USAGE, DONE))) + b"0\r\n\r\n"


def read(*reads: bytes) -> tuple[list[bool], list[tuple[float, int]]]:
    """Whether the answer was whole after each read, and what was heard of tokens."""
    heard: list[tuple[float, int]] = []
    stream = ChatStream(64, 3, lambda now_s, count: heard.append((now_s, count)))
    return [stream.feed(data, float(at)) for at, data in enumerate(reads)], heard


def test_answer_in_one_read_has_all_its_events_at_once() -> None:
    assert read(ANSWER) == ([True], [(0.0, 3)])


def test_events_that_share_an_http_chunk_are_counted_one_by_one() -> None:
    body = chunk(ROLE + TOKEN) + chunk(TOKEN + LAST + USAGE + DONE) + b"0\r\n\r\n"
    assert read(HEAD + body) == ([True], [(0.0, 3)])


@pytest.mark.parametrize("size", [1, 2, 7, 50])
def test_answer_cut_anywhere_has_the_same_events(size: int) -> None:
    reads = [ANSWER[at : at + size] for at in range(0, len(ANSWER), size)]
    whole, heard = read(*reads)
    assert whole == [False] * (len(reads) - 1) + [True]
    assert sum(count for _, count in heard) == 3


def test_role_without_content_is_no_token() -> None:
    assert read(HEAD + chunk(ROLE)) == ([False], [])


def test_status_of_a_refusal_is_shown() -> None:
    # Alone, so that refusals at other times or of other requests are counted as the same.
    with pytest.raises(WrongAnswerError, match=r"^HTTP/1\.1 429 Too Many Requests$"):
        read(b"HTTP/1.1 429 Too Many Requests\r\nx-request-id: 7b\r\n\r\n{}")


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (ANSWER.replace(b'"completion_tokens":3', b'"completion_tokens":2'), r"\(64, 2\)"),
        (ANSWER.replace(b'"prompt_tokens":64', b'"prompt_tokens":63'), r"\(63, 3\)"),
        (ANSWER.replace(b'"usage"', b'"usag"').replace(b'_tokens":', b'_":'), "None"),
    ],
)
def test_answer_of_another_length_is_refused(found: bytes, shown: str) -> None:
    with pytest.raises(WrongAnswerError, match=shown):
        read(found)


def test_answer_whose_tokens_are_not_seen_is_refused() -> None:
    with pytest.raises(WrongAnswerError, match="no event with content"):
        read(ANSWER.replace(b'"content":', b'"content" :'))
