"""What a compiler of grammars tells its gateway. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec


class CompileOutcome(msgspec.Struct, frozen=True):
    """What came of a grammar: `fields` are as an engine takes them, and `problem` is `None`.

    A `problem` is for the client.
    """

    problem: str | None = None
    fields: Mapping[str, Any] | None = None
