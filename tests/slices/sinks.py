"""A notice sink that a test can wait on."""

import asyncio
from collections.abc import Callable

from serving.slices.notices import Notice


class RecordingSink:
    """The notices that hold now, and all that was ever said."""

    def __init__(self) -> None:
        self.now: dict[tuple[int, str], Notice] = {}
        self.announced: list[Notice] = []
        self.withdrawn: list[tuple[int, str]] = []
        self._changed = asyncio.Event()

    def announce(self, notice: Notice) -> None:
        self.announced.append(notice)
        self.now[notice.worker_id, notice.source] = notice
        self._note()

    def withdraw(self, worker_id: int, source: str) -> None:
        self.withdrawn.append((worker_id, source))
        self.now.pop((worker_id, source), None)
        self._note()

    async def wait_for(self, condition: Callable[["RecordingSink"], object]) -> None:
        async with asyncio.timeout(20):
            while not condition(self):
                await self._changed.wait()

    def _note(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
