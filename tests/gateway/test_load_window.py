"""What a gateway counts of its load: rates, means, and each arrival once."""

import pytest

from serving.domain.load_report import LoadSample
from serving.gateway.telemetry.request_metrics import WINDOW_S, LoadWindow

START_S = 1000.0


def sample(window: LoadWindow, now_s: float) -> LoadSample:
    return window.sample(now_s, num_waiting=0, oldest_wait_s=0.0, num_in_flight=0)


def test_rate_and_means_are_of_the_window() -> None:
    window = LoadWindow(START_S)
    for second in range(60):
        for _ in range(3):
            window.arrived(START_S + second, prompt_tokens=10 if second < 30 else 40)
        window.finished(START_S + second, output_tokens=5 if second < 30 else 7)
    found = sample(window, START_S + 59.5)
    assert found.requests_per_s == pytest.approx(3.0)
    assert found.input_tokens_mean == 40.0
    assert found.output_tokens_mean == 7.0


def test_young_gateway_divides_by_its_age_but_not_by_less_than_five_seconds() -> None:
    window = LoadWindow(START_S)
    window.arrived(START_S + 0.1, 1)
    assert sample(window, START_S + 0.2).requests_per_s == pytest.approx(1 / 5)
    assert sample(window, START_S + 10.0).requests_per_s == pytest.approx(1 / 10)


def test_what_was_never_measured_is_none_and_what_was_is_kept() -> None:
    window = LoadWindow(START_S)
    assert sample(window, START_S + 1).input_tokens_mean is None
    assert sample(window, START_S + 1).output_tokens_mean is None
    window.arrived(START_S + 2, 12)
    window.finished(START_S + 3, 8)
    sample(window, START_S + 4)
    later = sample(window, START_S + 10 * WINDOW_S)
    assert (later.requests_per_s, later.input_tokens_mean, later.output_tokens_mean) == (0, 12, 8)


def test_cached_prompt_tokens_are_no_input() -> None:
    window = LoadWindow(START_S)
    window.arrived(START_S, 100)
    window.arrived(START_S, 100)
    window.found_cached(START_S + 0.5, 80)
    assert sample(window, START_S + 1).input_tokens_mean == 60.0


def test_request_that_waited_at_the_door_is_counted_when_it_came() -> None:
    window = LoadWindow(START_S)
    window.enqueued(START_S + 5)
    assert sample(window, START_S + 10).requests_per_s == pytest.approx(1 / 10)
    window.admitted(START_S + 20)
    window.arrived(START_S + 20, 7)
    # Its tokens are known now, and it is still one request.
    found = sample(window, START_S + 20)
    assert found.requests_per_s == pytest.approx(1 / 20)
    assert found.input_tokens_mean == 7.0


def test_request_let_in_and_never_seen_hides_no_later_one() -> None:
    window = LoadWindow(START_S)
    window.enqueued(START_S)
    window.admitted(START_S + 1)
    window.arrived(START_S + 2 + WINDOW_S, 7)
    assert sample(window, START_S + 2 + WINDOW_S).requests_per_s == pytest.approx(1 / WINDOW_S)


def test_counts_of_now_are_handed_on() -> None:
    found = LoadWindow(START_S).sample(START_S, num_waiting=4, oldest_wait_s=2.5, num_in_flight=9)
    assert (found.num_waiting, found.oldest_wait_s, found.num_in_flight) == (4, 2.5, 9)


def test_answer_that_its_client_cut_short_does_not_lower_the_mean() -> None:
    window = LoadWindow(START_S)
    window.aborted(START_S, 3)
    assert sample(window, START_S + 1).output_tokens_mean is None
    window.finished(START_S + 1, 100)
    assert sample(window, START_S + 2).output_tokens_mean == 100
    window.aborted(START_S + 2, 20)
    assert sample(window, START_S + 3).output_tokens_mean == 100
    window.aborted(START_S + 3, 300)  # it would have become longer still
    assert sample(window, START_S + 4).output_tokens_mean == 200
