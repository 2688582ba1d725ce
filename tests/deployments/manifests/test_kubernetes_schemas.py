"""Kubernetes' own schemas and the CRDs' rules in CEL."""

from collections.abc import Iterator
from typing import Any

import celpy
import kubernetes_validate
import pytest
import yaml

from deployments.validation.documents import LOADER
from serving.domain.topology import Generation, shapes
from tests.needs import CRDS

from .examples import in_memory, markets_of, raw_values

# The oldest Kubernetes that has all that is used: DRA is stable since then.
VERSION = "1.34"
BUILT_IN = ("v1", "apps/v1", "policy/v1")

Json = dict[str, Any]


def _is_built_in(api_version: str) -> bool:
    return api_version in BUILT_IN or api_version.split("/")[0] in (
        "networking.k8s.io",
        "rbac.authorization.k8s.io",
        "resource.k8s.io",
        "scheduling.k8s.io",
    )


def test_kubernetes_own_schemas_take_every_object() -> None:
    shape = shapes("v6e")[4]
    raw = raw_values(
        (shape, "spot"),
        dranet=True,
        bucket="weights",
        hostname="llm.example.com",
        redis={"own": {"image": "redis:7.4", "storage_class": "premium-rwo"}},
    )
    folder = in_memory(raw)
    held = [each for each in folder.manifests if _is_built_in(each.body["apiVersion"])]
    for each in held:
        kubernetes_validate.validate(each.body, VERSION, strict=True)
    # The pods of a Ray cluster are pods.
    for each in folder.of_kind("RayCluster"):
        spec = each.body["spec"]
        for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
            pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
            kubernetes_validate.validate(pod, VERSION, strict=True)
    assert len({each.kind for each in held}) >= 10


@pytest.mark.needs("crds")
@pytest.mark.parametrize("generation", Generation)
def test_rules_of_the_compute_class_hold(generation: Generation) -> None:
    path = CRDS / "computeclass" / "cloud.google.com_computeclasses.yaml"
    crd = next(iter(yaml.load_all(path.read_text(), Loader=LOADER)))
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    rules = Rules()
    # CEL in Python is slow: one shape of one host and one of several.
    single = shapes(generation)[0]
    several = next(shape for shape in shapes(generation) if shape.num_hosts > 1)
    for shape in (single, several):
        folder = in_memory(raw_values(*((shape, market) for market in markets_of(shape))))
        for each in folder.of_kind("ComputeClass"):
            assert list(rules.broken(schema, each.body)) == [], each.name
    assert rules.num_held > 0


class Rules:
    """Evaluates `x-kubernetes-validations`, except rules on changes."""

    def __init__(self) -> None:
        self._environment = celpy.Environment()
        self._programs: dict[str, Any] = {}
        self.num_held = 0

    def broken(self, schema: Json, value: Any) -> Iterator[str]:
        """The messages of those that do not hold of `value` or anything in it."""
        for rule in schema.get("x-kubernetes-validations", ()):
            if "oldSelf" in rule["rule"]:
                continue
            if self._holds(rule["rule"], value):
                self.num_held += 1
            else:
                yield rule.get("message", rule["rule"])
        if isinstance(value, dict):
            for name, below in schema.get("properties", {}).items():
                if name in value:
                    yield from self.broken(below, value[name])
        elif isinstance(value, list):
            for each in value:
                yield from self.broken(schema.get("items", {}), each)

    def _holds(self, rule: str, value: Any) -> bool:
        if rule not in self._programs:
            types = celpy.celtypes
            functions = {
                "split": lambda text, separator: types.ListType(
                    [types.StringType(part) for part in str(text).split(str(separator))]
                ),
                "dyn": lambda given: given,
            }
            compiled = self._environment.compile(rule)
            self._programs[rule] = self._environment.program(compiled, functions=functions)
        return bool(self._programs[rule].evaluate({"self": celpy.json_to_cel(value)}))
