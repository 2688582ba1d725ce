"""How many lines of a batch are asked at once: as many as it takes to be done in time.

Few at first, since they wait where others' requests wait. More, where those few would not be
answered before they are due, and as long as those that are asked do not wait. Half as many, down
to one, each time that others' requests have missed their objectives: an engine that has room for a
line still takes longer over each step with it.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

# A batch that is done with this part of its time left over is in time though lines take longer.
_MARGIN = 1.2
# How long ago what a gateway tells of objectives may have been: as long as its window is.
SEEN_FOR_S = 30.0
# Of the mean time of a line, what the last one counts for.
_NEWEST = 0.05


def _no() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class LineRoom:
    """What a gateway has for the lines of one batch: `most` at once, and whether they do not wait.

    `is_pressed` says that others' requests lately missed their objectives. Without a gateway a
    batch has what its settings say.
    """

    most: Callable[[], int] = lambda: 0
    has_room: Callable[[], bool] = _no
    is_pressed: Callable[[], bool] = _no


@dataclass(frozen=True, slots=True)
class LinesLeft:
    """So many lines, which are due in `left_s`. One is answered in `line_s`, if any was."""

    num_lines: int
    left_s: float
    line_s: float | None


def lines_wanted(now: int, least: int, most: int, left: LinesLeft, *, has_room: bool) -> int:
    """Returns how many lines to ask at once, of which there are `now`. Pure.

    It is `least`, or more if it has to be; at most twice as many as now, and none more where lines
    wait or are refused.
    """
    if left.line_s is None or left.num_lines <= 0:
        return min(max(now, least), 2 * now)
    rate = left.num_lines / max(left.left_s, left.line_s, 1e-3)
    needed = min(max(math.ceil(_MARGIN * rate * left.line_s), least), max(most, least))
    if needed <= now:
        return needed
    return min(needed, 2 * now) if has_room else now


class LineTuner:
    """Decides how many lines to ask at once, time after time. Pure: times come in."""

    def __init__(self, room: LineRoom, least: int) -> None:
        self._room = room
        self._least = least
        self._look_again_s = -math.inf

    def lines(self, now_s: float, num_now: int, left: LinesLeft, *, is_refused: bool) -> int:
        """Returns how many to ask; `is_refused` says that some were refused since the last time."""
        if now_s < self._look_again_s:
            return num_now
        if self._room.is_pressed():
            # What is seen then is of before.
            self._look_again_s = now_s + SEEN_FOR_S
            return max(1, num_now // 2)
        has_room = not is_refused and self._room.has_room()
        return lines_wanted(num_now, self._least, self._room.most(), left, has_room=has_room)


class LineWorkers:
    """Answers lines, so many at once as are wanted, until there is none. Of one event loop."""

    def __init__(
        self,
        group: asyncio.TaskGroup,
        answer_one: Callable[[], Awaitable[bool]],
        num_wanted: int,
    ) -> None:
        """Begins. `answer_one` answers the next line; it returns whether there was one."""
        self._group = group
        self._answer_one = answer_one
        self.num_wanted = 0
        self.num_workers = 0
        self.line_s: float | None = None
        """How long a line takes, on average lately; `None` before the first."""
        self._has_ended = asyncio.Event()
        self.want(num_wanted)

    def want(self, num_lines: int) -> None:
        """Has so many lines asked at once, one at least."""
        self.num_wanted = max(1, num_lines)
        while self.num_workers < self.num_wanted and not self._has_ended.is_set():
            self.num_workers += 1
            self._group.create_task(self._work())

    async def wait_ended(self) -> None:
        """Waits until every line has been answered."""
        await self._has_ended.wait()

    async def _work(self) -> None:
        now_s = asyncio.get_running_loop().time
        # Whoever is one too many leaves after a line; the last one finds that there is none left.
        while self.num_workers <= self.num_wanted:
            began_s = now_s()
            if not await self._answer_one():
                break
            took_s = now_s() - began_s
            mean_s = took_s if self.line_s is None else self.line_s
            self.line_s = mean_s + _NEWEST * (took_s - mean_s)
        self.num_workers -= 1
        if self.num_workers == 0:
            self._has_ended.set()
