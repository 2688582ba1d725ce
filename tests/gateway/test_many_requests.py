"""The work of one more request does not grow with the requests that are there already.

Counted in calls of functions, comprehensions' turns included: a clock would tell of the machine.
"""

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

from serving.gateway.dispatch.admission import FleetLimits
from serving.gateway.dispatch.dispatcher import Dispatcher
from tests.engine.simulated_time import run_simulated

from .engines import RecordingSink, ScriptedLink, in_flight

FEW, MANY = 100, 1000


def num_calls(act: Callable[[], object]) -> int:
    """How many functions, and turns of generators, `act` calls."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def calls_of_one_more(dispatcher: Dispatcher, num_requests: int) -> int:
    """The least of five: what is due now and then, whoever comes, is no work of a request."""
    for number in range(dispatcher.num_in_flight, num_requests):
        dispatcher.submit(in_flight(dispatcher, f"r{number}"))
    found = []
    for attempt in range(5):
        one_more = in_flight(dispatcher, f"one more of {num_requests}, {attempt}")
        found.append(num_calls(partial(dispatcher.submit, one_more)))
        dispatcher.abort([one_more.request_id])
    return min(found)


async def test_dispatching_costs_the_same_with_many_requests_in_flight() -> None:
    dispatcher = Dispatcher("m", FleetLimits())
    RecordingSink(dispatcher)
    links = [ScriptedLink(dispatcher, f"e{number}") for number in range(2)]
    few, many = (calls_of_one_more(dispatcher, count) for count in (FEW, MANY))
    assert sum(len(link.running) for link in links) == MANY
    assert many <= few + 5
    dispatcher.shutdown()


async def test_waiting_costs_the_same_with_many_requests_in_front() -> None:
    dispatcher = Dispatcher("m", FleetLimits())
    RecordingSink(dispatcher)
    few, many = (calls_of_one_more(dispatcher, count) for count in (FEW, MANY))
    assert dispatcher.num_waiting == MANY
    assert many <= few + 5
    dispatcher.shutdown()


def test_waiting_for_room_costs_the_same_with_many_requests_in_front() -> None:
    async def main() -> None:
        dispatcher = Dispatcher("m", FleetLimits())
        RecordingSink(dispatcher)
        links = [ScriptedLink(dispatcher, f"e{number}", places=1) for number in range(2)]
        few, many = (calls_of_one_more(dispatcher, count) for count in (FEW, MANY))
        assert dispatcher.num_waiting == MANY - len(links)
        assert many <= few + 5
        few = num_calls(lambda: links[0].tell(num_requests=1))
        dispatcher.abort([f"r{number}" for number in range(FEW, MANY)])
        many = num_calls(lambda: links[1].tell(num_requests=1))
        assert abs(many - few) <= 5
        dispatcher.shutdown()

    # On a slow machine time would pass, and a line of which nothing is answered is refused.
    run_simulated(main())


async def test_deadline_is_that_of_the_request_that_has_waited_longest() -> None:
    dispatcher = Dispatcher("m", FleetLimits(request_deadline_s=0.2))
    sink = RecordingSink(dispatcher)
    link = ScriptedLink(dispatcher)
    for name in ("first", "moved"):
        dispatcher.submit(in_flight(dispatcher, name))
    dispatcher.abort(["first"])
    dispatcher.lose_engine(link.engine_id, "gone")  # it waits from now on
    dispatcher.submit(in_flight(dispatcher, "last"))
    await sink.failed.wait()
    assert next(iter(sink.failures)) == "moved"
    dispatcher.shutdown()
