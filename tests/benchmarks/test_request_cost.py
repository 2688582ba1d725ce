"""The gateway of the benchmark of a request's cost starts, and answers each kind of request."""

import pytest

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
