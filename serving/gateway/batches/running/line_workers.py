"""The tasks that answer the lines of a batch: as many at once as are wanted."""

import asyncio
from collections.abc import Awaitable, Callable

# Of the mean time of a line, what the last one counts for.
_NEWEST = 0.05


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
