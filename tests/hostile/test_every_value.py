"""Every field of every route with every value of our table, at two real vLLM engines.

None may cost an engine, break an answer off, or be answered as if the fault were ours.
"""

import asyncio
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.e2e.application import Role, RunningApplication, application_args, demo_model, engine_ids

from .cases import Case, every_case

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.starts_engine]

NUM_AT_ONCE, PATIENCE_S = 8, 60.0
# A schema that refers to itself without end: the engine finds out, where it can only fail the
# request. Whoever compiles it before it is sent can refuse it.
_ENDLESS = '{"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}'
# What the errors of our own are called in an answer that has begun: vLLM's, ours and Anthropic's.
_OUR_FAULT = re.compile(r'"(InternalServerError|server_error|api_error|internal_error)"')
# Open, issue 21.
KNOWN = {Case("/v1/chat/completions", "response_format", _ENDLESS)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case ended: with a status, or with what broke it off.

    A stream that ends with an error of ours has status 500, whatever it began with.
    """

    case: Case
    status: int
    words: str


@pytest.fixture(scope="module")
def application() -> Iterator[RunningApplication]:
    with RunningApplication(application_args(demo_model())) as running:
        yield running


async def outcomes_of(base_url: str, cases: list[Case]) -> list[Outcome]:
    places = asyncio.Semaphore(NUM_AT_ONCE)
    headers = {"content-type": "application/json"}

    async def one(client: httpx.AsyncClient, case: Case) -> Outcome:
        async with places:
            try:
                answer = await client.post(case.path, content=case.text(), headers=headers)
            except httpx.HTTPError as error:
                return Outcome(case, 0, repr(error))
            is_ours = case.is_streamed and _OUR_FAULT.search(answer.text)
            return Outcome(case, 500 if is_ours else answer.status_code, answer.text[-300:])

    async with httpx.AsyncClient(base_url=base_url, timeout=PATIENCE_S) as client:
        return await asyncio.gather(*(one(client, case) for case in cases))


def test_no_value_of_any_field_costs_an_engine_or_is_our_fault(
    application: RunningApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = engine_ids(application.fleet())
    processes = {each.pid for each in application.processes(Role.ENGINE_HOST)}
    assert len(engines) == len(processes) == 2
    outcomes = asyncio.run(outcomes_of(application.base_url, every_case()))
    counts = Counter((each.case.path, each.status) for each in outcomes)
    with capsys.disabled():
        lines = (f"    {path} {status}: {n}\n" for (path, status), n in sorted(counts.items()))
        sys.stdout.writelines(["\n", *lines])
    bad = [each for each in outcomes if not 200 <= each.status < 500]
    assert {each.case for each in bad} <= KNOWN, bad[:10]
    assert engine_ids(application.fleet()) == engines
    assert {each.pid for each in application.processes(Role.ENGINE_HOST)} == processes


def test_nothing_is_left_of_them(application: RunningApplication) -> None:
    application.wait_idle()
