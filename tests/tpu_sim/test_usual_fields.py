"""Fields that clients usually send, to the real tpu-inference on JAX CPU: kept, or harmless.

What would end such an engine is refused by its host too, and one such field is shown to end it;
every other field leaves it alive. What the closed table calls ignored has no effect on its answers.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.logprobs import LogprobsProcessor

from serving.domain.models.request_fields.rules import State
from serving.domain.models.request_fields.sampling import SAMPLING
from serving.engine.vllm.engine import VllmEngine
from serving.link.engine_protocol import EngineDiedError
from serving.link.messages import TokenRequest
from serving.link.vllm_codec import decode_output, decode_request, output_decoder, request_decoder

from .engines import (
    ANSWER_S,
    answers,
    greedy,
    request,
    running_engine,
    simulation_environment,
)
from .grammars import LETTERS, under_grammar
from .tiny_models import QWEN3, TinyModels, token_text

pytestmark = [
    pytest.mark.tpu_sim,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # as in `test_parity`
]

NUM_TOKENS = 12
# Log-probabilities of one token by two ways through the model: float32, other shapes of a step.
TOLERANCE = 1e-4

# Each beside greedy sampling of some tokens; all that a request's parameters have but what is
# refused, and what never reaches an engine.
USUAL: dict[str, dict[str, Any]] = {
    "logprobs of the likeliest": {"logprobs": 20},
    "prompt_logprobs of 0": {"prompt_logprobs": 0},
    "prompt_logprobs": {"prompt_logprobs": 3, "logprobs": 0},
    "temperature, top_p, top_k": {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
    "min_p": {"temperature": 0.7, "min_p": 0.1},
    "penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
    },
    "logit_bias": {"logit_bias": {5: 2.0}},
    "min_tokens": {"min_tokens": 5, "ignore_eos": False},
    "stop_token_ids": {"stop_token_ids": [7]},
    "repetition_detection": {
        "repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_count=3)
    },
    "regex": {"structured_outputs": under_grammar()},
    "skip_reading_prefix_cache": {"skip_reading_prefix_cache": True},
    "extra_args": {"extra_args": {"mine": 1, "kv_transfer_params": {"a": 1}}},
}


@dataclass
class Answer:
    """An answer as vLLM's frontend puts it together; `chosen` are log-probabilities by position."""

    token_ids: list[int] = field(default_factory=list)
    per_token: list[list[int]] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)


def params_of(**fields: Any) -> SamplingParams:
    defaults: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return SamplingParams(**(defaults | fields))


async def outputs_of(engine: VllmEngine, asked: TokenRequest) -> list[EngineCoreOutput]:
    decoder = output_decoder()
    found: list[EngineCoreOutput] = []
    async with asyncio.timeout(ANSWER_S):
        await engine.submit(asked)
        while not (found and found[-1].finish_reason is not None):
            for output in await engine.next_step():
                assert output.request_id == asked.request_id
                found.append(decode_output(output, decoder))
    return found


async def answer_of(
    engine: VllmEngine,
    request_id: str,
    prompt: list[int],
    params: SamplingParams,
    emitted: list[int] | None = None,
) -> Answer:
    """Asks the engine, and reads the answer as the frontend does, which knows what was asked."""
    asked = request(request_id, prompt, params, emitted)
    frontend = LogprobsProcessor(None, [], None, 0.0, params.num_logprobs, None)
    answer = Answer()
    for output in await outputs_of(engine, asked):
        answer.token_ids += output.new_token_ids
        if params.num_logprobs is not None:
            frontend.update_from_output(output)
    for token_id, of_token in zip(answer.token_ids, frontend.logprobs or (), strict=False):
        answer.per_token.append(list(of_token))
        answer.chosen.append(of_token[token_id].logprob)
    return answer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(models: TinyModels, caches: Path) -> AsyncIterator[VllmEngine]:
    async with running_engine(models.path(QWEN3), simulation_environment(caches, 1)) as engine:
        yield engine


async def test_logprobs_of_0_bring_the_chosen_tokens_alone(
    engine: VllmEngine, models: TinyModels
) -> None:
    for number, prompt in enumerate(models.prompts[QWEN3][:3]):
        none = await answer_of(engine, f"none-{number}", prompt, params_of(logprobs=0))
        some = await answer_of(engine, f"some-{number}", prompt, params_of(logprobs=2))
        assert none.token_ids == some.token_ids
        assert none.per_token == [[token_id] for token_id in none.token_ids]
        assert len(none.chosen) == NUM_TOKENS
        assert none.chosen == pytest.approx(some.chosen, abs=TOLERANCE)


@pytest.mark.parametrize("num_emitted", [1, 5, NUM_TOKENS - 1])
async def test_logprobs_of_0_go_on_where_another_engine_left_them(
    engine: VllmEngine, models: TinyModels, num_emitted: int
) -> None:
    prompt = models.prompts[QWEN3][0]
    name = f"from-{num_emitted}"
    whole = await answer_of(engine, f"{name}-whole", prompt, params_of(logprobs=0))
    emitted = whole.token_ids[:num_emitted]
    rest = await answer_of(engine, f"{name}-rest", prompt, params_of(logprobs=0), emitted)
    assert emitted + rest.token_ids == whole.token_ids
    assert rest.per_token == whole.per_token[num_emitted:]
    assert rest.chosen == pytest.approx(whole.chosen[num_emitted:], abs=TOLERANCE)


@pytest.mark.parametrize("usual", USUAL)
async def test_engine_outlives_a_field_that_is_let_through(
    engine: VllmEngine, models: TinyModels, usual: str
) -> None:
    prompt = models.prompts[QWEN3][1]
    asked = request(f"usual {usual}", prompt, params_of(**USUAL[usual]))
    assert await outputs_of(engine, asked)
    await engine.check(ANSWER_S)


@pytest.mark.quick
async def test_requests_under_grammars_in_one_step_each_keep_their_own(
    engine: VllmEngine, models: TinyModels
) -> None:
    """Their ids sort otherwise than they come, as those of clients do."""
    prompt = models.prompts[QWEN3][2]
    regexes = {"z-letters": "[a-z]{80}", "m-digits": "[0-9]{80}", "a-stops": "[.]{80}"}
    asked = [
        request(name, prompt, params_of(structured_outputs=under_grammar(regex)))
        for name, regex in regexes.items()
    ]
    letters, digits, stops = [token_text(models, each) for each in await answers(engine, asked)]
    assert (set(letters) <= LETTERS, set(digits) <= set("0123456789"), set(stops)) == (
        True,
        True,
        {"."},
    )
    assert min(map(len, (letters, digits, stops))) >= NUM_TOKENS


@pytest.mark.parametrize("num_emitted", [1, 7])
async def test_grammar_goes_on_where_another_engine_left_it(
    engine: VllmEngine, models: TinyModels, num_emitted: int
) -> None:
    """In the middle of what it asks for: first letters, then digits."""
    prompt = models.prompts[QWEN3][2]
    params = params_of(structured_outputs=under_grammar("[a-z]{9}[0-9]{80}"))
    name = f"grammar-{num_emitted}"
    whole = await answer_of(engine, f"{name}-whole", prompt, params)
    emitted = whole.token_ids[:num_emitted]
    rest = await answer_of(engine, f"{name}-rest", prompt, params, emitted)
    assert emitted + rest.token_ids == whole.token_ids
    text = token_text(models, whole.token_ids)
    assert set(text[:9]) <= LETTERS
    assert set(text[9:]) <= set("0123456789")
    assert len(text) > 9


# What the gateway refuses because it is ignored, each strong enough to change a greedy answer.
STRONG: dict[str, dict[str, Any]] = {
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "logit_bias": {"logit_bias": {5: 100.0}},
}


@pytest.mark.parametrize("name", STRONG)
async def test_field_that_is_called_ignored_has_no_effect(
    engine: VllmEngine, models: TinyModels, name: str
) -> None:
    """Once tpu-inference minds the field, this fails, and the row of the table may change."""
    assert is_ignored(name)
    prompt = models.prompts[QWEN3][2]
    plain = await answer_of(engine, f"plain-{name}", prompt, params_of())
    asked = await answer_of(engine, f"asked-{name}", prompt, params_of(**STRONG[name]))
    assert asked.token_ids == plain.token_ids


def is_ignored(name: str) -> bool:
    """Whether the table says that engines on TPU take the field and do not mind it."""
    return name in {row.name for row in SAMPLING if row.tpu.state == State.IGNORED}


async def test_min_p_that_leaves_the_likeliest_token_alone_has_no_effect(
    engine: VllmEngine, models: TinyModels
) -> None:
    """As hot as can be: all tokens would be other ones now and then, but for a `min_p` of 1."""
    assert is_ignored("min_p")
    prompt = models.prompts[QWEN3][2]
    greedy_answer = await answer_of(engine, "greedy-min-p", prompt, params_of())
    hot = params_of(temperature=2.0, min_p=1.0)
    asked = await answer_of(engine, "hot-min-p", prompt, hot)
    assert asked.token_ids != greedy_answer.token_ids


async def test_bad_words_and_tokens_that_end_too_soon_come_all_the_same(
    engine: VllmEngine, models: TinyModels
) -> None:
    """Both forbid the token that is the likeliest first one."""
    assert is_ignored("bad_words")
    assert is_ignored("min_tokens")
    prompt = models.prompts[QWEN3][2]
    plain = await answer_of(engine, "plain-forbidden", prompt, params_of())
    first = plain.token_ids[0]
    banning = params_of()
    # What vLLM's frontend makes of the words before an engine gets them.
    banning._bad_words_token_ids = [[first]]
    banned = await answer_of(engine, "bad-words", prompt, banning)
    assert banned.token_ids == plain.token_ids
    ending = params_of(stop_token_ids=[first], min_tokens=5, ignore_eos=False)
    ended = await answer_of(engine, "min-tokens", prompt, ending)
    assert ended.token_ids[0] == first


@pytest.mark.parametrize("name", ["allowed_token_ids", "logprob_token_ids"])
async def test_field_that_would_end_it_is_refused_by_the_engine_host(
    engine: VllmEngine, models: TinyModels, name: str
) -> None:
    prompt = models.prompts[QWEN3][1]
    with pytest.raises(ValueError, match="engines on TPU"):
        await engine.submit(request(f"refused {name}", prompt, params_of(**{name: [5, 6]})))
    assert await outputs_of(engine, request(f"after {name}", prompt, greedy(2)))


async def test_field_that_is_refused_would_still_end_the_engine(
    engine: VllmEngine, models: TinyModels
) -> None:
    """The last one here: past our own check, by the client of vLLM that the engine host uses.

    Once tpu-inference takes the field, this fails, and the refusal may go.
    """
    prompt = models.prompts[QWEN3][1]
    fatal = request("fatal", prompt, params_of(allowed_token_ids=[5, 6]))
    core_request = decode_request(fatal, request_decoder())
    await engine._client.add_request_async(core_request)
    with pytest.raises(EngineDiedError):
        await outputs_of(engine, request("beside", prompt, greedy(2)))
