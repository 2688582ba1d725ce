"""A gateway's short history: from families of its metrics page to points in time."""

import math
import random
from collections.abc import Iterator, Sequence
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric as Family

from serving.dashboard.history import (
    COARSE_POINTS,
    FINE_POINTS,
    MAX_SERIES,
    History,
    Wanted,
)
from serving.dashboard.metric_sampling import ALL_MODELS, READ_SERIES, quantile
from serving.dashboard.time_series import Key, Means, Ring
from serving.gateway.metrics.ledger import LedgerCollector
from serving.gateway.metrics.requests import Families, ServingCollector
from serving.gateway.telemetry.request_metrics import EdgeMeter, Histogram, RequestMeter
from serving.ledger.ledger import Ledger
from serving.ledger.states import LedgerState
from serving.telemetry.metric_names import ALL

from .test_request_meter import StagedFleet, StagedSeat

NOW_S = 1_795_226_400.5  # the middle of a second, and the beginning of ten
CHAT, SPOT = {"model": "chat"}, {"model": "chat", "compute_class": "spot"}
FINE, COARSE = Wanted(1, ALL_MODELS, {}), Wanted(10, ALL_MODELS, {})
A = Key("", "a", "")


def families(**values: float | Histogram) -> Families:
    """A page with one series each of a model on one class; `_of_` cuts off what a label says."""
    result = Families()
    for name, value in values.items():
        name, _, said = name.partition("_of_")
        labels = {
            label: said if label in ("outcome", "cause", "state", "result") else text
            for label, text in (SPOT | dict.fromkeys(ALL[name].labels, "")).items()
        }
        if name == "slicewise_requests_waiting":
            labels = CHAT
        result.add(name, labels, value)
    return result


def history_of(*pages: Families, step_s: float = 1.0) -> History:
    history = History("g", NOW_S)
    for number, page in enumerate(pages):
        history.observe(page, NOW_S + number * step_s)
    return history


def points(history: History, name: str, label: str = "", wanted: Wanted = FINE) -> list[float]:
    """The last points of a series: as many as there are since the first look."""
    answer = history.describe(wanted)
    first = int(NOW_S) // wanted.step_s
    return list(answer["series"][name][label][first - answer["until"] :])


def tokens(count: int) -> Families:
    return families(slicewise_output_tokens_total=count, slicewise_sequences_in_flight=1)


# -- rates --


def test_counter_becomes_a_rate_of_what_was_added() -> None:
    history = history_of(tokens(1000), tokens(1010), tokens(1010), tokens(1040))
    assert points(history, "output_tokens_per_s", "spot")[1:] == [10, 0, 30]


def test_first_look_is_where_counting_begins() -> None:
    history = history_of(tokens(1000))
    assert set(history.describe(FINE)["series"]) == {"sequences"}


def test_counter_that_falls_began_again_at_zero() -> None:
    history = history_of(tokens(1000), tokens(7), tokens(9))
    assert points(history, "output_tokens_per_s", "spot")[1:] == [7, 2]


def test_series_that_appears_began_at_zero() -> None:
    before, after = families(), families(slicewise_sequences_total_of_stop=3)
    assert points(history_of(before, after), "requests_per_s", "finished")[1:] == [3]


def test_rate_after_late_looks_is_over_the_time_that_passed() -> None:
    history = history_of(tokens(0), tokens(100), step_s=5.0)
    rates = points(history, "output_tokens_per_s", "spot")
    assert rates[-1] == 20
    assert all(math.isnan(rate) for rate in rates[:-1])


def test_second_look_in_a_second_changes_nothing() -> None:
    history = history_of(tokens(0), tokens(10))
    told = history.version(FINE)
    history.observe(tokens(15), NOW_S + 1.4)
    assert history.version(FINE) == told
    history.observe(tokens(40), NOW_S + 2)
    assert points(history, "output_tokens_per_s", "spot")[1:] == [10, 30]


@pytest.mark.parametrize(
    ("series", "place"),
    [
        ("slicewise_sequences_total_of_stop", ("requests_per_s", "finished")),
        ("slicewise_sequences_total_of_length", ("requests_per_s", "finished")),
        ("slicewise_sequences_total_of_aborted", ("requests_per_s", "aborted")),
        ("slicewise_sequences_total_of_poison_request", ("requests_per_s", "failed")),
        ("slicewise_admissions_total_of_overloaded", ("requests_per_s", "refused")),
        ("slicewise_resumes_total_of_lost", ("losses", "moved_lost")),
        ("slicewise_resumes_total_of_draining", ("losses", "moved_draining")),
        ("slicewise_link_losses_total_of_lost", ("losses", "links_lost")),
    ],
)
def test_count_is_shown_under_its_outcome_alone(series: str, place: tuple[str, str]) -> None:
    history = history_of(families(), families(**{series: 4}))
    shown = history.describe(FINE)["series"]
    flows = {
        (name, label): values[-1]
        for name in ("requests_per_s", "losses")
        for label, values in shown[name].items()
    }
    assert flows.pop(place) == 4
    assert set(flows.values()) == {0}


def test_admission_and_a_link_that_drained_are_no_refusal_and_no_loss() -> None:
    page = families(
        slicewise_admissions_total_of_admitted=4, slicewise_link_losses_total_of_draining=2
    )
    history = history_of(families(), page)
    assert points(history, "requests_per_s", "refused")[1:] == [0]
    assert points(history, "losses", "links_lost")[1:] == [0]


# -- quantiles --


def filled(bounds: tuple[float, ...], samples: Sequence[float]) -> Histogram:
    histogram = Histogram(bounds)
    for sample in samples:
        histogram.observe(sample)
    return histogram


BOUNDS = (0.1, 0.2, 0.4, 0.8, 1.6)


@pytest.mark.parametrize(
    ("counts", "ratio", "expected"),
    [
        ([10, 0, 0, 0, 0, 0], 0.5, 0.05),  # the first bucket begins at zero
        ([0, 10, 0, 0, 0, 0], 0.5, 0.15),
        ([0, 10, 0, 0, 0, 0], 1.0, 0.2),
        ([5, 0, 0, 5, 0, 0], 0.5, 0.1),  # exactly at the end of a bucket
        ([5, 0, 0, 5, 0, 0], 0.6, 0.48),  # empty buckets in between hold nothing
        ([0, 0, 0, 0, 0, 3], 0.5, 1.6),  # beyond all bounds: at least the last
        ([0, 0, 0, 0, 0, 0], 0.5, None),
    ],
)
def test_quantile_is_interpolated_in_its_bucket(
    counts: list[float], ratio: float, expected: float | None
) -> None:
    assert quantile(ratio, BOUNDS, counts) == (
        None if expected is None else pytest.approx(expected)
    )


@given(
    st.lists(st.floats(0.001, 1.5), min_size=1, max_size=200),
    st.floats(0.01, 1.0),
)
def test_quantile_is_in_the_bucket_of_the_sample_that_has_this_rank(
    samples: list[float], ratio: float
) -> None:
    found = quantile(ratio, BOUNDS, filled(BOUNDS, samples).counts)
    sample = sorted(samples)[max(0, math.ceil(ratio * len(samples) - 1e-9) - 1)]
    upper = next(bound for bound in BOUNDS if sample <= bound)
    lower = max((bound for bound in (0.0, *BOUNDS) if bound < upper), default=0.0)
    assert found is not None
    assert lower - 1e-9 <= found <= upper + 1e-9


@pytest.mark.parametrize("mean_s", [0.05, 0.3])
def test_quantiles_of_a_known_distribution_are_as_near_as_the_buckets(mean_s: float) -> None:
    draw = random.Random(1)
    meter = RequestMeter().of_class("spot").to_first_token
    for _ in range(20_000):
        meter.observe(draw.expovariate(1 / mean_s))
    for ratio in (0.5, 0.99):
        exact = -mean_s * math.log(1 - ratio)
        upper = next(bound for bound in meter.bounds if bound >= exact)
        lower = max(bound for bound in meter.bounds if bound < exact)
        found = quantile(ratio, meter.bounds, meter.counts)
        assert found == pytest.approx(exact, abs=upper - lower)


def test_quantiles_are_of_the_last_ten_seconds() -> None:
    name = "slicewise_time_to_first_token_seconds"
    samples: list[float] = []
    pages = [families(**{name: filled(BOUNDS, samples)})]
    for second in range(25):
        samples += [0.15] * 100 if second < 10 else [1.2] * 100 if second < 12 else []
        pages.append(families(**{name: filled(BOUNDS, samples)}))
    p50 = points(history_of(*pages), "ttft_s", "p50")[1:]
    assert p50[0] == pytest.approx(0.15)
    assert p50[10] == pytest.approx(0.15, abs=0.01)  # 100 slow ones beside 900
    assert p50[20] == pytest.approx(1.2)  # only the slow ones are left
    assert math.isnan(p50[21])  # and then nothing: a gap, not zero


def test_histogram_that_falls_began_again_at_zero() -> None:
    name = "slicewise_time_per_output_token_seconds"
    pages = [families(**{name: filled(BOUNDS, [1.0] * 50)})]
    pages += [families(**{name: filled(BOUNDS, [0.15] * 4)})]
    assert points(history_of(*pages), "tpot_s", "p99")[1] == pytest.approx(0.199)


# -- what is now, and what it costs --


def test_gauges_add_up_over_classes_and_models() -> None:
    page = Families()
    for model, compute_class, count in (("a", "spot", 3), ("a", "kept", 4), ("b", "spot", 5)):
        labels = {"model": model, "compute_class": compute_class}
        page.add("slicewise_sequences_in_flight", labels, count)
        for state, chips in (("serving", 16), ("provisioning", 32)):
            page.add("slicewise_ledger_chips", labels | {"state": state}, chips)
    history = history_of(page)
    assert points(history, "sequences", "in_flight") == [12]
    assert points(history, "sequences", "in_flight", Wanted(1, "a", {})) == [7]
    assert points(history, "chips", "serving") == [48]
    assert points(history, "chips", "provisioning") == [96]
    # What is only wanted is held by nobody.
    assert points(history, "chips_held", "spot") == [32]


def test_engines_and_devices_are_shown_by_mean_and_what_is_missing_is_not_shown() -> None:
    page = Families()
    for engine, usage in (("e1", 0.2), ("e2", 0.8)):
        page.add("slicewise_engine_kv_usage_ratio", SPOT | {"engine": engine}, usage)
    for chip, duty, used in (("0", 0.5, 6e9), ("1", 1.0, 10e9)):
        labels = CHAT | {"chip": chip}
        page.add("tpu_duty_cycle_ratio", labels, duty)
        page.add("tpu_hbm_used_bytes", labels, used)
        page.add("tpu_hbm_capacity_bytes", labels, 32e9)
    history = history_of(page, families())
    assert points(history, "kv_usage_ratio", "mean")[0] == 0.5
    assert points(history, "kv_usage_ratio", "highest")[0] == 0.8
    assert points(history, "tpu_ratio", "duty_cycle")[0] == 0.75
    assert points(history, "tpu_ratio", "hbm")[0] == 0.25
    assert "tensorcore" not in history.describe(FINE)["series"]["tpu_ratio"]
    assert math.isnan(points(history, "tpu_ratio", "hbm")[1])


def test_prices_are_of_the_last_ten_seconds_and_absent_without_a_price_or_tokens() -> None:
    cost = "slicewise_ledger_cost_usd_total_of_serving"
    spent = "slicewise_output_tokens_total"
    usd, made, pages = 0.0, 0, []
    for second in range(16):
        pages.append(families(**{cost: usd, spent: made}))
        usd += 0.01
        made += 500 if second < 3 else 0
    history = history_of(*pages)
    assert points(history, "usd_per_hour")[1:] == pytest.approx([36.0] * 15)
    per_million = points(history, "usd_per_million_tokens")[1:]
    assert per_million[:3] == pytest.approx([20.0] * 3)
    assert per_million[9] == pytest.approx(0.1 / 1500 * 1e6, rel=1e-4)
    assert math.isnan(per_million[-1])
    unpriced = history_of(tokens(0), tokens(10)).describe(FINE)["series"]
    assert not unpriced.keys() & {"usd_per_hour", "usd_per_million_tokens"}


def test_coarse_points_are_means_of_ten_seconds_and_quantiles_of_the_last() -> None:
    pages = [tokens(0), *(tokens(100 if second < 4 else 140) for second in range(1, 12))]
    history = history_of(*pages)
    # Of its ten seconds the first had no rate, because counting began there.
    assert points(history, "output_tokens_per_s", "spot", COARSE) == [
        pytest.approx(140 / 9, rel=1e-4)
    ]
    assert points(history, "sequences", "in_flight", COARSE) == [1]


# -- the collectors of the gateway --


def gateway_pages() -> Iterator[Families]:
    """What a gateway's own collectors make, of only what is read."""
    meter = RequestMeter()
    fleet = StagedFleet(meter, [StagedSeat("spot", flights=["r"])], num_waiting=2)
    collector = ServingCollector({"chat": fleet}, EdgeMeter(), READ_SERIES)
    ledger = LedgerCollector(Ledger(0), {}, READ_SERIES)
    for second in range(3):
        watch = meter.taken(10, float(second))
        meter.dispatched(watch, "spot", second + 0.01)
        meter.emitted([(watch, 1)], second + 0.15)
        meter.emitted([(watch, 4)], second + 0.34)
        meter.ended(watch, "stop")
        yield [*collector.collect(), *ledger.collect()]  # type: ignore[misc] # iterable as well


def test_series_of_the_gateway_s_own_collectors_are_found() -> None:
    history = History("g", NOW_S)
    made: list[Family] = []
    for second, page in enumerate(gateway_pages()):
        made = list(page)
        history.observe(made, NOW_S + second)
    assert points(history, "requests_per_s", "finished")[1:] == [1, 1]
    assert points(history, "output_tokens_per_s", "spot")[1:] == [5, 5]
    assert points(history, "sequences", "waiting") == [2, 2, 2]
    # 150 ms are in the bucket from 0.1 to 0.25, 47 ms a token in the one from 0.04 to 0.05.
    assert 0.1 <= points(history, "ttft_s", "p50")[1] <= 0.25
    assert 0.04 <= points(history, "tpot_s", "p99")[1] <= 0.05
    names = {sample.name for family in made for sample in family.samples}
    assert "slicewise_inter_token_seconds_bucket" not in names


def test_every_series_that_is_read_is_in_the_registry_of_names() -> None:
    assert set(ALL) >= READ_SERIES


# -- the ring --


def ring_points(ring: Ring, since: int | None = None) -> list[float]:
    return list(dict(ring.read("", since))[A])


@given(st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=40))
def test_ring_keeps_exactly_the_last_points(steps: list[tuple[int, bool]]) -> None:
    ring, slot, kept = Ring(1, 7, 5), 1000, dict.fromkeys(range(2000), math.nan)
    for ahead, has_value in steps:
        slot += ahead
        ring.put(slot, {A: slot + 0.5} if has_value else {})
        if has_value:
            kept[slot] = slot + 0.5
        expected = [kept[each] for each in range(slot - 6, slot + 1)]
        found = ring_points(ring) if dict(ring.read("")) else [math.nan] * 7
        assert str(found) == str(expected)  # NaN is not equal to itself


def test_reader_gets_what_it_does_not_have() -> None:
    ring = Ring(1, 5, 5)
    for slot in range(100, 108):
        ring.put(slot, {A: float(slot)})
    assert ring_points(ring, since=106) == [106, 107]
    assert ring_points(ring, since=108) == []
    assert ring_points(ring, since=3) == [103, 104, 105, 106, 107]
    assert ring_points(ring, since=10**9) == []  # of a gateway whose clock went ahead


def test_ring_refuses_the_past() -> None:
    ring = Ring(1, 5, 5)
    ring.put(100, {A: 1.0})
    with pytest.raises(ValueError, match="slot 100: allowed is 101 or later"):
        ring.put(100, {A: 2.0})


def test_series_that_is_gone_from_the_ring_is_forgotten() -> None:
    ring = Ring(1, 5, 5)
    ring.put(100, {A: 1.0})
    ring.put(104, {})
    assert dict(ring.read(""))
    ring.put(105, {})
    assert not dict(ring.read(""))
    assert ring.num_bytes == 0


def test_memory_is_bounded_and_the_first_series_are_kept() -> None:
    ring = Ring(1, 300, 10)
    for slot in range(1000):
        keys = [A, *(Key("", f"class-{slot}-{number}", "") for number in range(20))]
        ring.put(slot, dict.fromkeys(keys, 1.0))
        assert ring.num_bytes <= ring.max_bytes == 10 * 300 * 8
    assert ring.num_left_out == 20
    assert ring_points(ring, since=999) == [1.0]


def test_stated_bounds_hold() -> None:
    assert History("g", 0.0).max_bytes == MAX_SERIES * (FINE_POINTS + COARSE_POINTS) * 8
    assert History("g", 0.0).max_bytes < 2.8e6


def test_ten_models_on_four_classes_have_room() -> None:
    page = Families()
    for model in range(10):
        for compute_class in ("reserved", "spot", "flex-start", "on-demand"):
            labels = {"model": f"m{model}", "compute_class": compute_class}
            page.add("slicewise_sequences_in_flight", labels, 1)
            page.add("slicewise_requests_waiting", {"model": f"m{model}"}, 1)
            page.add("slicewise_output_tokens_total", labels, 1)
            page.add("slicewise_engine_kv_usage_ratio", labels, 0.5)
            for state in ("provisioning", "probing", "loading", "idle", "serving", "draining"):
                page.add("slicewise_ledger_chips", labels | {"state": state}, 4)
                page.add("slicewise_ledger_cost_usd_total", labels | {"state": state}, 4)
            page.add("slicewise_ledger_chips", labels | {"state": "lost"}, 4)
            for name in (
                "slicewise_time_to_first_token_seconds",
                "slicewise_time_per_output_token_seconds",
            ):
                page.add(name, labels, filled(BOUNDS, [0.1]))
            for name in ("tpu_duty_cycle_ratio", "tpu_tensorcore_utilization_ratio"):
                page.add(name, labels, 0.5)
            page.add("tpu_hbm_used_bytes", labels, 1)
            page.add("tpu_hbm_capacity_bytes", labels, 2)
    history = history_of(families(), page, page)
    per_model = [history.describe(Wanted(1, model, {})) for model in ("", "m0", "m9")]
    assert {answer["num_left_out"] for answer in per_model} == {0}
    assert len({sum(map(len, answer["series"].values())) for answer in per_model}) == 1


def test_means_are_over_the_time_in_which_there_was_a_value() -> None:
    means = Means()
    means.add({A: 10.0}, 1.0)
    means.add({}, 5.0)
    means.add({A: 40.0}, 2.0)
    assert means.take() == {A: 30.0}
    assert means.take() == {}


def test_losses_are_numbers_that_add_up_and_requests_are_of_the_last_ten_seconds() -> None:
    lost, ended = "slicewise_resumes_total_of_lost", "slicewise_sequences_total_of_stop"
    pages = [families(**{lost: 0, ended: 0})]
    pages += [families(**{lost: 3 if each < 5 else 7, ended: 20}) for each in range(1, 21)]
    history = history_of(*pages)
    assert points(history, "losses", "moved_lost")[1:7] == [3, 0, 0, 0, 4, 0]
    assert points(history, "losses", "moved_lost", COARSE) == [7, 0]
    finished = points(history, "requests_per_s", "finished")[1:]
    assert finished[0] == 20  # in the only second there was
    assert finished[9:11] == [2, 0]
    # The first ten seconds end with the ninth look after the one where counting began.
    assert points(history, "requests_per_s", "finished", COARSE) == [pytest.approx(20 / 9, 1e-4), 0]


def test_cost_that_is_seen_for_the_first_time_was_not_just_now() -> None:
    cost = "slicewise_ledger_cost_usd_total_of_loading"
    history = history_of(families(), families(**{cost: 5.0}), families(**{cost: 5.01}))
    assert points(history, "usd_per_hour")[1:] == pytest.approx([0, 18.0])


def test_every_state_of_the_ledger_has_its_words_and_colour() -> None:
    kinds = files("serving.dashboard.page").joinpath("kinds.js").read_text()
    chips = kinds[kinds.index('series: "chips"') : kinds.index('series: "chips_held"')]
    assert [state for state in LedgerState if f'{state}: ["' not in chips] == []
