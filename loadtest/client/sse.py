"""Parses server-sent events of an OpenAI stream: lines in, events with their content out.

Owns the format. Does not own sockets, clocks or what a stream adds up to (`stream`). Pure.
"""

import msgspec

from loadtest.errors import ErrorKind, RequestFailedError

DONE = b"[DONE]"
_EXCERPT = 200  # bytes of an unreadable event that its error shows


class EventDecoder:
    """Puts the lines of a stream together to events. Lines end with LF, CRLF or not at all."""

    __slots__ = ("_data", "_is_error")

    def __init__(self) -> None:
        self._data: list[bytes] = []
        self._is_error = False

    def feed(self, line: bytes) -> bytes | None:
        """The data of the event that this line completes, `None` if it completes none.

        Raises:
            RequestFailedError: the event reports an error.
        """
        line = line.rstrip(b"\r\n")
        if not line:
            return self.finish()
        # The usual line first: everything else is a comment (used as a ping) or a rare field.
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line.startswith(b"event:"):
            self._is_error = line[6:].strip() == b"error"
        return None

    def finish(self) -> bytes | None:
        """The data of what came since the last event. Some servers end without the blank line.

        Raises:
            RequestFailedError: the event reports an error.
        """
        if not self._data:
            self._is_error = False
            return None
        data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
        self._data.clear()
        if self._is_error:
            self._is_error = False
            raise RequestFailedError(ErrorKind.STREAM_ERROR, _excerpt(data))
        return data


class _CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """The server's own count. `None`: it reported none."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None

    @property
    def cached_tokens(self) -> int | None:
        """The prompt tokens that were found in the cache."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct, frozen=True):
    """The answer's part of an event, or the whole answer of a response that is no stream."""

    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None

    @property
    def has_tokens(self) -> bool:
        """Returns whether it carries tokens: neither the role nor the finish is one."""
        if self.text or self.token_ids:
            return True
        delta = self.delta or self.message
        return delta is not None and bool(
            delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls
        )

    @property
    def content(self) -> str:
        """Returns what it adds to the answer, without reasoning and tool calls."""
        delta = self.delta or self.message
        return (self.text if delta is None else delta.content) or ""


class StreamEvent(msgspec.Struct, frozen=True):
    """The part of a chat or completions stream event that a load test reads."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: object = None
    prompt_token_ids: list[int] | None = None

    @property
    def choice(self) -> Choice | None:
        """The only choice, as one is asked for; `None` in an event of something else."""
        return self.choices[0] if self.choices else None


_DECODER = msgspec.json.Decoder(StreamEvent)


def parse_event(data: bytes) -> StreamEvent:
    """Returns the content of an event's data.

    Raises:
        RequestFailedError: it is an error of the server (`STREAM_ERROR`) or unreadable
            (`MALFORMED`).
    """
    try:
        event = _DECODER.decode(data)
    except msgspec.DecodeError as error:
        msg = f"{error}: {_excerpt(data)}"
        raise RequestFailedError(ErrorKind.MALFORMED, msg) from error
    if event.error is not None:
        raise RequestFailedError(ErrorKind.STREAM_ERROR, _excerpt(msgspec.json.encode(event.error)))
    return event


def _excerpt(data: bytes) -> str:
    return data[:_EXCERPT].decode("utf-8", "replace")
