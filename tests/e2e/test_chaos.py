"""Chaos under streams on a simulated cluster: every answer is whole, and the known one."""

import asyncio
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from deployments.simulation.throttle import STOP_S
from loadtest.chaos.actors import SimulationActor
from loadtest.chaos.resolution import RunLoad
from loadtest.chaos.runner import ChaosRunner, slices_in_fleet
from loadtest.chaos.schedule import parse_schedule
from loadtest.client.expected_output import RIGHT, compare
from loadtest.records import EventRecord
from serving.domain.tokens.paced import LETTERS, paced_tokens

from .application import RunningApplication, application_args, linked_engines, paced_model
from .streams import Answer, Request, stream_all

pytestmark = [pytest.mark.e2e, pytest.mark.long]

MODEL = "paced"
NUM_STREAMS = 64
NUM_TOKENS = 200
SHAPE = {"generation": "v6e", "topology": "1x1"}
PLAN = {
    "slices": [{"name": "spot", "compute_class": "spot", "count": 2, "returns_after_s": 1, **SHAPE}]
}


@pytest.fixture(scope="module")
def application() -> Iterator[RunningApplication]:
    deployment = {"compute_class": "spot", "replicas": 2, "num_cpus": 0.01, "slice": SHAPE}
    pace = {
        "ttft_ms": 10.0,
        "tpot_ms": 40.0,
        "tpot_per_seq_ms": 0.1,
        "prefill_tokens_per_s": 10_000.0,
    }
    args = application_args(paced_model(pace=pace, deployments=[deployment]))
    with RunningApplication(args, through="sim", plan=PLAN) as running:
        yield running


def prompt_of(number: int) -> list[int]:
    """As tokens: then nobody's tokenizer adds any."""
    return list(f"Stream {number}".encode())


def streams() -> list[Request]:
    return [
        Request(
            "/v1/completions",
            {
                "model": MODEL,
                "prompt": prompt_of(number),
                "max_tokens": NUM_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        for number in range(NUM_STREAMS)
    ]


async def under_chaos(
    application: RunningApplication, event: dict[str, Any]
) -> tuple[list[Answer], EventRecord]:
    """All streams at once, and the event when all of them are under way."""
    actor = SimulationActor(application.control_socket)
    chaos = ChaosRunner(parse_schedule({"events": [event]}), actor, seed=0)
    begun: set[int] = set()
    all_begun = asyncio.Event()

    def on_chunk(number: int, _: Answer) -> None:
        begun.add(number)
        if len(begun) == NUM_STREAMS:
            all_begun.set()

    start_s = time.monotonic()
    task = asyncio.create_task(stream_all(application.base_url, streams(), on_chunk))
    await all_begun.wait()
    fleet = await asyncio.to_thread(application.fleet)
    now_s = time.monotonic() - start_s
    load = RunLoad(NUM_STREAMS, 0.0)
    records = await asyncio.to_thread(chaos.tick, now_s, load, slices_in_fleet(fleet))
    return await task, records[0]


def known(number: int) -> list[int]:
    return paced_tokens(prompt_of(number), NUM_TOKENS, LETTERS)


@pytest.mark.parametrize(
    ("event", "is_given_up"),
    [
        pytest.param({"action": "slow", "factor": 4, "for_s": 4}, False, id="slow"),
        pytest.param({"action": "partition", "for_s": 4}, True, id="partition"),
    ],
)
def test_answers_are_the_known_ones_under(
    application: RunningApplication,
    event: dict[str, Any],
    is_given_up: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fleet = application.wait_fleet(lambda fleet: linked_engines(fleet) == {MODEL: 2}, 60.0)
    resumes_before = fleet["models"][0]["resumes"]
    moment = {"at_in_flight": NUM_STREAMS, "target": {"compute_class": "spot", "state": "ready"}}
    answers, record = asyncio.run(under_chaos(application, moment | event))
    assert record.error is None
    assert record.target in ("spot-0", "spot-1")
    assert [answer.error for answer in answers if answer.error] == []
    checks = [
        compare(known(number), answer.choices[0].token_ids) for number, answer in enumerate(answers)
    ]
    assert [check for check in checks if check != RIGHT] == []
    longest_s = max(answer.longest_gap_s() for answer in answers)
    # A slowed engine goes on with its requests, one that is cut off loses them to the other.
    assert longest_s > STOP_S / 2
    num_moved = application.fleet()["models"][0]["resumes"] - resumes_before
    if is_given_up:
        assert num_moved > 0
    with capsys.disabled():
        sys.stdout.write(
            f"\n    {record.action} of {record.target} under {NUM_STREAMS} streams: longest gap "
            f"{longest_s * 1000:.0f} ms, {num_moved} requests moved; 0 failed, 0 tokens lost\n"
        )


def test_simulation_tells_what_holds_a_slice_back(application: RunningApplication) -> None:
    application.simulation("slow", name="spot-0", factor=2.0, for_s=600.0)
    described = {each["name"]: each for each in application.simulation("describe")["slices"]}
    assert described["spot-0"]["slow_factor"] == 2.0
    assert 0 < described["spot-0"]["slowed_for_s"] <= 600
    assert described["spot-1"]["slow_factor"] is None
    # A later one takes its place.
    application.simulation("partition", name="spot-0", for_s=0.1)
    deadline_s = time.monotonic() + 30.0
    while held_back(application, "spot-0") != [None, None, None]:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def held_back(application: RunningApplication, name: str) -> list[float | None]:
    (row,) = [each for each in application.simulation("describe")["slices"] if each["name"] == name]
    return [row["slow_factor"], row["slowed_for_s"], row["partitioned_for_s"]]
