"""The API server takes every object that shipped values give: schemas, defaults, rules in CEL."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deployments.validation.documents import Folder, KubernetesManifest
from serving.domain.topology import SliceShape, slice_shape
from tests.deployments.manifests.examples import (
    VALUES,
    as_folder,
    raw_values,
    rendered,
    shipped_folder,
)

from .api import Api, RefusedByServerError

pytestmark = pytest.mark.process

Json = dict[str, Any]
# What has to be there before the rest; namespaces stay, for nobody here would empty them.
_FIRST = ("Namespace", "ServiceAccount", "PriorityClass")


def variant(folder: Folder, name: str) -> list[Json]:
    """The objects that `kubectl apply -k` would take of a variant, in an order that works."""
    other = {"rayservice": "raycluster", "raycluster": "rayservice"}[name]
    taken = [
        each
        for each in folder.manifests
        if each.kind != "Kustomization" and not each.file.startswith(f"kuberay/{other}/")
    ]

    def rank(each: KubernetesManifest) -> int:
        return _FIRST.index(each.kind) if each.kind in _FIRST else len(_FIRST)

    return [each.body for each in sorted(taken, key=rank)]


@contextmanager
def applied(api: Api, bodies: list[Json]) -> Iterator[list[Json]]:
    """Objects as the server has them; gone afterwards."""
    made: list[Json] = []
    try:
        # What was applied before a refusal has to go as well.
        made.extend(api.apply(body) for body in bodies)
        yield made
    finally:
        for body in reversed(made):
            if body["kind"] != "Namespace":
                api.delete(body)


@pytest.mark.parametrize("name", ["rayservice", "raycluster"])
@pytest.mark.parametrize("path", VALUES, ids=lambda path: path.name)
def test_api_server_takes_every_object(path: Path, name: str, api: Api) -> None:
    bodies = variant(shipped_folder(path.name), name)
    kinds = {body["kind"] for body in bodies}
    assert {"Service", "HealthCheckPolicy", "GCPBackendPolicy", "HTTPRoute"} <= kinds
    assert ("RayService" in kinds, "RayCluster" in kinds) == (
        name == "rayservice",
        name == "raycluster",
    )
    with applied(api, bodies) as made:
        assert [body["kind"] for body in made] == [body["kind"] for body in bodies]


def _check(body: Json) -> Json:
    found: Json = body["spec"]["default"]["config"]["httpHealthCheck"]
    return found


# What the server refuses, so that to be taken means something.
REFUSED: dict[str, tuple[str, Callable[[Json], object], str]] = {
    "health check of a port, by default of another": (
        "HealthCheckPolicy",
        lambda body: _check(body).pop("portSpecification"),
        "port and portName must be unset for portSpecification being USE_SERVING_PORT",
    ),
    "health check of a fixed port that it does not name": (
        "HealthCheckPolicy",
        lambda body: _check(body).pop("port"),
        "for portSpecification being USE_FIXED_PORT, port must be set",
    ),
    "health check that waits into the next one": (
        "HealthCheckPolicy",
        lambda body: body["spec"]["default"].update(timeoutSec=6),
        "timeOutSec cannot exceed checkIntervalSec",
    ),
    "field that there is not": (
        "HTTPRoute",
        lambda body: body["spec"].update(timeout="1h"),
        ".spec.timeout: field not declared in schema",
    ),
    "field of a pod that there is not": (
        "RayService",
        lambda body: body["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"].update(
            hostPids=True
        ),
        "template.spec.hostPids",
    ),
    "number of hosts in words": (
        "RayService",
        lambda body: body["spec"]["rayClusterConfig"]["workerGroupSpecs"][1].update(
            numOfHosts="one"
        ),
        "numOfHosts",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_api_server_refuses_a_changed_object(case: str, api: Api) -> None:
    kind, change, words = REFUSED[case]
    bodies = variant(shipped_folder("example.yaml"), "rayservice")
    body = copy.deepcopy(next(body for body in bodies if body["kind"] == kind))
    change(body)
    with (
        applied(api, [each for each in bodies if each["kind"] in _FIRST]),
        pytest.raises(RefusedByServerError) as refused,
    ):
        api.apply(body)
    assert words in str(refused.value)


def of_a_first_run(shape: SliceShape) -> list[Json]:
    """The objects that `kubectl apply -k kuberay/first-run` would take, and the namespace first."""
    folder = as_folder(rendered(raw_values((shape, "spot"), first_run_out="gs://bucket/first-run")))
    return [
        each.body
        for each in folder.manifests
        if each.kind in _FIRST
        or (each.file.startswith("kuberay/first-run/") and each.kind != "Kustomization")
    ]


@pytest.mark.parametrize(
    ("shape", "kinds"),
    [
        pytest.param(slice_shape("v6e", "2x2"), {"ConfigMap", "Job"}, id="one host"),
        pytest.param(slice_shape("v6e", "4x4"), {"RayJob"}, id="four hosts"),
    ],
)
def test_api_server_takes_a_first_run_and_keeps_all_that_it_says(
    shape: SliceShape, kinds: set[str], api: Api
) -> None:
    bodies = of_a_first_run(shape)
    assert {body["kind"] for body in bodies} - set(_FIRST) == kinds
    with applied(api, bodies) as made:
        (job,) = [body for body in made if body["kind"] in {"Job", "RayJob"}]
        (asked,) = [body for body in bodies if body["kind"] in {"Job", "RayJob"}]
        for name, value in asked["spec"].items():
            if name != "template":
                assert job["spec"][name] == value
        if "template" in asked["spec"]:
            (container,) = job["spec"]["template"]["spec"]["containers"]
            (wanted,) = asked["spec"]["template"]["spec"]["containers"]
            assert container["command"] == wanted["command"]
            assert container["resources"] == wanted["resources"]


@pytest.mark.parametrize(
    ("shape", "change", "words"),
    [
        (slice_shape("v6e", "2x2"), {"backoffLimits": 0}, "spec.backoffLimits"),
        (slice_shape("v6e", "4x4"), {"backoffLimit": "none"}, "backoffLimit"),
        (slice_shape("v6e", "4x4"), {"entryPoint": "true"}, "spec.entryPoint"),
    ],
)
def test_api_server_refuses_a_first_run_that_is_misspelt(
    shape: SliceShape, change: Json, words: str, api: Api
) -> None:
    *others, job = of_a_first_run(shape)
    changed = copy.deepcopy(job)
    changed["spec"].update(change)
    with applied(api, others), pytest.raises(RefusedByServerError) as refused:
        api.apply(changed)
    assert words in str(refused.value)
