"""How other clients' reports are read, what the golden server's truth comes to, and the tables."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import clients_report
from benchmarks.client_figures import (
    Figures,
    Truth,
    read_guidellm,
    read_slicewise,
    read_vllm,
    truth_of,
)
from benchmarks.clients import GATEWAY_CHAT, GOLDEN_COMPLETIONS, Client, Reported

MS = 1_000_000
TRUTH = Truth((50.0, 51.0), (20.0, 20.1), (1310.0, 1312.0), 640.0, 600.0)
SAID = Figures(
    requests=200,
    failed=0,
    input_tokens=64.0,
    ttft_ms=(51.0, 53.0),
    tpot_ms=(20.0, 20.1),
    e2e_ms=(1311.0, 1313.0),
    tokens_per_s=645.0,
    queue_p99_ms=2.0,
)
OURS = Reported(Client.SLICEWISE, GOLDEN_COMPLETIONS, 0, SAID, TRUTH)
PAGE = "before\n<!-- begin: measured -->stale<!-- end: measured -->\nafter\n"


def request(at_ms: int, num_tokens: int, ttft_ms: int = 50, tpot_ms: int = 20) -> dict[str, Any]:
    written = [at_ms + ttft_ms + number * tpot_ms for number in range(num_tokens)]
    return {"received_ns": at_ms * MS, "written_ns": [each * MS for each in written]}


def test_truth_is_that_of_the_last_requests() -> None:
    requests = {
        "warm-up": request(0, 3, ttft_ms=900),
        "b": request(1100, 11, ttft_ms=70),
        "a": request(1000, 11),
    }
    truth = truth_of(requests, 2)
    assert truth.ttft_ms == (50.0, 70.0)
    assert truth.tpot_ms == (20.0, 20.0)
    assert truth.e2e_ms == (250.0, 270.0)
    # From 1000 to 1100 ms come three tokens of `a`; the warm-up's were written before.
    assert truth.steady_tokens_per_s == pytest.approx(3 / 0.1)
    # The last token of the 22 comes at 1370 ms.
    assert truth.whole_tokens_per_s == pytest.approx(22 / 0.37)


def test_tokens_of_a_warm_up_count_in_the_steady_window() -> None:
    requests = {"warm-up": request(0, 100), "a": request(1000, 11), "b": request(1100, 11)}
    # Those due at 1010, 1030, 1050, 1070 and 1090 ms, and three of `a`.
    assert truth_of(requests, 2).steady_tokens_per_s == pytest.approx(8 / 0.1)


def test_our_scorecard_is_read_in_milliseconds() -> None:
    card = {
        "requests": {"ok": 4, "failed": 1},
        "tokens": {"input": 256},
        "ttft_s": {"p50": 0.05, "p99": 0.06},
        "tpot_s": {"p50": 0.02, "p99": 0.03},
        "e2e_s": {"p50": 1.0, "p99": 2.0},
        "throughput": {"output_tokens_per_s": 640.0},
        "schedule_lag_s": {"p99": 0.001},
        "client": {"valid": False, "reasons": ["event loop late", "CPU"]},
    }
    assert read_slicewise(card) == Figures(
        requests=4,
        failed=1,
        input_tokens=64.0,
        ttft_ms=(50.0, 60.0),
        tpot_ms=(20.0, 30.0),
        e2e_ms=(1000.0, 2000.0),
        tokens_per_s=640.0,
        queue_p99_ms=1.0,
        fault="event loop late; CPU",
    )


def test_our_scorecard_without_a_whole_answer_is_refused() -> None:
    card = {"requests": {"ok": 0, "failed": 4, "errors": {"no_tokens": 4}}}
    with pytest.raises(RuntimeError, match="no whole answer"):
        read_slicewise(card)


def test_result_of_vllm_is_read() -> None:
    points = {
        f"p{point}_{name}_ms": float(point) for point in (50, 99) for name in ("ttft", "tpot")
    }
    result = points | {
        "completed": 4, "failed": 0, "total_input_tokens": 100, "output_throughput": 600.0,
        "p50_e2el_ms": 1000.0, "p99_e2el_ms": 2000.0, "queue_times": [0.001, 0.002],
    }  # fmt: skip
    found = read_vllm(result)
    assert (found.ttft_ms, found.tpot_ms) == ((50.0, 99.0), (50.0, 99.0))
    assert (found.e2e_ms, found.input_tokens) == ((1000.0, 2000.0), 25.0)
    assert found.queue_p99_ms == pytest.approx(2.0)


def test_guidellms_itl_is_read_as_tpot() -> None:
    def metric(p50: float, p99: float, mean: float = 0.0) -> dict[str, Any]:
        return {"successful": {"mean": mean, "percentiles": {"p50": p50, "p99": p99}}}

    metrics = {
        "request_totals": {"successful": 4, "errored": 1},
        "prompt_token_count": metric(0, 0, 65.5),
        "time_to_first_token_ms": metric(51, 55),
        "inter_token_latency_ms": metric(20, 21),
        "time_per_output_token_ms": metric(20.5, 22),
        "request_latency": metric(1.3, 1.4),
        "request_dispatch_delay": metric(0.001, 0.08),
        "output_tokens_per_second": metric(0, 0, 600.0),
        "text": None,
    }
    found = read_guidellm({"benchmarks": [{"metrics": metrics}]})
    assert found.tpot_ms == (20, 21)
    assert found.mixed_tpot_ms == (20.5, 22)
    assert found.e2e_ms == (1300.0, 1400.0)
    assert (found.requests, found.failed, found.queue_p99_ms) == (4, 1, 80.0)
    assert (found.input_tokens, found.tokens_per_s) == (65.5, 600.0)


def row(page: str, *beginnings: str) -> list[str]:
    """The cells of the first row that begins so."""
    start = "| " + " | ".join(beginnings) + " |"
    found = [line for line in page.splitlines() if line.startswith(start)]
    assert found, f"no row {start} in\n{page}"
    return [cell.strip() for cell in found[0].strip("|").split("|")]


def saying(run: Reported, **changes: Any) -> Reported:
    return replace(run, said=replace(run.said, **changes))


def updated(runs: Sequence[Reported]) -> str:
    return clients_report.updated(PAGE, runs)


def test_page_keeps_the_text_around_its_tables() -> None:
    text = updated([OURS])
    assert text.startswith("before\n<!-- begin: measured -->\nMeasured on ")
    assert text.endswith("<!-- end: measured -->\nafter\n")
    assert "stale" not in text
    assert clients_report.updated(text, [OURS]) == text


def test_page_without_its_lines_is_refused() -> None:
    with pytest.raises(ValueError, match="the page has no lines"):
        clients_report.updated("nothing here", [OURS])


def test_table_has_median_and_range_beside_the_truth() -> None:
    later = [saying(OURS, ttft_ms=(51.0 + turn, 53.0)) for turn in (1, 2)]
    text = updated([OURS, *later])
    assert row(text, "slicewise loadtest", "200")[2:4] == ["52.0 (51.0 to 53.0)", "53.0"]
    truth = row(text, "the server itself", "200")
    assert truth[2:4] == ["50.0", "51.0"]
    assert truth[-1] == "steady 640, whole 600"


def test_difference_beyond_its_tolerance_stands_out() -> None:
    text = updated([OURS, saying(OURS, ttft_ms=(53.0, 62.0), tokens_per_s=700.0)])
    cells = text[text.index("largest difference") :]
    found = row(cells, "slicewise loadtest")
    # 3 ms is beyond 2, 11 beyond 10; 9.4 % beyond 3 of the steady window's 640.
    assert found[1:3] == ["**+3.00**", "**+11.00**"]
    assert found[3:7] == ["+0.00", "+0.00", "+1.00", "+1.00"]
    assert found[7] == "**+9.4%**"


def test_others_throughput_is_judged_by_their_own_definition() -> None:
    theirs = saying(replace(OURS, client=Client.VLLM), tokens_per_s=606.0)
    found = row(updated([theirs])[100:], "vllm bench serve", "+1.00")
    assert found[-1] == "+1.0%"


def test_without_a_truth_clients_are_compared_with_ours() -> None:
    first = replace(OURS, case=GATEWAY_CHAT, truth=None)
    ours = [saying(first, ttft_ms=(p50, 70.0)) for p50 in (54.0, 56.0, 58.0)]
    theirs = saying(replace(ours[0], client=Client.VLLM), ttft_ms=(54.5, 70.0))
    text = updated([*ours, theirs])
    assert "the server itself" not in text
    cells = text[text.index("largest difference") :]
    assert row(cells, "vllm bench serve")[1] == "-1.50"
    assert "slicewise loadtest |" not in cells.split("### Beside")[0].split("\n", 1)[1]


def test_what_stands_in_no_column_is_told() -> None:
    theirs = saying(replace(OURS, client=Client.GUIDELLM), mixed_tpot_ms=(20.5, 21.0), failed=2)
    text = updated([saying(OURS, fault="CPU 80 %"), theirs])
    assert row(text, GOLDEN_COMPLETIONS.name, "slicewise loadtest")[-1] == "CPU 80 %"
    assert row(text, GOLDEN_COMPLETIONS.name, "guidellm")[-2:] == ["2", "nothing"]
    assert "which has the first token in it: p50 20.50 ms" in text
