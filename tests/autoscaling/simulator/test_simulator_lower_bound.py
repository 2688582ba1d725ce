"""The lower bound: by hand, by trying every plan of tiny cases, and below simulated policies."""

from collections.abc import Mapping, Sequence
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaling.prices.table import price_table
from autoscaling.simulator.bounds.lower_bound import (
    Loading,
    LowerBoundError,
    MeanWork,
    lower_bound_usd,
    mean_work,
    most_carried,
    most_slices,
)
from autoscaling.simulator.bounds.step_mix import least_work
from autoscaling.simulator.bounds.yardsticks import SERVICE_LEVEL, lower_bound_of
from autoscaling.simulator.comparison import simulate_policy
from autoscaling.simulator.preparation import Replacements, prepare_run
from autoscaling.simulator.scenario import Scenario, read_scenario
from autoscaling.simulator.world.arrivals import Requests
from autoscaling.simulator.world.spot_capacity import CapacitySeries
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.compute_class import ComputeClass
from tests.autoscaling.simulator.simulated_days import profile

HOUR_S = 3600.0
SPOT = ComputeClass("spot", 3.0, is_revocable=True, max_slices=2)
ON_DEMAND = ComputeClass("od", 10.0, max_slices=2)


def bound(
    arrived: Sequence[float],
    due: Sequence[float],
    spot: Sequence[float],
    *,
    may_miss: float = 0.0,
    terms: Sequence[ComputeClass] = (SPOT, ON_DEMAND),
    most: Mapping[str, Sequence[float]] | None = None,
    carries: Mapping[str, float] | None = None,
    loading: Loading | None = None,
) -> float:
    """The bound where work is given in slice-hours per hour."""
    hours = len(due)
    work = MeanWork(
        hours * HOUR_S,
        HOUR_S,
        np.cumsum(arrived) * HOUR_S,
        np.cumsum(due) * HOUR_S,
        may_miss * HOUR_S,
    )
    had = {each.name: np.full(hours, float(each.max_slices)) for each in terms}
    had |= {"spot": np.array(spot, np.float64)}
    return lower_bound_usd(work, terms, had, carries, loading)


def cheapest_tried(
    arrived: Sequence[int], due: Sequence[int], spot: Sequence[int], may_miss: int, load_h: float
) -> float:
    """The least cost over every way to use whole slice-hours, miss, carry over and load."""
    hours, best = len(due), float("inf")
    mixes = list(product(range(3), repeat=2))
    for plan in product(mixes, repeat=hours):
        used = [sum(mix) for mix in plan]
        if all(mix[0] <= most for mix, most in zip(plan, spot, strict=True)):
            usd = sum(3.0 * mix[0] + 10.0 * mix[1] for mix in plan)
            for before, mix in pairwise([(0, 0), *plan]):
                usd += 3.0 * load_h * max(0, mix[0] - before[0])
                usd += 10.0 * load_h * max(0, mix[1] - before[1])
            done, missed = 0, 0
            for hour, total in enumerate(used):
                done = min(done + total, sum(arrived[: hour + 1]))
                missed = max(missed, sum(due[: hour + 1]) - done)
            if missed <= may_miss:
                best = min(best, usd)
    return best


def test_work_is_carried_over_to_the_hour_in_which_spot_is_there() -> None:
    assert bound([1, 0, 0], [0, 0, 1], [0, 0, 2]) == pytest.approx(3.0)
    assert bound([1, 0, 0], [0, 1, 0], [0, 0, 2]) == pytest.approx(10.0)


def test_work_is_not_done_before_it_arrives() -> None:
    assert bound([0, 0, 1], [0, 0, 1], [2, 2, 0]) == pytest.approx(10.0)


def test_slices_come_in_fractions() -> None:
    assert bound([0.25], [0.25], [2]) == pytest.approx(0.75)


def test_work_that_may_miss_is_left_out_where_it_is_dearest() -> None:
    assert bound([1, 1], [1, 1], [2, 0], may_miss=0.5) == pytest.approx(3.0 + 5.0)


def test_prepaid_is_paid_whole_and_used_first() -> None:
    reserved = ComputeClass("reserved", 5.0, is_prepaid=True, max_slices=1)
    terms = (reserved, SPOT, ON_DEMAND)

    assert bound([1, 2], [1, 2], [2, 2], terms=terms) == pytest.approx(2 * 5.0 + 3.0)


def test_slices_of_another_shape_do_more_or_less_work() -> None:
    # One on-demand slice does as much as four of spot, so that it is the cheaper one.
    assert bound([1], [1], [2], carries={"od": 4.0}) == pytest.approx(2.5)
    assert bound([1], [1], [2], carries={"spot": 0.5}) == pytest.approx(6.0)
    # What spot does not carry is left to the other.
    assert bound([2], [2], [2], carries={"spot": 0.5}) == pytest.approx(6.0 + 10.0)


def test_slice_is_paid_for_while_it_loads_unless_it_was_ready_at_the_start() -> None:
    half = {"spot": 0.5 * HOUR_S, "od": 0.5 * HOUR_S}

    def loaded(arrived: Sequence[float], had: Sequence[float], **initial: int) -> float:
        return bound(arrived, arrived, had, loading=Loading(half, initial))

    assert loaded([1], [2]) == pytest.approx(3.0 + 1.5)
    assert loaded([1], [2], spot=1) == pytest.approx(3.0)
    assert loaded([1, 1, 1], [2, 2, 2]) == pytest.approx(3 * 3.0 + 1.5)
    # Held over an hour without work, for 3 USD, or loaded twice for 1.5 each.
    assert loaded([1, 0, 1], [2, 2, 2]) == pytest.approx(2 * 3.0 + 2 * 1.5)
    # Where spot goes for an hour, on-demand loads as well, and spot once more.
    assert loaded([1, 1, 1], [1, 0, 1]) == pytest.approx(2 * 3.0 + 10.0 + 2 * 1.5 + 5.0)


@settings(max_examples=40, deadline=None)
@given(
    st.floats(0.2, 4.0),
    st.floats(0.2, 4.0),
    st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 800)), min_size=1, max_size=6),
)
def test_slice_of_another_shape_does_no_more_than_it_is_said_to(
    steps: float, prompts: float, lengths: list[tuple[int, int]]
) -> None:
    """Of any part of the requests, too: a bound that holds on the whole alone is none."""
    base = profile()
    other = base.model_copy(
        update={
            "base_s": base.base_s * min(steps, 1.5),
            "per_sequence_s": base.per_sequence_s * steps,
            "per_prompt_token_s": base.per_prompt_token_s * prompts,
        }
    )
    rows = [(0.0, prompt, answer) for prompt, answer in lengths]
    requests, tpot_s = Requests.of_rows(rows), 0.2
    carried = most_carried(requests, base, other, tpot_s=tpot_s)
    totals = float(requests.input_tokens.sum()), float((requests.output_tokens - 1).sum())
    one, two = (least_work(each, tpot_s, *totals) for each in (base, other))
    ours = one.prompt_s(requests.input_tokens) + one.decode_s(requests.output_tokens)
    theirs = two.prompt_s(requests.input_tokens) + two.decode_s(requests.output_tokens)
    assert (ours <= carried * theirs * (1 + 1e-9)).all()


def test_work_that_the_classes_cannot_carry_is_an_error() -> None:
    with pytest.raises(LowerBoundError, match="no lower bound"):
        bound([9], [9], [2])


@settings(max_examples=60, deadline=None)
@given(
    work=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=3),
    spot=st.lists(st.integers(0, 2), min_size=3, max_size=3),
    may_miss=st.integers(0, 2),
    load_h=st.sampled_from([0.0, 0.5, 2.0]),
)
def test_bound_is_the_cheapest_of_all_plans_of_a_tiny_case(
    work: list[tuple[int, int]], spot: list[int], may_miss: int, load_h: float
) -> None:
    arrived = [amount for amount, _ in work]
    due = [0] * len(work)
    for hour, (amount, delay) in enumerate(work):
        if hour + delay < len(work):
            due[hour + delay] += amount
    had = spot[: len(work)]
    least = cheapest_tried(arrived, due, had, may_miss, load_h)
    loading = Loading({"spot": load_h * HOUR_S, "od": load_h * HOUR_S}, {})

    if least == float("inf"):
        with pytest.raises(LowerBoundError):
            bound(arrived, due, had, may_miss=may_miss)
        return
    bare = bound(arrived, due, had, may_miss=may_miss)
    loaded = bound(arrived, due, had, may_miss=may_miss, loading=loading)
    assert bare - 1e-6 <= loaded <= least + 1e-6
    if not load_h:
        # Amounts and stock are whole, so the fractions that the programme may use gain nothing.
        assert bare == pytest.approx(least, abs=1e-6)
        assert loaded == pytest.approx(least, abs=1e-6)


LAW = CapacityProfile(
    model="m",
    engine="paced",
    base_s=0.03,
    per_sequence_s=0.004,
    per_prompt_token_s=0.001,
    max_num_seqs=8,
    max_num_batched_tokens=40,
    measured_on="2026-11-26",
    source="made up",
)


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 32)), min_size=1, max_size=12),
    tpot_ms=st.integers(40, 110),
    planned=st.tuples(st.integers(1, 500), st.integers(1, 500)),
)
def test_no_mix_of_steps_within_the_objective_is_shorter_than_the_least_work(
    steps: list[tuple[int, int]], tpot_ms: int, planned: tuple[int, int]
) -> None:
    tpot_s = tpot_ms / 1000
    lengths_s = [0.03 + 0.004 * running + 0.001 * prompt for running, prompt in steps]
    seen_s = sum(length * r for length, (r, _) in zip(lengths_s, steps, strict=True))
    later, prompts = (sum(each[place] for each in steps) for place in (0, 1))
    if seen_s > tpot_s * later:
        return

    # The prices hold for any load, not only for the one that they were computed for.
    for amounts in ((prompts, later), planned):
        least = least_work(LAW, tpot_s, *amounts)
        needed_s = later * least.later_token_s + prompts * least.prompt_token_s
        assert sum(lengths_s) >= needed_s * (1 - 1e-6) - 1e-9


def test_least_work_of_decoding_alone_is_that_of_steps_as_long_as_the_objective() -> None:
    least = least_work(LAW, 0.05, 0, 1000)

    # Five sequences make a step of 0.05 s.
    assert least.later_token_s == pytest.approx(0.05 / 5)


def test_least_work_of_an_objective_that_no_step_keeps_is_refused() -> None:
    with pytest.raises(ValueError, match="more than base_s"):
        least_work(LAW, 0.03, 1, 1)


def test_prompt_is_due_at_its_first_token_and_the_rest_at_the_last() -> None:
    requests = Requests(np.array([5.0]), np.array([100], np.int32), np.array([11], np.int32))
    law = profile()

    work = mean_work(
        requests,
        law,
        objectives=Objectives(4.9, 1.0),
        duration_s=30.0,
        service_level=1.0,
        interval_s=10.0,
    )
    least = least_work(law, 1.0, 100.0, 10.0)

    prompt_s = 100 * least.prompt_token_s + least.first_token_s
    whole_s = prompt_s + 10 * least.later_token_s
    assert work.arrived.tolist() == pytest.approx([whole_s] * 3)
    assert work.due.tolist() == pytest.approx([prompt_s, whole_s, whole_s])
    assert work.may_miss == 0


def test_prompt_is_due_later_by_what_the_objective_allows_for_its_tokens() -> None:
    requests = Requests(np.array([5.0]), np.array([100], np.int32), np.array([1], np.int32))

    def due(per_prompt_token_s: float) -> list[float]:
        objectives = Objectives(4.9, 1.0, per_prompt_token_s)
        work = mean_work(
            requests,
            profile(),
            objectives=objectives,
            duration_s=30.0,
            service_level=1.0,
            interval_s=10.0,
        )
        return [float(each) for each in np.diff(work.due, prepend=0.0) > 0]

    assert due(0.0) == [1.0, 0.0, 0.0]
    # 10 s for 100 tokens: from 9.9 s to 19.9 s.
    assert due(0.1) == [0.0, 1.0, 0.0]


def test_largest_requests_may_miss() -> None:
    requests = Requests(
        np.arange(10.0), np.arange(1, 11, dtype=np.int32) * 10, np.ones(10, np.int32)
    )
    law = profile()

    work = mean_work(
        requests, law, objectives=Objectives(1.0, 0.03), duration_s=60.0, service_level=0.9
    )

    least = least_work(law, 0.03, float(requests.input_tokens.sum()), 0.0)
    assert work.may_miss == pytest.approx(100 * least.prompt_token_s + least.first_token_s)


def test_most_slices_are_those_of_any_instant_and_of_the_notice_before() -> None:
    series = CapacitySeries((0.0, 100.0, 300.0), (5, 2, 9))

    assert most_slices(series, 7, 4, 150.0, 0.0).tolist() == [5, 2, 7, 7]
    assert most_slices(series, 7, 4, 150.0, 60.0).tolist() == [5, 5, 7, 7]
    assert most_slices(None, 7, 2, 150.0, 60.0).tolist() == [7, 7]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_no_policy_that_keeps_the_service_level_costs_less_than_the_bound(seed: int) -> None:
    whole = read_scenario("spot-drought").model_dump()
    scenario = Scenario.model_validate(whole | {"duration_s": 10_800.0})
    run_setup = prepare_run(scenario, seed, price_table(), Replacements())
    least_usd = lower_bound_of(run_setup, is_loading=True)
    assert least_usd > lower_bound_of(run_setup)

    names = ("static-on-demand", "spothedge", "slicewise")
    outcomes = [simulate_policy(run_setup, name) for name in names]

    keeping = [each for each in outcomes if each.service.slo_ratio >= SERVICE_LEVEL]
    assert len(keeping) >= 2
    for outcome in keeping:
        assert outcome.cost.total_usd >= least_usd
    assert least_usd > 0
