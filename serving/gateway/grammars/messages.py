"""What a gateway and its compiler of grammars tell each other: lines of JSON over pipes. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class CompilerSpec(msgspec.Struct, frozen=True):
    """For which model to compile, and how much one grammar may take.

    `engine_args` are those of the model's frontend. `cpu_s` is in whole seconds of processor time,
    `wall_s` in seconds, `memory_bytes` beyond what the program has anyway.
    """

    model: str
    names: Sequence[str]
    engine_args: Mapping[str, Any]
    cpu_s: int
    wall_s: float
    memory_bytes: int


class CompileOrder(msgspec.Struct, frozen=True):
    """One grammar: the fields of vLLM's `StructuredOutputsParams`, as a client set them."""

    number: int
    fields: Mapping[str, Any]


class CompileOutcome(msgspec.Struct, frozen=True):
    """What came of an order: `fields` are as an engine takes them, and `problem` is `None`.

    A `problem` is for the client. The first line of all has `number` 0: the program has begun, or
    cannot for this `problem`.
    """

    number: int
    problem: str | None = None
    fields: Mapping[str, Any] | None = None
