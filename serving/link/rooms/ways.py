"""Which batch work leaves an engine for what cannot wait at another gateway. Pure.

Owns what is on the engine of batch work, what of it was asked back, and for whom. A gateway has its
own batch work leave by itself: it asks only where that of others is in its way.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Generic

from serving.link.rooms.dealing import Name

# A gateway takes back what is asked of it at once. What is there after so many seconds it keeps,
# for it has left engines often enough, or cannot be resumed: another one is asked then.
PATIENCE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Way(Generic[Name]):
    """A request that was asked back from the gateway that has it, for another one."""

    of: Name
    asked_by: Name
    asked_at_s: float


class Ways(Generic[Name]):
    """The batch work of all gateways on one engine. `now_s` is of one clock, whichever it is."""

    def __init__(self) -> None:
        self._batch: dict[str, Name] = {}  # by request, the newest last; not those asked back
        self._num_of: Counter[Name] = Counter()
        # By the request that was asked back, the oldest first.
        self._ways: dict[str, _Way[Name]] = {}
        self._num_over: Counter[Name] = Counter()

    def began(self, request_id: str, gateway: Name) -> None:
        """Notes batch work that a gateway has sent."""
        self._batch[request_id] = gateway
        self._num_of[gateway] += 1

    def ended(self, request_id: str) -> None:
        """Notes that a request has left the engine, whatever it was."""
        if (gateway := self._batch.pop(request_id, None)) is not None:
            self._num_of[gateway] -= 1
        if (way := self._ways.pop(request_id, None)) is not None:
            self._num_over[way.asked_by] += 1

    def ask(self, gateway: Name, now_s: float) -> None:
        """Asks the newest of others' batch work back; where there is none, this is over at once."""
        for request_id, other in reversed(self._batch.items()):
            if other != gateway:
                del self._batch[request_id]
                self._num_of[other] -= 1
                self._ways[request_id] = _Way(other, gateway, now_s)
                return
        self._num_over[gateway] += 1

    def look(self, now_s: float) -> None:
        """Waits no longer for what its gateway keeps. It is not asked back again."""
        while self._ways:
            request_id, way = next(iter(self._ways.items()))
            if now_s < way.asked_at_s + PATIENCE_S:
                return
            del self._ways[request_id]
            self._num_over[way.asked_by] += 1

    def left(self, gateway: Name) -> None:
        """Forgets a gateway whose requests have ended: what it asked back stays where it is."""
        for request_id, way in list(self._ways.items()):
            if way.asked_by == gateway:
                del self._ways[request_id]
                self.began(request_id, way.of)
        del self._num_over[gateway], self._num_of[gateway]

    def to_yield(self, gateway: Name) -> list[str]:
        """Returns the requests of a gateway that are asked back, and are there still."""
        return [request_id for request_id, way in self._ways.items() if way.of == gateway]

    def num_of_others(self, gateway: Name) -> int:
        """Returns how much batch work of others can be asked back."""
        return len(self._batch) - self._num_of[gateway]

    def num_over(self, gateway: Name) -> int:
        """Returns how many of the times that a gateway asked are over."""
        return self._num_over[gateway]
