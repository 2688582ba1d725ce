"""Compiles grammars that clients send, each in a fork of its own with limits: a program.

To import vLLM and read a tokenizer takes seconds. Here that is done once; a fork takes some
hundredths. It compiles as an engine would, ends at its limits of processor time and memory, and is
killed when it takes too long. Orders come as lines on the input, outcomes go to the output. One
thread, so it may fork. Ends with its input, and its forks with it.
"""

import contextlib
import gc
import json
import logging
import os
import resource
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
)
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key

from serving.gateway.frontend import frontend_config
from serving.gateway.grammars.messages import CompileOrder, CompileOutcome, CompilerSpec

_MIB = 1024 * 1024
_READ_BYTES = 1024 * 1024
# Tokens of an answer that are tried.
_NUM_TRIED = 16
_LONGEST_PROBLEM = 500  # characters
# What vLLM takes first where it may choose. An engine has one for all of its requests, so what only
# another one could keep would not be kept.
_CHOSEN = "xgrammar"


class CannotKeepError(Exception):
    """The grammar is no grammar, or not one that engines here keep. The message is a client's."""


class Compiler:
    """Does what an engine does with a grammar. Built once, used in forks."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._tokenizer = cached_tokenizer_from_config(config.model_config)
        self._backends: dict[str, StructuredOutputBackend] = {}
        self.backend(self.own_backend)

    @property
    def own_backend(self) -> str:
        """The one that engines use."""
        configured = str(self._config.structured_outputs_config.backend)
        return _CHOSEN if configured == "auto" else configured

    def backend(self, name: str) -> StructuredOutputBackend:
        """Returns vLLM's compiler of this name, the same each time."""
        if name not in self._backends:
            kinds = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend}
            if name not in kinds:
                raise CannotKeepError(f"structured outputs are not compiled by {name} here")
            self._backends[name] = kinds[name](
                self._config,
                tokenizer=self._tokenizer,
                vocab_size=self._config.model_config.get_vocab_size(),
            )
        return self._backends[name]

    @staticmethod
    def _try_out(backend: StructuredOutputBackend, grammar: StructuredOutputGrammar) -> None:
        """Writes the first tokens of an answer: what leads nowhere, or is slow, shows there."""
        allowed = backend.allocate_token_bitmask(1)
        for _ in range(_NUM_TRIED):
            if grammar.is_terminated():
                return
            grammar.fill_bitmask(allowed, 0)
            words = allowed[0].tolist()
            at = next((at for at, word in enumerate(words) if word), None)
            if at is None:
                raise CannotKeepError("no text fits it")
            # The lowest bit of the first word that has one.
            token_id = at * 32 + ((words[at] & -words[at]).bit_length() - 1)
            if not grammar.accept_tokens("", [token_id]):
                return

    def compile(self, grammar: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields that an engine is sent.

        Raises:
            CannotKeepError: an engine would not keep this.
            ValueError: vLLM or its compiler refuses it.
        """
        asked = StructuredOutputsParams(**grammar)
        params = SamplingParams(structured_outputs=asked)
        params._validate_structured_outputs(
            self._config.model_config, self._config.structured_outputs_config, self._tokenizer
        )
        judged = params.structured_outputs
        assert judged is not None
        if judged._backend != self.own_backend:
            raise CannotKeepError(
                f"only {judged._backend} could keep this, and engines here use {self.own_backend}"
            )
        kind, text = get_structured_output_key(judged)
        backend = self.backend(self.own_backend)
        self._try_out(backend, backend.compile_grammar(kind, text))
        return {field.name: getattr(judged, field.name) for field in fields(judged)}


@dataclass(slots=True)
class _Fork:
    """One grammar under way. `until_s` is when it is killed (monotonic)."""

    number: int
    pid: int
    output: int
    until_s: float
    written: bytearray


class CompilerProgram:
    """Carries out orders until there are no more."""

    def __init__(self, spec: CompilerSpec, compiler: Compiler, output: int) -> None:
        self._spec = spec
        self._compiler = compiler
        self._output = output
        self._forks: dict[int, _Fork] = {}
        self._selector = selectors.DefaultSelector()

    def run(self, orders: int, begun: bytes) -> None:
        """Reads orders from `orders`, of which the bytes `begun` have been read before."""
        self._selector.register(orders, selectors.EVENT_READ)
        pending, is_over = bytearray(begun), False
        while not is_over:
            *lines, rest = pending.split(b"\n")
            pending = bytearray(rest)
            for line in lines:
                # By json, which reads integers of any size.
                self._begin(CompileOrder(**json.loads(line)))
            for key, _ in self._selector.select(self._patience_s()):
                if key.fd == orders:
                    read = os.read(orders, _READ_BYTES)
                    pending += read
                    is_over |= not read
                else:
                    self._read(self._forks[key.fd])
            self._kill_late()
        for fork in self._forks.values():
            os.kill(fork.pid, signal.SIGKILL)

    def _patience_s(self) -> float | None:
        if not self._forks:
            return None
        first_s = min(fork.until_s for fork in self._forks.values())
        return max(0.0, first_s - time.monotonic())

    def _begin(self, order: CompileOrder) -> None:
        read, written = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._carry_out(order, written)
        os.close(written)
        until_s = time.monotonic() + self._spec.wall_s
        self._forks[read] = _Fork(order.number, pid, read, until_s, bytearray())
        self._selector.register(read, selectors.EVENT_READ)

    def _read(self, fork: _Fork) -> None:
        chunk = os.read(fork.output, _READ_BYTES)
        fork.written += chunk
        if chunk:
            return
        self._selector.unregister(fork.output)
        os.close(fork.output)
        del self._forks[fork.output]
        os.waitpid(fork.pid, 0)
        # A fork that was ended says nothing, or not all of it.
        if fork.written.endswith(b"\n"):
            os.write(self._output, fork.written)
        else:
            self._tell(CompileOutcome(fork.number, self._limits()))

    def _kill_late(self) -> None:
        for fork in self._forks.values():
            if fork.until_s <= time.monotonic():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(fork.pid, signal.SIGKILL)

    def _limits(self) -> str:
        spec = self._spec
        return (
            f"it cannot be compiled within {spec.cpu_s} s of processor time, {spec.wall_s:g} s and "
            f"{spec.memory_bytes // _MIB} MiB; ask for something simpler"
        )

    def _tell(self, outcome: CompileOutcome) -> None:
        os.write(self._output, msgspec.json.encode(outcome) + b"\n")

    def _carry_out(self, order: CompileOrder, output: int) -> None:
        """In a fork: compiles, tells its parent, and ends."""
        try:
            _limit(self._spec)
            with open(output, "wb") as file:
                file.write(self._outcome(order) + b"\n")
        finally:
            # Whatever happened: what follows is the parent's.
            os._exit(0)

    def _outcome(self, order: CompileOrder) -> bytes:
        try:
            fields = self._compiler.compile(order.fields)
            return msgspec.json.encode(CompileOutcome(order.number, fields=fields))
        except MemoryError:
            problem = self._limits()
        except Exception as error:  # noqa: BLE001 # whatever a compiler says of what it got
            problem = (str(error) or repr(error))[:_LONGEST_PROBLEM]
        said = problem.encode("ascii", "backslashreplace").decode()
        return msgspec.json.encode(CompileOutcome(order.number, said))


def _limit(spec: CompilerSpec) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (spec.cpu_s, spec.cpu_s + 1))
    with open("/proc/self/statm", encoding="ascii") as file:
        size_bytes = int(file.read().split()[0]) * resource.getpagesize()
    most_bytes = size_bytes + spec.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _first_line(orders: int) -> tuple[bytes, bytes]:
    """Returns the first line, and what was read after it."""
    read = b""
    while b"\n" not in read:
        chunk = os.read(orders, _READ_BYTES)
        if not chunk:
            raise SystemExit
        read += chunk
    line, _, rest = read.partition(b"\n")
    return line, rest


def main() -> None:
    """Reads a `CompilerSpec`, then orders."""
    # What is printed would stand between the outcomes.
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    line, rest = _first_line(sys.stdin.fileno())
    try:
        spec = msgspec.json.decode(line, type=CompilerSpec)
        compiler = Compiler(frontend_config(spec.model, spec.names, spec.engine_args))
    except Exception:  # noqa: BLE001 # told to who began it
        problem = CompileOutcome(0, traceback.format_exc())
        os.write(output, msgspec.json.encode(problem) + b"\n")
        return
    # Compilers log what they were given, and that is a client's.
    logging.disable(logging.CRITICAL)
    # A collection in a fork would copy every page.
    gc.freeze()
    os.write(output, msgspec.json.encode(CompileOutcome(0)) + b"\n")
    CompilerProgram(spec, compiler, output).run(sys.stdin.fileno(), rest)


if __name__ == "__main__":
    main()
