"""A body is worked on in a fork: an order goes there, an outcome or a refusal comes back."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec

from serving.domain.errors import MalformedRequestError
from serving.gateway.forks.bodies.messages import BodyRefusal
from serving.gateway.forks.messages import ForkLimits
from serving.gateway.forks.server import ForkEndedError, ForkServer

_Outcome = TypeVar("_Outcome")


async def ask(
    forks: ForkServer, task: str, order: msgspec.Struct, outcome: type[_Outcome], limits: ForkLimits
) -> _Outcome:
    """Returns what came of an order: an `outcome`, of tagged structs.

    Raises:
        MalformedRequestError: the fork refused the body, or it took too much. The client must
            change it.
        NoTimeForRequestError: too many large bodies wait.
        GatewayFaultError: the process does not start, ended twice, or failed.
    """
    # A turn of the loop for each copy of what may be megabytes.
    await asyncio.sleep(0)
    payload = msgspec.msgpack.encode(order)
    await asyncio.sleep(0)
    try:
        told = await forks.run(task, payload, limits)
    except ForkEndedError as ended:
        raise MalformedRequestError(
            f"The body cannot be read within {ended}; allowed: one that can. Divide the request."
        ) from ended
    found: _Outcome | BodyRefusal = msgspec.msgpack.decode(told, type=outcome | BodyRefusal)  # type: ignore[operator]
    if isinstance(found, BodyRefusal):
        raise MalformedRequestError(found.message, found.param, found.code)
    return found


def told(work: Callable[[], msgspec.Struct]) -> bytes:
    """Returns what `work` returns, or that it refused the body, as `ask` reads it."""
    try:
        outcome = work()
    except MalformedRequestError as error:
        outcome = BodyRefusal(error.message, error.param, error.code)
    return msgspec.msgpack.encode(outcome)
