"""The models whose facts stand beside the TPU serve configs."""

import json
from functools import cache
from pathlib import Path

from serving.tpu.model_facts import ModelFacts, model_facts

DEPLOYMENTS = Path(__file__).parents[2] / "deployments" / "tpu"
MODELS = DEPLOYMENTS / "models"

LLAMA_8B, LLAMA_70B, QWEN_8B = "llama-3.1-8b", "llama-3.3-70b", "qwen3-8b"
CODER_30B, CODER_480B = "qwen3-coder-30b-a3b", "qwen3-coder-480b-a35b"
CODER_480B_FP8, QWEN_TINY = "qwen3-coder-480b-a35b-fp8", "qwen3-0.6b"


@cache
def facts_of(name: str) -> ModelFacts:
    return model_facts(json.loads((MODELS / f"{name}.json").read_text())["config"])
