"""What `/openapi.json` describes is served: requests are made from it, and answers held to it.

The gate asks some of each kind of an application that other tests share; the long suite asks
thousands of one that has an embedder besides.
"""

import asyncio
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.hostile.described import (
    lines_of,
    outcomes_of_described,
    requests_of,
    share_answered,
)

from .application import (
    Role,
    RunningApplication,
    application_args,
    demo_model,
    engine_ids,
)
from .several_models import embedding_model

pytestmark = [pytest.mark.e2e, pytest.mark.starts_engine, pytest.mark.needs("schemathesis")]

SEED = 20261124
# Of each operation, valid and invalid ones.
NUM_IN_GATE, NUM_LONG = 3, 150
LEAST_ANSWERED = 0.25


@pytest.fixture(scope="module")
def vllm_application() -> Iterator[RunningApplication]:
    """The shipped model on two engines, and an embedder: most described routes."""
    generating = demo_model()
    # Most answers are as long as the model lets them be.
    generating["engine_args"]["max_model_len"] = 96
    with RunningApplication(application_args(generating, embedding_model())) as running:
        yield running


def conform(
    application: RunningApplication, capsys: pytest.CaptureFixture[str], num_each: int
) -> None:
    """Sends what is described and what is not; nothing may be wrong with any answer."""
    engines = engine_ids(application.fleet())
    processes = {each.pid for each in application.processes(Role.ENGINE_HOST)}
    description = httpx.get(f"{application.base_url}/openapi.json").json()
    requests = requests_of(description, num_each, SEED)
    assert {each.path for each in requests} == set(description["paths"])
    outcomes = asyncio.run(outcomes_of_described(application.base_url, description, requests))
    with capsys.disabled():
        sys.stdout.write("".join(f"\n    {line}" for line in lines_of(outcomes)) + "\n")
    faults = [str(each) for each in outcomes if each.fault is not None]
    assert faults[:10] == [], application.bad_ends()
    assert share_answered(outcomes) >= LEAST_ANSWERED
    assert engine_ids(application.fleet()) == engines
    assert {each.pid for each in application.processes(Role.ENGINE_HOST)} == processes
    application.wait_idle(30.0)


def test_answers_are_as_described_whatever_is_asked(
    demo_application: RunningApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    conform(demo_application, capsys, NUM_IN_GATE)


@pytest.mark.long
def test_answers_of_vllms_engines_are_as_described_whatever_is_asked(
    vllm_application: RunningApplication, capsys: pytest.CaptureFixture[str]
) -> None:
    conform(vllm_application, capsys, NUM_LONG)
