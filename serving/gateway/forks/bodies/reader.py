"""The edge's look at a large body: what it does with any, in a fork. Knows no vLLM."""

import msgspec

from serving.domain.errors import MalformedRequestError
from serving.gateway.edge.fields import judge_fields, read_fields
from serving.gateway.forks.bodies.messages import (
    BodyRefusal,
    BodyRules,
    Judged,
    JudgedBody,
    JudgeOrder,
)
from serving.gateway.forks.messages import ForkLimits, Tasks
from serving.gateway.forks.server import ForkEndedError, ForkServer

JUDGE = "judge"
LIMITS = ForkLimits(cpu_s=5, wall_s=30.0, memory_bytes=1024 * 1024 * 1024)


class BodyReader:
    """Judges the bodies of one gateway. Used from one event loop."""

    def __init__(self) -> None:
        """Starts nothing yet: the first large body starts the process that reads it."""
        self._forks = ForkServer("large bodies", f"{__name__}:tasks", bytes)

    async def read(self, path: str, body: bytes, rules: BodyRules) -> JudgedBody:
        """Does what `judge_fields` does.

        Raises:
            MalformedRequestError: as there, or it takes too much to read.
            NoTimeForRequestError: too many large bodies wait to be read.
            GatewayFaultError: the process that reads does not start, or ended twice.
        """
        order = msgspec.msgpack.encode(JudgeOrder(path, body, rules))
        try:
            outcome = await self._forks.run(JUDGE, order, LIMITS)
        except ForkEndedError as ended:
            raise too_much(ended) from ended
        found = msgspec.msgpack.decode(outcome, type=Judged | BodyRefusal)
        if isinstance(found, BodyRefusal):
            raise MalformedRequestError(found.message, found.param, found.code)
        return found.judged

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._forks.close()


def too_much(ended: ForkEndedError) -> MalformedRequestError:
    """Returns the refusal of a body whose fork was ended."""
    return MalformedRequestError(
        f"The body cannot be read within {ended}; allowed: one that can. Divide the request."
    )


def refusal_of(error: MalformedRequestError) -> BodyRefusal:
    """Returns an error as forks tell it."""
    return BodyRefusal(error.message, error.param, error.code)


def tasks(_spec: bytes) -> Tasks:
    """Returns what the fork server does."""
    return {JUDGE: _judge_order}


def _judge_order(payload: bytes) -> bytes:
    order = msgspec.msgpack.decode(payload, type=JudgeOrder)
    try:
        outcome: Judged | BodyRefusal = Judged(
            judge_fields(order.path, read_fields(order.body), order.rules)
        )
    except MalformedRequestError as error:
        outcome = refusal_of(error)
    return msgspec.msgpack.encode(outcome)
