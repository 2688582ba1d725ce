"""JSON patch (RFC 6902) as the Kubernetes API server applies it: all operations or none."""

import copy
from collections.abc import Sequence
from typing import Any


class PatchError(ValueError):
    """An operation cannot be applied, or a `test` does not hold."""


def apply_patch(document: Any, operations: Sequence[dict[str, Any]]) -> Any:
    """A patched copy of `document`. `test`, `add`, `replace` and `remove`; paths must be there."""
    patched = copy.deepcopy(document)
    for operation in operations:
        keys = [part.replace("~1", "/").replace("~0", "~") for part in _parts(operation["path"])]
        parent = patched
        for key in keys[:-1]:
            parent = _child(parent, key, operation)
        _apply(parent, keys[-1], operation)
    return patched


def _parts(path: str) -> list[str]:
    if not path.startswith("/"):
        raise PatchError(f"path {path!r} does not begin with /")
    return path[1:].split("/")


def _child(parent: Any, key: str, operation: dict[str, Any]) -> Any:
    try:
        return parent[int(key)] if isinstance(parent, list) else parent[key]
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise PatchError(f"{operation['op']} {operation['path']}: no {key!r}") from error


def _apply(parent: Any, key: str, operation: dict[str, Any]) -> None:
    match operation["op"]:
        case "test":
            found = _child(parent, key, operation)
            if found != operation["value"]:
                raise PatchError(f"testing value {operation['path']} failed: it is {found!r}")
        case "replace":
            _child(parent, key, operation)
            _put(parent, key, operation["value"])
        case "add" if isinstance(parent, list):
            position = len(parent) if key == "-" else int(key)
            if position > len(parent):
                raise PatchError(f"add {operation['path']}: the list is shorter")
            parent.insert(position, copy.deepcopy(operation["value"]))
        case "add":
            _put(parent, key, operation["value"])
        case "remove":
            _child(parent, key, operation)
            del parent[int(key) if isinstance(parent, list) else key]
        case other:
            raise PatchError(f"no operation {other!r} here")


def _put(parent: Any, key: str, value: Any) -> None:
    parent[int(key) if isinstance(parent, list) else key] = copy.deepcopy(value)
