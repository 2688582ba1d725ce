"""Some hundreds of requests with values that no polite client sends: the gate's part of these."""

import asyncio
import sys

import pytest

from tests.hostile.cases import PRIVATE, paired_cases, some_cases
from tests.hostile.outcomes import outcomes_of, told

from .application import Role, RunningApplication, engine_ids
from .logs import logs_with

pytestmark = [pytest.mark.e2e, pytest.mark.starts_engine]

NUM_SINGLE, NUM_PAIRS, SEED = 150, 350, 20261124
LEAST_BY_ENGINES = 0.4


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
