"""Ends what is done for a client that leaves.

Serve would watch for that itself, by two more tasks for each request, and would end all that leave
together in one turn of the loop. So our ingress asks it not to (`deployments.start.ingress`), and
whoever waits for something else than the client waits in here.
"""

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from starlette.types import Message, Receive

from serving.gateway.streams.turns import Turns

_Done = TypeVar("_Done")


class ClientLeftError(Exception):
    """Reports that the client has left. Nobody reads an answer any more."""


class ReceiveInTurns:
    """What comes from a client. Of those that leave together, a few are seen to in each turn."""

    def __init__(self, receive: Receive, leaving: Turns) -> None:
        self._receive = receive
        self._leaving = leaving

    async def __call__(self) -> Message:
        """Returns the next message; see ASGI's `receive`."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            await self._leaving.wait()
        return message


class UntilClientLeaves:
    """Ends what is done within it when the client leaves, by a `ClientLeftError`.

    Nobody else may read from `receive` meanwhile.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._has_left = False

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._watch = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        assert self._task is not None
        self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._watch.cancel()
        if not self._has_left or self._task is None:
            return
        is_ours = self._task.uncancel() == 0
        # vLLM makes an answer of its own of being cancelled.
        if is_ours and kind in (None, asyncio.CancelledError):
            raise ClientLeftError


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, _Done]) -> _Done:
    """Returns what comes of the work, which ends when the client leaves; see `UntilClientLeaves`.

    Work that has nothing to wait for is done without a watch, which is a task.
    """
    try:
        first = work.send(None)
    except StopIteration as done:
        result: _Done = done.value
        return result
    async with UntilClientLeaves(receive):
        return await _rest(work, first)


@types.coroutine
def _rest(work: Coroutine[Any, Any, _Done], first: Any) -> Generator[Any, Any, _Done]:
    """Goes on with work that stands at its first wait, which the caller's task takes over."""
    wait = first
    try:
        while True:
            try:
                sent = yield wait
            except BaseException as error:  # noqa: BLE001 - whatever ends the wait is the work's
                wait = work.throw(error)
            else:
                wait = work.send(sent)
    except StopIteration as done:
        result: _Done = done.value
        return result
