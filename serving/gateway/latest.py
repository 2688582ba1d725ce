"""The latest value of something that changes now and then, for one task that follows it."""

import asyncio
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Latest(Generic[_T]):
    """A value that is told again and again. Used from one event loop; one task waits at a time.

    Of several changes that come while the task is busy, it sees the last.
    """

    def __init__(self) -> None:
        self._value: _T | None = None
        self._is_new = asyncio.Event()

    def tell(self, value: _T) -> None:
        """Takes in the value of now; one that is as before changes nothing."""
        if value != self._value:
            self._value = value
            self._is_new.set()

    async def next(self) -> _T:
        """Waits for the next change."""
        while True:
            await self._is_new.wait()
            self._is_new.clear()
            if self._value is not None:
                return self._value
