"""Determines which revision of its weights a model is at, from a few kilobytes.

Owns what is read. For a folder and a bucket it reads the names and sizes of all files and the
bytes of the small ones that describe the weights; for a Hugging Face id, the commit of its
files here. Does not own the use of the fingerprint (`serving.artifacts.compile_cache.key`).
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import JsonValue

from serving.artifacts.model_config_file import cached_model_config
from serving.artifacts.model_source import resolve_source
from serving.artifacts.object_store.address import is_bucket, open_store
from serving.artifacts.object_store.store import StoreError

logger = logging.getLogger(__name__)

# The files that name the tensors and their shapes.
_READ_WHOLE = ("config.json", "model.safetensors.index.json")
_DIGEST_CHARS = 32


def model_revision(source: str, args: Mapping[str, JsonValue]) -> str | None:
    """Returns the revision an engine with `args` would load here; `None` if it is unknown.

    It reads no weights. A change of weights that keeps the size is noticed in a bucket only.
    """
    folder = Path(resolve_source(source))
    try:
        if folder.is_dir():
            return f"files:{_of_folder(folder)}"
        if is_bucket(source):
            return f"objects:{_of_bucket(source)}"
    except (OSError, StoreError, ValueError) as error:
        logger.warning("model_revision_unknown source=%s error=%r", source, str(error))
        return None
    return _of_huggingface_id(source, args.get("revision"))


def config_digest(config: Mapping[str, object] | None) -> str | None:
    """Returns a fingerprint of a parsed `config.json`, in any layout; `None` for none. Pure."""
    if config is None:
        return None
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), default=str)
    return _digest([text])


def _of_folder(folder: Path) -> str:
    facts = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not any(part.startswith(".") for part in name.split("/")):
            facts.append(f"{name} {path.stat().st_size}")
            if name in _READ_WHOLE:
                facts.append(hashlib.sha256(path.read_bytes()).hexdigest())
    return _digest(facts)


def _of_bucket(source: str) -> str:
    """Returns the revision of a bucket, which reports a version of each object's bytes."""
    parent, _, last = source.rstrip("/").rpartition("/")
    stored = open_store(parent).list(last) if "://" in parent else []
    return _digest(f"{each.name} {each.num_bytes} {each.version}" for each in stored)


def _of_huggingface_id(source: str, revision: JsonValue) -> str | None:
    found = cached_model_config(source, revision if isinstance(revision, str) else None)
    # .../models--org--name/snapshots/COMMIT/config.json
    return None if found is None else f"commit:{found.parent.name}"


def _digest(facts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:_DIGEST_CHARS]
