"""Every sampling field that the table calls honoured has an effect on the real vLLM engine on CPU.

So none that passes is ignored. `test_usual_fields` in `tests/tpu_sim` has the TPU's part.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from vllm.sampling_params import (
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)

from serving.domain.models.engine_kind import EngineKind
from serving.domain.models.request_fields.rules import EngineFacts, State, Trait
from serving.domain.models.request_fields.sampling import SAMPLING
from serving.engine.vllm.engine import VllmEngine
from serving.link.messages import Finish
from serving.link.vllm_codec import decode_output, output_decoder

from .vllm_requests import RequestMaker, set_engine_environment, start_demo_engine

pytestmark = [pytest.mark.starts_engine, pytest.mark.asyncio(loop_scope="module")]

DEADLINE_S = 120.0
FACTS = EngineFacts(EngineKind.VLLM, frozenset({Trait.LISTS_NO_EXPERTS}))
THINKS = {"reasoning_config": {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}}
PROMPT = "A slice is a set of"
# vLLM's name for the end of an answer that repeats itself.
REPETITION = 4


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    # Per position, the candidates' ids.
    candidates: list[list[int]] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    finish: int | None = None


class Bench:
    """The engine, and a way to ask it."""

    def __init__(self, engine: VllmEngine, requests: RequestMaker) -> None:
        self.engine, self.requests = engine, requests
        self.eos = requests.eos_token_id
        self._decoder = output_decoder()
        self._num_asked = 0

    def bans_of(self, word: str) -> set[int]:
        """The tokens that vLLM bans for a bad word; none if one of its forms is of several."""
        forms = [self.requests.token_ids(form) for form in (word, f" {word}")]
        return {form[0] for form in forms} if all(len(form) == 1 for form in forms) else set()

    async def ask(self, prompt: str = PROMPT, **params: Any) -> Answer:
        """Asks greedily for 12 tokens, or as `params` say."""
        defaults: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
        self._num_asked += 1
        request_id = f"r{self._num_asked}"
        prompt_ids = self.requests.token_ids(prompt)
        sampling = SamplingParams(**defaults | params)
        answer = Answer()
        async with asyncio.timeout(DEADLINE_S):
            await self.engine.submit(self.requests.make(request_id, prompt_ids, sampling, []))
            while answer.finish is None:
                for message in await self.engine.next_step():
                    assert message.request_id == request_id
                    output = decode_output(message, self._decoder)
                    answer.token_ids += output.new_token_ids
                    if output.new_logprobs is not None:
                        rows = output.new_logprobs.logprob_token_ids
                        answer.candidates += [list(map(int, row)) for row in rows]
                    if output.new_prompt_logprobs_tensors is not None:
                        tensors = output.new_prompt_logprobs_tensors
                        answer.num_prompt_logprobs += len(tensors.logprob_token_ids)
                    if output.finish_reason is not None:
                        answer.finish = int(output.finish_reason)
        return answer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    set_engine_environment()
    requests = RequestMaker(**THINKS)
    engine = await start_demo_engine(**THINKS)
    yield Bench(engine, requests)
    await engine.close()


async def differs(bench: Bench, **params: Any) -> bool:
    """With the field a greedy answer of 60 tokens is another, and without it always the same."""
    plain, again = [(await bench.ask(max_tokens=60)).token_ids for _ in range(2)]
    return plain == again != (await bench.ask(max_tokens=60, **params)).token_ids


async def narrows(bench: Bench, **params: Any) -> bool:
    """Of wild sampling, the field leaves the likeliest token alone."""
    wild: dict[str, Any] = {"temperature": 2.0, "seed": 5}
    greedy = await bench.ask()
    free, narrowed = await bench.ask(**wild), await bench.ask(**wild, **params)
    return free.token_ids != greedy.token_ids and narrowed.token_ids == greedy.token_ids


async def presence_penalty(bench: Bench) -> bool:
    return await differs(bench, presence_penalty=2.0)


async def frequency_penalty(bench: Bench) -> bool:
    return await differs(bench, frequency_penalty=2.0)


async def repetition_penalty(bench: Bench) -> bool:
    return await differs(bench, repetition_penalty=2.0)


async def temperature(bench: Bench) -> bool:
    return await differs(bench, temperature=2.0, seed=5)


async def top_p(bench: Bench) -> bool:
    return await narrows(bench, top_p=1e-6)


async def top_k(bench: Bench) -> bool:
    return await narrows(bench, top_k=1)


async def min_p(bench: Bench) -> bool:
    return await narrows(bench, min_p=1.0)


async def seed(bench: Bench) -> bool:
    first, again, other = [
        (await bench.ask(temperature=2.0, seed=number)).token_ids for number in (5, 5, 6)
    ]
    return first == again != other


async def stop_token_ids(bench: Bench) -> bool:
    wanted = (await bench.ask()).token_ids[3]
    answer = await bench.ask(stop_token_ids=[wanted])
    return answer.token_ids[-1] == wanted and answer.finish == Finish.STOP


async def ignore_eos(bench: Bench) -> bool:
    ends = {"logit_bias": {bench.eos: 100.0}}
    minding = await bench.ask(**ends, ignore_eos=False)
    return len(minding.token_ids) == 1 and len((await bench.ask(**ends)).token_ids) == 12


async def max_tokens(bench: Bench) -> bool:
    return len((await bench.ask(max_tokens=5)).token_ids) == 5


async def min_tokens(bench: Bench) -> bool:
    ends = {"logit_bias": {bench.eos: 50.0}, "ignore_eos": False}
    least = await bench.ask(**ends, min_tokens=7)
    return len((await bench.ask(**ends)).token_ids) == 1 and len(least.token_ids) == 8


async def logprobs(bench: Bench) -> bool:
    some, none = await bench.ask(logprobs=2), await bench.ask()
    return [len(row) for row in some.candidates] == [3] * 12 and not none.candidates


async def prompt_logprobs(bench: Bench) -> bool:
    some, none = await bench.ask(prompt_logprobs=1), await bench.ask()
    num_prompt = len(bench.requests.token_ids(PROMPT))
    return (some.num_prompt_logprobs, none.num_prompt_logprobs) == (num_prompt - 1, 0)


async def logprob_token_ids(bench: Bench) -> bool:
    answer = await bench.ask(logprob_token_ids=[7, 400, 31])
    return len(answer.candidates) == 12 and all({7, 400, 31} <= {*r} for r in answer.candidates)


async def structured_outputs(bench: Bench) -> bool:
    # Longer than the answer, so that no end comes into it.
    regex = StructuredOutputsParams(regex="[0-9]{80}")
    # A grammar waits for the end of a thought.
    answer = await bench.ask(f"<think>\n\n</think>\n\n{PROMPT}", structured_outputs=regex)
    return bench.requests.text(answer.token_ids).isdigit()


async def logit_bias(bench: Bench) -> bool:
    return set((await bench.ask(logit_bias={300: 100.0})).token_ids) == {300}


async def allowed_token_ids(bench: Bench) -> bool:
    return {*(await bench.ask(allowed_token_ids=[300, 400])).token_ids} <= {300, 400}


async def bad_words(bench: Bench) -> bool:
    token_ids = (await bench.ask(max_tokens=60)).token_ids
    bad, word = next(
        (token_id, word)
        for token_id in token_ids
        if (word := bench.requests.text([token_id]).strip()).isalpha()
        and bench.bans_of(word) >= {token_id}
    )
    return bad not in (await bench.ask(max_tokens=60, bad_words=[word])).token_ids


async def thinking_token_budget(bench: Bench) -> bool:
    (think_end,) = bench.requests.token_ids("</think>")
    thinking = {"prompt": f"<think>{PROMPT}", "logit_bias": {think_end: -50.0}}
    free, bound = await bench.ask(**thinking), await bench.ask(**thinking, thinking_token_budget=9)
    return think_end not in free.token_ids and think_end in bound.token_ids


async def repetition_detection(bench: Bench) -> bool:
    detected = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
    answer = await bench.ask(logit_bias={300: 100.0}, repetition_detection=detected)
    return answer.finish == REPETITION and len(answer.token_ids) < 12


EFFECTS: dict[str, Callable[[Bench], Awaitable[bool]]] = {
    effect.__name__: effect
    for effect in (
        presence_penalty,
        frequency_penalty,
        repetition_penalty,
        temperature,
        top_p,
        top_k,
        min_p,
        seed,
        stop_token_ids,
        ignore_eos,
        max_tokens,
        min_tokens,
        logprobs,
        prompt_logprobs,
        logprob_token_ids,
        structured_outputs,
        logit_bias,
        allowed_token_ids,
        bad_words,
        thinking_token_budget,
        repetition_detection,
    )
}


@pytest.mark.parametrize("name", EFFECTS)
async def test_field_that_is_honoured_has_an_effect(bench: Bench, name: str) -> None:
    assert await EFFECTS[name](bench)


async def test_no_honoured_field_is_left_out_here() -> None:
    states = {row.name: row.outcome(FACTS.kind).state_for(FACTS) for row in SAMPLING}
    assert {name for name, state in states.items() if state == State.HONOURED} == EFFECTS.keys()
