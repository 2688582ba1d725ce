"""The gateway of the benchmark of a request's cost starts, and answers each kind of request."""

import pytest

from benchmarks import request_start
from benchmarks.request_cost import SHAPES, Row, gateways, report
from tests.e2e.application import PROJECT_ROOT

pytestmark = [pytest.mark.process, pytest.mark.long]


async def test_each_kind_of_request_has_a_cost() -> None:
    rows = []
    async with gateways({"now": PROJECT_ROOT}) as running:
        for shape in SHAPES:
            cost = await running["now"].round(shape)
            assert cost.before_us > 0
            assert cost.after_us > 0
            loop_us = await running["now"].closed_loop(shape, shape.at_once)
            assert loop_us > 0
            rows.append(Row(shape.name, "now", cost.before_us, cost.after_us, loop_us))
    assert len(report(rows).splitlines()) == 2 + len(SHAPES)


def test_whole_application_answers_rounds_of_each_size() -> None:
    starts = request_start.run(num_rounds=2)
    assert [start.at_once for start in starts] == list(request_start.AT_ONCE)
    # Of many at once the gateway's own time is more than what it computes without requests.
    assert starts[-1].median_us > 0
    assert len(list(request_start.report(starts))) == 2 + len(starts)
