"""Computes ragged paged attention without the TPU kernel: the same contract in `jax.numpy`.

Owns the sums. The layout of the KV cache is the kernel's own (`merge_kv`). Made for tiny models: it
reads all pages of a sequence for each of its tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
from tpu_inference.kernels.ragged_paged_attention.v3.kernel import merge_kv

# Arguments of the kernel that change its speed and not its result.
_TUNING = {
    "chunk_prefill_size", "d_block_sizes", "p_block_sizes", "m_block_sizes", "vmem_limit_bytes",
    "debug_mode", "disable_bounds_checks", "disable_semaphore_checks", "skip_kv_mask",
}  # fmt: skip
_MASKED = -1e30


def ragged_paged_attention(
    queries: jax.Array,  # [token, head, head_dim]
    keys: jax.Array,  # [token, kv_head, head_dim]
    values: jax.Array,  # [token, kv_head, head_dim]
    kv_cache: jax.Array,  # [page, slot, 2 * kv_head / packing, packing, padded head_dim]
    kv_lens: jax.Array,  # i32[sequence], with the tokens of this step
    page_indices: jax.Array,  # i32[sequence * pages of a sequence]
    cu_q_lens: jax.Array,  # i32[sequence + 1], where each sequence's tokens begin
    distribution: jax.Array,  # i32[3], the last is the number of sequences
    *,
    sm_scale: float = 1.0,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    **others: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns each token's attention to its sequence, and the cache with the step's keys, values.

    Rows of `queries` behind the last sequence's tokens are padding; their output is zero.

    Raises:
        NotImplementedError: an argument that would change the result is not known here.
    """
    unknown = {name for name, value in others.items() if value is not None} - _TUNING
    if unknown:
        raise NotImplementedError(f"attention on CPU does not know {', '.join(sorted(unknown))}")
    sequence, position, is_real = _places(queries.shape[0], kv_lens, cu_q_lens, distribution)
    pages = page_indices.reshape(kv_lens.shape[0], -1)
    if update_kv_cache:
        kv_cache = _written(kv_cache, keys, values, pages[sequence], position, is_real)
    cached_keys, cached_values = _read(kv_cache, pages, keys.shape[1], keys.shape[2])
    if k_scale is not None:
        cached_keys = cached_keys * k_scale
    if v_scale is not None:
        cached_values = cached_values * v_scale

    at = jnp.arange(cached_keys.shape[1])[None, :]
    sees = at < kv_lens[sequence][:, None]
    if use_causal_mask:
        sees &= at <= position[:, None]
    if sliding_window is not None:
        sees &= at > position[:, None] - sliding_window

    num_tokens, num_heads, head_dim = queries.shape
    grouped = queries.astype(jnp.float32).reshape(num_tokens, keys.shape[1], -1, head_dim)
    scores = jnp.einsum("tkgd,tskd->tkgs", grouped, cached_keys[sequence]) * sm_scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    weights = jax.nn.softmax(jnp.where(sees[:, None, None, :], scores, _MASKED), axis=-1)
    output = jnp.einsum("tkgs,tskd->tkgd", weights, cached_values[sequence])
    output = jnp.where(is_real[:, None, None, None], output, 0.0)
    return output.reshape(num_tokens, num_heads, head_dim).astype(queries.dtype), kv_cache


def _places(
    num_tokens: int, kv_lens: jax.Array, cu_q_lens: jax.Array, distribution: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns for each row its sequence, its position in it, and whether it is a token at all."""
    num_sequences = distribution[2]
    row = jnp.arange(num_tokens)
    ends = jnp.where(jnp.arange(kv_lens.shape[0]) < num_sequences, cu_q_lens[1:], num_tokens + 1)
    sequence = jnp.minimum(
        jnp.sum(row[:, None] >= ends[None, :], axis=1), jnp.maximum(num_sequences - 1, 0)
    )
    behind_it = cu_q_lens[sequence + 1] - row
    return sequence, kv_lens[sequence] - behind_it, row < cu_q_lens[num_sequences]


def _written(
    kv_cache: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    pages: jax.Array,  # i32[token, page of its sequence]
    position: jax.Array,
    is_real: jax.Array,
) -> jax.Array:
    slots = kv_cache.shape[1]
    nth = jnp.clip(position // slots, 0, pages.shape[1] - 1)
    page = jnp.take_along_axis(pages, nth[:, None], axis=1)[:, 0]
    # What is written to a page that does not exist is dropped.
    page = jnp.where(is_real, page, kv_cache.shape[0])
    rows = merge_kv(keys, values).astype(kv_cache.dtype)
    return kv_cache.at[page, position % slots].set(rows, mode="drop")


def _read(
    kv_cache: jax.Array, pages: jax.Array, num_kv_heads: int, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values, f32[sequence, position, kv_head, head_dim]; heads lie K, V, K, V."""
    cached = kv_cache[pages].astype(jnp.float32)
    cached = cached.reshape(pages.shape[0], -1, *cached.shape[-3:])
    cached = cached.reshape(*cached.shape[:2], -1, cached.shape[-1])
    cached = cached[:, :, : 2 * num_kv_heads, :head_dim]
    return cached[:, :, 0::2], cached[:, :, 1::2]
