"""Collects one response with its instants: tokens, gaps between them, usage, and its end.

Owns what counts as a token event and as a whole answer. Does not own the socket. Pure: instants are
arguments, monotonic seconds of one clock.
"""

from dataclasses import dataclass, field

from loadtest.client.sse import DONE, EventDecoder, Usage, parse_event
from loadtest.errors import ErrorKind, RequestFailedError
from loadtest.histogram import bucket_of


@dataclass(slots=True, eq=False)
class Answer:
    """Collects one response as it comes in. Instants are `None` before the first token event.

    `is_done` is true once the server has reported the end. `keeps_content` keeps the text of the
    answer, for a conversation that goes on or a check.
    """

    keeps_content: bool = field(kw_only=True)
    is_done: bool = False
    finish_reason: str | None = None
    first_s: float | None = None
    last_s: float | None = None
    gap_counts: dict[int, int] = field(default_factory=dict)
    longest_gap_s: float | None = None
    longest_gap_at_s: float | None = None
    num_chunks: int = 0
    usage: Usage | None = None
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    _texts: list[str] = field(default_factory=list, init=False)
    _decoder: EventDecoder = field(default_factory=EventDecoder, init=False)

    @property
    def text(self) -> str:
        """The answer so far, empty where content is not kept."""
        return "".join(self._texts)

    def take_line(self, line: bytes, now_s: float) -> None:
        """Takes in one line of the stream, read at `now_s`.

        Raises:
            RequestFailedError: an error of the server in the stream, or an unreadable event.
        """
        self._take(self._decoder.feed(line), now_s)

    def take_whole(self, body: bytes, now_s: float) -> None:
        """Takes in a response that is no stream: all its tokens come at once.

        Raises:
            RequestFailedError: the server answered an error, or something unreadable.
        """
        self._take(body, now_s)
        self.is_done = True

    def finish(self, now_s: float) -> None:
        """Ends the response.

        Raises:
            RequestFailedError: it was no whole answer.
        """
        self._take(self._decoder.finish(), now_s)
        # A server that loses the end of a stream also closes it in order: FIN proves nothing.
        if self.finish_reason is None or not self.is_done:
            missing = "[DONE]" if self.finish_reason else "finish_reason"
            msg = f"ended without {missing} after {self.num_chunks} token events"
            raise RequestFailedError(ErrorKind.TRUNCATED, msg)
        if self.first_s is None:
            raise RequestFailedError(ErrorKind.NO_TOKENS, f"finish_reason={self.finish_reason}")

    def _take(self, data: bytes | None, now_s: float) -> None:
        if data is None:
            return
        if data == DONE:
            self.is_done = True
            return
        event = parse_event(data)
        if event.usage is not None:  # with or without choices
            self.usage = event.usage
        if event.prompt_token_ids is not None:
            self.prompt_token_ids = event.prompt_token_ids
        choice = event.choice
        if choice is None:
            return
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
        if choice.prompt_token_ids is not None:
            self.prompt_token_ids = choice.prompt_token_ids
        if not choice.has_tokens:
            return
        self._count(now_s)
        if self.keeps_content:
            self._texts.append(choice.content)
            self.token_ids.extend(choice.token_ids or ())

    def _count(self, now_s: float) -> None:
        self.num_chunks += 1
        if self.last_s is None:
            self.first_s = self.last_s = now_s
            return
        gap_s = now_s - self.last_s
        bucket = bucket_of(gap_s)
        self.gap_counts[bucket] = self.gap_counts.get(bucket, 0) + 1
        if self.longest_gap_s is None or gap_s > self.longest_gap_s:
            self.longest_gap_s, self.longest_gap_at_s = gap_s, self.last_s
        self.last_s = now_s
