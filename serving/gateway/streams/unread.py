"""How much of their answers clients have not read, and whose connection is ended for it. Pure.

A client that reads slowly costs its engine the same as any other, and what it leaves unread waits
in this gateway. So one client has a bound, and all of them together have one: beyond it, the one
that left most is ended. Only clients that are behind are counted here, and whoever counts them says
when they have caught up.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from serving.domain.limits import MAX_UNREAD_BYTES, UNREAD_BUDGET_BYTES

_Client = TypeVar("_Client")

# Bytes of memory of a token that waits: its number, and its text where vLLM has read it. Measured,
# 92 (vLLM 0.32, 2026-11-28).
TOKEN_BYTES = 96
# vLLM makes objects of what comes with a token, such as likelihoods: so many bytes of memory of one
# byte on the link. Measured, 5 of a token's own likelihood, 14 of 20 rivals' besides.
OBJECT_RATIO = 16


def waiting_bytes(num_tokens: int, num_payload_bytes: int = 0) -> int:
    """Returns about how much memory such an output takes until its client reads."""
    return num_tokens * TOKEN_BYTES + num_payload_bytes * OBJECT_RATIO


@dataclass(frozen=True, slots=True)
class UnreadLimits:
    """Bytes that may wait for clients which do not read: for one, and for all of one gateway."""

    of_one: int = MAX_UNREAD_BYTES
    of_all: int = UNREAD_BUDGET_BYTES


class UnreadAnswers(Generic[_Client]):
    """The clients that are behind, and by how much."""

    def __init__(self, limits: UnreadLimits) -> None:
        self._limits = limits
        self._num_bytes: dict[_Client, int] = {}
        self.total_bytes = 0

    def note(self, client: _Client, num_bytes: int) -> _Client | None:
        """Notes how much waits for a client now; returns whose connection is to be ended.

        That is this client, or the one that left most if all of them together left too much, or
        `None`. Who is returned is no longer counted.
        """
        self.total_bytes += num_bytes - self._num_bytes.get(client, 0)
        self._num_bytes[client] = num_bytes
        ended = None
        if num_bytes > self._limits.of_one:
            ended = client
        elif self.total_bytes > self._limits.of_all:
            ended = max(self._num_bytes, key=self._num_bytes.__getitem__)
        if ended is not None:
            self.forget(ended)
        return ended

    def forget(self, client: _Client) -> None:
        """Notes that a client has caught up, or is gone. Unknown ones are ignored."""
        self.total_bytes -= self._num_bytes.pop(client, 0)
