"""Which line of a batch is asked next: lines that are refused wait aside, and hold up no others.

A line that was refused waits for its time without a worker, and counts as one of its model's: of a
model there are as many lines out, asked or waiting, as the batch asks at once. So a model without
engines has a few lines here, and the lines of other models go past it. Those of its lines that are
passed are read again later. Used from one event loop.
"""

import asyncio
import contextlib
import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from serving.domain.limits import MIB
from serving.gateway.batches.lines import BatchLine, RefusedLine
from serving.gateway.batches.running.line_source import LineSource, PlacedLine

# Bytes of bodies that are kept of lines that wait; others are read again when it is their time.
_MOST_KEPT_BYTES = 32 * MIB


@dataclass(slots=True, eq=False)
class AskedLine:
    """A line that was handed out. `num_faults` are its replies that were faults of a server."""

    line: BatchLine | RefusedLine
    begin: int
    num_refusals: int = 0
    num_faults: int = 0
    is_kept: bool = True

    @property
    def model(self) -> str | None:
        """The model that it names, if it names one."""
        return self.line.model if isinstance(self.line, BatchLine) else None

    @property
    def num_bytes(self) -> int:
        """The bytes of its body."""
        return len(self.line.body) if isinstance(self.line, BatchLine) else 0


class LineQueue:
    """The lines of one batch that have no answer."""

    def __init__(
        self,
        source: LineSource,
        most: Callable[[], int],
        models: Collection[str],
        most_kept_bytes: int = _MOST_KEPT_BYTES,
    ) -> None:
        """Takes how many lines are asked at once now.

        `models` are those that lines name; none if it is not known of all lines.
        """
        self._source = source
        self._most = most
        self._models = models
        self._most_kept_bytes = most_kept_bytes
        self._num_kept_bytes = 0
        self._num_out: Counter[str | None] = Counter()  # by model, also of those that wait
        self._num_asked_again = 0
        self._waiting: list[tuple[float, int, AskedLine]] = []  # a heap, by when they are asked
        self._order = itertools.count()
        self._passed: dict[str | None, deque[tuple[int, int]]] = {}  # places of lines, by model
        self._read_again: deque[PlacedLine] = deque()
        self._is_read = False
        self._has_changed = asyncio.Event()
        self._taking = asyncio.Lock()
        self._refused: set[str | None] = set()
        self._answered: set[str | None] = set()

    async def next(self) -> AskedLine | None:
        """Returns a line when there is one to ask; `None` if all are asked and none waits."""
        async with self._taking:
            while True:
                self._has_changed.clear()
                # Half of those that are asked may have been refused before, while there are others.
                asked = (
                    await self._take_waiting(max(1, self._most() // 2))
                    or await self._take_new()
                    or await self._take_waiting(math.inf)
                )
                if asked is not None:
                    return asked
                if self._is_read and not self._waiting and not self._passed:
                    return None
                await self._wait()

    def done(self, asked: AskedLine) -> None:
        """Notes that a line has its answer."""
        self._answered.add(asked.model)
        self._num_out[asked.model] -= 1
        self._end_asking(asked)

    def put_back(self, asked: AskedLine, wait_s: float) -> None:
        """Takes a line back that was refused, to be asked again in `wait_s`.

        Whoever puts it back asks for the next line, so that somebody does when it is its time.
        """
        self._refused.add(asked.model)
        self._end_asking(asked)
        asked.num_refusals += 1
        asked.is_kept = self._num_kept_bytes + asked.num_bytes <= self._most_kept_bytes
        if asked.is_kept:
            self._num_kept_bytes += asked.num_bytes
        elif isinstance(asked.line, BatchLine):
            asked.line = BatchLine(asked.line.number, asked.line.custom_id, b"", asked.line.model)
        due_s = asyncio.get_running_loop().time() + wait_s
        heapq.heappush(self._waiting, (due_s, next(self._order), asked))

    def take_is_refused(self) -> bool:
        """Returns whether since the last time some model refused lines that it could not take.

        One that answered none has no engine, which says nothing of others that answered.
        """
        refused, answered = self._refused, self._answered
        self._refused, self._answered = set(), set()
        return bool(refused & answered) or (bool(refused) and not answered)

    async def _take_waiting(self, most_asked_again: float) -> AskedLine | None:
        now_s = asyncio.get_running_loop().time()
        is_due = bool(self._waiting) and self._waiting[0][0] <= now_s
        if not is_due or self._num_asked_again >= most_asked_again:
            return None
        asked = heapq.heappop(self._waiting)[2]
        self._num_asked_again += 1
        if asked.is_kept:
            self._num_kept_bytes -= asked.num_bytes
        else:
            (placed,) = await self._source.read_again([(asked.line.number, asked.begin)])
            asked.line = placed.line
        return asked

    async def _take_new(self) -> AskedLine | None:
        """Returns a line that has not been asked, of a model that may have one more out."""
        if not self._read_again:
            await self._read_passed()
        if self._read_again:
            return self._hand_out(self._read_again.popleft())
        while not self._is_read and self._can_be_passed():
            placed = await self._source.next()
            if placed is None:
                self._is_read = True
            elif isinstance(placed.line, RefusedLine) or self._has_room(placed.line.model):
                return self._hand_out(placed)
            else:
                place = (placed.line.number, placed.begin)
                self._passed.setdefault(placed.line.model, deque()).append(place)
        return None

    async def _read_passed(self) -> None:
        model = next(filter(self._has_room, self._passed), None)
        places = self._passed.get(model)
        if not places:
            return
        room = self._most() - self._num_out[model]
        self._read_again += await self._source.read_again(list(itertools.islice(places, room)))
        for _ in self._read_again:
            places.popleft()
        if not places:
            del self._passed[model]

    def _has_room(self, model: str | None) -> bool:
        return self._num_out[model] < self._most()

    def _can_be_passed(self) -> bool:
        """Returns whether there may be lines that can be asked behind those that cannot."""
        return not self._models or any(map(self._has_room, self._models))

    def _hand_out(self, placed: PlacedLine) -> AskedLine:
        asked = AskedLine(placed.line, placed.begin)
        self._num_out[asked.model] += 1
        return asked

    def _end_asking(self, asked: AskedLine) -> None:
        self._num_asked_again -= asked.num_refusals > 0
        self._has_changed.set()

    async def _wait(self) -> None:
        """Waits until a line that waits is due, or something has changed."""
        due_s = self._waiting[0][0] if self._waiting else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(due_s):
                await self._has_changed.wait()
