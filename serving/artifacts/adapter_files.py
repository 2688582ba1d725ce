"""Reads what a LoRA adapter's folder says of itself, and whether an engine could load it.

A leaf, and without vLLM: `slicewise config check` asks it where the folder is on its own machine.
The engine itself loads every adapter before it is ready, and has the last word.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

# vLLM's default of `max_lora_rank` in 0.32.0.
DEFAULT_MAX_RANK = 16

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
# What PEFT can write into the file and vLLM 0.32.0 does not compute (`vllm/lora/peft_helper.py`).
_NOT_COMPUTED = ("use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication",
                 "use_bdlora", "use_qalora")  # fmt: skip
_CLASSIFIER_MODULES = {"classifier", "score"}


def adapter_complaints(folder: Path, max_rank: int) -> Iterator[tuple[str, str]]:
    """Yields what keeps an engine from loading the adapter, and what is allowed instead.

    `max_rank` is the engine's `max_lora_rank`.
    """
    if not any((folder / name).is_file() for name in _WEIGHTS):
        yield "it has no weights", f"needed: one of {', '.join(_WEIGHTS)}"
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        yield f"its {_CONFIG} cannot be read: {error.strerror}", "needed: PEFT's file"
        return
    except ValueError as error:
        yield f"its {_CONFIG} is not JSON: {error}", "needed: PEFT's file"
        return
    if not isinstance(config, dict):
        yield f"its {_CONFIG} is not a JSON object", "needed: PEFT's file"
        return
    yield from _complaints_of(config, max_rank)


def _complaints_of(config: Mapping[str, object], max_rank: int) -> Iterator[tuple[str, str]]:
    missing = [name for name in ("r", "lora_alpha", "target_modules") if name not in config]
    if missing:
        yield f"its {_CONFIG} lacks {', '.join(missing)}", "needed: PEFT's file"
    yield from _rank_complaints(config, max_rank)
    if config.get("bias", "none") != "none":
        yield f"it was trained with a bias ({config['bias']})", "allowed: none"
    for name in _NOT_COMPUTED:
        if config.get(name):
            yield f"it needs {name}, which vLLM does not compute", "allowed: a plain LoRA adapter"
    modules = config.get("modules_to_save")
    if isinstance(modules, list) and set(map(str, modules)) - _CLASSIFIER_MODULES:
        known = " and ".join(sorted(_CLASSIFIER_MODULES))
        yield f"it replaces whole modules ({', '.join(map(str, modules))})", f"allowed: {known}"


def _rank_complaints(config: Mapping[str, object], max_rank: int) -> Iterator[tuple[str, str]]:
    by_module = config.get("rank_pattern")
    ranks = [config.get("r"), *(by_module.values() if isinstance(by_module, dict) else ())]
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            if rank is not None:
                yield f"its rank is {rank!r}", "allowed: a positive integer"
        elif rank > max_rank:
            yield f"its rank is {rank}", f"allowed: at most max_lora_rank, which is {max_rank}"
