"""Gives tpu-inference 0.32.0 on CPU devices what it expects of JAX's TPU devices."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import pxla
from jax._src.pallas.mosaic import tpu_info
from jax.experimental.pallas import tpu as pltpu
from jaxlib import _jax

from serving.engine.tpu_sim.replacements import (
    BLOCK_COPY,
    CHIP_FACTS,
    COMPILE_OPTIONS,
    COORDINATES,
    DEVICE_PUT,
    RENDEZVOUS,
    claim,
    replace,
)

_GRID_WIDTH = 4


def drop_tpu_options() -> None:
    """Compiles without the options that only the TPU compiler has."""
    real_jit = jax.jit

    def jit(*args: Any, **kwargs: Any) -> Any:
        options = kwargs.get("compiler_options")
        if options:
            kept = {n: value for n, value in options.items() if not n.startswith("xla_tpu_")}
            kwargs["compiler_options"] = kept or None
        return real_jit(*args, **kwargs)

    replace(COMPILE_OPTIONS, jax, "jit", jit)


def copy_on_transfer() -> None:
    """Gives devices memory of their own.

    All of JAX's transfers from numpy go through `batched_device_put`: `jax.device_put`,
    `jnp.asarray`, and `jax.make_array_from_callback`, by which tpu-inference places a step's inputs
    over several hosts. Without the copy some runs give wrong tokens, and no error.
    """
    real_put = pxla.batched_device_put

    def batched_device_put(
        aval: Any, sharding: Any, xs: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        own: dict[int, Any] = {}
        for x in xs:
            if id(x) not in own:
                own[id(x)] = x.copy() if isinstance(x, np.ndarray) else x
        return real_put(aval, sharding, [own[id(x)] for x in xs], *args, **kwargs)

    replace(DEVICE_PUT, pxla, "batched_device_put", batched_device_put)


def give_coordinates() -> None:
    """Gives each device a place, which mesh construction reads."""
    replace(COORDINATES, _jax.Device, "coords", property(_coordinates))
    replace(COORDINATES, _jax.Device, "core_on_chip", property(lambda _: 0))


def give_slices(hosts_per_slice: int) -> None:
    """Gives each device the slice it is in, which a mesh over several slices reads."""
    slice_index = property(lambda device: device.process_index // hosts_per_slice)
    replace(COORDINATES, _jax.Device, "slice_index", slice_index)


def give_chip_facts() -> None:
    """Lets what asks for the chip's facts find those of v5e, on devices that are CPUs."""
    claim(CHIP_FACTS, f"{tpu_info.__name__}.registry")
    tpu_info.registry["cpu"] = lambda: pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5E, 1)


def copy_blocks_without_kernel(kv_transfer: Any) -> None:
    """Copies blocks of all layers' caches as tpu-inference's module of that name does."""

    def multi_layer_copy(
        *,
        src_array: list[jax.Array],  # of a layer [block, slot, ...]
        dest_array: list[jax.Array],  # of a layer, as many or more blocks
        src_offsets: jax.Array,  # i32[copy], which block
        dest_offsets: jax.Array,  # i32[copy]
        **_: Any,  # how the kernel is spread; and sizes, which are one block each
    ) -> list[jax.Array]:
        pairs = zip(src_array, dest_array, strict=True)
        return [dest.at[dest_offsets].set(src[src_offsets]) for src, dest in pairs]

    replace(BLOCK_COPY, kv_transfer, "multi_layer_copy", multi_layer_copy)


def join_hosts(coordinator: str, num_hosts: int, host: int) -> None:
    """Makes this process one host of a slice or multislice. Waits for the others (300 s).

    `coordinator` is an address of the first host. It listens there and nowhere else.
    """
    real_devices = jax.devices
    real_put = jax.device_put

    def devices(backend: Any = None) -> list[Any]:
        if backend == "cpu":
            return list(jax.local_devices(backend="cpu"))
        return list(real_devices(backend))

    def device_put(x: Any, device: Any = None, **kwargs: Any) -> Any:
        if not isinstance(device, jax.sharding.Sharding) or device.is_fully_addressable:
            return real_put(x, device, **kwargs)
        return jax.tree.map(lambda each: _place(each, device, real_put), x)

    replace(RENDEZVOUS, jax, "devices", devices)
    replace(DEVICE_PUT, jax, "device_put", device_put)
    jax.distributed.initialize(coordinator, num_hosts, host, coordinator_bind_address=coordinator)


def _place(value: Any, sharding: jax.sharding.Sharding, real_put: Any) -> Any:
    """Shards one value that every host has; no copies pass between CPU devices of two processes."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return real_put(value, sharding)
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = _place(jax.random.key_data(value), sharding, real_put)
        return jax.random.wrap_key_data(data)
    on_host = np.asarray(value)
    return jax.make_array_from_callback(on_host.shape, sharding, lambda index: on_host[index])


def _coordinates(device: Any) -> tuple[int, int, int]:
    return (device.id % _GRID_WIDTH, device.id // _GRID_WIDTH, 0)
