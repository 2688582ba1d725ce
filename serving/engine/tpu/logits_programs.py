"""Keeps logits alike for all that requests ask for, and compiles what their fields take.

In tpu-inference 0.32.0 the logits of a step leave the model spread over the devices by their
vocabulary. A grammar and log-probabilities of prompts each leave them spread otherwise, and JAX
compiles each later program anew for that. Its warm-up has the grammar's program for logits that are
not spread at all, and of prompts the last program alone, up to 1,024 tokens (run on JAX CPU with
four devices, 2026-11-26: nine programs late in the first of 11 mixed requests). Here both give
logits back as the model does, so that only their own programs are added to the warm-up.
"""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tpu_inference.layers.common.sharding import ShardingAxisName
from tpu_inference.layers.jax.sample.sampling import (
    _build_prompt_target_ids,
    compute_and_gather_prompt_logprobs,
)
from tpu_inference.utils import device_array, to_jax_dtype

from serving.engine.tpu.step_inputs import bucket_pairs

logger = logging.getLogger(__name__)


def compile_logits_programs(runner: Any) -> int:
    """Compiles what requests under grammars and with log-probabilities of prompts need.

    Changes `runner` such that they leave logits as they are without. Not what is refused: both with
    speculation, grammars with data parallelism, log-probabilities of prompts beside other media.
    Returns the number of shapes.
    """
    if not runner.is_last_rank or runner.is_pooling_model or runner.speculative_config:
        return 0
    num_shapes = 0
    with jax.set_mesh(runner.mesh):  # as in a step: JAX keeps programs apart by it
        if runner.vllm_config.sharding_config.total_dp_size == 1:
            _keep_after_grammars(runner)
            num_shapes += _compile_grammars(runner)
        if not runner.is_multimodal_model:
            _keep_after_prompts(runner)
            num_shapes += _compile_prompts(runner)
    return num_shapes


def as_model_leaves_it(runner: Any) -> NamedSharding:
    """Returns how logits are spread over the devices when they leave the model."""
    spec = PartitionSpec(ShardingAxisName.MLP_DATA, ShardingAxisName.MLP_TENSOR)  # type: ignore[no-untyped-call]
    return NamedSharding(runner.mesh, spec)  # type: ignore[no-untyped-call]


def _keep_after_grammars(runner: Any) -> None:
    manager = runner.structured_decoding_manager
    decode = manager.structured_decode_fn

    @functools.partial(jax.jit, out_shardings=as_model_leaves_it(runner))
    def decode_alike(is_asked: Any, masks: Any, logits: Any, bits: Any) -> Any:
        return decode(is_asked, masks, logits, bits)

    manager.structured_decode_fn = decode_alike


def _keep_after_prompts(runner: Any) -> None:
    select, sharding = runner._select_from_array_fn, as_model_leaves_it(runner)

    @functools.partial(jax.jit, static_argnums=(2, 3), out_shardings=sharding)
    def select_alike(logits: Any, indices: Any, mesh: Any, pcp_size: int) -> Any:
        return select(logits, indices, mesh, pcp_size)

    def select_rows(array: Any, indices: Any, mesh: Any, pcp_size: int = 1) -> Any:
        # Without log-probabilities of a prompt it is hidden states from which rows are selected.
        chosen = select_alike if array.sharding == sharding else select
        return chosen(array, indices, mesh, pcp_size)

    runner._select_from_array_fn = select_rows


def _compile_grammars(runner: Any) -> int:
    logits_dtype = full_logits_dtype(runner)
    for num_requests in runner.num_reqs_paddings:
        logits = jax.jit(
            functools.partial(jnp.zeros, (num_requests, runner.vocab_size), logits_dtype),
            out_shardings=as_model_leaves_it(runner),
        )()
        is_asked, masks, bits = device_array(
            runner.mesh,
            (
                runner.require_structured_out_cpu[:num_requests],
                runner.grammar_bitmask_cpu[:num_requests],
                runner.structured_decode_arange,
            ),
        )
        manager = runner.structured_decoding_manager
        manager.structured_decode_fn(is_asked, masks, logits, bits).block_until_ready()
    return len(runner.num_reqs_paddings)


def _compile_prompts(runner: Any) -> int:
    """Runs what a step does with logits of all of its tokens, for each bucket of them."""
    num_shapes = 0
    with runner.maybe_setup_dummy_loras(runner.lora_config):
        for num_tokens in runner.num_tokens_paddings:
            try:
                num_shapes += _compile_prompt(runner, num_tokens)
            except jax.errors.JaxRuntimeError as error:
                # For want of memory, most likely. Without such requests the engine does well.
                logger.warning(
                    "prompt_logprobs_not_compiled num_tokens=%d error=%r", num_tokens, str(error)
                )
    return num_shapes


def _compile_prompt(runner: Any, num_tokens: int) -> int:
    by_rank = NamedSharding(runner.mesh, PartitionSpec(ShardingAxisName.ATTN_DATA))  # type: ignore[no-untyped-call]
    full_logits = _full_logits(runner, num_tokens)
    num_shapes = 0
    for _, num_requests in bucket_pairs([num_tokens], runner.num_reqs_paddings):
        rows = device_array(runner.mesh, np.zeros(num_requests, np.int32), sharding=by_rank)
        pcp_size = runner.vllm_config.sharding_config.prefill_cp_size
        runner._select_from_array_fn(full_logits, rows, runner.mesh, pcp_size)
        num_shapes += 1
    targets = _build_prompt_target_ids(num_tokens, [], mesh=runner.mesh)
    max_logprobs = runner.model_config.max_logprobs
    in_float32 = full_logits.astype(jnp.float32)
    gathered = compute_and_gather_prompt_logprobs(in_float32, targets, max_logprobs)
    gathered.logprobs.block_until_ready()
    return num_shapes


def _full_logits(runner: Any, num_tokens: int) -> Any:
    """Returns the logits of made-up hidden states, one row for each token."""
    with runner.maybe_select_dummy_loras(runner.lora_config, np.array([num_tokens], np.int32)):
        lora_metadata = runner.lora_utils.extract_lora_metadata()
        hidden = _hidden_states(runner, num_tokens)
        return runner.compute_logits_fn(runner.state_leaves, hidden, lora_metadata)


def _hidden_states(runner: Any, num_tokens: int) -> Any:
    spec = PartitionSpec(ShardingAxisName.ATTN_DATA, None)  # type: ignore[no-untyped-call]
    shape = (num_tokens, runner.model_config.get_hidden_size())
    zeros = functools.partial(jnp.zeros, shape, to_jax_dtype(runner.model_config.dtype))
    sharding = NamedSharding(runner.mesh, spec)  # type: ignore[no-untyped-call]
    return jax.jit(zeros, out_shardings=sharding)()


def full_logits_dtype(runner: Any) -> Any:
    """Returns the precision in which logits leave the model, by a step of the least size."""
    with runner.maybe_setup_dummy_loras(runner.lora_config):
        return _full_logits(runner, runner.num_tokens_paddings[0]).dtype
