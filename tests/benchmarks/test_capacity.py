"""What a step of the capacity ladder comes to, and the tables made of steps."""

from dataclasses import replace

import pytest

from benchmarks import capacity_report
from benchmarks.capacity import MAX_OTHER_CORES, Step

_OFFERED = 100 * 200 / 4.03  # 100 streams of 200 tokens, each after 50 ms and 199 times 20 ms
CARRIED = Step(
    system="Slicewise",
    turn=0,
    streams=100,
    tokens_per_s=_OFFERED,
    ttft_ms=(60.0, 70.0),
    tpot_ms=(20.0, 20.5),
    gap_ms=(20.0, 21.0),
    ok=300,
    errors=(),
    cpu_us_per_token={"gateway": 100.0, "client": 50.0, "rest of Ray": 40.0},
    other_cores=0.0,
    client_faults=(),
)


def test_step_at_full_pace_is_carried() -> None:
    assert CARRIED.is_carried
    assert not CARRIED.is_lost


@pytest.mark.parametrize(
    ("change", "miss"),
    [
        ({"tokens_per_s": 0.94 * _OFFERED}, "throughput 94%"),
        ({"tpot_ms": (20.0, 25.2)}, "TPOT p99 1.26 x pace"),
        ({"errors": (("unavailable_503: no engine", 2),)}, "requests failed"),
    ],
)
def test_step_short_of_one_condition_says_which(change: dict[str, object], miss: str) -> None:
    step = replace(CARRIED, **change)  # type: ignore[arg-type]
    assert step.misses == (miss,)


def test_step_without_a_whole_answer_is_lost() -> None:
    step = replace(CARRIED, tokens_per_s=0.0, ttft_ms=None, tpot_ms=None, gap_ms=None, ok=0)
    assert not step.is_carried
    assert step.is_lost


def test_report_names_knee_and_keeps_the_text_around_it() -> None:
    broken = replace(CARRIED, streams=200, tokens_per_s=5000.0, other_cores=2 * MAX_OTHER_CORES)
    page = "before\n<!-- begin: measured -->old<!-- end: measured -->\nafter\n"
    text = capacity_report.updated(page, [broken, CARRIED])
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| Slicewise | 1 | 100 | 4,963 | 200 | throughput 50% |" in text
    assert "| 300 / 0 | 0.50 (disturbed) | valid |" in text
    assert "| 300 / 0 | 0.00 | valid |" in text
    assert "| Slicewise | 100 | 1 | 100 (gateway 100) | 50 | 40 |" in text


def test_report_without_its_lines_is_refused() -> None:
    with pytest.raises(ValueError, match="begin: measured"):
        capacity_report.updated("no lines\n", [CARRIED])


def test_report_compares_cpu_only_where_every_system_carried() -> None:
    page = "<!-- begin: measured --><!-- end: measured -->"
    other = replace(CARRIED, system="Ray Serve LLM", tokens_per_s=0.0)
    assert "CPU is not compared" in capacity_report.updated(page, [CARRIED, other])
