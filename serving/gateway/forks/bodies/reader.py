"""The edge's look at a large body: what it does with any, in a fork. Knows no vLLM."""

import msgspec

from serving.gateway.edge.fields import judge_fields, read_fields
from serving.gateway.forks.bodies.exchange import ask, told
from serving.gateway.forks.bodies.messages import BodyRules, JudgedBody, JudgeOrder
from serving.gateway.forks.messages import ForkLimits, Tasks
from serving.gateway.forks.server import ForkServer

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
        order = JudgeOrder(path, body, rules)
        return await ask(self._forks, JUDGE, order, JudgedBody, LIMITS)

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._forks.close()


def tasks(_spec: bytes) -> Tasks:
    """Returns what the fork server does."""
    return {JUDGE: _judge_order}


def _judge_order(payload: bytes) -> bytes:
    order = msgspec.msgpack.decode(payload, type=JudgeOrder)
    return told(lambda: judge_fields(order.path, read_fields(order.body), order.rules))
