"""Decides which engines share compiled programs, by one digest of all that changes a program.

Owns the parts and the digest. Does not own where the parts come from, nor the store's layout
(`layout`). Pure.

The key decides what is fetched together and never what is run: JAX finds a program by a key of
its own, over the program itself, the devices and the compiler. A part too many costs a compilation,
a part too few costs bytes; neither can make an engine run a wrong program.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pydantic import JsonValue

# Raised when the parts change their meaning: programs under older keys are then found no more.
KEY_FORMAT = 1
_DIGEST_CHARS = 32

# Engine arguments that no program depends on: where weights come from and how they are read, what
# is logged, what requests are called. `hf_token` is also a secret, and people read the records.
_OUTSIDE_ARGS = frozenset(
    {
        "download_dir",
        "load_format",
        "model_loader_extra_config",
        "ignore_patterns",
        "use_tqdm_on_load",
        "safetensors_load_strategy",
        "served_model_name",
        "tokenizer",
        "tokenizer_revision",
        "hf_token",
        "revision",
        "seed",
        "disable_log_stats",
        "enable_log_requests",
        "generation_config",
    }
)
# Variables that change programs, by the start of their names.
_PROGRAM_PREFIXES = (
    "JAX_", "XLA_", "LIBTPU_INIT_ARGS", "RPA_", "MOE_", "MLA_", "ATTN_", "BF16_", "USE_",
    "REQUANTIZE_",
)  # fmt: skip
# And by name. Source: tpu-inference 0.32.0 `envs.py`, read 2026-11-22.
_PROGRAM_VARIABLES = frozenset(
    {
        "MODEL_IMPL_TYPE",
        "DRAFT_MODEL_IMPL_TYPE",
        "NEW_MODEL_DESIGN",
        "PREFILL_SLICES",
        "DECODE_SLICES",
        "ENABLE_QUANTIZED_MATMUL_KERNEL",
        "DISABLE_MLA_Q_ACTIVATION_QUANTIZATION",
        "DISABLE_WEIGHT_REQUANTIZATION",
        "LAYOUT_Q_PROJ_AS_NDH",
        "CONTINUE_DECODE_EOS_CHECK_INTERVAL",
        "FORCE_MOE_RANDOM_ROUTING",
        "JITTED_MM_MODULE_KEYS",
        "REGISTER_MM_MODULE_CUSTOM_PYTREE_CLASSES",
        "TPU_OFFLOAD_NUM_STAGING_BLOCKS",
        "TPU_OFFLOAD_BLOCK_SIZE_BUCKETS",
        "TPU_MESH_SORT_BY_COORDS",
        "TPU_MESH_ATTN_DP_RING",
        "ENABLE_RS_KERNEL",
        "VLLM_MOE_CHUNK_SIZE",
        "VLLM_TPU_BUCKET_PADDING_GAP",
        "MIN_TOKEN_BUCKET",
        "ONEHOT_MOE_PERMUTE_THRESHOLD",
        "PROFILE_SINGLE_DEVICE",
        "LORA_MODULE_PATH",
        "SC_ALLREDUCE_ALLGATHER_OFFLOAD_MIN_BYTES",
        "SLICE_ROPE_CACHE",
        "ROPE_CACHE_ROW_MAJOR",
        "HASH_TABLE_ROW_MAJOR",
        "RAGGED_GATHER_MAX_ROW_SUBCHUNKS",
        "RAGGED_GATHER_TRIM_ROWS",
        "SAMPLING_MICROBATCH_SIZE",
        "DISTRIBUTED_SAMPLING_MAX_TOP_K",
        "SKIP_MAMBA_SCHEDULER_BLOCKS",
    }
)
# The prefixes among them that set where programs are kept and how JAX is watched.
_OUTSIDE_PREFIXES = (
    "JAX_PERSISTENT_CACHE_",
    "JAX_COMPILATION_CACHE_",
    "JAX_PROFILER_",
    "USE_JAX_PROFILER_SERVER",
    "JAX_LOG",
)
# What a new revision of the same architecture changes. Its programs are mostly the same ones.
_OF_THE_WEIGHTS = ("source", "revision")


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """The facts that an engine's programs depend on.

    `revision` is a fingerprint of the weights and `config` of the model's `config.json`; `None`
    means that it is not known. `versions` are packages by name. `args` are vLLM's engine arguments,
    as they are started with, and `env` the variables of the engine's processes, all of them.
    """

    source: str
    revision: str | None
    config: str | None
    versions: Mapping[str, str]
    generation: str
    topology: str
    chips_per_host: int
    num_slices: int = 1
    args: Mapping[str, JsonValue] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheKey:
    """The digest of an engine's programs and its parts, which are written beside the programs."""

    parts: Mapping[str, JsonValue]

    @cached_property
    def digest(self) -> str:
        """The digest of 128 bits, in hexadecimal."""
        return _digest(self.parts)

    @cached_property
    def family(self) -> str:
        """The digest without the weights, for all revisions of one architecture set up alike."""
        return _digest({n: value for n, value in self.parts.items() if n not in _OF_THE_WEIGHTS})

    @property
    def record(self) -> bytes:
        """The parts as JSON, for a reader."""
        return json.dumps(dict(self.parts), indent=2, sort_keys=True).encode()


def cache_key(facts: ProgramFacts) -> CacheKey:
    """Returns an engine's key; neither order nor values that no program uses change it."""
    return CacheKey(
        {
            "format": KEY_FORMAT,
            "source": facts.source,
            "revision": facts.revision,
            "config": facts.config,
            "versions": dict(facts.versions),
            "generation": facts.generation,
            "topology": facts.topology,
            "chips_per_host": facts.chips_per_host,
            "num_slices": facts.num_slices,
            "args": {name: v for name, v in facts.args.items() if name not in _OUTSIDE_ARGS},
            "env": {name: value for name, value in facts.env.items() if changes_programs(name)},
        }
    )


def changes_programs(variable: str) -> bool:
    """Returns whether an environment variable is known to change what is compiled."""
    if variable.startswith(_OUTSIDE_PREFIXES):
        return False
    return variable in _PROGRAM_VARIABLES or variable.startswith(_PROGRAM_PREFIXES)


def _digest(parts: Mapping[str, JsonValue]) -> str:
    text = json.dumps(dict(parts), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]
