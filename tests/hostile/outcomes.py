"""Sends cases, and says how each ended."""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from .cases import Case, can_stream

NUM_AT_ONCE, PATIENCE_S = 8, 60.0
# A gateway's page tells of the longest turn of the last half minute at least.
TURNS_KEPT_S = 25.0
_LONGEST_TURN = re.compile(
    r"^slicewise_gateway_longest_turn_(|cpu_)seconds(?:{.*})? (\S+)$", re.MULTILINE
)
# What the errors of our own are called in an answer that has begun: vLLM's, ours and Anthropic's.
_OUR_FAULT = re.compile(r'"(InternalServerError|server_error|api_error|internal_error)"')


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case ended: with a status, or with what broke it off.

    A stream that ends with an error of ours has status 500, whatever it began with.
    """

    case: Case
    status: int
    words: str

    @property
    def is_our_fault(self) -> bool:
        """Whether it is worse than a refusal."""
        return not 200 <= self.status < 500

    @property
    def is_an_engines(self) -> bool:
        """Whether an engine answered, or found that no token was left to it."""
        is_engines = self.status == 200 or '"no_token_left"' in self.words
        return can_stream(self.case.route) and is_engines


def is_error_of_ours(answer: httpx.Response) -> bool:
    """Returns whether a stream, read to its end, has an error in it that no client made."""
    return _OUR_FAULT.search(answer.text) is not None


async def longest_turn_s(base_url: str, is_over: asyncio.Event) -> tuple[float, float]:
    """Returns for how long the loop of the one gateway stood still at most, until it is over.

    And how much CPU time one such turn took at most.
    """
    longest_s = longest_cpu_s = 0.0
    async with httpx.AsyncClient(base_url=base_url, timeout=PATIENCE_S) as client:
        while True:
            page = (await client.get("/metrics")).text
            turn_s = dict(_LONGEST_TURN.findall(page))
            longest_s = max(longest_s, float(turn_s[""]))
            longest_cpu_s = max(longest_cpu_s, float(turn_s["cpu_"]))
            if is_over.is_set():
                return longest_s, longest_cpu_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), TURNS_KEPT_S)


async def outcomes_of(base_url: str, cases: Sequence[Case]) -> list[Outcome]:
    """Sends all, a few at once, as they are written."""
    places = asyncio.Semaphore(NUM_AT_ONCE)
    headers = {"content-type": "application/json"}

    async def one(client: httpx.AsyncClient, case: Case) -> Outcome:
        async with places:
            try:
                answer = await client.post(case.path, content=case.text(), headers=headers)
            except httpx.HTTPError as error:
                return Outcome(case, 0, repr(error))
            is_ours = case.is_streamed and is_error_of_ours(answer)
            return Outcome(case, 500 if is_ours else answer.status_code, answer.text[-300:])

    async with httpx.AsyncClient(base_url=base_url, timeout=PATIENCE_S) as client:
        return await asyncio.gather(*(one(client, case) for case in cases))


def told(outcomes: Sequence[Outcome]) -> str:
    """Returns lines that say how they ended, by route and status."""
    counts = Counter((each.case.path, each.status) for each in outcomes)
    lines = [f"{path} {status}: {number}" for (path, status), number in sorted(counts.items())]
    num_engines = sum(each.is_an_engines for each in outcomes)
    lines.append(f"{len(outcomes)} requests, {num_engines} answered by an engine")
    return "".join(f"\n    {line}" for line in lines) + "\n"
