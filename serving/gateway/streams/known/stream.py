"""The tokens of one answer of a known form, between the engine client and who sends the answer."""

import asyncio

from serving.domain.errors import RequestError
from serving.gateway.streams.direct import DirectStream
from serving.link.messages import TokenOutput


class KnownStream:
    """One answer on its way: what an engine sent of it, until it is written.

    Its first and last tokens are for who sends the answer; those between are given to `direct`,
    which the engine client writes.
    """

    __slots__ = ("_early", "_is_begun", "_wake", "direct", "error", "last", "num_tokens")

    def __init__(self, direct: DirectStream) -> None:
        self.direct = direct
        self.num_tokens = 0
        self._early: list[int] = []  # before the first event was sent
        self._is_begun = False
        self.last: TokenOutput | None = None  # the output that it ended with
        self.error: RequestError | None = None  # what it failed with
        self._wake: asyncio.Future[None] | None = None

    def take(self, output: TokenOutput) -> bool:
        """Takes an output; returns whether it is to be written straight to the connection."""
        self.num_tokens += len(output.token_ids)
        if output.finish is not None:
            self.last = output
            self._awake()
            return False
        if self._is_begun:
            self.direct.take(output.token_ids)
            return True
        self._early += output.token_ids
        if output.token_ids:
            self._awake()
        return False

    def fail(self, error: RequestError) -> None:
        """Ends the answer with an error, behind what has come."""
        self.error = error
        self._awake()

    @property
    def is_over(self) -> bool:
        """True if the engine has sent the last of it, or it has failed."""
        return self.last is not None or self.error is not None

    async def wait_first(self) -> list[int]:
        """Returns the first tokens; none if it is over with them, since they belong to its end."""
        if not self.is_over and not self._early:
            await self._awaken()
        if self.is_over:
            return []
        early, self._early = self._early, []
        return early

    def begin_direct(self) -> bool:
        """Has tokens written straight from now on; returns whether some have come meanwhile."""
        self._is_begun = True
        early, self._early = self._early, []
        self.direct.take(early)
        return bool(early)

    async def wait_over(self) -> list[int]:
        """Waits for the end; returns the tokens before its last output that are not written."""
        if not self.is_over:
            await self._awaken()
        return self._early + self.direct.hand_back()

    async def _awaken(self) -> None:
        self._wake = asyncio.get_running_loop().create_future()
        await self._wake

    def _awake(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
