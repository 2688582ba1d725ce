"""Some hundreds of requests with values that no polite client sends: the gate's part of these."""

import asyncio
import sys

import httpx
import pytest

from tests.hostile.cases import MODEL, PRIVATE, paired_cases, some_cases
from tests.hostile.outcomes import outcomes_of, told

from .answers import ANSWER_TIMEOUT_S
from .application import Role, RunningApplication, engine_ids
from .logs import logs_with

pytestmark = [pytest.mark.e2e, pytest.mark.starts_engine]

NUM_SINGLE, NUM_PAIRS, SEED = 100, 400, 20261124
LEAST_BY_ENGINES = 0.4
MESSAGES = [{"role": "user", "content": PRIVATE}]


def test_no_odd_value_costs_an_engine_or_is_our_fault(
    demo_application: RunningApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    application = demo_application
    engines = engine_ids(application.fleet())
    processes = {each.pid for each in application.processes(Role.ENGINE_HOST)}
    cases = [*some_cases(NUM_SINGLE, SEED), *paired_cases(NUM_PAIRS, SEED)]
    outcomes = asyncio.run(outcomes_of(application.base_url, cases))
    with capsys.disabled():
        sys.stdout.write(told(outcomes))
    assert [each for each in outcomes if each.is_our_fault] == []
    assert sum(each.is_an_engines for each in outcomes) >= LEAST_BY_ENGINES * len(outcomes)
    assert engine_ids(application.fleet()) == engines
    assert {each.pid for each in application.processes(Role.ENGINE_HOST)} == processes
    application.wait_idle()
    assert logs_with(application, [PRIVATE]) == {}


REGEX = {"structured_outputs": {"regex": "[0-9]{3}"}}
LEAVING_NONE = {
    "allowed_token_ids": [1],
    "bad_words": list("0123456789"),
    "stop_token_ids": list(range(300)),
}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("field", LEAVING_NONE)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_request_that_leaves_no_token_to_its_grammar_is_told_so(
    demo_application: RunningApplication, route: str, field: str, *, is_streamed: bool
) -> None:
    asks = {"prompt": PRIVATE} if "chat" not in route else {"messages": MESSAGES}
    sent = {"model": MODEL, "max_tokens": 8, "stream": is_streamed, **asks, **REGEX}
    sent |= {field: LEAVING_NONE[field], "seed": SEED}
    answer = httpx.post(demo_application.base_url + route, json=sent, timeout=ANSWER_TIMEOUT_S)
    # There is no output before it, so the head of a stream was not sent yet.
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "no_token_left"
    assert field in error["message"]
