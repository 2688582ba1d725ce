"""Reads a YAML file into a strict model, or refuses it with field, value and what is allowed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from loadtest.errors import LoadTestError

_Model = TypeVar("_Model", bound=BaseModel)


class YamlLoader(yaml.SafeLoader):
    """Reads dates as texts: no field is one, and a refusal shows the value in JSON."""


# Said here, because a package that vLLM may import says so of `SafeLoader` itself.
YamlLoader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)


def read_strict_yaml(path: Path, model: type[_Model]) -> _Model:
    """The file as a `model`.

    Raises:
        LoadTestError: it cannot be read, is no YAML, or has something that is not allowed; every
            problem is named.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), YamlLoader)
    except OSError as error:
        raise LoadTestError(f"{path}: not readable: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LoadTestError(f"{path}: not readable as YAML: {error}") from error
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = [f"{path}: {_format_problem(problem, model)}" for problem in error.errors()]
        raise LoadTestError("\n".join(problems)) from error


def place_in_file(location: Sequence[int | str], content: object, tag: str) -> str:
    """Returns a path such as `events[0].for_s`; "" for the whole file.

    Pydantic also puts the kind of a section into its path, which a reader would not. To leave it
    out, this walks along the file's `content`, where sections have their kind under `tag`.
    """
    path, within = "", content
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
            within = within[part] if isinstance(within, Sequence) and part < len(within) else None
        elif isinstance(within, Mapping) and (part in within or part != within.get(tag)):
            path += f".{part}"
            within = within.get(part)
    return path.removeprefix(".")


def _format_problem(problem: ErrorDetails, model: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or "the file"
    if problem["type"] == "extra_forbidden":
        allowed = fields_at(problem["loc"][:-1], model, {})
        return f"{where}: no such field; allowed: {', '.join(allowed)}"
    reason = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {problem['input']!r}: {reason[0].lower()}{reason[1:]}"


def fields_at(
    location: Sequence[int | str], model: type[BaseModel], kinds: Mapping[str, type[BaseModel]]
) -> list[str]:
    """The fields of the section of `model` at pydantic's `location`, which also names `kinds`."""
    for part in location:
        if part in kinds:
            model = kinds[str(part)]
        elif (field := model.model_fields.get(str(part))) is not None:
            types = (field.annotation, *get_args(field.annotation))
            sections = (kind for kind in types if isinstance(kind, type))
            model = next((kind for kind in sections if issubclass(kind, BaseModel)), model)
    return list(model.model_fields)
