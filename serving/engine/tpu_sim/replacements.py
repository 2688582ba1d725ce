"""Lists what replaces the TPU, piece by piece, and so what no run on it proves.

Owns the table and the only way to replace something of another package. Imports none of them. Each
name that is replaced belongs to a row of the table, so the table is as long as the code.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

# Switches the simulation on, in every process of it: gateway, engine host, engine core, workers.
ENABLED_VARIABLE: Final = "SLICEWISE_TPU_SIM"


@dataclass(frozen=True, slots=True)
class Replacement:
    """The replacement of one thing that a TPU host has and this machine has not."""

    what: str
    names: tuple[str, ...]  # the attributes replaced, with the package they belong to
    stand_in: str
    not_proven: str


ATTENTION = Replacement(
    "attention kernel",
    ("tpu_inference.layers.common.attention_interface.ragged_paged_attention",),
    "the same sums written with `jax.numpy`; sharding, KV layout and metadata around it are real",
    "the Pallas kernel: its numbers, its block sizes, its use of VMEM and SMEM, its speed",
)
COMPILE_OPTIONS = Replacement(
    "compiler options of the TPU",
    ("jax.jit",),
    "options named `xla_tpu_*` are left out",
    "what these options do, and that the TPU compiler takes them",
)
DEVICE_MEMORY = Replacement(
    "size of a device's memory",
    ("tpu_inference.utils.get_device_hbm_limit",),
    "64 MiB for each device",
    "how much fits: number of KV blocks, memory of programs, out-of-memory errors",
)
COORDINATES = Replacement(
    "place of a device in the slice, and which of joined slices it is in",
    (
        "jaxlib._jax.Device.coords",
        "jaxlib._jax.Device.core_on_chip",
        "jaxlib._jax.Device.slice_index",
    ),
    "a grid four wide, by device id; the slice by the process, in their order",
    "the order of devices in a mesh on the real interconnect, and any network between slices",
)
DEVICE_PUT = Replacement(
    "transfer of arrays to devices",
    ("jax._src.interpreters.pxla.batched_device_put", "jax.device_put"),
    "numpy arrays are copied first, because CPU devices use the caller's memory, which the runner "
    "writes again at once; over several processes each one places its own shards",
    "transfers between host and TPU, their order and their speed",
)
RENDEZVOUS = Replacement(
    "hosts of a slice finding each other",
    ("jax.devices",),
    "`jax.distributed` at an address that the engine host chose; `jax.devices('cpu')` stays this "
    "host's own, as on a TPU host",
    "libtpu's own discovery, ICI, and how long it takes",
)
TORCH_STORAGE = Replacement(
    "release of torch weights after their transfer",
    ("torch.storage.UntypedStorage.resize_",),
    "nothing is released: the CPU array may still use that memory",
    "how much memory a host needs while it loads",
)
TORCH_OPERATORS = Replacement(
    "torch operators that torchax 0.0.13 names and torch 2.13 has no longer",
    ("torch._ops.OpOverloadPacket.__getattr__",),
    "a placeholder for each missing name",
    "models of torchax that would call them; none here does",
)
VISION_MODELS = Replacement(
    "models with images that tpu-inference names on its way to others",
    (
        "sys.modules.vllm.model_executor.models.gemma4_mm",
        "sys.modules.vllm.model_executor.models.qwen3_omni_moe_thinker",
        "sys.modules.vllm.model_executor.models.qwen3_vl",
    ),
    "models that refuse: the index build of torchvision does not load beside torch for CPU",
    "models with images",
)
GROUPED_MATMUL = Replacement(
    "tokamax's grouped matrix multiplication",
    ("sys.modules.tokamax",),
    "the same products written with `jax.numpy`: tokamax needs Python 3.12. Rows that the kernel "
    "leaves as they were in memory are not numbers, so that whoever reads one is found",
    "the kernel: its tiles, its speed, its numbers, and that it quantises activations as well "
    "where the chip multiplies fp8 or int8",
)
CHIP_FACTS = Replacement(
    "a chip's facts, by which kernels are chosen",
    ("jax._src.pallas.mosaic.tpu_info.registry",),
    "those of v5e, which has no SparseCore; tpu-inference then gathers and adds up what experts "
    "give in its own `jax.numpy`",
    "its SparseCore kernels, which v6e, v5p and tpu7x take",
)
BLOCK_COPY = Replacement(
    "copies of blocks into the KV cache, from the host's memory",
    ("tpu_inference.distributed.kv_transfer.multi_layer_copy",),
    "the same blocks written with `jax.numpy`; what is kept, found and given up is real",
    "the Pallas kernel, transfers between host and TPU, and what of them a step hides",
)

REPLACEMENTS: Final = (
    ATTENTION,
    COMPILE_OPTIONS,
    DEVICE_MEMORY,
    COORDINATES,
    DEVICE_PUT,
    RENDEZVOUS,
    TORCH_STORAGE,
    TORCH_OPERATORS,
    VISION_MODELS,
    GROUPED_MATMUL,
    CHIP_FACTS,
    BLOCK_COPY,
)


class ReplacementError(RuntimeError):
    """A name to replace is not in the table. Compare the packages' versions with the lock."""


def claim(replacement: Replacement, full_name: str) -> None:
    """Checks that `replacement` lists `full_name`, which is to be replaced.

    Raises:
        ReplacementError: the table has no row for this name.
    """
    if full_name not in replacement.names:
        message = f"{full_name} is not in the row {replacement.what!r}: {replacement.names}"
        raise ReplacementError(message)


def replace(replacement: Replacement, owner: Any, name: str, stand_in: object) -> None:
    """Puts `stand_in` in the place of `owner.name`, for this process; `owner`: module or class.

    Raises:
        ReplacementError: the table has no row for this name.
    """
    is_class = isinstance(owner, type)
    owner_name = f"{owner.__module__}.{owner.__qualname__}" if is_class else owner.__name__
    claim(replacement, f"{owner_name}.{name}")
    setattr(owner, name, stand_in)


def as_markdown(replacements: Iterable[Replacement] = REPLACEMENTS) -> str:
    """Returns the table as the documentation shows it."""
    lines = ["| of a TPU host | here | therefore not proven |", "|---|---|---|"]
    lines += [f"| {each.what} | {each.stand_in} | {each.not_proven} |" for each in replacements]
    return "\n".join(lines)
