"""The history of the fleet: from samples of gateways to points in time."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.dashboard.history import MAX_SILENCE_S, History, Wanted
from serving.dashboard.metric_sampling import ALL_MODELS, Key, TpuSample, quantile
from serving.dashboard.time_series import TimeSeries
from serving.domain.dashboard_messages import (
    ClassCounts,
    EngineUsage,
    GatewaySample,
    LedgerEntry,
    ModelCounts,
)
from serving.gateway.reports.gateway_sample import ledger_entries, take_sample
from serving.gateway.telemetry.request_metrics import EdgeMetrics, Histogram, RequestMetrics
from serving.gateway.telemetry.request_telemetry import ModelTelemetry
from serving.ledger.ledger import Ledger
from serving.ledger.states import LedgerState
from tests.gateway.test_request_telemetry import StagedEngine, StagedFleet, dispatched, step

NOW_S = 1_795_226_400.5  # the middle of a second, and the beginning of ten
FINE, COARSE = Wanted(1, ALL_MODELS), Wanted(10, ALL_MODELS)
A = Key("", "a", "")
BOUNDS = (0.1, 0.2, 0.4, 0.8, 1.6)


def counts(model: str = "chat", compute_class: str = "spot", **known: Any) -> ClassCounts:
    """The counts of one model on one class, zero where nothing is said."""
    nothing: dict[str, Any] = {
        "sequences": {}, "resumes": {}, "link_losses": {}, "output_tokens": 0,
        "to_first_token": (), "per_output_token": (), "in_flight": 0,
    }  # fmt: skip
    return ClassCounts(model, compute_class, **(nothing | known))


def sample(
    *classes: ClassCounts,
    refused: int = 0,
    ledger: tuple[LedgerEntry, ...] = (),
    engines: tuple[EngineUsage, ...] = (),
) -> GatewaySample:
    models = tuple(sorted({each.model for each in classes} | {"chat"}))
    return GatewaySample(
        "g",
        0.0,
        BOUNDS,
        BOUNDS,
        models=tuple(ModelCounts(name, 0, refused) for name in models),
        classes=classes,
        engines=engines,
        ledger=ledger,
    )


def take(history: History, taken: GatewaySample, at_s: float) -> None:
    """Hands the history a sample, taken so many seconds after the first."""
    history.take(replace(taken, taken_at_s=at_s), NOW_S + at_s)


def history_of(*samples: GatewaySample, step_s: float = 1.0) -> History:
    history = History("d", NOW_S)
    for number, taken in enumerate(samples):
        take(history, taken, number * step_s)
    return history


def points(history: History, name: str, label: str = "", wanted: Wanted = FINE) -> list[float]:
    """The last points of a series: as many as there are since the first look."""
    answer = history.describe(wanted)
    first = int(NOW_S) // wanted.step_s
    return list(answer["series"][name][label][first - answer["until"] :])


def tokens(count: int) -> GatewaySample:
    return sample(counts(output_tokens=count, in_flight=1))


# -- rates --


def test_counter_becomes_a_rate_of_what_was_added() -> None:
    history = history_of(tokens(1000), tokens(1010), tokens(1010), tokens(1040))
    assert points(history, "output_tokens_per_s", "spot")[1:] == [10, 0, 30]


def test_first_sample_is_where_counting_begins() -> None:
    history = history_of(tokens(1000))
    assert set(history.describe(FINE)["series"]) == {"sequences", "chips", "chips_held"}


def test_counter_that_falls_began_again_at_zero() -> None:
    history = history_of(tokens(1000), tokens(7), tokens(9))
    assert points(history, "output_tokens_per_s", "spot")[1:] == [7, 2]


def test_series_that_appears_began_at_zero() -> None:
    before, after = sample(), sample(counts(sequences={"stop": 3}))
    assert points(history_of(before, after), "requests_per_s", "finished")[1:] == [3]


def test_rate_after_late_samples_is_over_the_time_that_passed() -> None:
    history = history_of(tokens(0), tokens(100), step_s=5.0)
    rates = points(history, "output_tokens_per_s", "spot")
    assert rates[-1] == 20
    assert all(math.isnan(rate) for rate in rates[:-1])


def test_second_sample_in_a_second_is_of_the_next_point() -> None:
    history = history_of(tokens(0), tokens(10))
    version = history.version(FINE)
    take(history, tokens(15), 1.4)
    assert history.version(FINE) == version
    take(history, tokens(40), 2.0)
    assert points(history, "output_tokens_per_s", "spot")[1:] == [10, 30]


@pytest.mark.parametrize(
    ("after", "place"),
    [
        (sample(counts(sequences={"stop": 4})), ("requests_per_s", "finished")),
        (sample(counts(sequences={"length": 4})), ("requests_per_s", "finished")),
        (sample(counts(sequences={"aborted": 4})), ("requests_per_s", "aborted")),
        (sample(counts(sequences={"poison_request": 4})), ("requests_per_s", "failed")),
        (sample(counts("chat", "", sequences={"error": 4})), ("requests_per_s", "failed")),
        (sample(refused=4), ("requests_per_s", "refused")),
        (sample(counts(resumes={"lost": 4})), ("losses", "moved_lost")),
        (sample(counts(resumes={"draining": 4})), ("losses", "moved_draining")),
        (sample(counts(link_losses={"lost": 4})), ("losses", "links_lost")),
    ],
)
def test_count_is_shown_under_its_outcome_alone(
    after: GatewaySample, place: tuple[str, str]
) -> None:
    shown = history_of(sample(), after).describe(FINE)["series"]
    flows = {
        (name, label): values[-1]
        for name in ("requests_per_s", "losses")
        for label, values in shown[name].items()
    }
    assert flows.pop(place) == 4
    assert set(flows.values()) == {0}


def test_link_that_drained_is_no_loss() -> None:
    history = history_of(sample(), sample(counts(link_losses={"draining": 2})))
    assert points(history, "losses", "links_lost")[1:] == [0]


# -- quantiles --


def filled(bounds: tuple[float, ...], samples: Sequence[float]) -> Histogram:
    histogram = Histogram(bounds)
    for sample in samples:
        histogram.observe(sample)
    return histogram


@pytest.mark.parametrize(
    ("buckets", "ratio", "expected"),
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
    buckets: list[float], ratio: float, expected: float | None
) -> None:
    assert quantile(ratio, BOUNDS, buckets) == (
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
    meter = RequestMetrics().of_class("spot").to_first_token
    for _ in range(20_000):
        meter.observe(draw.expovariate(1 / mean_s))
    for ratio in (0.5, 0.99):
        exact = -mean_s * math.log(1 - ratio)
        upper = next(bound for bound in meter.bounds if bound >= exact)
        lower = max(bound for bound in meter.bounds if bound < exact)
        found = quantile(ratio, meter.bounds, meter.counts)
        assert found == pytest.approx(exact, abs=upper - lower)


def waited(samples: Sequence[float]) -> GatewaySample:
    return sample(counts(to_first_token=tuple(filled(BOUNDS, samples).counts)))


def test_quantiles_are_of_the_last_ten_seconds() -> None:
    waits: list[float] = []
    taken = [waited(waits)]
    for second in range(25):
        waits += [0.15] * 100 if second < 10 else [1.2] * 100 if second < 12 else []
        taken.append(waited(waits))
    p50 = points(history_of(*taken), "ttft_s", "p50")[1:]
    assert p50[0] == pytest.approx(0.15)
    assert p50[10] == pytest.approx(0.15, abs=0.01)  # 100 slow ones beside 900
    assert p50[20] == pytest.approx(1.2)  # only the slow ones are left
    assert math.isnan(p50[21])  # and then nothing: a gap, not zero


def test_histogram_that_falls_began_again_at_zero() -> None:
    taken = [
        sample(counts(per_output_token=tuple(filled(BOUNDS, waits).counts)))
        for waits in ([1.0] * 50, [0.15] * 4)
    ]
    assert points(history_of(*taken), "tpot_s", "p99")[1] == pytest.approx(0.199)


# -- what is now, and what it costs --


def test_gauges_add_up_over_classes_and_models() -> None:
    classes, ledger = [], []
    for model, compute_class, in_flight in (("a", "spot", 3), ("a", "kept", 4), ("b", "spot", 5)):
        classes.append(counts(model, compute_class, in_flight=in_flight))
        for state, chips in (("serving", 16), ("provisioning", 32)):
            ledger.append(LedgerEntry(model, compute_class, state, chips, None))
    history = history_of(sample(*classes, ledger=tuple(ledger)))
    assert points(history, "sequences", "in_flight") == [12]
    assert points(history, "sequences", "in_flight", Wanted(1, "a")) == [7]
    assert points(history, "chips", "serving") == [48]
    assert points(history, "chips", "provisioning") == [96]
    # What is only wanted is held by nobody.
    assert points(history, "chips_held", "spot") == [32]


def test_engines_and_devices_are_shown_by_mean_and_what_is_missing_is_not_shown() -> None:
    chips = [
        TpuSample("chat", name, value)
        for name, values in (
            ("tpu_duty_cycle_ratio", (0.5, 1.0)),
            ("tpu_hbm_used_bytes", (6e9, 10e9)),
            ("tpu_hbm_capacity_bytes", (32e9, 32e9)),
        )
        for value in values
    ]
    history = History("d", NOW_S, lambda: chips)
    usage = (EngineUsage("e1", "chat", 0.2), EngineUsage("e2", "chat", 0.8))
    take(history, sample(counts(), engines=usage), 0.0)
    chips.clear()
    take(history, sample(counts()), 1.0)
    assert points(history, "kv_usage_ratio", "mean")[0] == 0.5
    assert points(history, "kv_usage_ratio", "highest")[0] == 0.8
    assert points(history, "tpu_ratio", "duty_cycle")[0] == 0.75
    assert points(history, "tpu_ratio", "hbm")[0] == 0.25
    assert "tensorcore" not in history.describe(FINE)["series"]["tpu_ratio"]
    assert math.isnan(points(history, "tpu_ratio", "hbm")[1])


def spent(usd: float | None, made: int = 0, state: str = "serving") -> GatewaySample:
    return sample(counts(output_tokens=made), ledger=(LedgerEntry("chat", "spot", state, 4, usd),))


def test_prices_are_of_the_last_ten_seconds_and_absent_without_a_price_or_tokens() -> None:
    usd, made, taken = 0.0, 0, []
    for second in range(16):
        taken.append(spent(usd, made))
        usd += 0.01
        made += 500 if second < 3 else 0
    history = history_of(*taken)
    assert points(history, "usd_per_hour")[1:] == pytest.approx([36.0] * 15)
    per_million = points(history, "usd_per_million_tokens")[1:]
    assert per_million[:3] == pytest.approx([20.0] * 3)
    assert per_million[9] == pytest.approx(0.1 / 1500 * 1e6, rel=1e-4)
    assert math.isnan(per_million[-1])
    unpriced = history_of(spent(None), spent(None, 10)).describe(FINE)["series"]
    assert not unpriced.keys() & {"usd_per_hour", "usd_per_million_tokens"}


def test_coarse_points_are_means_of_ten_seconds_and_quantiles_of_the_last() -> None:
    taken = [tokens(0), *(tokens(100 if second < 4 else 140) for second in range(1, 12))]
    history = history_of(*taken)
    # Of its ten seconds the first had no rate, because counting began there.
    assert points(history, "output_tokens_per_s", "spot", COARSE) == [
        pytest.approx(140 / 9, rel=1e-4)
    ]
    assert points(history, "sequences", "in_flight", COARSE) == [1]


# -- several gateways --


def of(gateway_id: str, taken: GatewaySample) -> GatewaySample:
    return replace(taken, gateway_id=gateway_id)


def busy(num: int) -> GatewaySample:
    """A gateway after so many seconds of its own traffic, with a ledger that all have."""
    waits = tuple(filled(BOUNDS, [0.15] * 10 * num).counts)
    return sample(
        counts(output_tokens=100 * num, in_flight=3, to_first_token=waits, resumes={"lost": num}),
        ledger=(LedgerEntry("chat", "spot", "serving", 16, 0.01 * num),),
        engines=(EngineUsage("e1", "chat", 0.25),),
    )


def test_gateways_add_up_and_what_all_of_them_see_counts_once() -> None:
    history = History("d", NOW_S)
    for second in range(4):
        take(history, of("g1", busy(second)), second)
        take(history, of("g2", busy(3 * second)), second + 0.2)
    assert history.describe(FINE)["gateways"] == ["g1", "g2"]
    assert points(history, "output_tokens_per_s", "spot")[-2:] == [400, 400]
    assert points(history, "sequences", "in_flight")[-1] == 6
    assert points(history, "losses", "moved_lost")[-1] == 4
    assert points(history, "chips", "serving")[-1] == 16
    assert points(history, "kv_usage_ratio", "mean")[-1] == 0.25
    # Of the ledgers the highest counts: 0.03 dollars a second.
    assert points(history, "usd_per_hour")[-1] == pytest.approx(108)


def test_quantiles_are_of_the_requests_of_all_gateways_together() -> None:
    history = History("d", NOW_S)
    for number, (fast, slow) in enumerate([(0, 0), (90, 10)]):
        take(history, of("g1", waited([0.15] * fast)), number)
        take(history, of("g2", waited([1.2] * slow)), number)
    assert points(history, "ttft_s", "p50")[-1] == pytest.approx(0.1 + 0.1 * 50 / 90, rel=1e-4)
    assert points(history, "ttft_s", "p99")[-1] == pytest.approx(0.8 + 0.8 * 9 / 10, rel=1e-4)


def test_second_in_which_a_gateway_is_late_is_a_gap_and_loses_nothing() -> None:
    history = History("d", NOW_S)
    for second in range(4):
        take(history, of("g1", tokens(100 * second)), second)
        if second != 2:
            take(history, of("g2", tokens(100 * second)), second)
    rates = points(history, "output_tokens_per_s", "spot")
    assert math.isnan(rates[2])
    assert [rates[1], rates[3]] == [200, 200]


def test_gateway_that_ended_is_left_out_and_does_not_hold_up_the_others() -> None:
    history = History("d", NOW_S)
    take(history, of("g1", tokens(0)), 0.0)
    for second in range(8):
        take(history, of("g2", tokens(0)), second)
    shown = points(history, "sequences", "in_flight")
    silent = int(MAX_SILENCE_S)
    assert [math.isnan(value) for value in shown[1 : silent + 1]] == [True] * silent
    assert shown[silent + 1 :] == [1] * (7 - silent)
    assert history.describe(FINE)["gateways"] == ["g2"]


# -- the samples of a gateway --


def gateway_samples() -> Iterator[GatewaySample]:
    """What a gateway hands out of its own counters, as it arrives."""
    telemetry, edge = ModelTelemetry("chat", 0.0), EdgeMetrics()
    fleet = StagedFleet(telemetry.metrics, [StagedEngine("spot", requests=["r"])], num_waiting=2)
    decoder = msgspec.msgpack.Decoder(GatewaySample)
    for second in range(3):
        request = telemetry.arrived("r", 10, float(second))
        dispatched(request, "spot", second + 0.01)
        step(telemetry, second + 0.15, (request, 1))
        step(telemetry, second + 0.34, (request, 4))
        request.ended("stop", second + 0.34)
        edge.record_admission("chat", "admitted", "default")
        edge.record_admission("chat", "overloaded", "default")
        ledger = ledger_entries(Ledger(0), {})
        taken = take_sample("g", {"chat": fleet}, edge, (), ledger, float(second))
        yield decoder.decode(msgspec.msgpack.encode(taken))


def test_counters_of_a_gateway_are_found() -> None:
    history = history_of(*gateway_samples())
    assert points(history, "requests_per_s", "finished")[1:] == [1, 1]
    assert points(history, "requests_per_s", "refused")[1:] == [1, 1]
    assert points(history, "output_tokens_per_s", "spot")[1:] == [5, 5]
    assert points(history, "sequences", "waiting") == [2, 2, 2]
    assert points(history, "sequences", "in_flight") == [1, 1, 1]
    # 150 ms are in the bucket from 0.1 to 0.25, 47 ms a token in the one from 0.04 to 0.05.
    assert 0.1 <= points(history, "ttft_s", "p50")[1] <= 0.25
    assert 0.04 <= points(history, "tpot_s", "p99")[1] <= 0.05
    assert history.models == {"chat"}


# -- what is kept --


def kept_points(series: TimeSeries, since: int | None = None) -> list[float]:
    return dict(series.read("", since)).get(A, [])


@given(st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=40))
def test_exactly_the_last_points_are_kept(steps: list[tuple[int, bool]]) -> None:
    series, slot, kept = TimeSeries(1, 7, 5), 1000, dict.fromkeys(range(2000), math.nan)
    for ahead, has_value in steps:
        slot += ahead
        series.put(slot, {A: slot + 0.5} if has_value else {})
        if has_value:
            kept[slot] = slot + 0.5
        expected = [kept[number] for number in range(slot - 6, slot + 1)]
        found = kept_points(series) or [math.nan] * 7
        assert str(found) == str(expected)  # NaN is not equal to itself


def test_reader_gets_what_it_does_not_have() -> None:
    series = TimeSeries(1, 5, 5)
    for slot in range(100, 108):
        series.put(slot, {A: float(slot)})
    assert kept_points(series, since=106) == [106, 107]
    assert kept_points(series, since=108) == []
    assert kept_points(series, since=3) == [103, 104, 105, 106, 107]
    assert kept_points(series, since=10**9) == []  # of a dashboard whose clock went ahead


def test_past_is_refused() -> None:
    series = TimeSeries(1, 5, 5)
    series.put(100, {A: 1.0})
    with pytest.raises(ValueError, match="slot 100: allowed is 101 or later"):
        series.put(100, {A: 2.0})


def test_series_without_a_point_is_forgotten() -> None:
    series = TimeSeries(1, 5, 5)
    series.put(100, {A: 1.0})
    series.put(104, {})
    assert dict(series.read(""))
    series.put(105, {})
    assert not dict(series.read(""))


def test_number_of_series_is_bounded_and_the_first_ones_are_kept() -> None:
    series = TimeSeries(1, 300, 10)
    for slot in range(1000):
        keys = [A, *(Key("", f"class-{slot}-{number}", "") for number in range(20))]
        series.put(slot, dict.fromkeys(keys, 1.0))
        assert len(dict(series.read("", since=slot))) == 10
    assert series.num_left_out == 11
    assert kept_points(series, since=999) == [1.0]


def test_ten_models_on_four_classes_have_room() -> None:
    names = [f"m{number}" for number in range(10)]
    places = [
        (model, compute_class)
        for model in names
        for compute_class in ("reserved", "spot", "flex-start", "on-demand")
    ]
    buckets = tuple(filled(BOUNDS, [0.1]).counts)
    states = ("provisioning", "probing", "loading", "idle", "serving", "draining", "lost")
    chips = [
        TpuSample(model, name, 0.5)
        for model in names
        for name in ("tpu_duty_cycle_ratio", "tpu_tensorcore_utilization_ratio")
    ]
    chips += [TpuSample(model, "tpu_hbm_used_bytes", 1) for model in names]
    chips += [TpuSample(model, "tpu_hbm_capacity_bytes", 2) for model in names]
    history = History("d", NOW_S, lambda: chips)
    for second in range(3):
        taken = sample(
            *(
                counts(
                    *place,
                    output_tokens=second,
                    to_first_token=tuple(second * count for count in buckets),
                    per_output_token=tuple(second * count for count in buckets),
                )
                for place in places
            ),
            engines=tuple(EngineUsage("-".join(place), place[0], 0.5) for place in places),
            ledger=tuple(
                LedgerEntry(*place, state, 4, 4.0) for place in places for state in states
            ),
        )
        take(history, replace(taken, models=taken.models[:-1]), second)
    answers = [history.describe(Wanted(1, model)) for model in ("", "m0", "m8")]
    assert {answer["num_left_out"] for answer in answers} == {0}
    assert len({sum(map(len, answer["series"].values())) for answer in answers}) == 1


def test_losses_are_numbers_that_add_up_and_requests_are_of_the_last_ten_seconds() -> None:
    taken = [sample(counts(resumes={"lost": 0}, sequences={"stop": 0}))]
    taken += [
        sample(counts(resumes={"lost": 3 if second < 5 else 7}, sequences={"stop": 20}))
        for second in range(1, 21)
    ]
    history = history_of(*taken)
    assert points(history, "losses", "moved_lost")[1:7] == [3, 0, 0, 0, 4, 0]
    assert points(history, "losses", "moved_lost", COARSE) == [7, 0]
    finished = points(history, "requests_per_s", "finished")[1:]
    assert finished[0] == 20  # in the only second there was
    assert finished[9:11] == [2, 0]
    # The first ten seconds end with the ninth sample after the one where counting began.
    assert points(history, "requests_per_s", "finished", COARSE) == [pytest.approx(20 / 9, 1e-4), 0]


def test_cost_that_is_seen_for_the_first_time_was_not_just_now() -> None:
    history = history_of(sample(counts()), spent(5.0), spent(5.01))
    assert points(history, "usd_per_hour")[1:] == pytest.approx([0, 18.0])


def test_every_state_of_the_ledger_has_its_words_and_colour() -> None:
    kinds = files("serving.dashboard.page").joinpath("kinds.js").read_text()
    chips = kinds[kinds.index('series: "chips"') : kinds.index('series: "chips_held"')]
    assert [state for state in LedgerState if f'{state}: ["' not in chips] == []
