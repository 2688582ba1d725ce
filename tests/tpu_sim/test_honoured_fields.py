"""Every sampling field that passes to tpu-inference has an effect there, and what is called ignored
has none.

The counterpart of `tests/engine/test_honoured_fields.py`. Both are closed: a row that the table of
request fields gets is missed here until its effect is shown.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.engine import EngineCoreOutput, FinishReason

from serving.domain.models.engine_kind import EngineKind
from serving.domain.models.request_fields.rules import EngineFacts, State, Trait
from serving.domain.models.request_fields.sampling import SAMPLING
from serving.engine.vllm.engine import VllmEngine

from .engines import request, running_engine, simulation_environment
from .grammars import LETTERS, under_grammar
from .test_usual_fields import outputs_of, params_of
from .tiny_models import QWEN3, TinyModels, token_text

pytestmark = [
    pytest.mark.tpu_sim,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # as in `test_parity`
]

NUM_TOKENS = 12
FACTS = EngineFacts(EngineKind.VLLM_TPU, frozenset({Trait.LISTS_NO_EXPERTS}))


class Bench:
    """The engine, one prompt, and what it answers to it greedily."""

    def __init__(self, engine: VllmEngine, models: TinyModels) -> None:
        self.engine, self.models = engine, models
        self.prompt = models.prompts[QWEN3][2]
        self.greedy = models.expected[QWEN3][2][:NUM_TOKENS]
        self._num_asked = 0

    async def outputs(self, **params: Any) -> list[EngineCoreOutput]:
        self._num_asked += 1
        name = f"{self._num_asked}"
        return await outputs_of(self.engine, request(name, self.prompt, params_of(**params)))

    async def tokens(self, **params: Any) -> list[int]:
        """The answer: greedy, of 12 tokens, or as `params` say."""
        return [token for each in await self.outputs(**params) for token in each.new_token_ids]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(models: TinyModels, caches: Path) -> AsyncIterator[Bench]:
    async with running_engine(models.path(QWEN3), simulation_environment(caches, 1)) as engine:
        yield Bench(engine, models)


async def temperature(bench: Bench) -> bool:
    drawn = [await bench.tokens(temperature=2.0) for _ in range(3)]
    return await bench.tokens() == bench.greedy and any(each != bench.greedy for each in drawn)


async def top_p(bench: Bench) -> bool:
    return await bench.tokens(temperature=2.0, top_p=1e-6) == bench.greedy


async def top_k(bench: Bench) -> bool:
    return await bench.tokens(temperature=2.0, top_k=1) == bench.greedy


async def stop_token_ids(bench: Bench) -> bool:
    wanted = bench.greedy[3]
    outputs = await bench.outputs(stop_token_ids=[wanted])
    tokens = [token for each in outputs for token in each.new_token_ids]
    at = bench.greedy.index(wanted)
    return tokens == bench.greedy[: at + 1] and outputs[-1].finish_reason == FinishReason.STOP


async def ignore_eos(bench: Bench) -> bool:
    """The end of an answer is a token that this one has, as the model's own would be."""
    lengths = []
    for name, is_ignored in (("minding", False), ("ignoring", True)):
        params = params_of(ignore_eos=is_ignored)
        params.update_from_generation_config({}, bench.greedy[3])  # as vLLM's frontend does
        outputs = await outputs_of(bench.engine, request(name, bench.prompt, params))
        lengths.append(sum(len(each.new_token_ids) for each in outputs))
    return lengths == [bench.greedy.index(bench.greedy[3]) + 1, NUM_TOKENS]


async def max_tokens(bench: Bench) -> bool:
    return await bench.tokens(max_tokens=5) == bench.greedy[:5]


async def logprobs(bench: Bench) -> bool:
    some, none = await bench.outputs(logprobs=2), await bench.outputs()
    rows = [each.new_logprobs for each in some]
    return all(row is not None for row in rows) and all(each.new_logprobs is None for each in none)


async def prompt_logprobs(bench: Bench) -> bool:
    def num_rows(outputs: list[EngineCoreOutput]) -> int:
        tensors = [each.new_prompt_logprobs_tensors for each in outputs]
        return sum(len(each.logprob_token_ids) for each in tensors if each is not None)

    some, none = await bench.outputs(prompt_logprobs=1), await bench.outputs()
    return (num_rows(some), num_rows(none)) == (len(bench.prompt) - 1, 0)


async def structured_outputs(bench: Bench) -> bool:
    tokens = await bench.tokens(structured_outputs=under_grammar())
    text = token_text(bench.models, tokens)
    return len(tokens) == NUM_TOKENS and set(text) <= LETTERS


async def repetition_detection(bench: Bench) -> bool:
    """A grammar with one answer repeats itself."""
    same = {"structured_outputs": under_grammar("a{80}")}
    detected = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
    plain = await bench.tokens(**same)
    return len(plain) == NUM_TOKENS > len(await bench.tokens(**same, repetition_detection=detected))


EFFECTS: dict[str, Callable[[Bench], Awaitable[bool]]] = {
    effect.__name__: effect
    for effect in (
        temperature,
        top_p,
        top_k,
        stop_token_ids,
        ignore_eos,
        max_tokens,
        logprobs,
        prompt_logprobs,
        structured_outputs,
        repetition_detection,
    )
}


@pytest.mark.parametrize("name", EFFECTS)
async def test_field_that_is_honoured_has_an_effect(bench: Bench, name: str) -> None:
    assert await EFFECTS[name](bench)


async def test_no_honoured_field_is_left_out_here() -> None:
    states = {row.name: row.outcome(FACTS.kind).state_for(FACTS) for row in SAMPLING}
    assert {name for name, state in states.items() if state == State.HONOURED} == EFFECTS.keys()
