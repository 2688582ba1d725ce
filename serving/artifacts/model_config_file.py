"""Finds a model's `config.json`, and what lies beside it, without an engine and a network.

Owns the search: the model's own folder, the Hugging Face cache of this machine, and files of
facts that lie beside a serve config. Does not own the file's contents (`serving.tpu.model_facts`).
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from serving.artifacts.model_source import resolve_source

# Beside the weights of a model that has several files of them.
_INDEX = "model.safetensors.index.json"
_GENERATION = "generation_config.json"


class ModelConfigUnreadableError(ValueError):
    """Reports a file that does not hold the model's configuration. Correct or remove it."""


def find_model_config(source: str, facts_folders: Iterable[Path] = ()) -> dict[str, Any] | None:
    """Returns a model's parsed `config.json`, by folder or Hugging Face id; `None` if not at hand.

    A file of facts is JSON with the fields `repository`, the id it is for, and `config`.

    Raises:
        ModelConfigUnreadableError: a file that was found is not JSON, or lacks those fields.
    """
    own = Path(resolve_source(source)) / "config.json"
    if own.is_file():
        return _mapping(own, _read(own))
    cached = cached_model_config(source)
    if cached is not None:
        return _mapping(cached, _read(cached))
    for folder in facts_folders:
        for path in sorted(folder.glob("*.json")):
            entry = _mapping(path, _read(path))
            if entry.get("repository") == source:
                return _mapping(path, entry.get("config"))
    return None


def find_generation_config(source: str) -> dict[str, Any] | None:
    """Returns a model's parsed `generation_config.json`, its defaults; `None` if not at hand.

    Raises:
        ModelConfigUnreadableError: the file that was found is not JSON.
    """
    beside = find_model_folder(source)
    path = None if beside is None else beside / _GENERATION
    return _mapping(path, _read(path)) if path is not None and path.is_file() else None


def find_weights_index(source: str) -> dict[str, Any] | None:
    """Returns the parsed index of a model's weights, whose total is exact; `None` if not at hand.

    Raises:
        ModelConfigUnreadableError: the file that was found is not JSON.
    """
    beside = find_model_folder(source)
    path = None if beside is None else beside / _INDEX
    return _mapping(path, _read(path)) if path is not None and path.is_file() else None


def find_model_folder(source: str) -> Path | None:
    """Returns a model's folder, its own or the one in the Hugging Face cache; `None` without."""
    own = Path(resolve_source(source))
    if own.is_dir():
        return own
    cached = cached_model_config(source)
    return None if cached is None else cached.parent


def cached_model_config(source: str, revision: str | None = None) -> Path | None:
    """Returns the file of an id in the local cache, at `revision` or at the newest one there.

    `None` if it is not there; no address such as `gs://` ever is.
    """
    # Part of transformers, which every vLLM brings; a machine that only checks files may lack it.
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415
        from huggingface_hub.errors import HFValidationError  # noqa: PLC0415
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(source, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelConfigUnreadableError(f"{path}: not readable as JSON: {error}") from error


def _mapping(path: Path, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ModelConfigUnreadableError(
            f"{path}: no mapping where a model's configuration should be"
        )
    return dict(value)
