"""A model is replaced under streams on one machine: Serve's rolling update, without slices."""

import asyncio
import sys
import time
from typing import Any

import pytest
import yaml

from .application import (
    Role,
    RunningApplication,
    application_args,
    demo_model,
    engine_ids,
    linked_engines,
    paced_model,
    serve_config,
)
from .rollout_load import StreamLoad, patiently
from .streams import Answer, Request, stream_all

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NUM_ENGINES = 2
NUM_TOKENS = 60
DEMO, GREEDY_TOKENS = "slicewise-demo", 120


def args_with(seed: int, *others: dict[str, Any]) -> dict[str, Any]:
    model = paced_model(NUM_ENGINES, {"tpot_ms": 50.0, "model_seed": seed})
    return application_args(model, *others, rollout={"drain_s": 60.0})


def test_changed_model_alone_is_replaced_and_no_stream_notices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with patiently(RunningApplication(args_with(1))) as application:
        before = application.fleet()["models"][0]
        others = application.processes(Role.GATEWAY) + application.processes(Role.DIRECTORY)
        load = StreamLoad(
            application.base_url, model="paced", width=8, num_tokens=NUM_TOKENS, seeds=(1, 2)
        )
        load.start()
        began_s = time.monotonic()
        path = application.folder / "changed.yaml"
        path.write_text(yaml.safe_dump(serve_config(args_with(2), application.port)))
        assert application.serve("deploy", str(path)).returncode == 0
        fleet = application.wait_fleet(
            lambda fleet: (
                fleet["models"][0]["version"] != before["version"]
                and linked_engines(fleet) == {"paced": NUM_ENGINES}
                and {row["version"] for row in fleet["slices"]} == {fleet["models"][0]["version"]}
            ),
            300.0,
        )
        took_s = time.monotonic() - began_s
        outcome = load.finish()
        assert outcome.failures == []
        assert outcome.mixed == []
        assert outcome.seeds[1] > 0
        assert not engine_ids(fleet) & {each["engine_id"] for each in before["engines"]}
        after = application.processes(Role.GATEWAY) + application.processes(Role.DIRECTORY)
        assert after == others
        with capsys.disabled():
            sys.stdout.write(
                f"\n    {NUM_ENGINES} engines replaced in {took_s:.0f} s: {outcome.num_streams} "
                f"answers, 0 failed, {dict(outcome.seeds)} by version, longest gap "
                f"{outcome.longest_gap_s:.2f} s\n"
            )


class GreedyLoad(StreamLoad):
    """Streams of a real model whose answers are known from before; they are the same ones again."""

    def __init__(self, application: RunningApplication, known: list[list[int]]) -> None:
        super().__init__(
            application.base_url, model=DEMO, width=3, num_tokens=GREEDY_TOKENS, seeds=()
        )
        self._known = known

    def _request(self, number: int) -> Request:
        return greedy_request(number % len(self._known))

    def _versions_of(self, number: int, answer: Answer) -> list[int]:
        is_known = answer.choices[0].token_ids == self._known[number % len(self._known)]
        return [1] if is_known else []


def greedy_request(number: int) -> Request:
    body = {
        "model": DEMO,
        "prompt": f"Question {number}: what is a slice of a TPU, and who reserves it?",
        "max_tokens": GREEDY_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return Request("/v1/completions", body)


def vllm_args(version: str) -> dict[str, Any]:
    """The shipped model on two engines. A label makes a version of its own of the same weights."""
    return application_args(demo_model(version=version), rollout={"drain_s": 60.0})


def test_vllm_engines_are_replaced_and_every_answer_is_the_undisturbed_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with patiently(RunningApplication(vllm_args("first"))) as application:
        application.wait_fleet(lambda fleet: linked_engines(fleet) == {DEMO: 2}, 120.0)
        before = application.fleet()
        asked = [greedy_request(number) for number in range(6)]
        undisturbed = asyncio.run(stream_all(application.base_url, asked))
        load = GreedyLoad(application, [answer.choices[0].token_ids for answer in undisturbed])
        load.start()
        began_s = time.monotonic()
        path = application.folder / "changed.yaml"
        path.write_text(yaml.safe_dump(serve_config(vllm_args("second"), application.port)))
        assert application.serve("deploy", str(path)).returncode == 0
        fleet = application.wait_fleet(
            lambda fleet: (
                linked_engines(fleet) == {DEMO: 2}
                and not engine_ids(fleet) & engine_ids(before)
                and {row["version"] for row in fleet["slices"]} == {fleet["models"][0]["version"]}
            ),
            400.0,
        )
        took_s = time.monotonic() - began_s
        outcome = load.finish()
        assert fleet["models"][0]["version"] != before["models"][0]["version"]
        assert outcome.failures == []
        assert outcome.mixed == []
        with capsys.disabled():
            sys.stdout.write(
                f"\n    two vLLM engines replaced in {took_s:.0f} s: {outcome.num_streams} "
                f"answers, 0 failed, each as undisturbed; {fleet['models'][0]['resumes']} resumes, "
                f"longest gap {outcome.longest_gap_s:.2f} s\n"
            )
