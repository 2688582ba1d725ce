"""vLLM's application behind a fork server that prepares large bodies. Knows no vLLM."""

import asyncio
import time
from collections import deque
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.gateway.edge.fields import BodyJudge, check_fields, read_fields
from serving.gateway.forks.bodies.exchange import ask
from serving.gateway.forks.bodies.messages import Answered, Prepared, PrepareOrder
from serving.gateway.forks.bodies.replay import decoded
from serving.gateway.forks.messages import ForkLimits
from serving.gateway.forks.server import ForkServer
from serving.gateway.streams.leaving import unless_client_leaves
from serving.gateway.telemetry.request_telemetry import present_context

PREPARE = "prepare"
_OUTCOME: Any = Answered | Prepared
# A tokenizer reads about 1 MB in a second.
LIMITS = ForkLimits(cpu_s=20, wall_s=60.0, memory_bytes=3 * 1024 * 1024 * 1024)


class PreparedApp:
    """Hands to an application what is left of a request when it has been rendered in a fork."""

    def __init__(
        self,
        app: ASGIApp,
        forks: ForkServer,
        judge: BodyJudge,
        limits: ForkLimits = LIMITS,
    ) -> None:
        """Takes a server with the task `PREPARE`. `judge` is of `check_fields`."""
        self._app = app
        self._forks = forks
        self._judge = judge
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request.

        Raises:
            MalformedRequestError: its body takes too much to read, or is not one that we take.
            NoTimeForRequestError: too many large bodies wait to be prepared.
            GatewayFaultError: the process that prepares them does not start, or ended twice.
            ClientLeftError: nobody waits for it any more.
        """
        # The edge has read all of it.
        message = {**await receive(), "more_body": False}
        order = PrepareOrder(scope["path"], list(scope["headers"]), message["body"])
        asked = ask(self._forks, PREPARE, order, _OUTCOME, self._limits)
        prepared = await unless_client_leaves(receive, asked)
        if isinstance(prepared, Answered):
            await _answer(prepared, send)
            return
        if prepared.body is not None:
            check_fields(read_fields(prepared.body), self._judge, scope["path"])
            renders: deque[Any] = deque()
            for render in prepared.renders:
                await asyncio.sleep(0)  # one may be of hundreds of thousands of tokens
                renders.append(decoded(render))
            present_context(time.monotonic()).renders = renders
            message = {**message, "body": prepared.body}
        await self._app(scope, receiving(message, receive), send)


async def _answer(answered: Answered, send: Send) -> None:
    await send(
        {"type": "http.response.start", "status": answered.status, "headers": answered.headers}
    )
    await send({"type": "http.response.body", "body": answered.body, "more_body": False})


def receiving(first: Message, receive: Receive) -> Receive:
    """Returns a `receive` that gives a message that was taken already, and then what follows."""
    pending = [first]

    async def receive_first() -> Message:
        return pending.pop() if pending else await receive()

    return receive_first
