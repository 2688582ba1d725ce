"""The identity of a model version: the tokens that its engines may emit.

A stream may go on at another engine only if both have one version. So a setting that could change
a token belongs to the version. A setting that only affects how much an engine holds, or how fast it
is, does not. Does not know the contents of a folder of weights: the `version` label distinguishes
other weights under the same `source`. Pure.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

# Engine arguments that leave the tokens of a request as they are: how many requests and tokens an
# engine takes at once, how much memory it may use, what it reports. They do change which requests
# share a batch, and so how a sum is rounded; so does the load of any moment. All others count.
LIMIT_ARGS = frozenset(
    {
        "cpu_offload_gb",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_num_batched_tokens",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "max_num_seqs",
        "num_gpu_blocks_override",
        "show_hidden_metrics_for_version",
        "max_parallel_loading_workers",
        "enable_prefix_caching",
        "prefix_caching_hash_algo",
        "scheduling_policy",
        "collect_detailed_traces",
        "otlp_traces_endpoint",
    }
)
# Environment variables of which the same is true.
LIMIT_ENV = frozenset(
    {
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_LOGGING_LEVEL",
        "VLLM_LOGGING_PREFIX",
        "VLLM_NO_USAGE_STATS",
        "DO_NOT_TRACK",
        "HF_TOKEN",
        "TPU_LOG_DIR",
    }
)
_NUM_HEX = 12


def model_version(
    *,
    source: str,
    engine: str,
    engine_args: Mapping[str, object],
    engine_env: Mapping[str, str],
    adapters: Sequence[tuple[str, str]],
    label: str | None,
) -> str:
    """Returns the version's id: `<digest>`, or `<label>-<digest>` where it has a label.

    `adapters` are names and paths. Their order does not matter, nor does that of other arguments.
    """
    identity = {
        "source": source,
        "engine": engine,
        "engine_args": {name: engine_args[name] for name in engine_args.keys() - LIMIT_ARGS},
        "engine_env": {name: engine_env[name] for name in engine_env.keys() - LIMIT_ENV},
        "adapters": sorted(adapters),
        "label": label,
    }
    digest = digest_of(identity)
    return digest if label is None else f"{label}-{digest}"


def digest_of(value: object) -> str:
    """Returns twelve hexadecimal digits for a JSON value, equal for equal values.

    The order of keys does not matter.

    Raises:
        TypeError: it holds something that JSON has no form for.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_NUM_HEX]
