"""What is learned of a compute class, and when it is relied on."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_world import RULES, SPOT

from autoscaling.policy.classes.class_history import ClassHistory
from autoscaling.records import SliceLoss, SliceView
from serving.domain.slice_lifecycle import HELD_STATES, WAITING, EndCause, SliceState

BACKING_OFF = replace(RULES, backoff_s=100.0, max_backoff_s=300.0)


def view(name: str, state: SliceState, since_s: float, requested_at_s: float = 0.0) -> SliceView:
    return SliceView(name, "spot", state, since_s, requested_at_s)


def lost(name: str, at_s: float, cause: str = "preempted") -> SliceLoss:
    return SliceLoss(name, "spot", at_s, cause)


def disappoint(history: ClassHistory, at_s: float) -> float:
    """All is lost at `at_s` and delivered anew 10 s later; how long it is not relied on after."""
    history.observe(at_s - 1, [view("a", SliceState.READY, 0)], [])
    history.observe(at_s, [view("b", SliceState.PROVISIONING, at_s, at_s)], [lost("a", at_s)])
    assert not history.is_healthy(at_s)
    history.observe(at_s + 10, [view("b", SliceState.LOADING, at_s + 10, at_s)], [])
    instant_s = at_s
    while not history.is_healthy(instant_s):
        instant_s += 1
    return instant_s - at_s


def test_each_disappointment_counts_for_longer_up_to_a_bound() -> None:
    history = ClassHistory(SPOT, BACKING_OFF)
    assert [disappoint(history, at_s) for at_s in (1000, 2000, 3000, 4000)] == [
        100,
        200,
        300,
        300,
    ]


@given(
    st.lists(
        st.builds(
            SliceView,
            st.just("a"),
            st.just("spot"),
            st.sampled_from(list(SliceState)),
            st.integers(0, 1000).map(float),
            st.integers(0, 1000).map(float),
            expires_at_s=st.none() | st.integers(900, 2500).map(float),
        ),
        max_size=8,
    ),
    st.booleans(),
    st.lists(st.integers(0, 1500).map(float), min_size=1, max_size=4),
)
def test_slices_serve_in_a_while_that_stay_until_then_and_are_ready_or_will_be(
    slices: list[SliceView], is_healthy: bool, within_s: list[float]
) -> None:
    now_s = 1000.0
    history = ClassHistory(SPOT, BACKING_OFF)
    if not is_healthy:
        disappoint(history, now_s - 20)
    assert history.is_healthy(now_s) == is_healthy

    def serves(each: SliceView, in_s: float) -> bool:
        if each.state == SliceState.DRAINING:
            return False
        expires_at_s = each.expires_at_s if each.state in HELD_STATES else None
        if expires_at_s is not None and expires_at_s - 130 - now_s < in_s:
            return False  # it will have left
        if each.state == SliceState.READY:
            return True
        if each.state not in WAITING:
            return each.since_s + history.load_s <= now_s + in_s
        eta_s = each.requested_at_s + history.lead_s
        return is_healthy and now_s <= eta_s <= now_s + in_s

    expected = history.expected(slices, now_s)
    for in_s in within_s:
        assert expected.num_within(in_s) == sum(serves(each, in_s) for each in slices)
        assert history.num_there(slices, now_s, in_s) == expected.num_within(in_s)


def test_order_whose_machines_boot_is_not_late_and_shows_that_the_class_delivers() -> None:
    history = ClassHistory(replace(SPOT, patience_s=50.0), BACKING_OFF)
    order = view("a", SliceState.PROVISIONING, 0)
    boots = replace(order, coming_since_s=40.0)
    for instant_s in range(0, 1000, 10):
        history.observe(instant_s, [boots if instant_s >= 40 else order], [])
        assert history.is_healthy(instant_s)
    # It did not boot in time and is condemned: the order has waited since it was made.
    history.observe(1000, [order], [])
    assert not history.is_healthy(1000)
    assert history.backoff_reason == "an order is 950 s late"
    # Machines for it come again: nothing is late, and the back-off runs out.
    history.observe(1010, [boots], [])
    assert history.is_healthy(1000 + 100)


def drought(history: ClassHistory, num_orders: int, apart_s: int, gap_s: int) -> float:
    """So many orders, the first filled 600 s after it was due; the end of the last back-off.

    Orders are made `apart_s` apart, and filled with `gap_s` between two.
    """
    filled_s = [
        SPOT.provisioning_s + 600 + place * max(apart_s, gap_s) for place in range(num_orders)
    ]
    now_s, ended_s = 0.0, 0.0
    while now_s <= filled_s[-1] or not history.is_healthy(now_s):
        now_s += 10
        slices = [
            view(
                f"s-{place}",
                SliceState.LOADING if now_s >= at_s else SliceState.PROVISIONING,
                min(now_s, at_s),
                place * apart_s,
            )
            for place, at_s in enumerate(filled_s)
            if now_s >= place * apart_s
        ]
        history.observe(now_s, slices, [])
        if now_s == filled_s[-1]:
            ended_s = now_s
    return now_s - ended_s


@pytest.mark.parametrize("gap_s", [60, 120])
def test_drought_that_gives_one_slice_a_minute_is_one_disappointment(gap_s: int) -> None:
    assert drought(ClassHistory(SPOT, RULES), 6, 60, gap_s) <= RULES.backoff_s


@given(st.integers(1, 8), st.integers(0, 12), st.integers(0, 12))
def test_drought_counts_once_however_its_slices_come(num_orders: int, apart: int, gap: int) -> None:
    history = ClassHistory(SPOT, RULES)
    assert drought(history, num_orders, 10 * apart, 10 * gap) <= RULES.backoff_s
    # The next episode backs off for twice as long, and not for the longest time.
    now_s = 12_000.0
    history.observe(now_s, [view("a", SliceState.READY, 0)], [])
    history.observe(now_s + 10, [], [lost("a", now_s + 10)])
    came = view("b", SliceState.LOADING, now_s + 20, now_s + 10)
    history.observe(now_s + 15, [view("b", SliceState.PROVISIONING, now_s, now_s + 10)], [])
    history.observe(now_s + 20, [came], [])
    assert not history.is_healthy(now_s + 10 + 2 * RULES.backoff_s - 1)
    assert history.is_healthy(now_s + 10 + 2 * RULES.backoff_s)


def test_order_that_is_withdrawn_in_a_drought_does_not_end_it() -> None:
    history = ClassHistory(replace(SPOT, patience_s=50.0), BACKING_OFF)
    for asked_s in (0, 200, 400):
        order = view(f"s-{asked_s}", SliceState.PROVISIONING, asked_s, asked_s)
        for instant_s in range(asked_s, asked_s + 110, 10):
            history.observe(instant_s, [order], [])
        history.observe(asked_s + 110, [], [])
        assert not history.is_healthy(asked_s + 190)
    history.observe(520, [view("s-520", SliceState.PROVISIONING, 520, 520)], [])
    history.observe(530, [view("s-520", SliceState.LOADING, 530, 520)], [])
    assert not history.is_healthy(599)
    assert history.is_healthy(600)


def test_old_disappointment_is_forgiven() -> None:
    history = ClassHistory(SPOT, BACKING_OFF)
    disappoint(history, 1000)
    disappoint(history, 2000)
    assert disappoint(history, 2000 + 7 * 3600) == 100


def test_one_long_stock_out_is_one_disappointment() -> None:
    history = ClassHistory(replace(SPOT, patience_s=50.0), BACKING_OFF)
    for instant_s in range(0, 5000, 10):
        history.observe(instant_s, [view("a", SliceState.PROVISIONING, 0)], [])
        assert history.is_healthy(instant_s) == (instant_s <= 50)
    history.observe(5000, [view("a", SliceState.LOADING, 5000)], [])
    assert history.is_healthy(5000 + 100)


def test_losing_one_of_many_keeps_the_trust() -> None:
    history = ClassHistory(SPOT, BACKING_OFF)
    slices = [view(name, SliceState.READY, 0) for name in "abc"]
    history.observe(10, slices, [])
    history.observe(20, slices[1:], [lost("a", 15)])
    assert history.is_healthy(20)


def test_times_are_learned_once_there_are_enough_of_them() -> None:
    history = ClassHistory(SPOT, RULES)
    for number in range(6):
        asked_s = 1000.0 * number
        name = f"s-{number}"
        steps = [
            (SliceState.PROVISIONING, asked_s),
            (SliceState.LOADING, asked_s + 200),
            (SliceState.READY, asked_s + 230),
        ]
        for state, at_s in steps:
            history.observe(at_s, [view(name, state, at_s, asked_s)], [])
        expected = (SPOT.provisioning_s, SPOT.load_s) if number < 3 else (200.0, 30.0)
        assert (history.provisioning_s, history.load_s) == expected


def test_engine_that_is_taken_over_shows_nothing_of_how_long_the_class_takes() -> None:
    history = ClassHistory(SPOT, RULES)
    for number in range(6):
        asked_s, name = 1000.0 * number, f"s-{number}"
        history.observe(asked_s, [view(name, SliceState.REQUESTED, asked_s, asked_s)], [])
        taken = view(name, SliceState.LOADING, asked_s + 1, asked_s)
        history.observe(asked_s + 1, [replace(taken, is_adopted=True)], [])
        ready = view(name, SliceState.READY, asked_s + 2, asked_s)
        history.observe(asked_s + 2, [replace(ready, is_adopted=True)], [])
    assert (history.provisioning_s, history.load_s) == (SPOT.provisioning_s, SPOT.load_s)


def deliver(
    history: ClassHistory, name: str, asked_s: float, came_s: float, boots_s: float
) -> None:
    """An order, whose machines are there and boot before its slice loads for a minute."""
    steps = [view(name, SliceState.PROVISIONING, asked_s, asked_s)] * 2
    steps.append(replace(steps[0], coming_since_s=came_s - boots_s))
    steps.append(view(name, SliceState.LOADING, came_s, asked_s))
    steps.append(view(name, SliceState.READY, came_s + 60, asked_s))
    instants_s = [asked_s, came_s - boots_s - 1, came_s - boots_s, came_s, came_s + 60]
    for instant_s, step in zip(instants_s, steps, strict=True):
        history.observe(instant_s, [step], [])


@pytest.mark.parametrize("boots_s", [40.0, 120.0])
def test_length_of_a_stock_out_is_not_learned_though_machines_boot_before_slices_are_held(
    boots_s: float,
) -> None:
    history = ClassHistory(SPOT, RULES)
    for number in range(6):
        asked_s = 20_000.0 * number
        deliver(history, f"dry-{number}", asked_s, asked_s + 3 * 3600, boots_s)
        assert history.provisioning_s == SPOT.provisioning_s
    for number in range(4):
        asked_s = 200_000.0 + 1000.0 * number
        deliver(history, f"s-{number}", asked_s, asked_s + boots_s + 30, boots_s)
    assert history.provisioning_s == boots_s + 30, "orders made after it teach as ever"


def test_order_of_a_stock_out_teaches_nothing_after_a_restart_either() -> None:
    history = ClassHistory(SPOT, RULES)
    orders = [view(f"s-{number}", SliceState.PROVISIONING, 0) for number in range(6)]
    history.observe(0.0, orders, [])
    history.observe(10_000.0, orders, [])
    history = ClassHistory.from_record(SPOT, RULES, history.to_record(), 10_000.0)
    history.observe(10_010.0, [replace(each, coming_since_s=10_000.0) for each in orders], [])
    came = [view(each.slice_id, SliceState.LOADING, 10_050) for each in orders]
    history.observe(10_050.0, came, [])
    assert history.provisioning_s == SPOT.provisioning_s


def test_slice_that_was_not_seen_while_it_loaded_shows_nothing_of_how_long_one_takes() -> None:
    history = ClassHistory(SPOT, RULES)
    for number in range(6):
        asked_s, name = 1000.0 * number, f"s-{number}"
        history.observe(asked_s, [view(name, SliceState.PROVISIONING, asked_s, asked_s)], [])
        ready = view(name, SliceState.READY, asked_s + 40 + 45, asked_s)
        history.observe(asked_s + 240, [ready], [])
    assert (history.provisioning_s, history.load_s) == (SPOT.provisioning_s, SPOT.load_s)


def counted_h(hours: float) -> float:
    """What so many hours until now count as: those of a day ago count half."""
    return (1 - 0.5 ** (hours / 24)) * 24 / math.log(2)


def test_prior_rate_of_losses_gives_way_to_experience() -> None:
    history = ClassHistory(replace(SPOT, losses_per_hour=1.0), RULES)
    held = [view("a", SliceState.READY, 0)]
    history.observe(0, held, [])
    assert history.losses_per_hour == pytest.approx(1.0)
    history.observe(240 * 3600, held, [])
    assert history.losses_per_hour == pytest.approx(24 / (24 + counted_h(240)))
    assert history.losses_per_hour < 0.42, "a class that is always held is known by 35 hours"


def test_experience_fades_whether_a_class_is_held_or_not() -> None:
    history = ClassHistory(replace(SPOT, losses_per_hour=0.02), RULES)
    for hour in range(12):
        history.observe(3600.0 * hour, [view("a", SliceState.READY, 0)], [])
        history.observe(3600.0 * hour + 3599, [], [lost("a", 1)])
    worst = (history.losses_per_hour, history.outages_per_hour)
    assert min(worst) > 0.3
    rates = []
    for day in range(1, 11):
        history.observe(12 * 3600 + day * 86_400.0, [], [])
        rates.append((history.losses_per_hour, history.outages_per_hour))
    for losses, outages in (worst, *rates[:4]):
        assert min(losses, outages) > 0.03, "for some days it is remembered"
    for losses, outages in rates[6:]:
        assert max(losses, outages) < 0.03, "then the operator's word is as good"
    assert rates == sorted(rates, reverse=True)


@given(st.lists(st.integers(1, 100_000), max_size=20))
def test_experience_fades_the_same_however_often_one_looks(instants_s: list[int]) -> None:
    often, seldom = ClassHistory(SPOT, RULES), ClassHistory(SPOT, RULES)
    held = [view("a", SliceState.READY, 0), view("b", SliceState.READY, 0)]
    for history, looks_s in ((often, [0, *sorted(instants_s), 100_001]), (seldom, [0, 100_001])):
        for instant_s in looks_s:
            history.observe(instant_s, held, [])
        history.observe(200_000, [], [])
        history.observe(300_000, [], [])
    assert often.losses_per_hour == pytest.approx(seldom.losses_per_hour)
    assert often.outages_per_hour == pytest.approx(seldom.outages_per_hour)


def test_experience_fades_while_no_policy_runs() -> None:
    history = ClassHistory(replace(SPOT, losses_per_hour=0.0), RULES)
    history.observe(0.0, [view("a", SliceState.READY, 0)], [])
    history.observe(3600.0, [], [lost("a", 1)])
    again = ClassHistory.from_record(history.terms, RULES, history.to_record(), 3600.0)
    history.observe(3600.0 + 4 * 86_400, [], [])
    again.observe(3600.0 + 4 * 86_400, [], [])
    assert again.outages_per_hour == pytest.approx(history.outages_per_hour)
    assert again.outages_per_hour < 0.01


def test_price_of_a_useful_hour_holds_the_loading_that_losses_cost() -> None:
    hourly = replace(SPOT, losses_per_hour=1.0, load_s=360.0, usd_per_slice_hour=10.0)
    assert ClassHistory(hourly, RULES).usd_per_useful_hour == pytest.approx(11.0)
    prepaid = replace(hourly, is_prepaid=True)
    assert ClassHistory(prepaid, RULES).usd_per_useful_hour == 0.0


def test_end_that_is_known_beforehand_costs_a_reload_too() -> None:
    hourly = replace(
        SPOT, max_run_s=3600.0, losses_per_hour=0.0, load_s=360.0, usd_per_slice_hour=10.0
    )
    assert ClassHistory(hourly, RULES).usd_per_useful_hour == pytest.approx(11.0)


def test_outage_is_the_loss_of_half_or_more_at_once() -> None:
    history = ClassHistory(replace(SPOT, losses_per_hour=0.0), RULES)
    slices = [view(name, SliceState.READY, 0) for name in "abcd"]
    history.observe(0, slices, [])
    history.observe(12 * 3600, slices[1:], [lost("a", 1)])
    assert history.outages_per_hour == 0.0
    history.observe(12 * 3600, slices[3:], [lost("b", 2), lost("c", 2)])
    assert history.outages_per_hour == pytest.approx(1 / (12 + counted_h(12)))


OWN_CAUSES = sorted(set(EndCause) - {EndCause.PREEMPTED})


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(OWN_CAUSES)), max_size=12),
    st.integers(1, 4),
)
def test_what_nobody_took_away_is_no_risk_of_the_class(
    ends: list[tuple[int, EndCause]], num_held: int
) -> None:
    failing, calm = ClassHistory(SPOT, RULES), ClassHistory(SPOT, RULES)
    held = [view(f"s-{number}", SliceState.READY, 0) for number in range(num_held)]
    for place, (num_ended, cause) in enumerate(ends):
        now_s = 60.0 * place
        failing.observe(now_s, held, [lost("s", now_s, cause)] * num_ended)
        calm.observe(now_s, held, [])
        assert failing.is_healthy(now_s)
    assert failing.losses_per_hour == calm.losses_per_hour
    assert failing.outages_per_hour == calm.outages_per_hour
    assert failing.usd_per_useful_hour == calm.usd_per_useful_hour


def test_preemption_counts_however_many_engines_fail_beside_it() -> None:
    history = ClassHistory(replace(SPOT, losses_per_hour=0.0), RULES)
    slices = [view(name, SliceState.READY, 0) for name in "abcd"]
    history.observe(0, slices, [])
    losses = [lost("a", 1), lost("b", 1, "unhealthy"), lost("c", 1, "boot_failed")]
    history.observe(12 * 3600, slices[3:], losses)
    assert history.losses_per_hour == pytest.approx(1 / (24 + 4 * counted_h(12)))
    assert history.outages_per_hour == 0.0
