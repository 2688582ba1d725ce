"""The memory of one device: weights, key-value cache, and the other needs of a step.

Owns that arithmetic for tpu-inference 0.32.0, whose layouts it follows; the figures are expected
ones, nothing of it was measured on a TPU. Does not own which sharding is right (`settings`), nor
the remedy when it does not fit (`plan`). Pure.

tpu-inference gives the cache what `gpu_memory_utilization` leaves of the memory beside the weights
and measures no step before, so that all activations have to live in the rest. Source:
`worker/tpu_worker.py`, `runner/kv_cache.py`, `kernels/ragged_paged_attention/v3`, read 2026-11-21.
"""

from dataclasses import dataclass

from serving.domain.topology import GIB, Generation, SliceShape
from serving.tpu.model_facts import ModelFacts

MIB = 1024**2
# What XLA does not hand out of the memory of a device: its out-of-memory messages name 15.75G for
# v5e and 31.25G for v6e (public logs of many projects, read 2026-11-21). For the others the table
# in `serving.domain.topology` is already at or below what those messages name.
_HELD_BACK_BYTES = {Generation.V5E: 256 * MIB, Generation.V6E: 768 * MIB}
# Lanes of a vector register: the kernel pads a head to a multiple of it; 64 has a kernel of its own
# in which key and value share the lanes of one. Source: as above.
_LANES = 128
# A cache row is made of 32-bit words. Source: as above.
_WORD_BYTES = 4
_CACHE_BYTES = {"auto": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "float32": 4}
# Buffers of the width of the residual, of the MLP and of the logits that are alive at once, as
# upper guesses of ours: XLA plans them, and its report of the first run replaces them.
_RESIDUAL_BUFFERS = 6
_MLP_BUFFERS = 3
_LOGIT_BUFFERS = 3
# Only where they are so many times what is left is an engine refused. They are 2 % more than a
# recipe of Google's leaves, which runs: Qwen3-32B on four chips of v6e (`published`).
_SURE_TIMES = 1.5


@dataclass(frozen=True, slots=True)
class Sharding:
    """The layout of a model over devices. `tensor` counts the shards of an MLP within a stage.

    Among those shards, `attention_data` groups each hold the whole attention and their own
    sequences. Each of the `copies` of the model holds all of that once: on a slice each of a
    multislice, or on as many parts of one slice.
    """

    tensor: int
    pipeline: int = 1
    attention_data: int = 1
    copies: int = 1

    @property
    def attention_shards(self) -> int:
        """The number of parts that the heads of one attention are divided into."""
        return max(1, self.tensor // self.attention_data)


@dataclass(frozen=True, slots=True)
class MemoryRequirements:
    """The requirements of an engine. Lengths are tokens; `utilization` is a share of the memory.

    `staging_tokens`: the tokens whose cache is kept free for copies to and from the host.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    utilization: float
    kv_cache_dtype: str = "auto"
    staging_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HbmBudget:
    """The memory of the fullest device, in bytes, and the size of its cache.

    A negative `cache_bytes` means that the weights alone are too large. `kv_bytes_per_token` is for
    one device, `cache_tokens` for the whole engine, and `tokens_per_group` for the devices that one
    sequence is on.
    """

    hbm_bytes: int
    reserve_bytes: int
    workspace_bytes: int
    weights_bytes: int
    cache_bytes: int
    kv_bytes_per_token: int
    cache_groups: int
    max_model_len: int

    @property
    def tokens_per_group(self) -> int:
        """The tokens that fit into one group's cache: the longest that a sequence can get."""
        return max(0, self.cache_bytes) // self.kv_bytes_per_token

    @property
    def cache_tokens(self) -> int:
        """The tokens in all caches of the engine."""
        return self.tokens_per_group * self.cache_groups

    @property
    def fits(self) -> bool:
        """True if a step has room and one request of the longest kind can run."""
        return not self.complaints

    @property
    def complaints(self) -> tuple[str, ...]:
        """The parts that do not fit, with the numbers; empty when everything does."""
        found = []
        if self.cache_bytes <= 0:
            found.append(
                f"weights of {gib(self.weights_bytes)} a device are more than the "
                f"{gib(self.hbm_bytes - self.reserve_bytes)} it has for weights and cache"
            )
        elif self.tokens_per_group < self.max_model_len:
            found.append(
                f"one request of max_model_len {self.max_model_len} needs more than the "
                f"{self.tokens_per_group} tokens that the cache holds"
            )
        if self.workspace_bytes > _SURE_TIMES * self.reserve_bytes:
            found.append(self._short_of_activations)
        return tuple(found)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What may be too little, by a guess that is no reason to refuse."""
        is_doubtful = self.reserve_bytes < self.workspace_bytes <= _SURE_TIMES * self.reserve_bytes
        return (self._short_of_activations,) if is_doubtful else ()

    @property
    def _short_of_activations(self) -> str:
        return (
            f"a step needs an expected {gib(self.workspace_bytes)} of activations, and "
            f"gpu_memory_utilization leaves {gib(self.reserve_bytes)}"
        )


def gib(num_bytes: float) -> str:
    """Returns the bytes in GiB, for a reader."""
    return f"{num_bytes / GIB:.2f} GiB"


def usable_hbm_bytes(shape: SliceShape) -> int:
    """Returns the bytes of one device's memory that programs get."""
    return shape.hbm_bytes_per_device - _HELD_BACK_BYTES.get(shape.generation, 0)


def hbm_budget(
    facts: ModelFacts, shape: SliceShape, sharding: Sharding, requirements: MemoryRequirements
) -> HbmBudget:
    """Returns the budget of the fullest device. `facts` have to be countable."""
    hbm = usable_hbm_bytes(shape)
    reserve = int(hbm * (1 - requirements.utilization))
    weights = weight_bytes(facts, sharding)
    per_token = kv_bytes_per_token(facts, sharding, requirements.kv_cache_dtype)
    staging = requirements.staging_tokens * per_token
    return HbmBudget(
        hbm_bytes=hbm,
        reserve_bytes=reserve,
        workspace_bytes=_workspace_bytes(facts, sharding, requirements),
        weights_bytes=weights,
        cache_bytes=hbm - reserve - weights - staging,
        kv_bytes_per_token=per_token,
        cache_groups=sharding.attention_data * sharding.copies,
        max_model_len=requirements.max_model_len,
    )


def weight_bytes(facts: ModelFacts, sharding: Sharding) -> int:
    """Returns the bytes of weights on the fullest device.

    With more shards than KV heads each shard has one whole head, so that heads are held repeatedly.
    Norms and routers are on every device.
    """
    heads_here = max(1.0, facts.num_kv_heads / sharding.attention_shards)
    linear = (
        facts.q_parameters / sharding.attention_shards
        + heads_here * facts.kv_parameters_per_head
        + facts.mlp_parameters / sharding.tensor
    )
    layers = -(-facts.num_layers // sharding.pipeline)
    # Of a pipeline the first stage has the embedding and the last the head; tied, each has it.
    num_ends = 1 if facts.is_tied or sharding.pipeline > 1 else 2
    ends = num_ends * facts.embedding_parameters / sharding.tensor + facts.hidden_size
    weights = facts.weights
    return int(
        layers * (linear * weights.linear_bytes + facts.other_parameters * weights.other_bytes)
        + ends * weights.other_bytes
    )


def kv_bytes_per_token(facts: ModelFacts, sharding: Sharding, dtype: str) -> int:
    """Returns the cache bytes of one token on one device, over its stage's layers, with padding.

    Raises:
        ValueError: the cache's dtype is not known here.
    """
    if dtype not in _CACHE_BYTES:
        raise ValueError(f"kv_cache_dtype {dtype}; known: {', '.join(sorted(_CACHE_BYTES))}")
    itemsize = int(facts.weights.other_bytes) if dtype == "auto" else _CACHE_BYTES[dtype]
    packing = _WORD_BYTES // itemsize
    heads = max(1, facts.num_kv_heads // sharding.attention_shards)
    if facts.head_dim == _LANES // 2:
        rows, lanes = heads, _LANES
    else:
        rows, lanes = 2 * heads, _align(facts.head_dim, _LANES)
    layers = -(-facts.num_layers // sharding.pipeline)
    return layers * _align(rows, packing) * lanes * itemsize


def _workspace_bytes(
    facts: ModelFacts, sharding: Sharding, requirements: MemoryRequirements
) -> int:
    """Returns an upper estimate, in bytes, of a step's activations on one device."""
    itemsize = facts.weights.other_bytes
    qkv = (facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim / sharding.attention_shards
    mlp = facts.experts_per_token * facts.intermediate_size / sharding.tensor
    per_token = _RESIDUAL_BUFFERS * facts.hidden_size + qkv + _MLP_BUFFERS * mlp
    # Sampling gathers the logits of a step as float32 of the whole vocabulary.
    logits = _LOGIT_BUFFERS * requirements.max_num_seqs * facts.vocab_size * 4
    return int(requirements.max_num_batched_tokens * per_token * itemsize + logits)


def _align(size: int, step: int) -> int:
    return -(-size // step) * step
