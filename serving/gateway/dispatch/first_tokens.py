"""How long first tokens take at each engine, and which requests should have theirs by now.

A gateway computes what a request costs until its first token in tokens of prompts (`routing`). What
a token takes in seconds it sees: from the time between a request's leaving and its first token.
"""

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_low

# In so many first tokens of an engine the past counts half.
_HALF_LIFE = 16
# So many have to have come from an engine before it is compared.
_LEAST_COUNT = 8
# The others' median is computed anew after so many first tokens of any engine.
_LOOK_EVERY = 16
# A first token is late after so many times what was expected, between so many seconds.
_LATE_AFTER = 4.0
_LEAST_LATE_S, _MOST_LATE_S = 2.0, 60.0
# So much sooner another engine has to be expected to begin, and so often a request is moved.
GAIN = 2.0
MOST_TIMES = 2


@dataclass(slots=True)
class _Seen:
    cost: float = 0.0
    took_s: float = 0.0
    count: int = 0

    def add(self, cost: float, took_s: float) -> None:
        kept = 0.5 ** (1 / _HALF_LIFE)
        self.cost = self.cost * kept + cost
        self.took_s = self.took_s * kept + took_s
        self.count += 1

    @property
    def pace(self) -> float | None:
        """Seconds per token; `None` while too few have come."""
        return self.took_s / self.cost if self.count >= _LEAST_COUNT else None


class FirstTokenPace:
    """Seconds of first tokens for what they cost, of each engine and of the median one. Pure."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._median: float | None = None
        self._num_unlooked = 0

    def took(self, engine_id: str, cost: int, took_s: float) -> None:
        """Takes in that a first token of this cost has taken so long, or longer."""
        seen = self._seen.setdefault(engine_id, _Seen())
        seen.add(max(1, cost), took_s)
        self._num_unlooked += 1
        if seen.count == _LEAST_COUNT or self._num_unlooked >= _LOOK_EVERY:
            self._look()

    def forget(self, engine_id: str) -> None:
        """Forgets an engine that is gone."""
        if self._seen.pop(engine_id, None) is not None:
            self._look()

    def expected_s(self, cost: int) -> float | None:
        """Returns what a first token takes at the median engine; `None` if that is not known."""
        return None if self._median is None else self._median * max(1, cost)

    def late_after_s(self, cost: int) -> float | None:
        """Returns in how many seconds a first token is late; `None` if that is not known."""
        expected_s = self.expected_s(cost)
        if expected_s is None:
            return None
        return min(_MOST_LATE_S, max(_LEAST_LATE_S, _LATE_AFTER * expected_s))

    def _look(self) -> None:
        self._num_unlooked = 0
        paces = [seen.pace for seen in self._seen.values()]
        known = [pace for pace in paces if pace is not None]
        # Of two the quicker one: that the other is slow could not be seen else.
        self._median = median_low(known) if known else None


class Unbegun:
    """The requests that engines have and have not begun: a timer, for the first that is late."""

    def __init__(self, on_late: Callable[[str, int], float | None]) -> None:
        """`on_late` gets a request and its attempt whose time is over, begun or not.

        It returns in how many seconds that is looked at again; `None` for never.
        """
        self._on_late = on_late
        self._due: list[tuple[float, str, int]] = []  # a heap
        self._timer: asyncio.Handle | None = None
        # uvloop's handle of what is due at once does not know when.
        self._timer_at_s = 0.0

    def given(self, request_id: str, attempt: int, in_s: float) -> None:
        """Notes that an engine was given it, and is late with it in so many seconds."""
        at_s = asyncio.get_running_loop().time() + in_s
        heapq.heappush(self._due, (at_s, request_id, attempt))
        self._arm()

    def stop(self) -> None:
        """Forgets all of them."""
        self._due.clear()
        self._cancel()

    def _arm(self) -> None:
        if not self._due:
            return
        at_s = self._due[0][0]
        if self._timer is None or at_s < self._timer_at_s:
            self._cancel()
            self._timer_at_s = at_s
            self._timer = asyncio.get_running_loop().call_at(at_s, self._look)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        while self._due and self._due[0][0] <= now_s:
            _, request_id, attempt = heapq.heappop(self._due)
            again_in_s = self._on_late(request_id, attempt)
            if again_in_s is not None:
                self.given(request_id, attempt, again_in_s)
        self._arm()
