"""How long first tokens take, which are late, and what is taken back from an engine."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest
import uvloop

from serving.gateway.dispatch.admission import FleetLimits
from serving.gateway.dispatch.dispatcher import Dispatcher
from serving.gateway.dispatch.first_tokens import MOST_TIMES, FirstTokenPace, Unbegun
from tests.engine.simulated_time import run_simulated
from tests.gateway.engines import RecordingSink, ScriptedLink, answer_to, in_flight

LATE_S = 2.0


def pace_of(**took_s: float) -> FirstTokenPace:
    """Of engines whose first tokens have taken so long for 1,000 tokens, each of them ten times."""
    pace = FirstTokenPace()
    for _ in range(10):
        for engine_id, each_s in took_s.items():
            pace.took(engine_id, 1000, each_s)
    return pace


def test_nothing_is_expected_before_a_few_have_come() -> None:
    pace = FirstTokenPace()
    for _ in range(7):
        pace.took("a", 1000, 0.5)
        assert (pace.expected_s(1000), pace.late_after_s(1000)) == (None, None)
    pace.took("a", 1000, 0.5)
    assert pace.expected_s(2000) == pytest.approx(1.0)


def test_the_median_engine_is_the_measure_and_of_two_the_quicker_one() -> None:
    assert pace_of(a=0.1, b=0.12, c=0.9).expected_s(1000) == pytest.approx(0.12)
    assert pace_of(a=0.1, b=0.3).expected_s(1000) == pytest.approx(0.1)


def test_engine_that_is_gone_is_no_measure() -> None:
    pace = pace_of(a=0.1, b=0.3, c=0.3)
    pace.forget("b")
    assert pace.expected_s(1000) == pytest.approx(0.1)
    pace.forget("a")
    assert pace.expected_s(1000) == pytest.approx(0.3)


def test_what_engines_do_now_counts_and_not_what_they_did_long_ago() -> None:
    pace = pace_of(a=0.1, b=0.1)
    for _ in range(160):
        pace.took("a", 1000, 0.4)
        pace.took("b", 1000, 0.5)
    assert pace.expected_s(1000) == pytest.approx(0.4, rel=0.01)


@pytest.mark.parametrize(("took_s", "late_s"), [(0.01, 2.0), (0.75, 3.0), (500.0, 60.0)])
def test_first_token_is_late_within_bounds(took_s: float, late_s: float) -> None:
    assert pace_of(a=took_s).late_after_s(1000) == pytest.approx(late_s)


def test_the_first_that_is_late_is_looked_at_first_and_again() -> None:
    looked: list[tuple[float, str, int]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        again_in_s = {"then": 5.0}

        def late(request_id: str, attempt: int) -> float | None:
            looked.append((loop.time(), request_id, attempt))
            if len(looked) == 4:
                done.set()
            return again_in_s.pop(request_id, None)

        unbegun = Unbegun(late)
        unbegun.given("late", 0, 9.0)
        unbegun.given("soon", 1, 2.0)
        unbegun.given("then", 0, 4.0)
        await done.wait()
        unbegun.given("never", 0, 1.0)
        unbegun.stop()
        await asyncio.sleep(10.0)

    run_simulated(main())
    assert looked == [(2.0, "soon", 1), (4.0, "then", 0), (9.0, "late", 0), (9.0, "then", 0)]


def test_what_is_late_at_once_leaves_the_others_their_time_on_the_loop_of_gateways() -> None:
    looked: list[str] = []

    async def main() -> None:
        done = asyncio.Event()

        def late(request_id: str, _attempt: int) -> None:
            looked.append(request_id)
            if request_id == "last":
                done.set()

        unbegun = Unbegun(late)
        # After a turn of seconds, as on a machine short of cores.
        unbegun.given("overdue", 0, -1.0)
        unbegun.given("last", 0, 0.02)
        unbegun.given("before", 0, -2.0)
        await done.wait()

    uvloop.run(asyncio.wait_for(main(), 60.0))
    assert looked == ["before", "overdue", "last"]


class Fleet:
    """A dispatcher and two engines that have begun ten requests each, after a tenth of a second."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher("demo", FleetLimits())
        self.sink = RecordingSink(self.dispatcher)
        self.links = [ScriptedLink(self.dispatcher, name, places=20) for name in ("a", "b")]

    async def warm_up(self) -> None:
        for number in range(20):
            self.submit(f"w{number}", max_tokens=1)
        await asyncio.sleep(0.1)
        for link in self.links:
            assert len(link.running) == 10
            link.step()

    def submit(self, name: str, max_tokens: int = 5) -> None:
        self.dispatcher.submit(in_flight(self.dispatcher, name, max_tokens))

    def on(self, name: str) -> tuple[ScriptedLink, ScriptedLink]:
        """The engine that has this request, and the other one."""
        return tuple(sorted(self.links, key=lambda link: name not in link.running))  # type: ignore[return-value]


def with_fleet(script: Callable[[Fleet], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        fleet = Fleet()
        await fleet.warm_up()
        await script(fleet)
        fleet.dispatcher.shutdown()

    run_simulated(main())


def test_what_was_not_begun_in_time_is_begun_by_another_and_nothing_is_lost() -> None:
    async def script(fleet: Fleet) -> None:
        fleet.submit("r")
        still, other = fleet.on("r")
        await asyncio.sleep(LATE_S - 0.01)
        assert (still.running, other.running) == (["r"], [])
        await asyncio.sleep(0.02)
        assert (still.running, other.running) == ([], ["r~1"])
        other.step(5)
        assert fleet.sink.tokens["r"] == answer_to("r")
        numbers = fleet.dispatcher.telemetry.metrics.of_class("local")
        assert numbers.resumes == {"slow": 1}

    with_fleet(script)


def test_what_has_begun_stays() -> None:
    async def script(fleet: Fleet) -> None:
        fleet.submit("r")
        still, other = fleet.on("r")
        still.step()
        await asyncio.sleep(100.0)
        assert (still.running, other.running) == (["r"], [])

    with_fleet(script)


def test_engine_that_stands_still_gets_nothing_until_it_goes_on() -> None:
    async def script(fleet: Fleet) -> None:
        fleet.submit("kept")
        still, other = fleet.on("kept")
        still.step()
        fleet.submit("r0")
        fleet.submit("r1")
        other.step()
        await asyncio.sleep(LATE_S + 0.01)
        assert still.running == ["kept"]
        for number in range(2, 6):
            fleet.submit(f"r{number}")
        assert (len(still.running), len(other.running)) == (1, 6)
        still.step()
        fleet.submit("next")
        assert "next" in still.running

    with_fleet(script)


def test_engine_that_has_nothing_left_is_tried_again() -> None:
    async def script(fleet: Fleet) -> None:
        fleet.submit("r")
        still, other = fleet.on("r")
        await asyncio.sleep(LATE_S + 0.01)
        assert still.running == []
        other.step()
        still.tell()
        fleet.submit("not yet")
        assert still.running == []
        other.step()
        await asyncio.sleep(LATE_S + 0.1)
        fleet.submit("again")
        assert still.running == ["again"]

    with_fleet(script)


def test_request_waits_for_others_while_its_engine_stands_still() -> None:
    async def script(fleet: Fleet) -> None:
        fleet.submit("r")
        still, other = fleet.on("r")
        other.places = 0
        other.tell()
        await asyncio.sleep(LATE_S + 0.01)
        assert (still.running, fleet.dispatcher.num_waiting) == ([], 1)
        other.places = 20
        other.tell()
        assert other.running == ["r~1"]

    with_fleet(script)


def test_request_stays_at_an_engine_that_turns_where_no_other_has_room() -> None:
    async def script(fleet: Fleet) -> None:
        fleet.submit("r")
        slow, other = fleet.on("r")
        other.places = 0
        other.tell()
        fleet.submit("s", max_tokens=100)
        for _ in range(20):
            await asyncio.sleep(0.5)
            slow.step(only=["s"])
        assert slow.running == ["r", "s"]
        other.places = 20
        other.tell()
        for _ in range(20):
            await asyncio.sleep(0.5)
            slow.step(only=["s"])
            other.step()
        assert (slow.running, slow.aborted) == (["s"], ["r"])
        assert fleet.sink.tokens["r"] == answer_to("r")

    with_fleet(script)


def test_request_is_taken_back_so_often_and_no_more() -> None:
    async def script(fleet: Fleet) -> None:
        fleet.submit("r")
        await asyncio.sleep(1000.0)
        assert sum(len(link.aborted) for link in fleet.links) == MOST_TIMES
        (running,) = [name for link in fleet.links for name in link.running]
        assert running == f"r~{MOST_TIMES}"

    with_fleet(script)
