"""The middle of a plain stream: token ids in, server-sent events out, straight to the client.

`DirectStream` owns a stream from its hand-over, when vLLM has sent what came first, to its
hand-back, when something comes that is more than tokens: its end, an error, the first output after
a resume. In between vLLM sees nothing of it. Does not own which streams are plain (`plain`), nor
when tokens come and how long they wait (`engine_client`).
"""

import time
from typing import Protocol

import msgspec

from serving.gateway.streams.unread import waiting_bytes
from serving.gateway.telemetry.request_telemetry import RequestTelemetry

escaped = msgspec.json.Encoder().encode


class Connection(Protocol):
    """The interface of a client's connection; see `ClientConnection`."""

    @property
    def has_left(self) -> bool:
        """True if the client is gone."""
        ...

    @property
    def is_full(self) -> bool:
        """True if the client does not read."""
        ...

    @property
    def num_waiting(self) -> int:
        """What `waits` was told last; 0 after `caught_up`."""
        ...

    def waits(self, num_bytes: int) -> None:
        """Notes how much of the answer waits, in bytes, because the client does not read."""
        ...

    def caught_up(self) -> None:
        """Notes that nothing waits any more."""
        ...

    def write(self, part: bytes) -> None:
        """Writes one part of the answer."""
        ...


class Detokenizer(Protocol):
    """The part of vLLM's fast detokenizer that is used here; it goes on with it at hand-back."""

    token_ids: list[int]

    def decode_next(self, next_token_id: int) -> str:
        """Returns the text that a token adds."""
        ...


class EventTemplate(msgspec.Struct, frozen=True):
    """The bytes of a stream's events around their text. `has_empty`: those without text are sent.

    A token may add no text: it is half a character, or a special token.
    """

    head: bytes
    tail: bytes
    has_empty: bool

    def event(self, text: str) -> bytes:
        """Returns the event with this text; empty if none is sent for it."""
        return self.head + escaped(text) + self.tail if text or self.has_empty else b""


class DirectStream:
    """Writes the tokens of one stream. Used from one event loop only."""

    __slots__ = (
        "_connection", "_detokenizer", "_from", "_num_written", "_pending", "_template",
        "is_dirty", "telemetry",
    )  # fmt: skip

    def __init__(
        self, connection: Connection, detokenizer: Detokenizer, template: EventTemplate
    ) -> None:
        """Takes the stream over from vLLM, whose `detokenizer` has seen all tokens until now."""
        self._connection = connection
        self._detokenizer = detokenizer
        self._template = template
        self._from = len(detokenizer.token_ids)
        self._num_written = 0
        self._pending: list[int] = []
        self.is_dirty = False  # it is on the list of those to be flushed
        self.telemetry: RequestTelemetry | None = None  # once it is attached

    @property
    def num_tokens_before(self) -> int:
        """The tokens that vLLM had before the hand-over."""
        return self._from

    @property
    def written_ids(self) -> list[int]:
        """The tokens that were written here."""
        return self._detokenizer.token_ids[self._from : self._from + self._num_written]

    def take(self, token_ids: list[int]) -> None:
        """Takes tokens, to be written at the next flush."""
        self._pending += token_ids

    def hand_back(self) -> list[int]:
        """Ends the direct part; returns the tokens that are not written, which vLLM gets."""
        left, self._pending = self._pending, []
        return left

    def flush(self, now_s: float, *, is_held: bool) -> bool:
        """Writes what is pending as one event; returns `False` if the client does not read.

        Then the tokens stay, as ids, until it does, or until the hand-back.

        Raises:
            Exception: the tokenizer cannot read the tokens. Fail the request.
        """
        token_ids = self._pending
        if not token_ids:
            return True
        connection = self._connection
        if connection.is_full and not connection.has_left:
            connection.waits(waiting_bytes(len(token_ids)))
            return False
        if connection.num_waiting:
            connection.caught_up()
        self._pending = []
        detokenizer = self._detokenizer
        detokenizer.token_ids += token_ids
        # One by one: several at once, of which the last is half a character, would have no text.
        text = "".join(map(detokenizer.decode_next, token_ids))
        self._num_written += len(token_ids)
        event = self._template.event(text)
        if event and not connection.has_left:
            connection.write(event)
        if self.telemetry is not None:
            self._note_written(self.telemetry, now_s, is_held=is_held)
        return True

    @staticmethod
    def _note_written(telemetry: RequestTelemetry, now_s: float, *, is_held: bool) -> None:
        telemetry.numbers.output_chunks += 1
        if telemetry.context.output_at_s is not None:
            if is_held:
                telemetry.released(now_s)
            telemetry.context.written(time.monotonic())
