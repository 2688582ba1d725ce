"""Has grammars of clients compiled by another process, and remembers what came of them.

Owns that process: starts it when the first grammar comes, and again when it has ended. Does not own
what a grammar is (`compiler`). Knows no vLLM.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import JsonValue

from serving.domain.errors import GatewayFaultError, MalformedRequestError, OverloadedError
from serving.gateway.grammars.messages import CompileOutcome, CompilerSpec

logger = logging.getLogger(__name__)

_MIB = 1024 * 1024
_PROGRAM = "serving.gateway.grammars.compiler"
_LONGEST_LINE_BYTES = 64 * _MIB
# Compiled at once, waiting for that, and remembered; what is longer is not remembered.
_NUM_AT_ONCE, _NUM_WAITING, _NUM_KEPT, _LONGEST_KEPT = 2, 32, 256, 64 * 1024
_LONGEST = 256 * 1024
_RETRY_S = 5.0
_NUM_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """How much one grammar may take: processor time, time, and memory of its own."""

    cpu_s: int = 2
    wall_s: float = 20.0
    memory_bytes: int = 1024 * _MIB


class _CompilerGoneError(Exception):
    """The process has ended. Another one may do."""


class GrammarJudge:
    """Judges the grammars of one model. Used from one event loop."""

    def __init__(
        self,
        model: str,
        names: Sequence[str],
        engine_args: Mapping[str, JsonValue],
        limits: GrammarLimits = GrammarLimits(),
    ) -> None:
        """Takes what `frontend_config` takes; starts nothing yet."""
        self._name = names[0]
        self._spec = CompilerSpec(
            model, names, engine_args, limits.cpu_s, limits.wall_s, limits.memory_bytes
        )
        self._known: OrderedDict[str, CompileOutcome] = OrderedDict()
        self._places = asyncio.Semaphore(_NUM_AT_ONCE)
        self._num_waiting = 0
        self._process: _CompilerProcess | None = None
        self._starting = asyncio.Lock()

    async def judged(self, grammar: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the fields of a grammar as an engine takes them.

        Raises:
            MalformedRequestError: it is none, cannot be kept, or takes too much to compile.
            OverloadedError: too many wait to be compiled.
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
            outcome = await self._compiled(key, grammar)
            if len(key) <= _LONGEST_KEPT:
                self._known[key] = outcome
        if key in self._known:
            self._known.move_to_end(key)
        while len(self._known) > _NUM_KEPT:
            self._known.popitem(last=False)
        if outcome.problem is not None:
            raise _refusal(outcome.problem)
        return outcome.fields or {}

    def close(self) -> None:
        """Ends the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    async def wait_closed(self) -> None:
        """Ends the process, and waits until it has ended."""
        process = self._process
        self.close()
        if process is not None:
            await process.wait_ended()

    @property
    def pid(self) -> int | None:
        """The process, if there is one."""
        return None if self._process is None else self._process.pid

    async def _compiled(self, key: str, grammar: Mapping[str, Any]) -> CompileOutcome:
        if self._num_waiting >= _NUM_WAITING:
            raise OverloadedError(self._name, self._num_waiting, _RETRY_S)
        self._num_waiting += 1
        try:
            async with self._places:
                for _ in range(_NUM_ATTEMPTS):
                    process = await self._running()
                    with contextlib.suppress(_CompilerGoneError):
                        return await process.compile(grammar)
        finally:
            self._num_waiting -= 1
        logger.error("grammar_compiler_ended_twice model=%s length=%d", self._name, len(key))
        raise GatewayFaultError

    async def _running(self) -> "_CompilerProcess":
        async with self._starting:
            if self._process is None or self._process.is_over:
                self.close()
                self._process = await _CompilerProcess.start(self._spec)
            return self._process


def _refusal(problem: str) -> MalformedRequestError:
    return MalformedRequestError(f"structured outputs: {problem}", "structured_outputs")


class _CompilerProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[CompileOutcome]] = {}
        self._reading = asyncio.create_task(self._read(), name="read-grammars")

    @classmethod
    async def start(cls, spec: CompilerSpec) -> "_CompilerProcess":
        """Returns it once it takes orders.

        Raises:
            GatewayFaultError: it does not start; the log says why.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _PROGRAM),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Compilers print what they were given, and that is a client's.
            stderr=subprocess.DEVNULL,
            limit=_LONGEST_LINE_BYTES,
            start_new_session=True,
        )
        started = cls(process)
        ready = started._expect(0)
        try:
            started._send(msgspec.to_builtins(spec))
            outcome = await ready
        except _CompilerGoneError:
            outcome = CompileOutcome(0, "it ended")
        except BaseException:
            started.close()
            raise
        if outcome.problem is not None:
            logger.error("grammar_compiler_does_not_start problem=%s", outcome.problem)
            started.close()
            raise GatewayFaultError
        return started

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_over(self) -> bool:
        return self._reading.done()

    async def compile(self, grammar: Mapping[str, Any]) -> CompileOutcome:
        number = next(self._numbers)
        outcome = self._expect(number)
        self._send({"number": number, "fields": grammar})
        return await outcome

    def close(self) -> None:
        # Its output ends with it, and then the task that reads does.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def wait_ended(self) -> None:
        await self._process.wait()
        await asyncio.gather(self._reading, return_exceptions=True)

    def _expect(self, number: int) -> "asyncio.Future[CompileOutcome]":
        if self.is_over:
            raise _CompilerGoneError
        self._open[number] = asyncio.get_running_loop().create_future()
        return self._open[number]

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        # By json, which writes integers of any size, and halves of characters.
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                outcome = msgspec.json.decode(line, type=CompileOutcome)
                waiting = self._open.pop(outcome.number, None)
                # Who waited for it may have left.
                if waiting is not None and not waiting.done():
                    waiting.set_result(outcome)
        finally:
            for waiting in self._open.values():
                if not waiting.done():
                    waiting.set_exception(_CompilerGoneError())
