"""Applies CustomResourceDefinitions as the API server does: defaults first, then validation.

Stricter than the server in one thing: unknown fields are refused, not dropped in silence. Rules in
CEL are left out; those that matter here are checks of ours. The schemas are the user's files.
"""

import copy
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from deployments.validation.documents import LOADER, Folder, Json, KubernetesManifest
from serving.domain.errors import Problem

_MAX_SHOWN = 5


class SchemaFileError(ValueError):
    """Reports an unusable file or folder of schemas. Name CRDs as YAML."""


class Schemas:
    """The schemas by apiVersion and kind."""

    def __init__(self, definitions: Iterable[Json]) -> None:
        self._schemas: dict[tuple[str, str], tuple[Json, Any]] = {}
        for definition in definitions:
            spec = definition["spec"]
            for version in spec["versions"]:
                key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
                schema = version["schema"]["openAPIV3Schema"]
                strict = strict_schema(schema)
                strict["properties"]["metadata"] = {"type": "object"}
                self._schemas[key] = (schema, jsonschema.Draft7Validator(strict))

    def has(self, manifest: KubernetesManifest) -> bool:
        """Returns whether there is one for this object."""
        return _key(manifest) in self._schemas

    def problems(self, manifest: KubernetesManifest) -> Iterator[Problem]:
        """Yields why the API server would refuse the object; the first few reasons."""
        if not self.has(manifest):
            return
        schema, validator = self._schemas[_key(manifest)]
        body = copy.deepcopy(manifest.body)
        fill_in_defaults(schema, body)
        for error in itertools.islice(validator.iter_errors(body), _MAX_SHOWN):
            field = ".".join(map(str, error.absolute_path)) or "(object)"
            yield manifest.problem(field, error.message[:200], "see the schema of its kind")


def read_schemas(paths: Iterable[Path]) -> Schemas:
    """The schemas in some files, and in the YAML files below some folders.

    Raises:
        SchemaFileError: one of them holds no CustomResourceDefinition.
    """
    definitions = []
    for path in paths:
        files = sorted(path.rglob("*.yaml")) if path.is_dir() else [path]
        found = [each for file in files for each in _definitions(file)]
        if not found:
            raise SchemaFileError(f"{path}: no CustomResourceDefinition in it")
        definitions += found
    return Schemas(definitions)


def schema_problems(folder: Folder, schemas: Schemas) -> Iterator[Problem]:
    """Yields what the schemas refuse of every object."""
    for manifest in folder.manifests:
        yield from schemas.problems(manifest)


def _definitions(file: Path) -> list[Json]:
    try:
        documents = list(yaml.load_all(file.read_text(encoding="utf-8"), Loader=LOADER))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SchemaFileError(f"{file}: not readable as YAML: {error}") from error
    return [
        document
        for document in documents
        if isinstance(document, dict) and document.get("kind") == "CustomResourceDefinition"
    ]


def _key(manifest: KubernetesManifest) -> tuple[str, str]:
    return str(manifest.body.get("apiVersion", "")), manifest.kind


def strict_schema(schema: Json) -> Json:
    """Returns Kubernetes' structural schema as JSON schema that knows no other fields."""
    strict = {key: value for key, value in schema.items() if key not in ("format", "nullable")}
    if strict.pop("x-kubernetes-int-or-string", False):
        strict.pop("anyOf", None)
        strict["type"] = ["integer", "string"]
    if schema.get("nullable") and isinstance(strict.get("type"), str):
        strict["type"] = [strict["type"], "null"]
    if "properties" in strict:
        strict["properties"] = {
            name: strict_schema(inner) for name, inner in strict["properties"].items()
        }
        is_open = any(
            schema.get(f"x-kubernetes-{word}")
            for word in ("preserve-unknown-fields", "embedded-resource")
        )
        if not is_open:
            strict.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(strict.get(key), dict):
            strict[key] = strict_schema(strict[key])
    return strict


def fill_in_defaults(schema: Json, value: Any) -> None:
    """Fills what `value` leaves out, in place, as the API server does before it validates."""
    if isinstance(value, list):
        for element in value:
            fill_in_defaults(schema.get("items", {}), element)
    elif isinstance(value, dict):
        for name, below in schema.get("properties", {}).items():
            if name not in value and "default" in below:
                value[name] = copy.deepcopy(below["default"])
            if name in value:
                fill_in_defaults(below, value[name])
