"""The programs that choose tokens where an engine guesses, compiled before anybody waits for one.

With speculation a step of tpu-inference 0.32.0 takes the rows of guesses and of what comes behind
them out of the logits, which leaves them spread over the devices in another way, and in the model's
precision. Its warm-up has sampling and judgement for logits as they leave the model, so that those
of a step were compiled late (run on JAX CPU, 2026-11-26: 4 programs in 65 requests). Here the same
is done as in a step. Source: `runner/tpu_runner.py`, `_sample_from_logits`, read 2026-11-28.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tpu_inference.layers.common.sharding import ShardingAxisName
from tpu_inference.layers.jax.sample.sampling import (
    compute_and_gather_logprobs,
    distributed_sampling_allowed,
    sample,
)
from tpu_inference.layers.jax.sample.sampling_metadata import TPUSupportedSamplingMetadata
from tpu_inference.spec_decode.jax.utils import extend_logits_simple
from tpu_inference.utils import device_array

from serving.engine.tpu.logits_programs import as_model_leaves_it, full_logits_dtype


def compile_guess_programs(runner: Any) -> int:
    """Compiles what a step needs that judges guesses; returns the number of shapes, 0 without."""
    if not runner.speculative_config or not runner.is_last_rank or runner.is_pooling_model:
        return 0
    num_shapes = 0
    with jax.set_mesh(runner.mesh):  # as in a step: JAX keeps programs apart by it
        dtype = full_logits_dtype(runner)
        for num_logits in runner.num_logits_paddings:
            logits = jax.jit(
                functools.partial(jnp.zeros, (num_logits, runner.vocab_size), dtype),
                out_shardings=as_model_leaves_it(runner),
            )()
            logits.astype(jnp.float32)
            for num_requests in runner.num_reqs_paddings:
                if num_requests <= num_logits:  # each request has at least one row
                    num_shapes += 1
                    _judge(runner, logits, num_requests)
    return num_shapes


def _judge(runner: Any, logits: jax.Array, num_requests: int) -> None:
    """Does what a step does with these logits, for each kind of request that changes a program."""
    by_rank = NamedSharding(runner.mesh, PartitionSpec(ShardingAxisName.ATTN_DATA))  # type: ignore[no-untyped-call]
    put = functools.partial(device_array, runner.mesh, sharding=by_rank)
    pcp_size = runner.vllm_config.sharding_config.prefill_cp_size
    select = runner._select_from_array_fn
    rows, guesses = np.zeros(num_requests, np.int32), np.zeros(logits.shape[0], np.int32)
    behind = select(logits, put(rows), runner.mesh, pcp_size)
    guessed = select(logits, put(guesses), runner.mesh, pcp_size)
    for is_drawn, has_logprobs in itertools.product((False, True), repeat=2):
        metadata = _metadata(runner, num_requests, is_drawn=is_drawn, has_logprobs=has_logprobs)
        key = later_key = runner.rng_params_for_sampling
        if is_drawn:
            key, later_key = jax.random.split(jax.random.split(key)[1])
        chosen, _ = sample(
            key,
            runner.mesh,
            behind,
            metadata,
            allow_distributed_sampling=distributed_sampling_allowed(
                has_logprobs, runner.model_config.logprobs_mode
            ),
        )
        tokens = runner.rejection_sampler(
            draft_token_ids=put(guesses),
            num_draft_tokens=put(rows),
            draft_probs=None,
            target_logits=guessed,
            bonus_token_ids=chosen,
            sampling_metadata=metadata,
            key=later_key,
        )
        if has_logprobs:
            both = extend_logits_simple(guessed, behind, runner.mesh)
            compute_and_gather_logprobs(both, tokens, runner.model_config.max_logprobs)
        tokens.block_until_ready()


def _metadata(
    runner: Any, num_requests: int, *, is_drawn: bool, has_logprobs: bool
) -> TPUSupportedSamplingMetadata:
    """Returns what a step of such requests has: of greedy ones no temperature, and so on."""
    by_rank = NamedSharding(runner.mesh, PartitionSpec(ShardingAxisName.ATTN_DATA))  # type: ignore[no-untyped-call]
    everywhere = NamedSharding(runner.mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    drawn = {}
    if is_drawn:
        values = {
            "temperature": np.ones(num_requests, np.float32),
            "top_k": np.ones(num_requests, np.int32),
            "top_p": np.ones(num_requests, np.float32),
        }
        drawn = {
            name: device_array(runner.mesh, value, sharding=by_rank)
            for name, value in values.items()
        }
    # tpu-inference tells programs with log-probabilities from those without by its length.
    length = np.zeros(1 if has_logprobs else 2, np.int32)
    return TPUSupportedSamplingMetadata(
        **drawn,
        _cache_collision_dummy=device_array(runner.mesh, length, sharding=everywhere),
        do_sampling=is_drawn,
        logprobs=has_logprobs,
    )
