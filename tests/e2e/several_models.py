"""What one application with several models and API keys is made of."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from safetensors.numpy import save_file

from .application import PROJECT_ROOT, demo_model

KEYS = ("sk-first-0123456789abcdef", "sk-second-fedcba9876543210")
LIMITED_KEY = "sk-limited-0123456789abc"
EXPIRED_KEY = "sk-expired-0123456789abc"
PAGE = "https://chat.example.com"


def key_records() -> str:
    """The file of keys: two that may do everything, for two tenants; a limited and an ended one."""
    scopes = ["inference", "metrics", "fleet"]
    limited = {"models": ["paced"], "routes": ["/v1/completions"], "tenant": "small"}
    digest = hashlib.sha256(KEYS[1].encode()).hexdigest()
    records: list[dict[str, Any]] = [
        {"name": "first", "key": KEYS[0], "tenant": "one", "scopes": scopes},
        {"name": "second", "sha256": digest, "tenant": "two", "scopes": scopes},
        {"name": "limited", "key": LIMITED_KEY, **limited},
        {"name": "ended", "key": EXPIRED_KEY, "expires_at": "2026-01-01T00:00:00Z"},
    ]
    return yaml.safe_dump({"keys": records})


def adapted_model(adapter: Path) -> dict[str, Any]:
    """The shipped model on one engine, with `adapter` served as `adapted`."""
    arguments = demo_model()["engine_args"]
    arguments |= {"enable_lora": True, "max_lora_rank": 8, "max_model_len": 512}
    return demo_model(
        name="base",
        engine_args=arguments,
        frontend_args=demo_model()["frontend_args"] | {"enable_prompt_tokens_details": True},
        lora_adapters=[{"name": "adapted", "path": str(adapter)}],
        deployments=[{"compute_class": "local", "replicas": 1}],
    )


def embedding_model() -> dict[str, Any]:
    """The shipped model's weights as an embedder, on one engine."""
    arguments = {
        "runner": "pooling",
        "convert": "embed",
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "gpu_memory_utilization": 0.1,
    }
    return {
        "name": "embedder",
        "source": "models/slicewise-demo",
        "engine_args": arguments,
        "engine_env": demo_model()["engine_env"],
        "deployments": [{"compute_class": "local", "replicas": 1}],
    }


def write_adapter(folder: Path, rank: int = 4) -> Path:
    """A LoRA adapter of the shipped model, in PEFT's format, strong enough to change its words."""
    config = json.loads((PROJECT_ROOT / "models/slicewise-demo/config.json").read_text())
    num_outputs = {
        "q_proj": config["num_attention_heads"] * config["head_dim"],
        "v_proj": config["num_key_value_heads"] * config["head_dim"],
    }
    chance = np.random.default_rng(0)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, outputs in num_outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = _normal(chance, rank, config["hidden_size"])
            weights[f"{prefix}.lora_B.weight"] = _normal(chance, outputs, rank)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "models/slicewise-demo",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(num_outputs),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder


def _normal(chance: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return chance.standard_normal(shape, dtype=np.float32)
