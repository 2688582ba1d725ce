"""The protocol that every engine implements: vLLM on CPU, vLLM on TPU, the paced fake.

Nothing above this protocol knows which of the three it has.
"""

from collections.abc import Callable
from typing import Protocol

from serving.domain.tokens.cached_blocks import CacheMirror
from serving.link.messages import EngineEnd, EngineLoad, EngineStats, TokenOutput, TokenRequest
from serving.link.rooms.room import EngineCapacity


class EngineDiedError(Exception):
    """Reports that the engine is gone, with the reason; resume what it held on another one.

    `end` says in what way: whether its requests may be to blame.
    """

    def __init__(self, reason: str, end: EngineEnd = EngineEnd.CRASHED) -> None:
        super().__init__(reason)
        self.end = end


class Engine(Protocol):
    """Turns token requests into tokens, one step at a time."""

    # Called when the engine begins with a request, with its id and the monotonic time in seconds.
    # `None` if nobody asks. An engine that cannot know the time never calls it.
    on_scheduled: Callable[[str, float], None] | None

    async def submit(self, request: TokenRequest) -> None:
        """Takes one request; its outputs follow from `next_step`.

        Raises:
            ValueError: the request can never be served here (a malformed payload). Fail it.
            EngineDiedError: resume it elsewhere.
        """
        ...

    async def abort(self, request_ids: list[str]) -> None:
        """Frees these sequences at the next step. Unknown ids are ignored."""
        ...

    async def next_step(self) -> list[TokenOutput]:
        """Waits for the next step that added something, or left the engine with another load.

        Raises:
            EngineDiedError: no step will ever come.
        """
        ...

    async def call(self, method: str, args: bytes) -> bytes:
        """Runs a rare operation by name. Raises `ValueError` for a name it does not have."""
        ...

    async def check(self, timeout_s: float) -> None:
        """Proves that the engine loop still turns.

        Raises:
            EngineDiedError: it does not within `timeout_s` (its `end` is then `HUNG`), or it is
                gone. Replace it.
        """
        ...

    def busy_s(self) -> float | None:
        """Returns the CPU seconds of the process that computes; `None` where that says nothing.

        Of several processes that compute together it is the one that has computed least: while one
        of them stands still, they all wait for it. Only differences mean something.
        """
        ...

    def compiling(self, since_s: float) -> str | None:
        """Returns a program that a step compiles, or has compiled since `since_s` (loop time).

        `None`: none, or nobody knows. A step that compiles may last for minutes.
        """
        ...

    @property
    def capacity(self) -> EngineCapacity | None:
        """What it can have at once, fixed at start.

        `None` from an engine that cannot tell what stands in its line: it is given everything.
        """
        ...

    @property
    def cached(self) -> CacheMirror | None:
        """What its prefix cache has after the latest step; `None` if it has none or cannot tell."""
        ...

    @property
    def load(self) -> EngineLoad:
        """The load after the latest step, with what was submitted since; costs nothing to read."""
        ...

    @property
    def engine_stats(self) -> EngineStats | None:
        """The engine's work since its start; `None` from an engine that does not count.

        The fields by tenant are left to `link.server`, which knows the tenants. Read once a second.
        """
        ...

    @property
    def info(self) -> dict[str, object]:
        """The facts fixed at start: `max_model_len`, `supported_tasks`, and so on. JSON-able."""
        ...

    async def close(self) -> None:
        """Stops the engine and every process it started. Idempotent."""
        ...
