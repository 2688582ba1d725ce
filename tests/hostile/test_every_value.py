"""Every field of every route with every value of our table, and pairs, at two real vLLM engines.

None may cost an engine, break an answer off, or be answered as if the fault were ours.
"""

import asyncio
import sys
from collections.abc import Iterator

import pytest

from tests.e2e.application import Role, RunningApplication, application_args, demo_model, engine_ids
from tests.e2e.logs import logs_with

from .cases import PRIVATE, every_case, paired_cases
from .outcomes import outcomes_of, told

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.starts_engine]

NUM_PAIRS, SEED = 25_000, 21


@pytest.fixture(scope="module")
def application() -> Iterator[RunningApplication]:
    with RunningApplication(application_args(demo_model())) as running:
        yield running


@pytest.mark.parametrize("kind", ["single values", "pairs"])
def test_no_value_of_any_field_costs_an_engine_or_is_our_fault(
    application: RunningApplication, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    engines = engine_ids(application.fleet())
    processes = {each.pid for each in application.processes(Role.ENGINE_HOST)}
    assert len(engines) == len(processes) == 2
    cases = every_case() if kind == "single values" else paired_cases(NUM_PAIRS, SEED)
    outcomes = asyncio.run(outcomes_of(application.base_url, cases))
    with capsys.disabled():
        sys.stdout.write(told(outcomes))
    assert [each for each in outcomes if each.is_our_fault][:10] == []
    assert engine_ids(application.fleet()) == engines
    assert {each.pid for each in application.processes(Role.ENGINE_HOST)} == processes
    # Of both, two of five have to come to an engine: what is refused at once tries little.
    assert sum(each.is_an_engines for each in outcomes) > 0.1 * len(outcomes)
    application.wait_idle()
    assert logs_with(application, [PRIVATE]) == {}
