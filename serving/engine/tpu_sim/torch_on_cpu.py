"""Supplies what tpu-inference 0.32.0 needs and the installed torch and its companions lack.

Owns the replacements that must stand before tpu-inference is imported.
"""

import importlib
import sys
import types
from typing import Any

import torch

from serving.engine.tpu_sim.grouped_matmul import calculate_tiling, grouped_matmul
from serving.engine.tpu_sim.replacements import (
    GROUPED_MATMUL,
    TORCH_OPERATORS,
    TORCH_STORAGE,
    VISION_MODELS,
    claim,
    replace,
)

_VISION_MODULES = (
    "vllm.model_executor.models.gemma4_mm",
    "vllm.model_executor.models.qwen3_omni_moe_thinker",
    "vllm.model_executor.models.qwen3_vl",
)
_TOKAMAX_MODULE = "tokamax._src.ops.experimental.gmm_v2.gmm_v2"


def name_missing_operators() -> None:
    """Lets torchax name operators that this torch does not have."""
    packet = torch._ops.OpOverloadPacket
    find = packet.__getattr__

    def __getattr__(self: Any, key: str) -> Any:  # noqa: N807 - torch's own
        try:
            return find(self, key)
        except AttributeError:
            asking = sys._getframe(1).f_globals.get("__name__", "")
            if not asking.startswith("torchax"):
                raise
            return f"missing operator {self}.{key}"

    replace(TORCH_OPERATORS, packet, "__getattr__", __getattr__)


def keep_storage() -> None:
    """Keeps torch's weights when the model has handed them over."""
    storage = torch.UntypedStorage
    resize = storage.resize_

    def resize_(self: Any, size: int) -> Any:
        return self if size == 0 else resize(self, size)

    replace(TORCH_STORAGE, storage, "resize_", resize_)


def leave_out_vision() -> None:
    """Lets lists of models be read without torchvision, which those with images need."""
    for name in _VISION_MODULES:
        claim(VISION_MODELS, f"sys.modules.{name}")
        module: Any = types.ModuleType(name)
        module.__getattr__ = _refused_class
        sys.modules[name] = module


def stand_in_for_tokamax() -> None:
    """Gives tokamax's module where tokamax is not installed, with products in `jax.numpy`."""
    try:
        importlib.import_module(_TOKAMAX_MODULE)
    except ImportError:
        claim(GROUPED_MATMUL, "sys.modules.tokamax")
    else:
        return
    parts = _TOKAMAX_MODULE.split(".")
    for depth in range(1, len(parts) + 1):
        module: Any = types.ModuleType(".".join(parts[:depth]))
        module.__path__ = []
        sys.modules[module.__name__] = module
    module.gmm_v2 = grouped_matmul
    module.calculate_tiling = calculate_tiling


class _Refused:
    """Stands in for a class that is only ever named here."""

    def __init__(self, *_: object, **__: object) -> None:
        _refuse()


def _refused_class(name: str) -> type[_Refused]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Refused


def _refuse(*_: object, **__: object) -> None:
    raise NotImplementedError("tpu-sim has no torchvision: no images")
