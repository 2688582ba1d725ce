"""A constant load of streams on a paced model, each answer held against the known one."""

import asyncio
import json
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx

from loadtest.client.expected_output import RIGHT, compare
from serving.domain.tokens.paced import LETTERS, paced_tokens
from tests.e2e.streams import Answer

# Longer than any deadline of a gateway here: who is silent for longer has lost the request.
_SILENCE_S = 300.0
# A refusal says when to come again.
REFUSALS = (429, 503)


@dataclass(frozen=True)
class Asked:
    """One request: when it was sent (monotonic), what came of it. `status` is `None` without any.

    `retry_after_s` is what a refusal told, `None` where it told nothing.
    """

    number: int
    sent_s: float
    answer: Answer
    status: int | None
    retry_after_s: float | None

    @property
    def ttft_s(self) -> float | None:
        """To the first token; `None` if there never was one."""
        return self.answer.chunk_times_s[0] - self.sent_s if self.answer.chunk_times_s else None

    @property
    def is_refused(self) -> bool:
        """Whether the client was sent away in order, with a time to come again."""
        return self.status in REFUSALS and self.retry_after_s is not None


class ConstantLoad:
    """So many streams per second, sent when their time has come; an async context manager.

    At the end no more are sent, and those under way are waited for.
    """

    def __init__(self, base_url: str, model: str, per_s: float, num_tokens: int) -> None:
        self.per_s = per_s
        self.asked: list[Asked] = []
        self._base_url = base_url
        self._model = model
        self._num_tokens = num_tokens
        self._num_sent = 0
        self._is_over = asyncio.Event()
        self._ended = asyncio.Condition()

    async def __aenter__(self) -> Self:
        self._arriving = asyncio.create_task(self._arrive())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        await self._arriving

    async def more_answers(self, count: int, timeout_s: float) -> None:
        """Waits until `count` requests that were sent from now on have their answers."""
        since_s = time.monotonic()
        async with asyncio.timeout(timeout_s), self._ended:
            await self._ended.wait_for(lambda: len(self.sent_since(since_s)) >= count)

    def sent_since(self, since_s: float, until_s: float = float("inf")) -> list[Asked]:
        """The finished ones that were sent in a span of time."""
        return [each for each in self.asked if since_s <= each.sent_s < until_s]

    def wrong(self) -> list[str]:
        """What is wrong with whatever was answered at all, or was not and got no refusal."""
        return [
            f"{each.number}: {problem}"
            for each in self.asked
            if not each.is_refused and (problem := self._problem(each)) is not None
        ]

    def _problem(self, each: Asked) -> str | None:
        if each.answer.error is not None:
            return each.answer.error
        if not each.answer.is_done:
            return "the stream ended without its end"
        known = paced_tokens(prompt_of(each.number), self._num_tokens, LETTERS)
        check = compare(known, each.answer.choices[0].token_ids)
        return None if check == RIGHT else str(check)

    async def _arrive(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=self._base_url, timeout=_SILENCE_S, limits=limits) as client,
            asyncio.TaskGroup() as asking,
        ):
            while not self._is_over.is_set():
                asking.create_task(self._ask(client, self._num_sent))
                self._num_sent += 1
                due_s += 1 / self.per_s
                await asyncio.sleep(max(0.0, due_s - loop.time()))

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        answer, status, retry_after_s = Answer(), None, None
        body = {
            "model": self._model,
            "prompt": prompt_of(number),
            "max_tokens": self._num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        sent_s = time.monotonic()
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                status = response.status_code
                if status == httpx.codes.OK:
                    await _read(response, answer)
                else:
                    answer.error = f"{status}: {(await response.aread()).decode()}"
                    told = response.headers.get("Retry-After")
                    retry_after_s = None if told is None else float(told)
        except httpx.HTTPError as error:
            answer.error = repr(error)
        self.asked.append(Asked(number, sent_s, answer, status, retry_after_s))
        async with self._ended:
            self._ended.notify_all()


async def _read(response: httpx.Response, answer: Answer) -> None:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            answer.is_done = True
        elif line.startswith("data: "):
            answer.take(json.loads(line.removeprefix("data: ")))


def prompt_of(number: int) -> list[int]:
    """As tokens: then nobody's tokenizer adds any."""
    return list(f"Stream {number}".encode())
