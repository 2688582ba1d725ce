"""Has grammars of clients compiled in forks, and remembers what came of them.

Does not own what a grammar is (`compiler`), nor the process that compiles it (`forks`). Knows no
vLLM.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from serving.domain.errors import MalformedRequestError
from serving.gateway.forks.grammars.messages import CompileOutcome
from serving.gateway.forks.messages import ForkLimits
from serving.gateway.forks.server import ForkEndedError, ForkServer

COMPILE = "compile"
LIMITS = ForkLimits(cpu_s=2, wall_s=20.0, memory_bytes=1024 * 1024 * 1024)
# Remembered, and how long one may be for that; and how long one may be at all.
_NUM_KEPT, _LONGEST_KEPT = 256, 64 * 1024
_LONGEST = 256 * 1024


class GrammarJudge:
    """Judges the grammars of one model. Used from one event loop."""

    def __init__(self, forks: ForkServer, limits: ForkLimits = LIMITS) -> None:
        """Takes a server with the task `COMPILE`; it is closed by its owner."""
        self._forks = forks
        self._limits = limits
        self._known: OrderedDict[str, CompileOutcome] = OrderedDict()

    async def judged(self, grammar: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the fields of a grammar as an engine takes them.

        Raises:
            MalformedRequestError: it is none, cannot be kept, or takes too much to compile.
            NoTimeForRequestError: too many wait to be compiled.
            GatewayFaultError: the compiler does not start, or ended twice.
        """
        try:
            key = json.dumps(grammar)
        except RecursionError:
            raise _refusal("nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise _refusal(str(error)) from error
        if len(key) > _LONGEST:
            raise _refusal(f"{len(key)} characters of JSON; allowed: at most {_LONGEST}")
        outcome = self._known.get(key)
        if outcome is None:
            outcome = await self._compiled(key)
            if len(key) <= _LONGEST_KEPT:
                self._known[key] = outcome
        if key in self._known:
            self._known.move_to_end(key)
        while len(self._known) > _NUM_KEPT:
            self._known.popitem(last=False)
        if outcome.problem is not None:
            raise _refusal(outcome.problem)
        return outcome.fields or {}

    async def _compiled(self, key: str) -> CompileOutcome:
        try:
            outcome = await self._forks.run(COMPILE, key.encode(), self._limits)
        except ForkEndedError as ended:
            return CompileOutcome(
                f"it cannot be compiled within {ended}; ask for something simpler"
            )
        return msgspec.json.decode(outcome, type=CompileOutcome)


def _refusal(problem: str) -> MalformedRequestError:
    return MalformedRequestError(f"structured outputs: {problem}", "structured_outputs")
