"""The programs that take a step's inputs apart, compiled before anybody waits for one.

tpu-inference sends the inputs of a step to the devices as one array and splits it there, by sizes
that depend on the buckets of tokens and of requests. Its own warm-up leaves these small programs
out, so that the first step of each pair of buckets compiled one. Source: tpu-inference 0.32.0
`runner/tpu_runner.py`, `_prepare_inputs`, read 2026-11-22.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from tpu_inference.layers.common.sharding import ShardingAxisName
from tpu_inference.utils import DeviceBuffer, device_array


def compile_step_inputs(runner: Any) -> int:
    """Splits made-up inputs of every step `runner` may have; returns the number of bucket pairs."""
    sharding = NamedSharding(runner.mesh, PartitionSpec(ShardingAxisName.BATCH))  # type: ignore[no-untyped-call]
    selections = runner.num_reqs_paddings
    if runner.speculative_config:
        selections = runner.num_logits_paddings
    num_pairs = 0
    with jax.set_mesh(runner.mesh):  # as in a step: JAX keeps programs apart by it
        for num_tokens, num_selected in bucket_pairs(runner.num_tokens_paddings, selections):
            blob, layout = _inputs(runner, num_tokens, num_selected).build()
            DeviceBuffer.unpack_arrays(device_array(runner.mesh, blob, sharding=sharding), layout)
            num_pairs += 1
    return num_pairs


def bucket_pairs(tokens: Iterable[int], selections: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields the buckets a step can have together: its tokens, and how many outputs are read."""
    selections = list(selections)
    for num_tokens in tokens:
        for before, num_selected in zip([0, *selections], selections, strict=False):
            if before < num_tokens:  # so many requests have at least so many tokens
                yield num_tokens, num_selected


def _inputs(runner: Any, num_tokens: int, num_selected: int) -> DeviceBuffer:
    """Returns the inputs in the order in which `_prepare_inputs` writes them."""
    most = runner.attn_max_num_seqs
    buffer = DeviceBuffer()
    buffer.get_view(num_tokens, key="input_ids")
    buffer.get_view(most + runner.dp_size, key="query_start_loc")
    buffer.get_view(most, key="seq_lens")
    buffer.get_view(num_selected, key="logits_indices")
    for group in range(len(runner.kv_cache_config.kv_cache_groups)):
        columns = runner.input_batch.block_table[group].max_num_blocks_per_req
        buffer.get_view((most, columns), key=f"block_tables_gid_{group}")
    return buffer
