"""Multiplies groups of rows by a matrix each, without tokamax's TPU kernel, in `jax.numpy`.

Owns the sums and the meaning of the arguments, as tpu-inference 0.32.0 gives them. Made for tiny
models: every row is multiplied by every matrix. Weights are exact; the kernel also quantises the
rows where the chip multiplies such numbers, which is not done here.
"""

from typing import Any

import jax
import jax.numpy as jnp

# Arguments of the kernel that change its speed, or its rounding, and not what it computes.
_TUNING = {"tile_info", "vmem_limit_bytes", "precision", "acc_dtype", "maybe_quantize_lhs"}


def calculate_tiling(*_: Any, **__: Any) -> None:
    """Stands in for the choice of tile sizes, which nothing here asks for.

    Raises:
        NotImplementedError: something did.
    """
    raise NotImplementedError("there are no tiles on CPU")


def grouped_matmul(
    lhs: jax.Array,  # [row, in], sorted by group
    rhs: jax.Array,  # [own group, in, out]
    group_sizes: jax.Array,  # i32[group], rows of each group, own or not
    rhs_scale: jax.Array | None = None,  # [own group, block of in, 1, out]
    rhs_bias: jax.Array | None = None,  # [own group, 1, out]
    group_offset: jax.Array | None = None,  # i32[1] or i32[], the first own group
    *,
    preferred_element_type: Any = None,
    zero_initialize: bool = True,
    fuse_act: str | None = None,
    **others: Any,
) -> jax.Array:
    """Returns each row times the matrix of its group; with `fuse_act` half as many columns.

    `None` for `rhs_scale`: not quantised; for `preferred_element_type`: as `lhs`. Rows of groups
    that are not own are zero, or, without `zero_initialize`, not numbers: the kernel leaves there
    what was in memory, and nobody may read it.

    Raises:
        NotImplementedError: an argument that would change the result is not known here.
    """
    unknown = {name for name, value in others.items() if value is not None} - _TUNING
    if unknown:
        raise NotImplementedError(f"grouped products on CPU do not know {sorted(unknown)}")
    weights = rhs.astype(jnp.float32)
    if rhs_scale is not None:
        num_in = rhs.shape[1]
        per_row = jnp.repeat(rhs_scale[:, :, 0, :], num_in // rhs_scale.shape[1], axis=1)
        weights = weights * per_row
    products = jnp.einsum("ri,gio->gro", lhs.astype(jnp.float32), weights)
    if rhs_bias is not None:
        products = products + rhs_bias
    if fuse_act is not None:
        products = _activated(products, fuse_act)
    row = jnp.arange(lhs.shape[0])
    group = jnp.sum(row[:, None] >= jnp.cumsum(group_sizes)[None, :], axis=1)
    if group_offset is not None:
        group = group - jnp.reshape(group_offset, ())
    is_own = (group >= 0) & (group < rhs.shape[0])
    chosen = products[jnp.clip(group, 0, rhs.shape[0] - 1), row]
    unread = 0.0 if zero_initialize else jnp.nan
    result = jnp.where(is_own[:, None], chosen, unread)
    return result.astype(preferred_element_type or lhs.dtype)


def _activated(products: jax.Array, activation: str) -> jax.Array:
    """Returns the gated half; the gate's columns come first, then as many that it lets through."""
    gate, up = jnp.split(products, 2, axis=-1)
    match activation:
        case "silu":
            return jax.nn.silu(gate) * up
        case "gelu":
            return jax.nn.gelu(gate) * up
        case "gelu_tanh":
            return jax.nn.gelu(gate, approximate=True) * up
        case _:
            raise NotImplementedError(f"grouped products on CPU do not know {activation}")
