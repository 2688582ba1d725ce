"""Reads the manifests of a folder: objects with the file they are from, and ways into them.

Reading a path in an object never fails: what is missing, or of another kind, is empty. That it
should be there is for schemas and checks to decide.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deployments.manifests.render import RENDERED_FOLDERS
from serving.config.schema import shown
from serving.domain.errors import Problem

Json = dict[str, Any]
SERVE_CONFIG_NAME = "serve_config.yaml"


@dataclass(frozen=True, slots=True)
class KubernetesManifest:
    """The object of a manifest, and its file by its path below the folder."""

    file: str
    body: Json

    @property
    def kind(self) -> str:
        """The kind of the object, such as `RayService`."""
        return str(self.body.get("kind", ""))

    @property
    def name(self) -> str:
        """The name in its metadata."""
        return str(mapping(self.body, "metadata").get("name", ""))

    @property
    def namespace(self) -> str | None:
        """The namespace; `None` for what belongs to the whole cluster."""
        given = mapping(self.body, "metadata").get("namespace")
        return None if given is None else str(given)

    def problem(self, field: str, complaint: str, allowed: str, value: object = None) -> Problem:
        """Returns what is wrong with one of its fields; `value` of `None`: nothing is there."""
        path = f"{self.file}: {self.kind}/{self.name}: {field}"
        text = None if value is None else shown("", value)
        return Problem(path, complaint, allowed, text)


@dataclass(frozen=True, slots=True)
class Folder:
    """The content of a folder. `serve_configs` are texts, by file; `files` all paths of YAML."""

    manifests: tuple[KubernetesManifest, ...]
    serve_configs: dict[str, str]
    files: frozenset[str]

    def of_kind(self, *kinds: str) -> list[KubernetesManifest]:
        """The objects of some kinds, in the order of their files."""
        return [manifest for manifest in self.manifests if manifest.kind in kinds]

    def names(self, kind: str) -> set[str]:
        """The names of all objects of a kind."""
        return {manifest.name for manifest in self.of_kind(kind)}


def read_folder(folder: Path) -> tuple[Folder, list[Problem]]:
    """Returns what lies in `folder` and below, and what of it cannot be read.

    In a folder that was rendered into, it reads only what rendering writes: other things may be
    beside it, as in ours.
    """
    rendered = [folder / name for name in RENDERED_FOLDERS]
    paths = list(folder.rglob("*.yaml"))
    if all(part.is_dir() for part in rendered):
        paths = [path for part in rendered for path in part.rglob("*.yaml")]
        paths += folder.glob("kustomization.yaml")
    return parse_files(
        {
            path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8", errors="replace")
            for path in paths
        }
    )


def parse_files(texts: dict[str, str]) -> tuple[Folder, list[Problem]]:
    """Returns the same from the texts of files, by path. Pure."""
    manifests: list[KubernetesManifest] = []
    serve_configs: dict[str, str] = {}
    problems: list[Problem] = []
    for file in sorted(texts):
        if not file.endswith(".yaml"):
            continue
        if file.rpartition("/")[2] == SERVE_CONFIG_NAME:
            serve_configs[file] = texts[file]
            continue
        try:
            documents = list(yaml.load_all(texts[file], Loader=LOADER))
        except yaml.YAMLError as error:
            problems.append(Problem(file, f"not readable as YAML: {error}", "allowed: YAML"))
            continue
        for number, document in enumerate(documents):
            if isinstance(document, dict) and document.get("kind"):
                manifests.append(KubernetesManifest(file, document))
            elif document is not None:
                complaint = f"document {number + 1} is no Kubernetes object"
                problems.append(Problem(file, complaint, "required: apiVersion and kind"))
    files = frozenset(file for file in texts if file.endswith(".yaml"))
    return Folder(tuple(manifests), serve_configs, files), problems


# The C parser is ten times as fast, where PyYAML was built with it.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def mapping(value: Any, *path: str | int) -> Json:
    """The mapping at `path`; empty where there is none."""
    found = value_at(value, *path)
    return found if isinstance(found, dict) else {}


def sequence(value: Any, *path: str | int) -> list[Any]:
    """The list at `path`; empty where there is none."""
    found = value_at(value, *path)
    return found if isinstance(found, list) else []


def value_at(value: Any, *path: str | int) -> Any:
    """Returns what stands at `path`; `None` where nothing does."""
    for step in path:
        if isinstance(value, dict) and isinstance(step, str):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return None
    return value


def named(entries: Iterable[Any], name: str) -> Json:
    """The entry of that name; empty where there is none."""
    for entry in entries:
        if isinstance(entry, dict) and entry.get("name") == name:
            return entry
    return {}


def texts(found: Sequence[object]) -> str:
    """Joins values one after the other, for a message."""
    return ", ".join(str(value) for value in found) or "nothing"


def ray_clusters(folder: Folder) -> Iterator[tuple[KubernetesManifest, str, Json]]:
    """Yields every Ray cluster: its object, the path of its spec, its spec."""
    for manifest in folder.of_kind("RayService", "RayCluster"):
        is_service = manifest.kind == "RayService"
        path = "spec.rayClusterConfig" if is_service else "spec"
        yield manifest, path, mapping(manifest.body, *path.split("."))
