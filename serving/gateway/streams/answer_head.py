"""When a stream's head is sent: with its first output, or after a while of waiting for it.

It waits from when the request may wait for an engine, before there is an application that answers.
Until the head has gone, a request that fails is answered with the status and the headers of its
error, which say whether and when to try again. Proxies and clients give up a connection on which
nothing comes, so the head goes in time all the same, and comments after it, which readers of
server-sent events drop. Used from one event loop only.
"""

import asyncio
import contextlib

from starlette.types import Message, Send

from serving.domain.limits import COMMENT_EVERY_S, HEAD_AFTER_S

_COMMENT: Message = {
    "type": "http.response.body",
    "body": b": waiting\n\n",
    "more_body": True,
}


class AnswerHead:
    """The head of one stream, with what was sent before its first output.

    After that it sends comments while the stream stands still, if it is told so.
    """

    __slots__ = ("_parts", "_send", "_sending", "_timer", "is_held", "was_sent")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._parts: list[Message] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None  # of what the timer sends
        self.is_held = False
        self.was_sent = False  # the head itself

    def hold(self, head: Message) -> None:
        """Holds a head back, for `HEAD_AFTER_S` at the longest.

        It takes the place of one that is held already, and goes when that would have gone.
        """
        if not self.is_held:
            self._arm(HEAD_AFTER_S)
        self.is_held = True
        self._parts = [head]

    def keep(self, part: Message) -> None:
        """Keeps a part that comes before the first output, to go with the head."""
        self._parts.append(part)

    @property
    def has_part(self) -> bool:
        """True if something of its own has to go before the next part does, or may come later."""
        return self.is_held or self._timer is not None or self._sending is not None

    async def release(self) -> None:
        """Sends the head and the parts kept with it, before anything else is sent."""
        self._disarm()
        if self._sending is not None:
            await asyncio.wait([self._sending])
            self._sending = None
        await self._send_parts()

    def drop(self) -> None:
        """Never sends the head: the request is answered in another way."""
        self.close()
        self.is_held = False
        self._parts = []

    def stands_still(self) -> None:
        """Notes that nothing may come for a while, in a stream that has begun."""
        if not self.is_held and self._timer is None:
            self._arm(COMMENT_EVERY_S)

    def goes_on(self) -> None:
        """Notes that something comes."""
        if not self.is_held:
            self._disarm()

    def close(self) -> None:
        """Sends nothing any more by itself: the answer is whole, or nobody waits for it."""
        self._disarm()
        if self._sending is not None and not self._sending.done():
            self._sending.cancel()

    def _arm(self, in_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(in_s, self._tell)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self) -> None:
        self._arm(COMMENT_EVERY_S)
        # A client that does not read has enough to read.
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send_comment())

    async def _send_comment(self) -> None:
        # A client that has left is the application's to notice.
        with contextlib.suppress(OSError):
            await self._send_parts()
            await self._send(_COMMENT)

    async def _send_parts(self) -> None:
        self.was_sent |= self.is_held
        self.is_held = False
        parts, self._parts = self._parts, []
        for part in parts:
            await self._send(part)
