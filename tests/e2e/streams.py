"""Streamed requests to a running application, written down token by token."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

# Between two chunks of a stream, whatever happens to its engine.
READ_TIMEOUT_S = 60.0


@dataclass
class Choice:
    """One choice of an answer, put together from its chunks."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprob_tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def same_as(self, other: "Choice") -> bool:
        """Whether both are one answer; log-probabilities may differ by rounding."""
        return (
            self.text == other.text
            and self.token_ids == other.token_ids
            and self.logprob_tokens == other.logprob_tokens
            and len(self.logprobs) == len(other.logprobs)
            and all(abs(a - b) < 1e-2 for a, b in zip(self.logprobs, other.logprobs, strict=True))
            and (self.finish_reason, self.stop_reason) == (other.finish_reason, other.stop_reason)
        )


@dataclass
class Answer:
    """One whole streamed answer. `error` is what the stream or the connection failed with."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: str | None = None
    is_done: bool = False
    # When each chunk came, seconds on the monotonic clock.
    chunk_times_s: list[float] = field(default_factory=list)

    def same_as(self, other: "Answer") -> bool:
        """Whether a client could not tell them apart but by their timing."""
        return (
            self.error == other.error is None
            and self.is_done
            and other.is_done
            and self.usage == other.usage
            and self.choices.keys() == other.choices.keys()
            and all(choice.same_as(other.choices[at]) for at, choice in self.choices.items())
        )

    @property
    def num_tokens(self) -> int:
        """Tokens so far, over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def longest_gap_s(self, since_s: float = 0.0) -> float:
        """The longest time between two chunks, of which the second came after `since_s`."""
        pairs = itertools.pairwise(self.chunk_times_s)
        return max((later - earlier for earlier, later in pairs if later > since_s), default=0.0)

    def take(self, chunk: Mapping[str, Any]) -> None:
        """One event of the stream, of either API."""
        if "error" in chunk:
            self.error = json.dumps(chunk["error"])
            return
        self.chunk_times_s.append(time.monotonic())
        self.usage = chunk.get("usage") or self.usage
        for part in chunk["choices"]:
            choice = self.choices.setdefault(part["index"], Choice())
            delta = part.get("delta", part)
            choice.text += delta.get("text") or delta.get("content") or ""
            choice.token_ids += part.get("token_ids") or []
            choice.finish_reason = part.get("finish_reason") or choice.finish_reason
            choice.stop_reason = part.get("stop_reason") or choice.stop_reason
            self._take_logprobs(choice, part.get("logprobs") or {})

    @staticmethod
    def _take_logprobs(choice: Choice, logprobs: Mapping[str, Any]) -> None:
        for entry in logprobs.get("content") or ():
            choice.logprob_tokens.append(entry["token"])
            choice.logprobs.append(entry["logprob"])
        choice.logprob_tokens += logprobs.get("tokens") or []
        choice.logprobs += logprobs.get("token_logprobs") or []


@dataclass(frozen=True)
class Request:
    """What to ask, and where."""

    path: str
    body: Mapping[str, Any]

    async def stream(
        self, client: httpx.AsyncClient, on_chunk: Callable[[Answer], None] = lambda _: None
    ) -> Answer:
        """Asks and reads to the end; a failure is written down, not raised."""
        answer = Answer()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with client.stream("POST", self.path, json={**self.body, **options}) as response:
                if response.status_code != 200:
                    answer.error = f"{response.status_code}: {(await response.aread()).decode()}"
                    return answer
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        answer.is_done = True
                    elif line.startswith("data: "):
                        answer.take(json.loads(line.removeprefix("data: ")))
                        on_chunk(answer)
        except httpx.HTTPError as error:
            answer.error = repr(error)
        return answer


def token_stream(model: str, prompt: list[int], num_tokens: int) -> Request:
    """A completion of token ids that is as long as it may be, and tells the ids of its answer."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return Request("/v1/completions", body)


def client_of(base_url: str, api_key: str = "none") -> httpx.AsyncClient:
    """A client without a bound on connections: every stream has its own."""
    return httpx.AsyncClient(
        base_url=base_url,
        headers={"Authorization": f"Bearer {api_key}"},
        timeout=httpx.Timeout(READ_TIMEOUT_S),
        limits=httpx.Limits(max_connections=None),
    )


async def stream_all(
    base_url: str,
    requests: list[Request],
    on_chunk: Callable[[int, Answer], None] = lambda *_: None,
    api_key: str = "none",
) -> list[Answer]:
    """All at once; `on_chunk` gets the request's number and its answer so far."""
    async with client_of(base_url, api_key) as client:
        return await asyncio.gather(
            *(
                request.stream(client, lambda answer, number=number: on_chunk(number, answer))
                for number, request in enumerate(requests)
            )
        )


async def begin_all(
    base_url: str, requests: list[Request], timeout_s: float
) -> asyncio.Task[list[Answer]]:
    """Sends all requests; returns once each has begun to be answered, with what answers them.

    Raises:
        AssertionError: some did not begin, within `timeout_s` or at all; it has what they said.
    """
    begun: set[int] = set()
    all_begun = asyncio.Event()

    def on_chunk(number: int, _: Answer) -> None:
        begun.add(number)
        if len(begun) == len(requests):
            all_begun.set()

    answering = asyncio.create_task(stream_all(base_url, requests, on_chunk))
    watch = asyncio.create_task(all_begun.wait())
    await asyncio.wait({answering, watch}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if all_begun.is_set():
        return answering
    watch.cancel()
    late = sorted({*range(len(requests))} - begun)
    said = [answer.error for answer in answering.result()] if answering.done() else []
    answering.cancel()
    raise AssertionError(f"did not begin within {timeout_s:g} s: requests {late}; errors: {said}")
