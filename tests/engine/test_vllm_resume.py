"""A request continued on another engine answers as if nothing had happened, whatever it asks for.

Each kind of request runs whole, then again from several split points with what was emitted so far.
One engine plays all parts: it keeps nothing of a request but cached prefixes.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput

from serving.engine.vllm.engine import VllmEngine
from serving.link.messages import Finish, TokenRequest
from serving.link.vllm_codec import decode_output, output_decoder

from .vllm_requests import RequestMaker, set_engine_environment, start_demo_engine

pytestmark = [pytest.mark.starts_engine, pytest.mark.asyncio(loop_scope="module")]

DEADLINE_S = 120.0
THINK_END = "</think>"

ITEMS_SCHEMA = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array",
            "minItems": 4,
            "maxItems": 6,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": "^[a-z]{3,6}$"},
                    "chips": {"type": "integer", "minimum": 0, "maximum": 999},
                },
                "required": ["name", "chips"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["items"],
    "additionalProperties": False,
}
GRAMMAR = """
root ::= "begin " item{12,20} "end"
item ::= word ", "
word ::= "chip" | "host" | "slice" | "token"
"""
LONG_CHOICES = [
    "a slice is a set of chips joined by a fast network",
    "a slice is a set of hosts that come and go together",
    "a host is one machine with chips in it",
]


def structured(**constraint: Any) -> dict[str, Any]:
    return {
        "temperature": 0,
        "max_tokens": 400,
        "structured_outputs": StructuredOutputsParams(**constraint),
    }


GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 60}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "greedy to its natural end": {"temperature": 0, "max_tokens": 300},
    "longer than two KV blocks": GREEDY | {"max_tokens": 300},
    "presence and frequency penalty": GREEDY | {"presence_penalty": 0.9, "frequency_penalty": 0.6},
    "repetition penalty": GREEDY | {"repetition_penalty": 1.3},
    "min_tokens": {"temperature": 0, "min_tokens": 90, "max_tokens": 200},
    "bad words": GREEDY | {"bad_words": ["slice", "the chip", "TPU", "host"]},
    "logit bias": GREEDY | {"logit_bias": {300: 4.0, 400: -100.0, 17: 3.0}},
    "seeded": {"temperature": 0.9, "seed": 11, "ignore_eos": True, "max_tokens": 60},
    "seeded with top-k, top-p and penalties": {
        "temperature": 1.2,
        "seed": 12,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "ignore_eos": True,
        "max_tokens": 60,
    },
    "logprobs": GREEDY | {"logprobs": 3},
    "prompt logprobs": GREEDY | {"prompt_logprobs": 2, "logprobs": 1},
    "json schema": structured(json=ITEMS_SCHEMA),
    "regex": structured(regex=r"(chip|host) [0-9]{30,40} [a-z]{20,30}!"),
    "choice": structured(choice=LONG_CHOICES),
    "grammar": structured(grammar=GRAMMAR),
    "seeded json schema with logprobs": structured(json=ITEMS_SCHEMA)
    | {"temperature": 0.8, "seed": 13, "logprobs": 2},
    "json schema with penalties": structured(json=ITEMS_SCHEMA) | {"presence_penalty": 1.0},
}
# What the others are made of; those are long tests.
ALWAYS_TRIED = {
    "greedy", "seeded json schema with logprobs", "repetition penalty", "regex", "min_tokens",
}  # fmt: skip
CONSTRAINED = [kind for kind, params in KINDS.items() if "structured_outputs" in params]


@dataclass
class Answer:
    """What came back for one request."""

    token_ids: list[int] = field(default_factory=list)
    # Per position, the candidates' ids and log-probabilities.
    logprobs: list[tuple[list[int], list[float]]] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    finish: tuple[int, Any] | None = None

    def take(self, output: EngineCoreOutput) -> None:
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            rows = zip(
                output.new_logprobs.logprob_token_ids, output.new_logprobs.logprobs, strict=True
            )
            self.logprobs += [(list(map(int, ids)), list(map(float, row))) for ids, row in rows]
        if output.new_prompt_logprobs_tensors is not None:
            self.num_prompt_logprobs += len(output.new_prompt_logprobs_tensors.logprob_token_ids)
        if output.finish_reason is not None:
            self.finish = (int(output.finish_reason), output.stop_reason)


class Bench:
    """The engine, and a way to run requests on it."""

    def __init__(self, engine: VllmEngine, requests: RequestMaker) -> None:
        self.engine = engine
        self.requests = requests
        self._decoder = output_decoder()
        self._num_runs = 0

    async def run(
        self, prompt: list[int], params: dict[str, Any], *splits: list[int]
    ) -> list[Answer]:
        """One answer per list of emitted tokens, all run at once."""
        async with asyncio.timeout(DEADLINE_S):
            answers: dict[str, Answer] = {}
            for emitted in splits:
                self._num_runs += 1
                request_id = f"run-{self._num_runs}"
                answers[request_id] = Answer()
                sampling = SamplingParams(**params)
                await self.engine.submit(self.requests.make(request_id, prompt, sampling, emitted))
            while any(answer.finish is None for answer in answers.values()):
                for message in await self.engine.next_step():
                    # What a failed test left behind is not ours.
                    if message.request_id in answers:
                        answers[message.request_id].take(decode_output(message, self._decoder))
        return list(answers.values())

    async def run_whole(self, prompt: list[int], params: dict[str, Any]) -> Answer:
        return (await self.run(prompt, params, []))[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    set_engine_environment()
    engine = await start_demo_engine()
    try:
        yield Bench(engine, RequestMaker())
    finally:
        await engine.close()


@pytest.fixture
def prompt(bench: Bench) -> list[int]:
    return bench.requests.token_ids(
        "<|im_start|>user\nWhat is a slice?<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )


def split_points(num_tokens: int) -> list[int]:
    """The ends, the middle, and both sides of the first KV block (128 tokens)."""
    wanted = {1, 2, num_tokens // 3, num_tokens // 2, num_tokens - 2, num_tokens - 1}
    wanted |= {at for at in (127, 128, 129, 255, 257) if at < num_tokens - 1}
    return sorted(at for at in wanted if 0 < at < num_tokens)


def assert_continues(whole: Answer, rest: Answer, at: int) -> None:
    assert whole.token_ids[:at] + rest.token_ids == whole.token_ids, f"split at {at}"
    assert rest.finish == whole.finish
    assert len(rest.logprobs) == max(0, len(whole.logprobs) - at)
    for (ids, values), (whole_ids, whole_values) in zip(
        rest.logprobs, whole.logprobs[at:], strict=False
    ):
        assert ids[0] == whole_ids[0]
        assert set(ids) == set(whole_ids)
        assert sorted(values) == pytest.approx(sorted(whole_values), abs=1e-3)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in ALWAYS_TRIED else pytest.mark.long) for kind in KINDS],
)
async def test_resumed_request_answers_as_the_undisturbed_one(
    bench: Bench, prompt: list[int], kind: str
) -> None:
    whole = await bench.run_whole(prompt, KINDS[kind])
    points = split_points(len(whole.token_ids))
    assert len(points) >= 3, f"the undisturbed answer is only {whole.token_ids}"
    rests = await bench.run(prompt, KINDS[kind], *(whole.token_ids[:at] for at in points))
    for at, rest in zip(points, rests, strict=True):
        assert_continues(whole, rest, at)
        assert rest.num_prompt_logprobs == 0


@pytest.mark.parametrize("kind", ["json schema", "seeded json schema with logprobs"])
async def test_resumed_json_is_whole_and_valid(bench: Bench, prompt: list[int], kind: str) -> None:
    whole = await bench.run_whole(prompt, KINDS[kind])
    emitted = whole.token_ids[: len(whole.token_ids) // 2]
    (rest,) = await bench.run(prompt, KINDS[kind], emitted)
    items = json.loads(bench.requests.text(emitted + rest.token_ids).removesuffix("<|im_end|>"))
    assert 4 <= len(items["items"]) <= 6


async def test_prompt_logprobs_came_with_the_first_engine_only(
    bench: Bench, prompt: list[int]
) -> None:
    whole = await bench.run_whole(prompt, KINDS["prompt logprobs"])
    assert whole.num_prompt_logprobs == len(prompt) - 1


@pytest.mark.parametrize("kind", ["greedy", "repetition penalty", "seeded", "json schema"])
async def test_request_resumed_again_and_again_answers_as_the_undisturbed_one(
    bench: Bench, prompt: list[int], kind: str
) -> None:
    whole = await bench.run_whole(prompt, KINDS[kind])
    # Each attempt is cut short by an abort, as the death of its engine would.
    emitted: list[int] = []
    for attempt, at in enumerate(split_points(len(whole.token_ids))[:4]):
        request_id = f"{kind}-{attempt}"
        async with asyncio.timeout(DEADLINE_S):
            await bench.engine.submit(
                bench.requests.make(request_id, prompt, SamplingParams(**KINDS[kind]), emitted)
            )
            while len(emitted) < at:
                for message in await bench.engine.next_step():
                    if message.request_id == request_id:
                        emitted = emitted + message.token_ids
            await bench.engine.abort([request_id])
        await forget_late_outputs(bench, prompt)
    (rest,) = await bench.run(prompt, KINDS[kind], emitted)
    assert_continues(whole, rest, len(emitted))


async def forget_late_outputs(bench: Bench, prompt: list[int]) -> None:
    """Runs a short request by hand: behind its end nothing of an aborted one can follow."""
    async with asyncio.timeout(DEADLINE_S):
        for probe in ("probe-1", "probe-2"):
            params = SamplingParams(temperature=0, max_tokens=1)
            await bench.engine.submit(bench.requests.make(probe, prompt, params, []))
            has_ended = False
            while not has_ended:
                outputs = await bench.engine.next_step()
                has_ended = any(output.request_id == probe for output in outputs)


async def test_stop_token_ends_a_resumed_request_where_it_ended_the_whole_one(
    bench: Bench, prompt: list[int]
) -> None:
    free = await bench.run_whole(prompt, GREEDY)
    # The first token that occurs late in the answer, for the first time there.
    stop = next(
        token
        for at, token in enumerate(free.token_ids)
        if at >= 12 and free.token_ids.index(token) == at
    )
    params = GREEDY | {"stop_token_ids": [stop]}
    whole = await bench.run_whole(prompt, params)
    assert whole.finish == (Finish.STOP, stop)
    points = split_points(len(whole.token_ids))
    rests = await bench.run(prompt, params, *(whole.token_ids[:at] for at in points))
    for at, rest in zip(points, rests, strict=True):
        assert_continues(whole, rest, at)


async def test_min_tokens_counts_what_was_emitted_before(bench: Bench, prompt: list[int]) -> None:
    natural = await bench.run_whole(prompt, {"temperature": 0, "max_tokens": 300})
    assert natural.finish is not None
    assert natural.finish[0] == Finish.STOP
    min_tokens = len(natural.token_ids) + 10
    params = {"temperature": 0, "max_tokens": 300, "min_tokens": min_tokens}
    whole = await bench.run_whole(prompt, params)
    assert len(whole.token_ids) >= min_tokens
    at = len(natural.token_ids) - 1  # just before the end it must not take
    (rest,) = await bench.run(prompt, params, whole.token_ids[:at])
    assert_continues(whole, rest, at)


async def test_samples_of_one_request_resume_apart(bench: Bench, prompt: list[int]) -> None:
    # What vLLM's frontend makes of `n=2, seed=21`.
    samples = [KINDS["seeded"] | {"seed": seed} for seed in (21, 22)]
    wholes = [await bench.run_whole(prompt, params) for params in samples]
    assert wholes[0].token_ids != wholes[1].token_ids
    for params, whole, at in zip(samples, wholes, (20, 33), strict=True):
        (rest,) = await bench.run(prompt, params, whole.token_ids[:at])
        assert_continues(whole, rest, at)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["greedy", "seeded", "logprobs"])
async def test_prefix_cache_with_emitted_tokens_in_it_changes_nothing(
    bench: Bench, prompt: list[int], kind: str
) -> None:
    params = KINDS[kind] | {"max_tokens": 300}
    await bench.engine.call("reset_prefix_cache", b"")
    whole = await bench.run_whole(prompt, params)
    (warm,) = await bench.run(prompt, params, whole.token_ids[:280])  # two blocks of it are cached
    await bench.engine.call("reset_prefix_cache", b"")
    (cold,) = await bench.run(prompt, params, whole.token_ids[:280])
    assert_continues(whole, warm, 280)
    assert_continues(whole, cold, 280)


@pytest.mark.long
@pytest.mark.parametrize("position", ["while it reasons", "as it ends", "in its answer"])
async def test_grammar_behind_a_reasoning_part_resumes_on_either_side_of_it(
    bench: Bench, position: str
) -> None:
    prompt = bench.requests.token_ids(
        "<|im_start|>user\nWhat is a slice?<|im_end|>\n<|im_start|>assistant\n"
    )
    (think_end,) = bench.requests.token_ids(THINK_END)
    # The model is small: a bias by which it ends its reasoning sooner or later stands in for sense.
    params = structured(json=ITEMS_SCHEMA) | {
        "temperature": 1.0,
        "seed": 5,
        "logit_bias": {think_end: 9.0, 2: -100.0},
        "max_tokens": 500,
    }
    whole = await bench.run_whole(prompt, params)
    assert think_end in whole.token_ids
    end = whole.token_ids.index(think_end)
    at = {"while it reasons": max(1, end - 1), "as it ends": end + 1, "in its answer": end + 12}
    (rest,) = await bench.run(prompt, params, whole.token_ids[: at[position]])
    assert_continues(whole, rest, at[position])


@pytest.mark.parametrize("payload", [KINDS["greedy"], KINDS["json schema"]])
async def test_abort_during_a_resume_frees_the_request(
    bench: Bench, prompt: list[int], payload: dict[str, Any]
) -> None:
    whole = await bench.run_whole(prompt, payload)
    half = whole.token_ids[: len(whole.token_ids) // 2]
    request: TokenRequest = bench.requests.make("gone", prompt, SamplingParams(**payload), half)
    async with asyncio.timeout(DEADLINE_S):
        await bench.engine.submit(request)
        await bench.engine.abort(["gone"])
        await forget_late_outputs(bench, prompt)
        assert bench.engine.load.num_running <= 1
