"""What is sent is simulated as it was sent, and the page is what its record says."""

import pytest

from benchmarks.conversations import report
from benchmarks.conversations.loads import PACED_LOADS, VLLM_LOAD, Load
from benchmarks.conversations.records import (
    BEFORE,
    OURS,
    REPORT,
    SIMULATED,
    Part,
    Record,
    Run,
    Turn,
    read_record,
)
from benchmarks.conversations.twin import prompts_of
from loadtest.client.body import BodyMaker, Conversation
from loadtest.client.http_client import Exchange
from loadtest.client.prompt_source import ServerPrompts
from loadtest.client.stream import Answer
from loadtest.records import RequestRecord
from loadtest.workload.build import build_workload
from loadtest.workload.prompts import Vocabulary
from serving.domain.tokens.paced import LETTERS, paced_tokens

VOCABULARY = Vocabulary(tuple(range(300, 900)))


def test_simulated_prompts_are_those_that_the_client_sends() -> None:
    load = PACED_LOADS[1]
    planned = build_workload(load.workload, models=["bench"], duration_s=20.0, seed=3).requests
    prompts = prompts_of(planned, VOCABULARY)
    assert len(planned) == len(prompts) > 100
    maker = BodyMaker(ServerPrompts({"bench": VOCABULARY}, {"bench": 0}), wants_token_ids=True)
    for each in planned:
        if each.turn == 0:
            so_far = Conversation()
        sent = maker.make(each, so_far).prompt_token_ids
        assert sent is not None
        assert list(sent) == prompts[each.request_id]
        answer = Answer(keeps_content=True)
        answer.token_ids += paced_tokens(sent, each.output_tokens, LETTERS)
        maker.add_answer(each, so_far, Exchange(0.0, answer))


@pytest.mark.parametrize("load", [*PACED_LOADS, VLLM_LOAD], ids=lambda load: load.name)
def test_loads_have_conversations_that_share_their_beginnings(load: Load) -> None:
    built = build_workload(load.workload, models=["bench"], duration_s=load.duration_s, seed=1)
    begun = [each for each in built.requests if each.turn == 0]
    assert len(built.requests) > 2 * len(begun)
    assert len({each.blocks[0] for each in begun}) <= 24


def request_record(**changes: object) -> RequestRecord:
    given = {
        "request_id": "r1",
        "worker": 0,
        "model": "bench",
        "api": "completions",
        "scheduled_s": 1.0,
        "sent_s": 2.0,
        "first_s": 2.5,
        "last_s": 4.0,
        "ended_s": 4.1,
        "planned_input_tokens": 30,
        "planned_output_tokens": 20,
        "input_tokens": 30,
        "output_tokens": 20,
        "turn": 1,
    }
    return RequestRecord(**given | changes)  # type: ignore[arg-type]


def test_times_count_from_when_it_was_sent() -> None:
    assert Turn.of(request_record(cached_tokens=16)) == Turn(1, 0.5, 2.0, 30, 16, 20)
    assert Turn.of(request_record()).cached_tokens == 0


@pytest.mark.parametrize(
    "changes", [{"error": "status"}, {"first_s": None}, {"input_tokens": None}]
)
def test_request_that_failed_is_not_put_on_record(changes: dict[str, object]) -> None:
    with pytest.raises(RuntimeError, match="r1"):
        Turn.of(request_record(**changes))


def run_of(system: str, load: str, pair: int, ttft_s: float) -> Run:
    turns = [Turn(0, ttft_s, 2.0, 100, 25, 10)] * 3
    return Run(system, load, pair, 1, None if system == SIMULATED else 0.1, turns)


def test_ratios_are_of_pairs_and_differences_of_the_simulation() -> None:
    paced = [
        run_of(system, load.name, pair, ttft_s)
        for pair, load in enumerate(PACED_LOADS)
        for system, ttft_s in ((OURS, 0.150), (SIMULATED, 0.140))
    ]
    vllm = [run_of(OURS, "vllm", pair, 0.1 + 0.1 * pair) for pair in range(3)]
    vllm += [run_of(BEFORE, "vllm", pair, 0.2) for pair in range(3)]
    parts = (Part("2026-11-28", "abc", "2 cores", "3.11", runs) for runs in (paced, vllm))
    text = report.updated("<!-- begin: measured -->\n<!-- end: measured -->", Record(*parts))
    assert "| light | 1.5 | 3 | difference | +10.0 | +10.0 | +10.0 | +0.0 | +0.0 | +0.0 |" in text
    assert "| TTFT p90 ms | 200 (100 to 300) | 200 (200 to 200) | **1.00 (0.50 to 1.50)** |" in text


def test_page_is_what_its_record_says() -> None:
    page = REPORT.read_text(encoding="utf-8")
    assert page == report.updated(page, read_record())
