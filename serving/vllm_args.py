"""vLLM's engine arguments from a configuration file: the same at the gateway and at the engine."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args

from vllm.engine.arg_utils import AsyncEngineArgs


def async_engine_args(model: str, engine_args: Mapping[str, Any], **more: Any) -> AsyncEngineArgs:
    """The arguments as vLLM takes them; a section like `structured_outputs_config` is a mapping.

    Raises:
        ValueError: vLLM refuses a section; its message says why.
    """
    kinds = {field.name: field.type for field in fields(AsyncEngineArgs)}
    settled = {name: _section(kinds.get(name), value) for name, value in engine_args.items()}
    return AsyncEngineArgs(model=model, **settled, **more)


def _section(kind: Any, value: Any) -> Any:
    """`value` as the record that `kind` names: vLLM converts some of its sections, not all."""
    if isinstance(value, Mapping):
        for option in (kind, *get_args(kind)):
            if isinstance(option, type) and is_dataclass(option):
                return option(**value)
    return value
