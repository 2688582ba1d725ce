"""Plans a KV cache in the memory of the host, behind that of the devices.

Owns what tpu-inference 0.32.0's `TPUOffloadConnector` needs to work: its variables, the memory that
it takes of the host and of each device, and where it may not be used. Expected, not measured. Pure.

Source of all of it: `offload/`, `envs.py`, `worker/tpu_worker.py`, `platforms/tpu_platform.py` and
`layers/vllm/backends/flash_attn.py` of its wheel, read 2026-11-28.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from serving.domain.errors import Problem
from serving.tpu.requirements import Args, EngineRequirements, count, section

CONNECTOR = "TPUOffloadConnector"
# Where vLLM finds it: it is in no list of vLLM's.
CONNECTOR_MODULE = "tpu_inference.offload.tpu_offload_connector"
_CHUNKS, _STAGING = "TPU_OFFLOAD_NUM_CPU_CHUNKS", "TPU_OFFLOAD_NUM_STAGING_BLOCKS"
_BUCKETS = "TPU_OFFLOAD_BLOCK_SIZE_BUCKETS"
# tpu-inference's own, written down so that budget and engine agree.
_DEFAULT_CHUNKS, _DEFAULT_STAGING = 1024, 128
# It has none by default, and then the first block that it copies ends the engine.
_DEFAULT_BUCKETS = "1,2,4,8,16,32,64"
# A block is 16 to 256 tokens; longer contexts than this begin with the least.
_LONG_TOKENS = 8192
_LEAST_BLOCK, _LARGEST_BLOCK = 16, 256
# Block tables may take half of the scalar memory, of 1 MiB; an entry has 4 bytes.
_TABLE_ENTRIES = 1024 * 1024 // 2 // 4


@dataclass(frozen=True, slots=True)
class HostCache:
    """A cache in the host's memory of `num_blocks` blocks of `block_tokens` tokens.

    `staging_blocks` of them are kept free in the devices' own memory for what is on its way.
    """

    num_blocks: int
    staging_blocks: int
    block_tokens: int

    @property
    def tokens(self) -> int:
        """How many tokens it holds."""
        return self.num_blocks * self.block_tokens

    @property
    def staging_tokens(self) -> int:
        """How many tokens' cache the devices lack for it."""
        return self.staging_blocks * self.block_tokens


def has_host_cache(args: Args) -> bool:
    """Returns whether the engine keeps a cache in the memory of its host."""
    return section(args, "kv_transfer_config").get("kv_connector") == CONNECTOR


def host_cache(args: Args, env: Mapping[str, str]) -> HostCache | None:
    """Returns the cache that an engine with these settings keeps; `None` if it keeps none.

    `args` have the lengths that a block follows from, unless `block_size` is set by hand.
    """
    if not has_host_cache(args):
        return None
    return HostCache(
        num_blocks=int(env.get(_CHUNKS, _DEFAULT_CHUNKS)),
        staging_blocks=int(env.get(_STAGING, _DEFAULT_STAGING)),
        block_tokens=count(args, "block_size")
        or block_tokens(count(args, "max_model_len") or 0, count(args, "max_num_seqs") or 1),
    )


def block_tokens(max_model_len: int, max_num_seqs: int) -> int:
    """Returns the tokens of a block, as tpu-inference chooses them where nobody does."""
    wanted = _LEAST_BLOCK
    if max_model_len <= _LONG_TOKENS:
        wanted = min(_LARGEST_BLOCK, max(_LEAST_BLOCK, _power_of_two(max_model_len) // 16))
    blocks_of_one = max(1, _TABLE_ENTRIES // max_num_seqs)
    return max(wanted, _power_of_two(-(-max_model_len // blocks_of_one)))


def host_cache_env(args: Args) -> Iterator[tuple[str, str, str]]:
    """Yields the variables without which it does not work as planned: name, value, reason."""
    if not has_host_cache(args):
        return
    yield (
        _BUCKETS,
        _DEFAULT_BUCKETS,
        "blocks are copied so many at a time; without it the first copy ends the engine",
    )
    yield _CHUNKS, str(_DEFAULT_CHUNKS), "blocks in the host's memory; each is kept once"
    yield _STAGING, str(_DEFAULT_STAGING), "blocks of each device's memory for what is on its way"


def host_cache_problems(path: str, requirements: EngineRequirements) -> Iterator[Problem]:
    """Yields why this engine can have no such cache. `path`: its `engine_args`."""
    if not has_host_cache(requirements.args):
        return
    field = f"{path}.kv_transfer_config.kv_connector"
    if requirements.num_hosts > 1:
        yield Problem(
            field,
            "it waits for as many hosts as the whole Ray cluster has with TPUs, not for those of "
            "the engine, so that of several hosts it never frees what it has copied",
            "allowed: a slice of one host, or no kv_transfer_config",
            CONNECTOR,
        )
    if (count(requirements.args, "pipeline_parallel_size") or 1) > 1:
        yield Problem(
            field,
            "it ends where an engine has pipeline stages",
            "allowed: pipeline_parallel_size 1, or no kv_transfer_config",
            CONNECTOR,
        )


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()
