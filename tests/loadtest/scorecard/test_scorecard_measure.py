"""What a scorecard says of runs whose every latency is known."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_run import (
    MadeRun,
    calm_sample,
    failed_request,
    made_request,
    ready_slices,
    steady_run,
)
from pydantic import ValidationError

from loadtest.errors import ExitCode, LoadTestError
from loadtest.histogram import bucket_of
from loadtest.records import EventRecord, FleetSample, RunEnd
from loadtest.scorecard.measure import Scorecard, measure
from loadtest.scorecard.slo import (
    NO_OBJECTIVES,
    ClientGates,
    GoodputLimits,
    LatencyLimits,
    ServiceLevel,
)
from loadtest.scorecard.spread import spread_of
from loadtest.scorecard.stored_run import gather, read_run
from loadtest.scorecard.timeline import MAX_INTERVALS


def scorecard(
    run: MadeRun, level: ServiceLevel = NO_OBJECTIVES, prices: dict[str, float] | None = None
) -> Scorecard:
    return measure(run.stored, level, prices)


def test_latencies_of_one_request_follow_their_definitions() -> None:
    request = made_request(0, 5.0, ttft_s=0.25, tpot_s=0.02, tokens=51, lag_s=0.01)
    card = scorecard(MadeRun((request,)))

    assert card.ttft_s.p99 == pytest.approx(0.25)
    assert card.ttft_scheduled_s.p99 == pytest.approx(0.26)
    assert card.tpot_s.p99 == pytest.approx(0.02)
    assert card.e2e_s.p99 == pytest.approx(1.25)
    assert card.e2e_scheduled_s.p99 == pytest.approx(1.26)
    assert card.ntpot_s.p99 == pytest.approx(1.25 / 51)
    assert card.schedule_lag_s.p99 == pytest.approx(0.01)
    assert card.icl_s.n == 50
    assert card.icl_s.p50 == pytest.approx(0.02, rel=0.01)


def test_percentiles_are_values_that_occurred() -> None:
    requests = (made_request(n, n / 10, ttft_s=(n + 1) / 1000) for n in range(200))
    ttft_s = scorecard(MadeRun(tuple(requests))).ttft_s

    found = (ttft_s.p50, ttft_s.p90, ttft_s.p95, ttft_s.p99, ttft_s.max)
    assert found == pytest.approx((0.1, 0.18, 0.19, 0.198, 0.2))
    assert ttft_s.n == 200


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=200))
def test_percentiles_agree_with_numpy_on_any_values(values: list[float]) -> None:
    spread = spread_of(values)
    shares = (50, 90, 95, 99)
    expected = np.percentile(values, shares, method="inverted_cdf")
    assert (spread.p50, spread.p90, spread.p95, spread.p99) == tuple(expected)


def test_one_token_has_no_tpot_and_no_gap() -> None:
    card = scorecard(MadeRun((made_request(0, 1.0, tokens=1),)))
    assert card.tpot_s.n == card.icl_s.n == card.longest_gap_s.n == 0
    assert card.tpot_s.p99 is None
    assert card.ttft_s.n == 1


def test_tpot_counts_tokens_by_usage_and_not_by_events() -> None:
    clumped = made_request(0, 1.0, tokens=41, num_chunks=11)
    card = scorecard(MadeRun((clumped,)))
    assert card.tpot_s.p50 == pytest.approx(0.02)
    assert (card.tokens.output, card.tokens.chunks) == (41, 11)
    assert card.tokens.output_unlike_chunks == 1


def test_warm_up_requests_are_counted_but_not_judged() -> None:
    cold = made_request(0, 1.0, ttft_s=9.0)
    warm = tuple(made_request(n, 20.0 + n) for n in range(1, 11))
    card = scorecard(MadeRun((cold, *warm), warmup_s=15.0))
    assert card.ttft_s.max == pytest.approx(0.1)
    assert (card.requests.total, card.requests.warmup) == (10, 1)


def test_scheduled_requests_without_record_have_failed() -> None:
    run = steady_run(100).but(num_scheduled=103)
    card = scorecard(run)
    assert (card.requests.total, card.requests.failed, card.requests.missing) == (103, 3, 3)
    assert card.requests.errors == {"missing": 3}
    assert card.requests.error_ratio == pytest.approx(3 / 103)


def test_failures_count_by_kind_and_have_no_latency() -> None:
    slow = failed_request(1, 2.0, "timeout")
    broken = made_request(2, 3.0, error="truncated", ttft_s=0.001)
    refused = failed_request(3, 3.0, "timeout", attempts=3)
    card = scorecard(MadeRun((made_request(0, 1.0), slow, broken, refused)))
    assert card.requests.errors == {"timeout": 2, "truncated": 1}
    assert (card.requests.retried, card.requests.retries) == (1, 2)
    assert card.ttft_s.n == 1


def test_throughput_leaves_warm_up_and_drain_out() -> None:
    # Two tokens per second without end, from one request of 200 tokens over 100 s.
    endless = made_request(0, 0.0, ttft_s=0.5, tpot_s=0.5, tokens=200)
    card = scorecard(MadeRun((endless,), warmup_s=20.0, end=RunEnd(110.0)))
    assert card.throughput.output_tokens_per_s == pytest.approx(2.0, rel=0.03)


def test_without_usage_nothing_is_made_up() -> None:
    card = scorecard(MadeRun((made_request(0, 1.0, output_tokens=None, input_tokens=None),)))
    assert card.throughput.output_tokens_per_s is None
    assert card.tokens.output is None
    assert card.tpot_s.p50 is None
    assert card.tokens.without_usage == 1
    assert "without usage" in card.warnings[0]


def test_goodput_counts_against_everything_scheduled() -> None:
    limits = GoodputLimits(ttft_s=0.5, tpot_s=0.05)
    requests = (
        *(made_request(n, float(n)) for n in range(6)),
        made_request(6, 6.0, ttft_s=0.6),
        made_request(7, 7.0, tpot_s=0.06),
        failed_request(8, 8.0, "timeout"),
    )
    run = MadeRun(requests, num_scheduled=10)
    goodput = scorecard(run, ServiceLevel(goodput=limits)).goodput
    assert goodput is not None
    assert goodput.good == 6
    assert goodput.ratio == pytest.approx(0.6)
    assert goodput.requests_per_s == pytest.approx(0.1)


def test_goodput_is_measured_from_the_scheduled_instant() -> None:
    level = ServiceLevel(goodput=GoodputLimits(ttft_s=0.5))
    late = made_request(0, 1.0, ttft_s=0.1, lag_s=0.45)
    goodput = scorecard(MadeRun((late,)), level).goodput
    assert goodput is not None
    assert goodput.good == 0


def test_goodput_allows_a_long_prompt_its_time() -> None:
    level = ServiceLevel(goodput=GoodputLimits(ttft_s=0.5, ttft_per_prompt_token_s=0.001))
    requests = (
        made_request(0, 1.0, ttft_s=0.65, input_tokens=200),
        made_request(1, 2.0, ttft_s=0.75, input_tokens=200),
        # Without usage it is the planned prompt, of 100 tokens.
        made_request(2, 3.0, ttft_s=0.58, input_tokens=None),
        made_request(3, 4.0, ttft_s=0.62, input_tokens=None),
    )
    goodput = scorecard(MadeRun(requests), level).goodput
    assert goodput is not None
    assert goodput.good == 2
    with pytest.raises(ValidationError, match="ttft_per_prompt_token_s needs ttft_s"):
        GoodputLimits(tpot_s=0.1, ttft_per_prompt_token_s=0.001)


@pytest.mark.parametrize(("tokens", "usage", "good"), [(1, 1, 1), (11, None, 0)])
def test_tpot_limit_spares_one_token_but_not_an_unknown_number(
    tokens: int, usage: int | None, good: int
) -> None:
    level = ServiceLevel(goodput=GoodputLimits(tpot_s=0.05))
    request = made_request(0, 1.0, tokens=tokens, output_tokens=usage)
    goodput = scorecard(MadeRun((request,)), level).goodput
    assert goodput is not None
    assert goodput.good == good


def test_clumped_stream_is_warned_of() -> None:
    clumps = {bucket_of(0.0001): 90, bucket_of(0.2): 10}
    run = steady_run(20, lambda n, at_s: made_request(n, at_s, tokens=101, gap_counts=clumps))
    assert any("clumps" in warning for warning in scorecard(run).warnings)
    assert not scorecard(steady_run(20)).warnings


def test_event_shows_who_was_in_flight_and_the_gap_it_caused() -> None:
    # Of 100 tokens over 2 s; the stall lies in the middle, one second after the first token.
    stalled = made_request(0, 9.0, tokens=101, stall_s=0.5)
    failed = failed_request(1, 9.9, "stream_error")
    before = made_request(2, 3.0, tokens=101, stall_s=0.9)
    event = EventRecord(10.0, "preempt", "spot-0")
    card = scorecard(MadeRun((stalled, failed, before), events=(event,)))
    (impact,) = card.events
    assert (impact.in_flight, impact.failed) == (2, 1)
    assert impact.longest_gap_s == pytest.approx(0.52)
    assert impact.added_s == pytest.approx(0.5, abs=0.001)


def test_event_without_any_gap_near_it_has_none() -> None:
    event = EventRecord(50.0, "kill", "spot-0", error="no such slice")
    card = scorecard(MadeRun((made_request(0, 3.0),), events=(event,)))
    (impact,) = card.events
    assert impact.longest_gap_s is None
    assert impact.added_s is None
    assert impact.error == "no such slice"


def test_cost_is_paid_chips_times_time_times_price() -> None:
    fleet = tuple(ready_slices(float(second), spot=2, reserved=1) for second in range(61))
    # One token per request at its end: 60 of them within the window.
    run = steady_run(60, lambda n, at_s: made_request(n, at_s, tokens=1)).but(fleet=fleet)
    cost = scorecard(run, prices={"spot": 0.5, "reserved": 1.0}).cost
    usd = (32 * 0.5 + 16 * 1.0) / 60
    assert cost.chip_hours == pytest.approx(48 / 60)
    assert cost.usd == pytest.approx(usd)
    assert cost.usd_per_million_output_tokens == pytest.approx(usd / 60 * 1e6)


def test_slices_that_are_only_requested_cost_nothing() -> None:
    states = {
        "requested": {"slices": 3, "chips": 48},
        "provisioning": {"slices": 1, "chips": 16},
        "draining": {"slices": 1, "chips": 16},
    }
    fleet = tuple(FleetSample(float(second), {"spot": states}) for second in range(61))
    cost = scorecard(steady_run().but(fleet=fleet), prices={"spot": 1.0}).cost
    assert cost.chip_hours == pytest.approx(16 / 60)


@pytest.mark.parametrize(
    ("prices", "seconds", "reason"),
    [
        (None, 61, "no prices were given"),
        ({"reserved": 1.0}, 61, "no price for spot"),
        ({"spot": 1.0}, 20, "was seen for 48% of the window only"),
        ({"spot": 1.0}, 0, "showed no fleet"),
    ],
)
def test_cost_that_is_not_known_is_none_with_a_reason(
    prices: dict[str, float] | None, seconds: int, reason: str
) -> None:
    fleet = tuple(ready_slices(float(second), spot=1) for second in range(seconds))
    cost = scorecard(steady_run().but(fleet=fleet), prices=prices).cost
    assert cost.usd is None
    assert cost.usd_per_million_output_tokens is None
    assert cost.reason is not None
    assert reason in cost.reason


def test_wrong_tokens_are_summed_over_what_was_checked() -> None:
    damage = made_request(0, 1.0, lost_tokens=2, repeated_tokens=3, foreign_tokens=4)
    sound = made_request(1, 2.0, lost_tokens=0, repeated_tokens=0, foreign_tokens=0)
    unchecked = made_request(2, 3.0)
    found = scorecard(MadeRun((damage, sound, unchecked))).correctness
    assert found.checked == 2
    assert (found.lost_tokens, found.repeated_tokens, found.foreign_tokens) == (2, 3, 4)
    assert scorecard(MadeRun((unchecked,))).correctness.lost_tokens is None


def test_groups_are_by_model_tenant_and_priority() -> None:
    requests = (
        made_request(0, 1.0, tenant="acme", ttft_s=0.1),
        made_request(1, 2.0, tenant="zeta", ttft_s=0.3, model="other", priority=1),
        failed_request(2, 3.0, "timeout", tenant="zeta"),
        made_request(3, 4.0),
    )
    card = scorecard(MadeRun(requests))
    assert [(group.name, group.total, group.failed) for group in card.by_tenant] == [
        ("acme", 1, 0),
        ("zeta", 2, 1),
    ]
    assert [group.name for group in card.by_model] == ["demo", "other"]
    assert [group.name for group in card.by_priority] == ["0", "1"]
    assert card.by_tenant[1].ttft_scheduled_s.p50 == pytest.approx(0.3)


def test_timeline_adds_up_to_the_run() -> None:
    card = scorecard(steady_run(120).but(end=RunEnd(61.0)))
    line = card.timeline
    width_s = line.edges_s[1] - line.edges_s[0]
    assert sum(line.asked_per_s) * width_s == pytest.approx(120)
    assert sum(line.achieved_per_s) * width_s == pytest.approx(120)
    assert sum(line.output_tokens_per_s) * width_s == pytest.approx(120 * 11)
    assert sum(spread.n for spread in line.ttft_scheduled_s) == 120
    assert line.in_flight[-1] == 0


def test_timeline_of_a_long_run_stays_short() -> None:
    run = MadeRun(steady_run().requests, duration_s=7200.0, client=(), end=RunEnd(7200.0))
    assert len(scorecard(run).timeline.middles_s) == MAX_INTERVALS


# The client and the verdict.


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"loop_lag_counts": {bucket_of(0.03): 200}}, "loop lag p99"),
        ({"cpu_ratio": 0.8}, "CPU p90"),
    ],
)
def test_the_worst_worker_makes_the_client_invalid(change: dict[str, object], reason: str) -> None:
    calm = [calm_sample(float(second), 0) for second in range(60)]
    harried = [calm_sample(float(second), 1, **change) for second in range(60)]
    card = scorecard(steady_run().but(num_workers=2, client=(*calm, *harried)))
    assert not card.client.valid
    assert reason in card.client.reasons[0]
    assert card.verdict.exit_code == ExitCode.CLIENT_INVALID


def test_silent_worker_makes_the_client_invalid() -> None:
    calm = tuple(calm_sample(float(second), 0) for second in range(60))
    card = scorecard(steady_run().but(num_workers=2, client=calm))
    assert not card.client.valid
    assert "not measured" in card.client.reasons[0]


def test_late_sends_make_the_client_invalid() -> None:
    run = steady_run(120, lambda n, at_s: made_request(n, at_s, lag_s=0.05))
    (reason,) = scorecard(run).client.reasons
    assert "schedule lag p99" in reason
    level = ServiceLevel(client=ClientGates(schedule_lag_p99_s=0.1))
    assert scorecard(run, level).client.valid


def test_truncated_schedule_makes_the_client_invalid() -> None:
    card = scorecard(steady_run(120).but(num_scheduled=200))
    assert "achieved over asked rate 60 %" in card.client.reasons[0]


def test_closed_loop_has_no_asked_rate_to_miss() -> None:
    card = scorecard(steady_run().but(num_scheduled=None))
    assert card.client.valid
    assert card.throughput.asked_requests_per_s is None


def test_invalid_client_outranks_failures_and_these_outrank_objectives() -> None:
    level = ServiceLevel(ttft_s=LatencyLimits(p50=0.05))
    run = steady_run()
    assert scorecard(run).verdict.exit_code == ExitCode.OK
    assert scorecard(run, level).verdict.exit_code == ExitCode.OBJECTIVE_MISSED
    broken = run.but(requests=(*run.requests, failed_request(999, 59.0, "timeout")))
    assert scorecard(broken, level).verdict.exit_code == ExitCode.FAILED
    assert scorecard(broken.but(client=()), level).verdict.exit_code == ExitCode.CLIENT_INVALID


def test_failures_within_the_stated_error_ratio_are_allowed() -> None:
    run = steady_run(199)
    run = run.but(requests=(*run.requests, failed_request(999, 59.0, "timeout")))
    allowed, exceeded = ServiceLevel(error_ratio=0.005), ServiceLevel(error_ratio=0.004)
    assert scorecard(run, allowed).verdict.exit_code == ExitCode.OK
    assert scorecard(run, exceeded).verdict.exit_code == ExitCode.FAILED


@pytest.mark.parametrize("kind", ["lost_tokens", "repeated_tokens", "foreign_tokens"])
def test_wrong_tokens_fail_the_run(kind: str) -> None:
    run = steady_run()
    wrong = made_request(999, 59.0, **{kind: 1})
    assert scorecard(run.but(requests=(*run.requests, wrong))).verdict.exit_code == ExitCode.FAILED


def test_run_without_a_success_fails_whatever_may_fail() -> None:
    run = steady_run(60, lambda n, at_s: failed_request(n, at_s, "connect"))
    card = scorecard(run, ServiceLevel(error_ratio=1.0))
    assert card.verdict.exit_code == ExitCode.FAILED
    assert "no request succeeded" in card.verdict.sentence


# Reading and writing.


def test_run_without_an_end_is_cut_short() -> None:
    card = scorecard(steady_run().but(end=None))
    assert card.run.cut_short == "the records end before the run did"
    assert any("cut short" in warning for warning in card.warnings)


def test_run_without_exactly_one_start_is_refused() -> None:
    records = steady_run().records
    with pytest.raises(LoadTestError, match="0 records of kind run_start"):
        gather(records[1:])
    with pytest.raises(LoadTestError, match="2 records of kind run_start"):
        gather([records[0], *records])


def test_damaged_and_missing_records_are_refused_by_name(tmp_path) -> None:
    with pytest.raises(LoadTestError, match=r"requests\.jsonl: not readable"):
        read_run(tmp_path)
    (tmp_path / "requests.jsonl").write_text('{"kind": "dance"}\n')
    with pytest.raises(LoadTestError, match=r"requests\.jsonl: a line is no record"):
        read_run(tmp_path)


def test_json_has_the_promised_keys_and_says_null_for_missing() -> None:
    answer = json.loads(scorecard(MadeRun((failed_request(0, 1.0, "connect"),))).to_json())
    assert answer["version"] == 1
    assert answer["requests"]["total"] == answer["requests"]["failed"] == 1
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert [answer[name][point] for point in ("p50", "p95", "p99")] == [None, None, None]
    assert answer["client"]["valid"] is True
    assert answer["slo"] == {"ok": True, "objectives": []}
    assert answer["verdict"]["exit_code"] == 1


def test_fleet_in_the_json_is_only_what_changed() -> None:
    fleet = tuple(ready_slices(float(second), spot=1 + (second >= 30)) for second in range(61))
    card = scorecard(steady_run().but(fleet=fleet))
    assert [sample.at_s for sample in card.fleet] == [0.0, 30.0, 60.0]


def test_later_turns_do_not_stand_for_missing_requests() -> None:
    first = made_request(0, 1.0, session_id="s")
    later = made_request(1, 2.0, session_id="s", turn=1)
    card = scorecard(MadeRun((first, later), num_scheduled=2))
    assert (card.requests.total, card.requests.missing) == (3, 1)
