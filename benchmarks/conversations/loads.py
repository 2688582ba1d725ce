"""The loads: assistants with a system prompt each, and conversations of several turns with them."""

import json
from dataclasses import dataclass
from typing import Any

from loadtest.workload.spec import WorkloadSpec

NUM_GATEWAYS, NUM_ENGINES = 2, 4
# A paced engine: a step takes 20 ms and 1 ms more for each sequence, a prompt 0.25 ms a token.
PACE = {
    "tpot_ms": 20,
    "tpot_per_seq_ms": 1,
    "prefill_tokens_per_s": 4000,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 2048,
    "max_model_len": 4096,
    "kv_cache_tokens": 32_000,
    "block_size": 16,
}
# vLLM's engine on the CPU, with a cache that has room for some of all prompts, as on a chip.
ENGINE_ARGS: dict[str, Any] = {
    "max_model_len": 2048,
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_seqs": 32,
    "gpu_memory_utilization": 0.1,
    "block_size": 32,
    "num_gpu_blocks_override": 512,
}


@dataclass(frozen=True, slots=True)
class Load:
    """Conversations that begin at a rate, for so long."""

    name: str
    conversations_per_s: float
    duration_s: float
    max_context_tokens: int

    @property
    def workload(self) -> WorkloadSpec:
        """What the load test sends: prompts as tokens, so that their lengths are exact."""
        fields = {
            "arrivals": {"law": "poisson", "rate_per_s": self.conversations_per_s},
            "lengths": {
                "input": {"law": "lognormal", "p50": 60, "p99": 300, "max": 600},
                "output": {"law": "lognormal", "p50": 60, "p99": 250, "max": 400},
            },
            "prefixes": {
                "count": 24,
                "tokens": {"law": "uniform", "min": 200, "max": 1500},
                "zipf": 1.0,
            },
            "sessions": {
                "turns": {"law": "uniform", "min": 2, "max": 6},
                "think_time_s": {"law": "lognormal", "p50_s": 3, "p99_s": 20},
            },
            "api": "completions",
            "max_context_tokens": self.max_context_tokens,
        }
        return WorkloadSpec.model_validate_json(json.dumps(fields))


# Engines run 2, 5 and 9 of their 32 sequences on average.
PACED_LOADS = (
    Load("light", 1.5, 90.0, 4000),
    Load("busy", 3.0, 90.0, 4000),
    Load("heavy", 4.5, 90.0, 4000),
)
VLLM_LOAD = Load("vllm", 1.0, 90.0, 2000)
