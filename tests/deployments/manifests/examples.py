"""Values files for tests, and renderings of them as a folder would hold them."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from deployments.manifests.ray_objects import serve_config
from deployments.manifests.render import SERVE_CONFIG, manifests, render
from deployments.manifests.slice_groups import SliceGroup, slice_groups
from deployments.manifests.values import Values, parse_values
from deployments.validation.documents import Folder, KubernetesManifest, parse_files
from deployments.validation.validate import folder_problems
from serving.domain.compute_class import Market
from serving.domain.topology import Generation, SliceShape

ROOT = Path(__file__).parents[3]
VALUES = sorted((ROOT / "deployments" / "values").glob("*.yaml"))

Raw = dict[str, Any]


def raw_values(*slices: tuple[SliceShape, str], **cluster: Any) -> Raw:
    """A values file with a model for each shape, and a deployment for each compute class of it."""
    by_shape: dict[SliceShape, list[Raw]] = {}
    for shape, compute_class in slices:
        wanted = {
            "generation": str(shape.generation),
            "topology": shape.topology,
            "chips_per_host": shape.chips_per_host,
        }
        deployment = {"compute_class": compute_class, "slice": wanted}
        by_shape.setdefault(shape, []).append(deployment)
    models = [
        {
            "name": f"demo-{number}",
            "source": "models/demo",
            "engine": "paced",
            "deployments": deployments,
        }
        for number, deployments in enumerate(by_shape.values())
    ]
    classes = []
    if any(compute_class == "reserved" for _, compute_class in slices):
        classes = [{"compute_class": "reserved", "reservation": "ours"}]
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8000},
        "applications": [
            {
                "name": "slicewise",
                "route_prefix": "/",
                "import_path": "serving.app:build",
                "args": {
                    "models": models,
                    "auth": {"keys_env": "KEYS"},
                    "link": {"secret_env": "LINK"},
                },
            }
        ],
        "cluster": {
            "name": "llm",
            "zones": ["us-east5-b"],
            "images": {"cpu": "registry/cpu:1", "tpu": "registry/tpu:1"},
            "redis": {"address": "redis:6379"},
            "secrets": {"api_keys": "keys", "link": "link"},
            "classes": classes,
            **cluster,
        },
    }


def markets_of(shape: SliceShape) -> list[str]:
    """The markets in which GKE has slices of this shape."""
    none = (Market.FLEX_START,) if shape.generation == Generation.V4 else ()
    return [market.value for market in Market if market not in none]


def parsed(raw: Raw) -> Values:
    """The values; engine arguments are not looked at."""
    return parse_values(copy.deepcopy(raw), None)


def groups_of(raw: Raw) -> list[SliceGroup]:
    values = parsed(raw)
    return slice_groups(values.cluster, values.app)


def rendered(raw: Raw) -> dict[str, str]:
    return render(parsed(raw), "values.yaml")


def in_memory(raw: Raw) -> Folder:
    """The rendered objects, without being written as YAML and read again."""
    values = parsed(raw)
    objects = manifests(values)
    found = [KubernetesManifest(path, body) for path, bodies in objects.items() for body in bodies]
    return Folder(tuple(found), {SERVE_CONFIG: serve_config(values)}, frozenset(objects))


def as_folder(files: dict[str, str]) -> Folder:
    folder, problems = parse_files(files)
    assert problems == []
    return folder


def found(folder: Folder) -> list[str]:
    """What is wrong with it, as the user reads it."""
    return [str(problem) for problem in folder_problems(folder)]


def one(folder: Folder, kind: str, name: str | None = None) -> KubernetesManifest:
    """The only object of a kind, or of a kind and name."""
    (manifest,) = [each for each in folder.of_kind(kind) if name in (None, each.name)]
    return manifest


@cache
def shipped_text(name: str) -> str:
    return (ROOT / "deployments" / "values" / name).read_text()


@cache
def shipped_folder(name: str) -> Folder:
    """What a shipped values file gives, written and read back. Not to be changed."""
    return as_folder(rendered(shipped(name)))


def shipped(name: str) -> Raw:
    raw: Raw = yaml.safe_load(shipped_text(name))
    return raw
