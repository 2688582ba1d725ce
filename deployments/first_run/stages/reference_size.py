"""Finds what a reference takes of memory, and whether it is there, before anything is loaded.

Owns that arithmetic and the reading of what is at hand: weights, `config.json`, files of facts. It
asks nobody over a network. Expected, not measured.
"""

from collections.abc import Sequence
from pathlib import Path

from serving.artifacts.model_config_file import (
    ModelConfigUnreadableError,
    find_model_config,
    find_model_folder,
    find_weights_index,
)
from serving.tpu.hbm import gib
from serving.tpu.host_needs import stored_bytes
from serving.tpu.model_facts import ModelFacts, ModelFactsError, model_facts

# What a reference needs beside its weights, at most.
_MEMORY_FACTOR = 1.3
# Bytes of a parameter, by the names that vLLM has for dtypes.
_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}


def reference_bytes(name: str, dtype: str, facts_folders: Sequence[Path]) -> int | None:
    """Returns the weights of a reference as it has them in memory; `None` if nothing tells.

    `name` is a folder or a Hugging Face id, whose weights may not be here yet.
    """
    try:
        raw, index = find_model_config(name, facts_folders), find_weights_index(name)
    except ModelConfigUnreadableError:
        return None
    try:
        facts = None if raw is None else model_facts(raw)
    except ModelFactsError:
        facts = None
    folder = find_model_folder(name)
    weights = (
        [] if folder is None else [each.stat().st_size for each in folder.glob("*.safetensors")]
    )
    # Some of the files may still have to come.
    stored = max(sum(weights), stored_bytes(facts, index) or 0)
    return loaded_bytes(stored, facts, dtype) if stored else None


def loaded_bytes(stored: int, facts: ModelFacts | None, dtype: str) -> int:
    """Returns the memory of weights of `stored` bytes once they are of `dtype`. Pure.

    `auto` is the model's own. Quantised weights count as if they were not, at most: transformers
    5.19.0 unpacks fp8 where there is no GPU (`quantizers/quantizer_finegrained_fp8.py`). Without
    `facts` they count as they are stored.
    """
    if facts is None:
        return stored
    wanted = _BYTES.get(dtype, facts.weights.other_bytes)
    return int(stored * wanted / facts.weights.linear_bytes)


def no_room(name: str, weights_bytes: int | None, free_bytes: int) -> str | None:
    """Returns why a reference is not loaded; `None` if there is room. Pure.

    `free_bytes` is what the machine, or the container on it, has left. What does not fit is not
    tried: the kernel could end the application or the run in its place.
    """
    if weights_bytes is None:
        return (
            f"the size of {name} is not known here, and loading it could end what runs beside it:"
            " name a --reference of a folder with its weights"
        )
    need = int(weights_bytes * _MEMORY_FACTOR)
    if need <= free_bytes:
        return None
    return (
        f"{name} needs {gib(need)} of memory with transformers, and {gib(free_bytes)} are free"
        " where the command runs: name a smaller --reference, or run it where there is more"
    )
