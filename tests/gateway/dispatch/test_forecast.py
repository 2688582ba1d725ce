"""Who can be served in time is let in to wait; others are told when to come back, and then are."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.domain.models.request_fields.service_class import ServiceClass
from serving.domain.usage.tenant_shares import TenantShares
from serving.gateway.dispatch.admission import FleetLimits
from serving.gateway.dispatch.dispatcher import Dispatcher
from serving.gateway.dispatch.forecast import (
    MARGIN,
    MOST_PROMISES,
    Capacity,
    DrainRate,
    LineForecast,
)
from serving.gateway.dispatch.requests import InFlightRequest
from serving.gateway.dispatch.waiting import WaitingRequests
from tests.gateway.engines import in_flight

RATE = 100.0  # an engine's, in units of work a second
TWO_ENGINES = Capacity(2)
INTERACTIVE, STANDARD, BATCH = ServiceClass


class Line:
    """A line, and engines that are known to take 100 of work a second each."""

    def __init__(self, *, is_rate_known: bool = True) -> None:
        self._dispatcher = Dispatcher("demo", FleetLimits())
        self.waiting = WaitingRequests(TenantShares())
        self.forecast = LineForecast(self.waiting)
        self.now_s = 0.0
        self._num_requests = 0
        if is_rate_known:
            self.forecast.rate.look(0.0, 1)
            # Of somebody who is no reason for others to wait.
            warm = self.request(RATE, service_class=BATCH, tenant="warm", weight=1e-9)
            for second in range(1, 11):
                self.forecast.rate.took(warm, RATE)
                self.forecast.rate.look(float(second), 1)
            self.now_s = 10.0

    def request(
        self, work: float = 10.0, patience_s: float = 10.0, name: str = "", **changes: Any
    ) -> InFlightRequest:
        self._num_requests += 1
        return in_flight(
            self._dispatcher,
            f"r{self._num_requests}",
            prompt=list((name or f"r{self._num_requests}").encode()),
            line_work=work,
            first_token_by_s=self.now_s + patience_s,
            **changes,
        )

    def wait(self, work: float, **changes: Any) -> InFlightRequest:
        request = self.request(work, **changes)
        self.waiting.add(request)
        return request

    def come(self, request: InFlightRequest, capacity: Capacity = TWO_ENGINES) -> float | None:
        in_s = self.forecast.come_back_in_s(request, capacity, self.now_s)
        if in_s is None:
            self.waiting.add(request)
        return in_s

    def wait_s(self, capacity: Capacity = TWO_ENGINES, **changes: Any) -> float | None:
        return self.forecast.wait_s(self.request(**changes), capacity, self.now_s)


def after(seconds: float) -> Any:
    """What a forecast says of so many seconds of work."""
    return pytest.approx(seconds * MARGIN)


def of_work(work: float) -> InFlightRequest:
    return in_flight(Dispatcher("demo", FleetLimits()), line_work=work)


def test_rate_is_that_of_engines_while_they_could_have_more() -> None:
    rate = DrainRate()
    assert rate.per_engine_s is None
    for second in range(1, 60):
        rate.look(second - 1.0, 4)
        rate.took(of_work(900.0), 900.0)  # the first of a line; no time has passed
        rate.look(second - 1.0, 4)
        rate.took(of_work(100.0), 100.0)  # after half a second at four engines
        rate.look(second - 0.5, 0)
        rate.took(of_work(900.0), 900.0)  # it did not wait for engines with no room
    assert rate.per_engine_s == pytest.approx(50.0, rel=0.02)


def test_rate_follows_what_engines_do_of_late() -> None:
    rate = DrainRate()
    for second in range(1, 601):
        work = 100.0 if second < 300 else 300.0
        rate.took(of_work(work), work)
        rate.look(float(second), 1)
    assert rate.per_engine_s == pytest.approx(300.0, rel=0.02)


def test_rate_of_engines_that_seldom_take_something_is_known() -> None:
    rate = DrainRate()
    for take in range(20):
        rate.look(15.0 * take, 1)
        rate.took(of_work(60.0), 60.0)
        rate.look(15.0 * take, 1)
        assert (rate.per_engine_s is None) == (take < 8)
    assert rate.per_engine_s == pytest.approx(4.0, rel=0.15)
    rate.look(300.0, 0)
    rate.look(360.0, 1)
    assert rate.per_engine_s is None, "a minute without a line"


def test_time_is_that_of_the_work_before_it() -> None:
    line = Line()
    assert line.wait_s() == 0.0
    line.wait(500.0, patience_s=3.0)
    line.wait(300.0, patience_s=5.0)
    assert line.wait_s() == after(4.0)
    assert line.wait_s(Capacity(1)) == after(8.0)
    # After two seconds there are three engines.
    assert line.wait_s(Capacity(2, 2.0)) == pytest.approx(2.0 + (800 * MARGIN - 400) / 300)
    assert line.wait_s(Capacity(2, 5.0)) == after(4.0)
    # What is due later goes behind it.
    assert line.wait_s(patience_s=4.0) == after(2.5)
    assert line.wait_s(patience_s=2.0) == 0.0


def test_nobody_is_refused_while_nobody_can_tell() -> None:
    line = Line(is_rate_known=False)
    line.wait(1e9)
    assert line.wait_s() is None
    assert line.come(line.request()) is None
    assert line.come(line.request(), Capacity(0)) is None


def test_only_what_goes_before_it_counts() -> None:
    line = Line()
    line.wait(200.0, service_class=INTERACTIVE, tenant="b")
    line.wait(400.0, tenant="b")
    line.wait(800.0, service_class=BATCH, tenant="b")
    assert line.wait_s(service_class=INTERACTIVE, tenant="b") == after(1.0)
    assert line.wait_s(tenant="b") == after(3.0)
    assert line.wait_s(service_class=BATCH, tenant="b") == after(7.0)


def test_streams_that_have_begun_go_before_all() -> None:
    line = Line()
    line.wait(400.0, attempt=1, service_class=STANDARD)
    assert line.wait_s(service_class=INTERACTIVE) == after(2.0)


def test_of_other_tenants_no_more_counts_than_their_shares_and_than_they_have() -> None:
    line = Line()
    line.wait(6000.0, tenant="flood", weight=3.0)
    line.wait(100.0, tenant="few")
    # Three times as much of the flood goes before its own.
    assert line.wait_s(tenant="few") == after(4 * 100 / (2 * RATE))
    assert line.wait_s(tenant="nobody yet") == 0.0
    assert line.wait_s(tenant="flood", weight=3.0) == after(6100 / (2 * RATE))


def test_what_comes_meanwhile_of_those_who_go_before_counts() -> None:
    line = Line()
    line.wait(600.0)
    # Of what was taken lately others had three quarters, and they have nothing waiting now.
    for _ in range(3):
        line.forecast.rate.took(line.request(tenant="few", weight=2.0), 1000.0)
    rate = line.forecast.rate.per_engine_s
    assert rate is not None
    assert line.wait_s() == after((600 + 2 * 600) / (2 * rate)), "no more than their share"
    above = Line()
    above.wait(600.0)
    above.forecast.rate.took(above.request(service_class=INTERACTIVE, tenant="other"), 1000.0)
    # Engines took that beside all else, of which there is as much in a second as before.
    assert above.wait_s() == after(600 / (2 * RATE))


def test_who_could_not_be_served_in_time_is_told_when_to_come_back() -> None:
    line = Line()
    line.wait(2400.0, patience_s=1.0)
    wait_s = 12.0 * MARGIN
    assert line.come(line.request(patience_s=wait_s + 0.1)) is None
    in_s = line.come(line.request(patience_s=10.0))
    # When half of its client's time is left to wait then.
    assert in_s == pytest.approx(wait_s - 5.0, abs=0.1)


def test_those_that_are_refused_have_places_one_behind_the_other() -> None:
    line = Line()
    line.wait(2400.0)
    told = [line.come(line.request(200.0)) for _ in range(3)]
    assert told == [pytest.approx(seconds * MARGIN - 5.0) for seconds in (12, 13, 14)]
    assert line.forecast.num_promised(line.now_s) == 3


def test_who_comes_back_as_told_gets_in_before_newcomers() -> None:
    line = Line()
    waits = line.wait(2400.0)
    told_s = line.come(line.request(200.0, name="one"))
    assert told_s is not None
    line.now_s += told_s
    line.waiting.remove(waits)
    line.wait(9.9 / MARGIN * 2 * RATE)  # and the promise is of more than a second
    assert line.come(line.request(200.0, name="another")) is not None
    assert line.come(line.request(200.0, name="one")) is None
    assert line.come(line.request(200.0, name="one")) is not None, "one place, once"


def test_who_comes_back_early_keeps_its_place_and_does_not_get_in() -> None:
    line = Line()
    line.wait(2400.0)
    told_s = line.come(line.request(200.0, name="one"))
    assert told_s is not None
    line.now_s += told_s / 2
    assert line.come(line.request(200.0, name="one")) is not None
    assert line.forecast.num_promised(line.now_s) == 1


def test_all_sequences_of_a_request_that_comes_back_are_let_in() -> None:
    """Of one that asks for several answers (`n`) the first is refused, and all fail with it."""
    line = Line()
    waits = line.wait(2400.0)
    told_s = line.come(line.request(200.0, name="one"))
    assert told_s is not None
    assert line.come(line.request(200.0, name="another")) is not None
    line.now_s += told_s
    line.waiting.remove(waits)
    line.wait(9.5 / MARGIN * 2 * RATE)
    sequences = [line.request(10.0, name="one") for _ in range(4)]
    for sequence in sequences[1:]:
        sequence.telemetry.context = sequences[0].telemetry.context
    assert [line.come(sequence) for sequence in sequences] == [None] * 4
    assert line.come(line.request(10.0, name="one")) is not None, "of another request"


def test_a_prompt_that_is_no_tokens_has_no_promise() -> None:
    line = Line()
    line.wait(2400.0)
    request = line.request(200.0)
    request.prompt_token_ids = []
    assert line.come(request) is not None
    assert line.forecast.num_promised(line.now_s) == 0


def test_engines_do_not_stand_idle_for_those_who_do_not_come_back() -> None:
    line = Line()
    waits = line.wait(2400.0)
    for _ in range(50):
        line.come(line.request(200.0))
    line.waiting.remove(waits)
    line.wait(4.9 / MARGIN * 2 * RATE)  # less than half of 10 s
    assert line.come(line.request(200.0)) is None


def test_promises_lapse() -> None:
    line = Line()
    waits = line.wait(2400.0)
    for _ in range(50):
        line.come(line.request(200.0))
    line.waiting.remove(waits)
    line.wait(1200.0)
    assert line.come(line.request()) is not None
    assert line.forecast.num_promised(line.now_s) > 1
    line.now_s += 100.0
    assert line.forecast.num_promised(line.now_s) == 0
    assert line.come(line.request()) is None


def test_a_flood_is_told_to_come_back_and_others_are_not() -> None:
    line = Line()
    for _ in range(100):
        line.come(line.request(100.0, tenant="flood"))
    assert line.forecast.num_promised(line.now_s) > 50
    assert line.come(line.request(100.0, tenant="other")) is None


def test_promises_are_bounded() -> None:
    line = Line()
    line.wait(1e9)
    for number in range(MOST_PROMISES + 10):
        assert line.come(line.request(name=f"{number}")) is not None
    assert line.forecast.num_promised(line.now_s) == MOST_PROMISES


# -- the line itself --


def order(waiting: WaitingRequests) -> list[str]:
    passed: set[str] = set()
    while (request := waiting.first_except(0.0, passed)) is not None:
        passed.add(request.request_id)
    return [bytes(each.prompt_token_ids).decode() for each in _in_order(waiting)]


def _in_order(waiting: WaitingRequests) -> list[InFlightRequest]:
    taken = []
    while (request := waiting.first_except(0.0)) is not None:
        waiting.remove(request)
        taken.append(request)
    return taken


def test_classes_go_in_their_order_and_within_a_tenant_whose_first_token_is_due_first() -> None:
    line = Line()
    line.wait(1.0, name="batch", service_class=BATCH, patience_s=1.0)
    line.wait(1.0, name="patient", patience_s=60.0)
    line.wait(1.0, name="urgent", patience_s=5.0)
    line.wait(1.0, name="as urgent", patience_s=5.0)
    line.wait(1.0, name="interactive", service_class=INTERACTIVE, patience_s=600.0)
    line.wait(1.0, name="begun", attempt=1)
    line.wait(1.0, name="batch that was stopped", service_class=BATCH, attempt=1, patience_s=90.0)
    assert line.waiting.num_of_class() == {INTERACTIVE: 1, STANDARD: 4, BATCH: 2}
    assert order(line.waiting) == [
        "begun",
        "interactive",
        "urgent",
        "as urgent",
        "patient",
        "batch that was stopped",
        "batch",
    ]
    assert (len(line.waiting), line.waiting.num_tokens) == (0, 0)
    assert line.waiting.work_before_lines == 0.0
    assert line.waiting.next_deadline_s() is None


def test_first_of_those_whose_time_is_over_are_found() -> None:
    line = Line()
    late = line.wait(1.0, patience_s=3.0)
    later = line.wait(1.0, patience_s=5.0, service_class=BATCH)
    line.wait(1.0, patience_s=math.inf)
    gone = line.wait(1.0, patience_s=1.0)
    line.waiting.remove(gone)
    assert line.waiting.next_deadline_s() == 13.0
    assert line.waiting.due(14.0) == [late]
    line.waiting.remove(late)
    assert line.waiting.next_deadline_s() == 15.0
    assert line.waiting.due(20.0) == [later]


# -- those that can be in time no more --


def test_those_that_can_be_in_time_no_more_stand_behind_the_others_with_a_fourth_of_the_work() -> (
    None
):
    line = Line()
    for number in range(3):
        line.wait(1.0, name=f"late {number}", overdue_at_s=11.0)
    for number in range(8):
        line.wait(1.0, name=f"new {number}", overdue_at_s=99.0)
    assert _taken_in_turn(line, 12.0) == [
        *("new 0", "new 1", "new 2", "late 0", "new 3", "new 4", "new 5", "late 1"),
        *("new 6", "new 7", "late 2"),
    ]


def test_turns_of_what_is_overdue_are_by_work_and_not_by_number() -> None:
    line = Line()
    for number in range(4):
        line.wait(10.0, name=f"late {number}", overdue_at_s=11.0)
    for number in range(3):
        line.wait(60.0, name=f"new {number}", overdue_at_s=99.0)
    # Two for each: 20 of 80.
    expected = ["new 0", "late 0", "late 1", "new 1", "late 2", "late 3", "new 2"]
    assert _taken_in_turn(line, 12.0) == expected


def test_one_that_is_never_overdue_keeps_nobody_behind_it_from_being_so() -> None:
    line = Line()
    line.wait(30.0, name="with its own deadline", patience_s=1.0, overdue_at_s=math.inf)
    line.wait(10.0, name="late", patience_s=2.0, overdue_at_s=line.now_s + 1.0)
    line.wait(10.0, name="new", patience_s=3.0, overdue_at_s=line.now_s + 3.0)
    assert _taken_in_turn(line, line.now_s + 2.0) == ["with its own deadline", "late", "new"]
    line.wait(10.0, name="with its own deadline", patience_s=1.0, overdue_at_s=math.inf)
    line.wait(10.0, name="late", patience_s=2.0, overdue_at_s=line.now_s + 1.0)
    line.wait(10.0, name="new", patience_s=3.0, overdue_at_s=line.now_s + 3.0)
    assert _taken_in_turn(line, line.now_s + 2.0) == ["with its own deadline", "new", "late"]


def _taken_in_turn(line: Line, now_s: float) -> list[str]:
    taken = []
    while (request := line.waiting.first_except(now_s)) is not None:
        line.waiting.has_turn(request)
        line.waiting.remove(request)
        taken.append(bytes(request.prompt_token_ids).decode())
    return taken


def test_a_request_is_overdue_from_its_time_on_and_stays_so() -> None:
    line = Line()
    line.wait(1.0, name="first", overdue_at_s=11.0)
    line.wait(1.0, name="second", overdue_at_s=12.0)

    def next_at(now_s: float) -> str:
        request = line.waiting.first_except(now_s)
        assert request is not None
        return bytes(request.prompt_token_ids).decode()

    assert [next_at(now_s) for now_s in (10.9, 11.0, 11.9)] == ["first", "second", "second"]
    assert next_at(12.0) == "first"
    assert line.waiting.num_of_account() == {(STANDARD, ""): 2}


def test_one_that_will_be_overdue_is_told_that_it_has_a_fourth_of_the_work() -> None:
    line = Line()
    line.wait(400.0, overdue_at_s=line.now_s + 1.0)  # two seconds of two engines
    in_time = line.wait_s(overdue_at_s=line.now_s + 5.0)
    assert in_time == after(2.0)
    had = 1.0 / MARGIN / 2.0  # of what is before it, as long as it can be in time
    late = line.wait_s(overdue_at_s=line.now_s + 1.0)
    assert late == after(2.0 * (had + 4 * (1 - had)))
    assert line.wait_s(overdue_at_s=line.now_s) == after(8.0)


def test_who_is_overdue_stands_in_nobodys_way_who_can_be_in_time() -> None:
    line = Line()
    line.wait(2000.0, overdue_at_s=line.now_s)
    line.waiting.first_except(line.now_s)
    assert line.wait_s(overdue_at_s=line.now_s + 5.0) == 0.0
    assert line.wait_s(overdue_at_s=line.now_s) == after(40.0)
    # Beside others it has its part: a third of what they have.
    line.wait(600.0, overdue_at_s=math.inf)
    assert line.wait_s(overdue_at_s=line.now_s + 9.0) == after(4.0)


def test_who_is_refused_comes_back_when_what_waits_is_done_and_is_in_time_then() -> None:
    line = Line()
    line.wait(1000.0, overdue_at_s=line.now_s)  # five seconds
    line.waiting.first_except(line.now_s)
    newcomer = line.request(name="newcomer", patience_s=8.0, overdue_at_s=line.now_s)
    in_s = line.come(newcomer)
    # Twenty seconds by a fourth of the work: more than it has. All of it takes 5.75.
    assert in_s == pytest.approx(5.0 * MARGIN - 4.0)
    line.now_s += in_s
    assert line.come(line.request(name="newcomer", overdue_at_s=line.now_s + 1.0)) is None


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(1, 100)), min_size=1, max_size=30))
def test_whatever_is_overdue_when_each_has_its_turn_once_and_sums_stay_right(
    requests: list[tuple[float, float]],
) -> None:
    line = Line()
    waiting = [
        line.wait(work, name=f"r{number}", overdue_at_s=at_s, patience_s=60.0 + at_s)
        for number, (at_s, work) in enumerate(requests)
    ]
    newcomer = line.request(patience_s=100.0)
    taken: list[InFlightRequest] = []
    others = had = largest = 0.0  # while something is overdue
    now_s = 0.0
    while (request := line.waiting.first_except(now_s)) is not None:
        left = [each for each in waiting if each not in taken]
        ahead, overdue = line.waiting.work_ahead(newcomer)
        assert ahead + overdue == pytest.approx(sum(each.line_work for each in left))
        late = [each.line_work for each in left if each.overdue_at_s <= now_s]
        if not late:
            others = had = largest = 0.0
        elif request.overdue_at_s <= now_s:
            had += request.line_work
        else:
            others, largest = others + request.line_work, max(largest, request.line_work)
            assert others <= 3 * (had + max(late)) + largest + 1e-6
        line.waiting.has_turn(request)
        line.waiting.remove(request)
        taken.append(request)
        now_s += 1.0
    assert sorted(each.request_id for each in taken) == sorted(each.request_id for each in waiting)
    assert (len(line.waiting), line.waiting.num_lines) == (0, 0)


@st.composite
def comers(draw: st.DrawFn) -> list[tuple[float, float, float, float]]:
    """Who comes when, with how much work, until when in time, and with how much patience."""
    number = draw(st.integers(1, 25))
    each = st.tuples(
        st.floats(0, 4),
        st.sampled_from([20.0, 100.0, 900.0, 3000.0]),
        # With an objective, or a deadline of its own, which is never overdue. None is due before
        # one that came before: it would be before that one as long as both can be in time.
        st.sampled_from([(1.0, 60.0), (3.0, 60.0), (math.inf, 60.0)]),
    )
    at_s = 0.0
    found = []
    for _ in range(number):
        after_s, work, (overdue_s, patience_s) = draw(each)
        at_s += after_s
        found.append((at_s, work, overdue_s, patience_s))
    return found


@given(comers())
def test_nobody_waits_for_longer_than_was_forecast_though_others_come_meanwhile(
    requests: list[tuple[float, float, float, float]],
) -> None:
    """One engine that takes them one after the other."""
    line = Line()
    one = Capacity(1)
    engine_free_s = began_s = line.now_s
    told: dict[str, float] = {}
    coming = [(began_s + at_s, *rest) for at_s, *rest in requests]

    def take_until(until_s: float) -> None:
        nonlocal engine_free_s
        while len(line.waiting) and engine_free_s <= until_s:
            request = line.waiting.first_except(engine_free_s)
            assert request is not None
            assert engine_free_s <= told[request.request_id] + 1e-6
            line.waiting.has_turn(request)
            line.waiting.remove(request)
            engine_free_s += request.line_work / RATE

    for at_s, work, overdue_s, patience_s in coming:
        take_until(at_s)
        line.now_s = at_s
        engine_free_s = max(engine_free_s, at_s)
        request = line.request(
            work, patience_s, overdue_at_s=at_s + overdue_s, name=f"{work} {at_s}"
        )
        # What the engine is at is not in the line: it is asked as of when that is over. Parts are
        # whole requests, so that one of any length may be taken before its own part has come, and
        # the overdue may have part of an earlier one due.
        wait_s = line.forecast.wait_s(request, one, engine_free_s)
        assert wait_s is not None
        told[request.request_id] = engine_free_s + wait_s + 6 * 3000.0 / RATE
        line.waiting.add(request)
    take_until(math.inf)
