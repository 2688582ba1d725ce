"""A CustomResourceDefinition's schema as the API server uses it: defaults first, then validation.

It validates as `slicewise` itself holds manifests against schemas: that is no second opinion. The
second opinion is that of a real kube-apiserver, in `tests/control_plane`.
"""

import copy
import itertools
from functools import cache
from typing import Any

import jsonschema
import yaml

from deployments.validation.schemas import fill_in_defaults, strict_schema
from tests.needs import CRDS

CRD_FOLDER = CRDS / "kuberay"
_MAX_SHOWN = 3


class CrdSchema:
    """One version of one kind of object."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        strict = strict_schema(schema)
        strict["properties"]["metadata"] = {"type": "object"}
        self._validator = jsonschema.Draft7Validator(strict)

    def defaulted(self, document: dict[str, Any]) -> dict[str, Any]:
        """A copy with the schema's defaults filled in."""
        filled = copy.deepcopy(document)
        fill_in_defaults(self._schema, filled)
        return filled

    def complaints(self, document: dict[str, Any]) -> list[str]:
        """The first few reasons to refuse it; empty if there are none."""
        found = itertools.islice(self._validator.iter_errors(document), _MAX_SHOWN)
        return [f"{'.'.join(map(str, each.absolute_path))}: {each.message[:200]}" for each in found]


@cache
def crd_schema(plural: str) -> CrdSchema:
    """KubeRay 1.7's schema of `rayclusters` or `rayservices`, version v1."""
    text = (CRD_FOLDER / f"ray.io_{plural}.v1.7.0.yaml").read_text()
    # The C parser takes half a second for a megabyte, Python's ten.
    document = next(iter(yaml.load_all(text, Loader=yaml.CSafeLoader)))
    version = next(each for each in document["spec"]["versions"] if each["name"] == "v1")
    return CrdSchema(version["schema"]["openAPIV3Schema"])
