"""Streams on paced engines of two model versions: who answered each, and whether it is whole.

Engines of another `model_seed` answer other tokens, so an answer says which version it is of, and
an answer of two versions would be the known one of neither.
"""

import asyncio
import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.domain.tokens.paced import LETTERS, paced_tokens

from .application import RunningApplication
from .streams import Answer, Request, client_of

# A busy machine starts six Ray nodes in minutes.
START_S = 400.0
# Of an answer's end: no two places of a few hundred letters have so many in common.
_STOP_LETTERS = 8


@contextlib.contextmanager
def patiently(application: RunningApplication) -> Iterator[RunningApplication]:
    """The application, started however long that takes, and ended."""
    try:
        application.launch()
        application.wait_ready(START_S)
        yield application
    finally:
        application.stop()


def prompt_of(number: int) -> list[int]:
    """As tokens: then nobody's tokenizer adds any."""
    return list(f"Stream {number}".encode())


def letters_of(tokens: Sequence[int]) -> str:
    """The text of an answer's tokens: each is a letter."""
    return "".join(chr(ord("a") + token - LETTERS[0]) for token in tokens)


def stop_of(number: int, num_tokens: int, seed: int) -> str:
    """A text that stands at the end of the first `num_tokens` of an answer, and nowhere before."""
    text = letters_of(paced_tokens(prompt_of(number), num_tokens, LETTERS, seed))
    stop = text[-_STOP_LETTERS:]
    assert text.find(stop) == num_tokens - _STOP_LETTERS, "it stands in the answer twice"
    return stop


def seeds_of(number: int, answer: Answer, num_tokens: int, seeds: tuple[int, ...]) -> list[int]:
    """The versions, by `model_seed`, of which this is the whole answer."""
    tokens = answer.choices[0].token_ids if answer.choices else []
    return [
        seed
        for seed in seeds
        if tokens == paced_tokens(prompt_of(number), num_tokens, LETTERS, seed)
    ]


@dataclass
class Outcome:
    """What became of all streams. `seeds` counts whole answers by version."""

    num_streams: int = 0
    failures: list[str] = field(default_factory=list)
    mixed: list[int] = field(default_factory=list)
    seeds: Counter[int] = field(default_factory=Counter)
    longest_gap_s: float = 0.0
    users: dict[str, set[int]] = field(default_factory=dict)


class StreamLoad(threading.Thread):
    """Keeps `width` streams open until it is finished, one after the other in each place.

    With a `bound` that many tokens are asked for, and answers end after `num_tokens` all the same,
    by a stop text: nobody who looks at the bound can tell that they will end soon.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str,
        width: int,
        num_tokens: int,
        seeds: tuple[int, ...],
        num_users: int = 0,
        bound: int | None = None,
        api_key: str = "none",
    ) -> None:
        super().__init__(daemon=True)
        self.outcome = Outcome()
        self._bound = bound
        self._api_key = api_key
        self._base_url = base_url
        self._model = model
        self._width = width
        self._num_tokens = num_tokens
        self._seeds = seeds
        self._num_users = num_users
        self._numbers = itertools.count()
        self._ending = threading.Event()

    def run(self) -> None:
        asyncio.run(self._run())

    def finish(self, timeout_s: float = 120.0) -> Outcome:
        """Begins no further stream, and waits for those that are open."""
        self._ending.set()
        self.join(timeout_s)
        assert not self.is_alive(), "streams are still open"
        return self.outcome

    async def _run(self) -> None:
        async with client_of(self._base_url, self._api_key) as client:

            async def place() -> None:
                while not self._ending.is_set():
                    number = next(self._numbers)
                    request = self._request(number)
                    self._note(number, request, await request.stream(client))

            await asyncio.gather(*(place() for _ in range(self._width)))

    def _request(self, number: int) -> Request:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt_of(number),
            "max_tokens": self._num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if self._bound is not None:
            stops = [stop_of(number, self._num_tokens, seed) for seed in self._seeds]
            body |= {"max_tokens": self._bound, "stop": stops, "include_stop_str_in_output": True}
        if self._num_users:
            body["user"] = f"user-{number % self._num_users}"
        return Request("/v1/completions", body)

    def _versions_of(self, number: int, answer: Answer) -> list[int]:
        """Those of which this is the whole answer."""
        return seeds_of(number, answer, self._num_tokens, self._seeds)

    def _note(self, number: int, request: Request, answer: Answer) -> None:
        outcome = self.outcome
        outcome.num_streams += 1
        outcome.longest_gap_s = max(outcome.longest_gap_s, answer.longest_gap_s())
        if answer.error is not None or not answer.is_done:
            outcome.failures.append(f"{number}: {answer.error or 'ended early'}")
            return
        seeds = self._versions_of(number, answer)
        if len(seeds) != 1:
            outcome.mixed.append(number)
            return
        outcome.seeds[seeds[0]] += 1
        if (user := request.body.get("user")) is not None:
            outcome.users.setdefault(user, set()).add(seeds[0])
