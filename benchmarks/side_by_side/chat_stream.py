"""Reads one streamed chat answer off a connection: when tokens came, how many, and its end. Pure.

Looks for byte patterns and parses no JSON, because the client shares the cores with the server. It
knows what vLLM's frontend writes, which all systems have; an answer without them is an error.
"""

import re
from collections.abc import Callable

_HEAD_END = b"\r\n\r\n"
_EVENT_END = b"\n\n"
_CONTENT, _NO_CONTENT = b'"content":"', b'"content":""'
_DONE = b"data: [DONE]"
_BODY_END = b"\r\n0\r\n\r\n"
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens":(\d+)')
_ANSWER_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
_SHOWN_BYTES = 200


class WrongAnswerError(Exception):
    """An answer that is not what was asked for."""


class ChatStream:
    """One answer. `on_tokens` hears of each read with tokens: its instant and how many events."""

    def __init__(
        self, prompt_tokens: int, answer_tokens: int, on_tokens: Callable[[float, int], None]
    ) -> None:
        self.num_events = 0
        self._asked = (prompt_tokens, answer_tokens)
        self._on_tokens = on_tokens
        self._rest = b""
        self._usage = b""
        self._has_head = False
        self._is_done = False

    def feed(self, data: bytes, now_s: float) -> bool:
        """Takes in what was read at `now_s`; returns whether the answer is whole.

        Raises:
            WrongAnswerError: an error of the server, or an answer of another length.
        """
        data = self._rest + data if self._rest else data
        if not self._has_head:
            if _HEAD_END not in data:
                self._rest = data
                return False
            self._check_head(data)
            data = data[data.index(_HEAD_END) + len(_HEAD_END) :]
        cut = data.rfind(_EVENT_END) + len(_EVENT_END)
        if cut >= len(_EVENT_END):
            self._take_events(data[:cut], now_s)
            data = data[cut:]
        self._rest = data
        # The events' own end is before the end of the chunk that they came in.
        if not (self._is_done and data.endswith(_BODY_END)):
            return False
        self._check_usage()
        return True

    def _check_head(self, data: bytes) -> None:
        if not data.startswith(b"HTTP/1.1 200"):
            # The status alone: what else a head says differs from answer to answer.
            status = data.partition(b"\r\n")[0][:_SHOWN_BYTES]
            raise WrongAnswerError(status.decode(errors="replace"))
        self._has_head = True

    def _take_events(self, events: bytes, now_s: float) -> None:
        num_events = events.count(_CONTENT) - events.count(_NO_CONTENT)
        if num_events:
            self.num_events += num_events
            self._on_tokens(now_s, num_events)
        if b'"completion_tokens":' in events:
            self._usage = events
        if _DONE in events:
            self._is_done = True

    def _check_usage(self) -> None:
        found = [pattern.findall(self._usage) for pattern in (_PROMPT_TOKENS, _ANSWER_TOKENS)]
        told = tuple(int(numbers[-1]) if numbers else None for numbers in found)
        if told != self._asked:
            raise WrongAnswerError(f"asked for {self._asked} tokens, usage says {told}")
        if not self.num_events:
            raise WrongAnswerError("no event with content")
