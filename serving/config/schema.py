"""Describes a configuration schema for a reader: the allowed values of each field, and each fault.

Owns the wording shared by error messages and the reference page, and the one translation of
pydantic's errors. Knows no field of ours by name. Pure.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from serving.config.vllm.vllm_args import kind_of
from serving.domain.errors import Problem

# A JSON schema node. Any, because JSON schema nests arbitrarily and each key has its own type.
Schema = Mapping[str, Any]

_SHOWN_LENGTH = 80
# Where names run to hundreds, only close ones are worth printing.
_MAX_NAMES_LISTED = 16
_TYPE_WORDS = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}
_SECRET_NAME = re.compile(r"(token|secret|password|credentials?|key|engine_env)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"^(hf_|sk-)")


def resolve(node: Schema, root: Schema) -> Schema:
    """Returns the node; for a `$ref` its target, with the keys that stand beside the `$ref`."""
    reference = node.get("$ref")
    if reference is None:
        return node
    target: Schema = root["$defs"][str(reference).rsplit("/", 1)[-1]]
    return {**target, **{key: value for key, value in node.items() if key != "$ref"}}


def type_text(node: Schema, root: Schema) -> str:
    """Describes the type of a field: "an integer", "a list of strings", "a string or null"."""
    node = resolve(node, root)
    if "anyOf" in node:
        return " or ".join(type_text(option, root) for option in node["anyOf"])
    if "const" in node:
        return f"`{node['const']}`"
    if "enum" in node:
        return "one of " + ", ".join(str(value) for value in node["enum"])
    words = _TYPE_WORDS.get(str(node.get("type")), "any JSON value")
    if node.get("type") == "array":
        item = type_text(node["items"], root)
        words += f" of {item if ',' in item else re.sub(r'^an? ', '', item) + 's'}"
    return words


def limit_text(node: Schema, root: Schema) -> str:
    """Describes the bound on a field's value; "" if any value of its type is allowed."""
    node = resolve(node, root)
    if "allowed" in node:
        return str(node["allowed"])
    if "anyOf" in node:
        return ", ".join(filter(None, (limit_text(option, root) for option in node["anyOf"])))
    if node.get("type") == "array" and "minItems" in node:
        return f"at least {node['minItems']}"
    low, above = node.get("minimum"), node.get("exclusiveMinimum")
    high = node.get("maximum")
    bounds = []
    if low is not None and high is not None:
        return f"{low:g} to {high:g}" if high < 1e6 else f"{low} to {high}"
    if low is not None:
        bounds.append(f"at least {low}")
    if above is not None:
        bounds.append(f"more than {above:g}")
    if high is not None:
        bounds.append(f"at most {high:g}")
    return ", ".join(bounds)


def allowed_text(node: Schema, root: Schema) -> str:
    """Describes type and bound together."""
    return ", ".join(filter(None, (type_text(node, root), limit_text(node, root))))


def path_text(parts: Iterable[str | int]) -> str:
    """Formats a location as `models[0].name`, or as `args` for the whole."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".") or "args"


def shown(name: str, value: object) -> str:
    """Formats `value`: short, scalars only, and hidden where it resembles a secret."""
    if isinstance(value, (dict, list)):
        return kind_of(value)
    if isinstance(value, str) and (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value)):
        return "<hidden>"
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "..."


def name_hint(name: str, allowed: Iterable[str]) -> str:
    """Returns the close names, if there are any; else all of them, if they are few."""
    names = sorted(allowed)
    asked = name.lower().replace("-", "_")
    close = difflib.get_close_matches(asked, names, n=3, cutoff=0.8)
    close = close or difflib.get_close_matches(asked, names, n=1)
    if close:
        return "did you mean " + " or ".join(repr(match) for match in close) + "?"
    if len(names) > _MAX_NAMES_LISTED:
        return f"none of the {len(names)} names allowed here is close to it"
    return "allowed: " + (", ".join(names) or "nothing")


def problems_of(error: ValidationError, root: Schema) -> list[Problem]:
    """Translates pydantic's complaints into ours, in the order of the schema."""
    problems = [
        _problem(detail["type"], detail["loc"], detail["input"], root)
        for detail in error.errors(include_url=False, include_context=False)
        # Pydantic counts only the valid items of a list; the broken ones are reported themselves.
        if not (detail["type"] == "too_short" and detail["input"])
    ]
    # It complains once for each of several types that a field may have.
    return list(dict.fromkeys(problems))


def _problem(kind: str, location: tuple[str | int, ...], value: object, root: Schema) -> Problem:
    if kind == "invalid-json-value":
        # Pydantic names the kinds of container it went through, which are no part of the path.
        path = path_text(part for part in location if part not in ("dict", "list"))
        return Problem(path, "not allowed", "allowed: a JSON value", shown("", value))
    if kind == "invalid_key" or location[-1:] == ("[key]",):
        location = location[:-1] if location[-1:] == ("[key]",) else location
        limit = limit_text(_node_at(location[:-1], root), root) or "a string"
        return Problem(path_text(location), "not allowed as a name", f"allowed: {limit}")
    location = _without_type(location, root)
    path = path_text(location)
    name = str(location[-1]) if location else ""
    if kind == "extra_forbidden":
        options = _options(_node_at(location[:-1], root), root)
        fields = [field for option in options for field in option.get("properties", {})]
        return Problem(path, "unknown key", name_hint(name, fields), shown(name, value))
    words = allowed_text(_node_at(location, root), root)
    if kind == "missing":
        return Problem(path, "missing", f"required: {words}")
    return Problem(path, "not allowed", f"allowed: {words}", shown(name, value))


def _node_at(location: tuple[str | int, ...], root: Schema) -> Schema:
    """Returns the schema of the field at `location`, without what pydantic adds below it."""
    node = root
    for part in location:
        steps = (_below(option, part) for option in _options(node, root))
        below = next(filter(None, steps), None)
        if below is None:
            return node
        node = resolve(below, root)
    return node


def _without_type(location: tuple[str | int, ...], root: Schema) -> tuple[str | int, ...]:
    """Returns the location without the type that pydantic tried where a field may have several."""
    field = _node_at(location[:-1], root)
    if "anyOf" not in field or any(_below(each, location[-1]) for each in _options(field, root)):
        return location
    is_key = any("properties" in each for each in _options(field, root))
    return location if is_key else location[:-1]


def _options(node: Schema, root: Schema) -> list[Schema]:
    """Returns the options of an `anyOf`, or the node itself if it is none."""
    return [resolve(option, root) for option in node.get("anyOf", [node])]


def _below(node: Schema, part: str | int) -> Schema | None:
    """Returns the schema one step down; `None` where the schema does not go there."""
    if isinstance(part, int):
        item: Schema | None = node.get("items")
        return item
    fields: Mapping[str, Schema] = node.get("properties", {})
    by_pattern: Mapping[str, Schema] = node.get("patternProperties", {})
    return fields.get(part) or next(iter(by_pattern.values()), None)
