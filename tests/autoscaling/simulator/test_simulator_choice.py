"""Where simulated requests go, held to the gateway's own choice, and what waits at it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_days import profile

from autoscaling.simulator.world import kernel
from autoscaling.simulator.world.arrivals import Requests
from autoscaling.simulator.world.engines import Engines, GatewayLimits, bounds_of
from serving.gateway.dispatch.choice.engine_table import UNBOUNDED, EngineColumns
from serving.gateway.dispatch.choice.routing import Wish, choose_engine
from serving.gateway.dispatch.known_room import Need

LAW = profile(max_num_seqs=8, max_num_batched_tokens=1000)
PROMPT, OUTPUT = 700, 50
FOREVER = GatewayLimits(request_deadline_s=1e6, max_waiting_requests=1_000_000)

# Few values each, so that many are equal, and about as many engines with a place as without.
engines = st.tuples(
    st.integers(0, 8),  # in flight
    st.integers(0, 2),  # dispatched
    st.sampled_from([0, 63, 64, 700, 999, 1000, 9000]),  # tokens in line
)


def all_at_once(count: int, prompt: int = PROMPT, output: int = OUTPUT) -> Requests:
    lengths = np.full(count, prompt, np.int32), np.full(count, output, np.int32)
    return Requests(np.zeros(count), *lengths)


@given(
    st.lists(engines, min_size=1, max_size=14),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 40, 300]),
    st.integers(1, OUTPUT),
)
@settings(max_examples=400, deadline=None)
def test_choice_is_the_gateways(
    fleet: list[tuple[int, int, int]], number: int, expected: int, left: int
) -> None:
    world = Engines(all_at_once(1), LAW, FOREVER)
    for _ in fleet:
        world.open(-1.0)
    state = world.state
    state.requests["left"][0], state.counts[kernel.EXPECTED_TOKENS] = left, expected
    columns = EngineColumns.of([f"{slot:03d}" for slot in range(len(fleet))], (False,) * len(fleet))
    for slot, (in_flight, dispatched, line) in enumerate(fleet):
        engine = state.engines[slot]
        engine["in_flight"], engine["dispatched"] = in_flight, dispatched
        engine["line_tokens"] = line
        columns.num_in_flight[slot], columns.num_dispatched[slot] = in_flight, dispatched
        columns.backlog_tokens[slot], columns.kv_tokens[slot] = line, UNBOUNDED
        has_sequence = in_flight < LAW.max_num_seqs
        columns.has_place[slot] = has_sequence and line < LAW.max_num_batched_tokens
        columns.has_full_line[slot] = has_sequence and not columns.has_place[slot]
    emitted = OUTPUT - left
    need = Need(PROMPT + emitted, max(0, expected - emitted))
    rows = {engine_id: row for row, engine_id in enumerate(columns.engine_ids)}
    route = choose_engine(columns, rows, Wish(need, number=number))
    chosen = kernel.choose(state, bounds_of(FOREVER, None), 0, number)
    assert chosen == (kernel.NOBODY if route.engine_id is None else int(route.engine_id))


def test_numbers_of_requests_are_spread_over_all_that_the_gateways_are() -> None:
    numbers = np.array([kernel.number_of(request) for request in range(4000)])
    assert numbers.min() >= 0
    assert numbers.max() < 2**32
    assert len(np.unique(numbers)) == len(numbers)
    for num_engines in (9, 64):
        counts = np.bincount(numbers % num_engines, minlength=num_engines)
        # As often each, as chance goes: five deviations.
        assert abs(counts - 4000 / num_engines).max() < 5 * (4000 / num_engines) ** 0.5 + 1


def test_what_finds_no_place_waits_at_the_gateway_and_not_in_a_line() -> None:
    world = Engines(all_at_once(20, prompt=10), LAW, FOREVER)
    world.open(0.0)
    seen = world.traffic(0.001)
    assert (seen.num_in_flight, seen.num_waiting, seen.full_s) == (8, 12, 0.001)
    assert seen.oldest_wait_s == pytest.approx(0.001)
    world.open(0.002)
    seen = world.traffic(0.002)
    assert (seen.num_in_flight, seen.num_waiting, seen.full_s) == (16, 4, 0.002)


def test_engines_are_full_from_the_first_that_waits_to_the_last() -> None:
    world = Engines(all_at_once(12, prompt=10), LAW, FOREVER)
    # Without an engine nothing is full, however long work waits.
    assert world.traffic(1.0).num_waiting == 12
    assert world.traffic(1.0).full_s == 0
    slot = world.open(1.0)
    assert world.traffic(1.5).full_s == 0.5
    # Eight have places. All end at one step, and then the other four have some.
    times = np.arange(1.5, 200.0, 0.01)
    is_waiting = [world.traffic(float(now_s)).num_waiting > 0 for now_s in times]
    num_full = sum(is_waiting)
    assert 0 < num_full < len(times)
    seen = world.traffic(200.0)
    assert seen.full_s == pytest.approx(0.5 + 0.01 * num_full, abs=0.011)
    world.drain(slot, 201.0)
    assert world.traffic(300.0).full_s == seen.full_s


def test_engines_that_go_while_work_waits_are_full_no_longer() -> None:
    world = Engines(all_at_once(12, prompt=10), LAW, FOREVER)
    slot = world.open(0.0)
    world.close(slot, 0.25)
    assert world.traffic(5.0).num_waiting == 12
    assert world.traffic(5.0).full_s == 0.25


def test_line_of_prompts_is_no_longer_than_a_step() -> None:
    # The one that takes the last tokens may take more than are left.
    world = Engines(all_at_once(20), LAW, FOREVER)
    world.open(-1.0)
    world.advance(0.0)
    # The first began at once; of two of 700 tokens the second is the last to fit.
    assert world.in_flight[0] == 3
    assert world.traffic(0.0).num_waiting == 17


def test_request_that_waits_too_long_for_a_place_fails() -> None:
    world = Engines(all_at_once(20, prompt=10, output=2000), LAW, GatewayLimits(5.0))
    world.open(0.0)
    answers = world.finish()
    assert np.count_nonzero(answers.status == kernel.SERVED) == 8
    assert np.count_nonzero(answers.status == kernel.FAILED) == 12


def test_streams_that_lost_their_engine_go_before_those_that_wait() -> None:
    world = Engines(all_at_once(16, prompt=10, output=500), LAW, FOREVER)
    first, second = world.open(0.0), world.open(0.0)
    world.advance(1.0)
    late = world.traffic(1.0)
    assert (late.num_in_flight, late.num_waiting) == (16, 0)
    world.close(first, 1.0)
    assert world.traffic(1.0).num_waiting == 8
    answers = world.finish()
    assert np.count_nonzero(answers.moves) == 8
    moved = answers.moves > 0
    # They went on when the others ended, which had all begun by then.
    assert answers.last_s[moved].min() > answers.last_s[~moved].max()
    assert second != first


def test_draining_engine_keeps_what_no_other_has_room_for_until_its_time_is_up() -> None:
    requests = all_at_once(16, prompt=10, output=500)
    world = Engines(requests, LAW, FOREVER)
    leaving, other = world.open(0.0), world.open(0.0)
    world.advance(1.0)
    world.drain(leaving, 1.0)
    world.leave(leaving, 1.0, stay_until_s=2.0)
    assert [world.in_flight[slot] for slot in (leaving, other)] == [8, 8]
    assert world.traffic(1.5).num_waiting == 0
    # A third one comes: they move as soon as it has room, with the next step of any.
    third = world.open(1.5)
    world.advance(1.6)
    assert [world.in_flight[slot] for slot in (leaving, other, third)] == [0, 8, 8]
    answers = world.finish()
    assert np.count_nonzero(answers.moves) == 8
    assert np.all(answers.status == kernel.SERVED)
    assert answers.stall_s.max() < 0.2


def test_draining_engine_is_left_once_its_time_is_up_though_others_are_full() -> None:
    world = Engines(all_at_once(16, prompt=10, output=500), LAW, FOREVER)
    leaving, _ = world.open(0.0), world.open(0.0)
    world.advance(1.0)
    world.drain(leaving, 1.0)
    world.leave(leaving, 1.0, stay_until_s=2.0)
    world.leave(leaving, 2.0, stay_until_s=2.0)
    seen = world.traffic(2.0)
    assert (seen.num_in_flight, seen.num_waiting) == (8, 8)
