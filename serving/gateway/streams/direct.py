"""The middle of a plain stream: token ids in, server-sent events out, straight to the client.

`DirectStream` owns a stream from its hand-over, when vLLM has sent what came first, to its
hand-back, when something comes that is more than tokens: its end, an error, the first output after
a resume. In between vLLM sees nothing of it. Does not own which streams are plain (`plain`), nor
when tokens come and how long they wait (`engine_client`).
"""

import logging
import time
from typing import Any, Protocol

import msgspec

from serving.gateway.telemetry.request_telemetry import RequestTelemetry

logger = logging.getLogger(__name__)

_escaped = msgspec.json.Encoder().encode


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

    def write(self, part: bytes) -> None:
        """Writes one part of the answer."""
        ...


class Detokenizer(Protocol):
    """The part of vLLM's fast detokenizer that is used here; it goes on with it at hand-back."""

    token_ids: list[int]
    stream: Any
    tokenizer: Any
    skip_special_tokens: bool

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
        """
        token_ids = self._pending
        if not token_ids:
            return True
        if self._connection.is_full and not self._connection.has_left:
            return False
        self._pending = []
        text = self._decoded(token_ids)
        self._num_written += len(token_ids)
        template = self._template
        if text or template.has_empty:
            self._connection.write(template.head + _escaped(text) + template.tail)
        if self.telemetry is not None:
            self._note_written(self.telemetry, now_s, is_held=is_held)
        return True

    def _decoded(self, token_ids: list[int]) -> str:
        detokenizer = self._detokenizer
        detokenizer.token_ids += token_ids
        try:
            return detokenizer.stream.step(detokenizer.tokenizer, token_ids) or ""
        except Exception as error:  # noqa: BLE001 - the tokenizer has but one class
            # Bytes that are no text. vLLM goes on with a new stream, token by token, and so do we.
            logger.warning("detokenizer_reset error=%r", str(error))
            fresh = type(detokenizer.stream)
            detokenizer.stream = fresh(skip_special_tokens=detokenizer.skip_special_tokens)
            return "".join(detokenizer.decode_next(token_id) for token_id in token_ids)

    @staticmethod
    def _note_written(telemetry: RequestTelemetry, now_s: float, *, is_held: bool) -> None:
        telemetry.numbers.output_chunks += 1
        if telemetry.context.output_at_s is not None:
            if is_held:
                telemetry.released(now_s)
            telemetry.context.written(time.monotonic())
