"""Features of tpu-inference that `serving.tpu.features` says were run: here is where.

Experts and weights in fp8 are computed with stand-ins for kernels that no CPU has, as the table of
replacements says. What is exact is held against transformers token for token. What is rounded (fp8)
is held against transformers with the weights that the rounded ones stand for: how much likelier it
finds another token than the one chosen.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from serving.domain.topology import slice_shape
from serving.engine.vllm.engine import VllmEngine
from serving.link.messages import TokenRequest
from serving.link.vllm_codec import decode_output, output_decoder
from serving.tpu.requirements import EngineRequirements
from serving.tpu.settings import engine_settings

from .engines import (
    ANSWER_S,
    ENGINE_ARGS,
    IN_FLOAT32,
    NGRAM,
    OFFLOAD,
    answers,
    greedy,
    request,
    running_engine,
    simulation_environment,
)
from .evidence import Evidence
from .test_parity import Shape, tensor
from .tiny_models import (
    DRAFTED,
    FP8,
    LLAMA,
    MOE,
    MOE_FP8,
    NUM_DRAFTED_TOKENS,
    QWEN3,
    TinyModels,
)

pytestmark = [
    pytest.mark.tpu_sim,
    pytest.mark.filterwarnings("default"),  # the engine core is forked, see test_parity
]

TRANSFORMERS = "transformers"
SPLITS = (1, 9, 17)
# By rounding of activations to fp8 another token may win that is nearly as likely. An engine that
# took blocks or scales for others answers as if by chance, nats away.
MOST_NATS = 1.0
MOST_NOT_LIKELIEST = 0.2
# What the random model answers with one token again and again, so that guesses are right.
REPEATING, NUM_REPEATED = [7, 8] * 20, 60
EXPERTS = {"tensor_parallel_size": 4, "enable_expert_parallel": True}


def in_bfloat16(**engine_args: Any) -> Shape:
    """As vLLM asks for it where weights are stored in fp8."""
    return Shape("TP 4", 4, {"tensor_parallel_size": 4, "dtype": "bfloat16"} | engine_args)


@asynccontextmanager
async def engine_of(
    models: TinyModels, caches: Path, model: str, shape: Shape, **engine_args: Any
) -> AsyncIterator[VllmEngine]:
    environment = simulation_environment(caches, shape.num_devices) | shape.environment
    args = shape.engine_args | engine_args
    async with running_engine(models.path(model), environment, **args) as engine:
        yield engine


async def answer_all(
    engine: VllmEngine, models: TinyModels, model: str, name: str, num_tokens: int
) -> list[list[int]]:
    asked = [
        request(f"{name}-{at}", prompt, greedy(num_tokens))
        for at, prompt in enumerate(models.prompts[model])
    ]
    return await answers(engine, asked)


async def gone_on(
    engine: VllmEngine, models: TinyModels, model: str, whole: list[list[int]]
) -> list[list[list[int]]]:
    """Each answer goes on behind each of the splits; for each split, then prompt, all tokens."""
    found = []
    for split in SPLITS:
        begun = [answer[:split] for answer in whole]
        asked = [
            request(f"after-{split}-{at}", prompt, greedy(len(whole[at])), begun[at])
            for at, prompt in enumerate(models.prompts[model])
        ]
        rest = await answers(engine, asked)
        found.append([first + then for first, then in zip(begun, rest, strict=True)])
    return found


async def resumed(
    engine: VllmEngine, models: TinyModels, model: str, whole: list[list[int]]
) -> int:
    """Each answer goes on behind each of the splits as if it had begun here. How many did."""
    found = await gone_on(engine, models, model, whole)
    for split, answered in zip(SPLITS, found, strict=True):
        assert answered == whole, f"split at {split}"
    return len(SPLITS) * len(whole)


@pytest.mark.parametrize(
    "shape",
    [
        tensor(4),
        Shape("TP 4 with expert parallelism", 4, EXPERTS, IN_FLOAT32),
    ],
    ids=str,
)
async def test_experts(models: TinyModels, caches: Path, evidence: Evidence, shape: Shape) -> None:
    expected = models.expected[MOE]
    async with engine_of(models, caches, MOE, shape) as engine:
        assert await answer_all(engine, models, MOE, "one", len(expected[0])) == expected
        num_resumed = await resumed(engine, models, MOE, expected)
    evidence.parity(
        f"{MOE}, {shape}, also resumed after {', '.join(map(str, SPLITS))} tokens",
        f"{shape.num_devices} devices of one host",
        TRANSFORMERS,
        len(expected) + num_resumed,
    )


@dataclass(frozen=True)
class Rounded:
    """A model whose answers are not exact, and how it is served."""

    name: str
    model: str
    shape: Shape

    def __str__(self) -> str:
        return self.name


@pytest.mark.parametrize(
    "rounded",
    [
        Rounded("fp8 weights", FP8, in_bfloat16()),
        Rounded("fp8 experts", MOE_FP8, in_bfloat16()),
        Rounded(
            "fp8 experts, expert parallelism", MOE_FP8, in_bfloat16(enable_expert_parallel=True)
        ),
        Rounded(
            "fp8 cache",
            QWEN3,
            Shape("TP 4", 4, {"tensor_parallel_size": 4, "kv_cache_dtype": "fp8"}),
        ),
    ],
    ids=str,
)
async def test_what_is_rounded_chooses_what_is_as_likely(
    models: TinyModels, caches: Path, evidence: Evidence, rounded: Rounded
) -> None:
    async with engine_of(models, caches, rounded.model, rounded.shape) as engine:
        first = await answer_all(engine, models, rounded.model, "one", 24)
        later = await gone_on(engine, models, rounded.model, first)
    told = as_likely(models, rounded.model, first, later)
    evidence.placed(f"{rounded.name}, {rounded.shape}: {told}")


async def test_guesses_by_ngrams(models: TinyModels, caches: Path, evidence: Evidence) -> None:
    expected = models.expected[LLAMA]
    async with engine_of(models, caches, LLAMA, tensor(4), speculative_config=NGRAM) as engine:
        assert await answer_all(engine, models, LLAMA, "one", len(expected[0])) == expected
        num_resumed = await resumed(engine, models, LLAMA, expected)
        asked = [request("repeats", REPEATING, greedy(NUM_REPEATED))]
        (repeated,) = await answers(engine, asked)
        _, num_guessed, num_right = drafts(engine)
    assert max(models.gaps(LLAMA, [repeated], [REPEATING])[0]) == 0
    assert num_guessed > num_right > 0
    evidence.parity(
        f"{LLAMA}, TP 4, with guesses by n-grams ({num_right} of {num_guessed} right), also "
        f"resumed after {', '.join(map(str, SPLITS))} tokens",
        "4 devices of one host",
        TRANSFORMERS,
        len(expected) + num_resumed + 1,
    )


async def test_likelihoods_with_guesses_by_ngrams(
    models: TinyModels, caches: Path, evidence: Evidence
) -> None:
    """Of requests with and without log-probabilities; steps with guesses and without."""
    prompts = [*models.prompts[LLAMA], REPEATING, REPEATING]
    params = [greedy(NUM_REPEATED, asked_for) for asked_for in (None, 0, 3, 0, None, 1, 0, None)]
    asked = [
        request(str(at), prompt, each)
        for at, (prompt, each) in enumerate(zip(prompts, params, strict=True))
    ]
    async with engine_of(models, caches, LLAMA, tensor(4), speculative_config=NGRAM) as engine:
        told = await chosen_likelihoods(engine, asked)
        _, num_guessed, num_right = drafts(engine)
    assert num_guessed > num_right > 0
    given = [[token_id for token_id, _ in answer] for answer in told]
    expected = models.log_probabilities(LLAMA, given, prompts)
    num_told = 0
    for each, answer, reference in zip(params, told, expected, strict=True):
        assert len(answer) == NUM_REPEATED
        if each.logprobs is None:
            assert {own for _, own in answer} == {None}
            continue
        num_told += len(answer)
        differences = [
            abs((own or 0) - other) for (_, own), other in zip(answer, reference, strict=True)
        ]
        assert max(differences) < 1e-3
    evidence.placed(
        f"{LLAMA}, TP 4, with guesses by n-grams: the log-probabilities of {num_told} chosen "
        "tokens are transformers' within 0.001"
    )


async def chosen_likelihoods(
    engine: VllmEngine, requests: list[TokenRequest]
) -> list[list[tuple[int, float | None]]]:
    """All at once; the tokens of each, with what each had, `None` where none was asked for."""
    told: dict[str, list[tuple[int, float | None]]] = {each.request_id: [] for each in requests}
    open_ids, decoder = set(told), output_decoder()
    async with asyncio.timeout(ANSWER_S):
        for each in requests:
            await engine.submit(each)
        while open_ids:
            for message in await engine.next_step():
                output = decode_output(message, decoder)
                lists, token_ids = output.new_logprobs, output.new_token_ids
                own: list[float | None] = [None] * len(token_ids)
                if lists is not None:
                    assert lists.logprob_token_ids[:, 0].tolist() == token_ids
                    own = lists.logprobs[:, 0].tolist()
                told[message.request_id] += zip(token_ids, own, strict=True)
                if message.finish is not None:
                    open_ids.discard(message.request_id)
    return list(told.values())


# Who is first trains the draft: minutes of a whole core.
@pytest.mark.timeout(2400)
async def test_guesses_by_a_draft_model(
    models: TinyModels, caches: Path, evidence: Evidence
) -> None:
    """EAGLE-3, with a draft that is right often, but not always.

    All in bfloat16, which the draft computes in whatever the model does: the kernel wants keys of
    the cache's type, which is the model's.
    """
    shape, num_tokens = in_bfloat16(), NUM_DRAFTED_TOKENS
    args = drafting(models)
    async with engine_of(models, caches, DRAFTED, shape, speculative_config=args) as engine:
        first = await answer_all(engine, models, DRAFTED, "one", num_tokens)
        later = await gone_on(engine, models, DRAFTED, first)
        _, num_guessed, num_right = drafts(engine)
    told = as_likely(models, DRAFTED, first, later)
    assert num_guessed > num_right > num_guessed / 10
    evidence.placed(
        f"EAGLE-3 draft, {shape}, {num_right} of {num_guessed} guesses were right: {told}"
    )


def as_likely(
    models: TinyModels, model: str, first: list[list[int]], later: list[list[list[int]]]
) -> str:
    """Checks that transformers finds each token as likely as any, or nearly so; and tells it.

    What is computed in other groups is rounded otherwise: who goes on may choose the other of two
    that are nearly as likely, so that `later` is held against transformers too, not `first`.
    """
    gaps: list[float] = []
    for answered in [first, *later]:
        gaps += [gap for answer in models.gaps(model, answered) for gap in answer]
    others = [gap for gap in gaps if gap > 0]
    assert len(others) <= MOST_NOT_LIKELIEST * len(gaps), sorted(others)
    assert max(gaps) <= MOST_NATS
    pairs = [(a, b) for answered in later for a, b in zip(answered, first, strict=True)]
    return (
        f"{len(gaps) - len(others)} of {len(gaps)} tokens are transformers' likeliest, the others "
        f"within {max(gaps):.2f} nats of it; {sum(a == b for a, b in pairs)} of {len(pairs)} "
        "resumed requests went on with the same tokens"
    )


def drafting(models: TinyModels) -> dict[str, Any]:
    return {"method": "eagle3", "model": models.draft(), "num_speculative_tokens": 3}


def drafts(engine: VllmEngine) -> tuple[int, int, int]:
    assert engine.engine_stats.drafts is not None
    return engine.engine_stats.drafts


# Two of the long prompts do not find room side by side with their answers.
FEW_BLOCKS = {
    "block_size": 16,
    "num_gpu_blocks_override": 12,
    "max_model_len": 176,
    "max_num_seqs": 2,
}


@pytest.mark.parametrize(
    "asynchronous",
    [pytest.param(True, marks=pytest.mark.quick), False],
    ids=["asynchronous", "synchronous"],
)
async def test_preempted_requests_go_on(
    models: TinyModels, caches: Path, evidence: Evidence, asynchronous: bool
) -> None:
    """Found wrong with tpu-inference's own worker: `serving.engine.tpu.known_tokens` says why."""
    expected = models.expected[LLAMA]
    args = FEW_BLOCKS | {"async_scheduling": asynchronous}
    async with engine_of(models, caches, LLAMA, tensor(4), **args) as engine:
        assert await answer_all(engine, models, LLAMA, "one", len(expected[0])) == expected
        num_resumed = await resumed(engine, models, LLAMA, expected)
        num_preempted = engine.engine_stats.num_preemptions
    assert num_preempted > 0
    evidence.parity(
        f"{LLAMA}, TP 4, {num_preempted} preemptions, "
        f"{'asynchronous' if asynchronous else 'synchronous'} scheduling, also resumed after "
        f"{', '.join(map(str, SPLITS))} tokens",
        "4 devices of one host",
        TRANSFORMERS,
        len(expected) + num_resumed,
    )


async def test_cache_in_the_memory_of_the_host(
    models: TinyModels, caches: Path, evidence: Evidence
) -> None:
    """What a device's cache of 12 blocks gives up is found again in the memory of the host."""
    expected = models.expected[LLAMA]
    # As an engine is started that has nothing of it but the connector in its configuration.
    planned = engine_settings(
        EngineRequirements(
            LLAMA,
            slice_shape("v6e", "2x2"),
            ENGINE_ARGS | FEW_BLOCKS | {"kv_transfer_config": OFFLOAD},
        ),
        None,
    )
    shape = Shape("TP 4", 4, planned.engine_args, planned.environment)
    async with engine_of(models, caches, LLAMA, shape) as engine:
        for number in range(3):
            # One after the other, so that each gives up what those before it have.
            for at, prompt in enumerate(models.prompts[LLAMA]):
                asked = [request(f"{number}-{at}", prompt, greedy(len(expected[at])))]
                assert await answers(engine, asked) == [expected[at]], f"round {number}"
        num_resumed = await resumed(engine, models, LLAMA, expected)
        found = engine.engine_stats.external_prefix_cache
    assert found is not None
    assert found[1] > 0, "nothing was found in the host's memory"
    evidence.parity(
        f"{LLAMA}, TP 4, with a KV cache in the host's memory ({found[1]} prompt tokens found "
        f"there), also resumed after {', '.join(map(str, SPLITS))} tokens",
        "4 devices of one host",
        TRANSFORMERS,
        3 * len(expected) + num_resumed,
    )
