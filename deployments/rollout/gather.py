"""Reads what would be applied: a values file, rendered in memory, or a folder of manifests."""

from pathlib import Path

import yaml

from deployments.kubectl import Json, Kubectl
from deployments.manifests.command import format_source
from deployments.manifests.render import render
from deployments.manifests.values import parse_values
from deployments.validation.documents import Folder, parse_files, read_folder
from serving.config.sections import load_yaml
from serving.config.vllm.vllm_args import installed_vllm_args
from serving.domain.errors import ConfigError, UnsupportedVllmError


class ManifestsUnreadableError(Exception):
    """What would be applied cannot be read; the message says what to mend."""


def read_wanted(path: Path, kind: str) -> tuple[Json, list[Json]]:
    """Returns the object of `kind` that would be applied, and the quotas beside it.

    Raises:
        ManifestsUnreadableError: the file or folder has problems, or not exactly one such object.
    """
    folder = read_manifests(path)
    found = [manifest.body for manifest in folder.of_kind(kind)]
    if len(found) != 1:
        raise ManifestsUnreadableError(f"{path}: {len(found)} objects of kind {kind}; allowed: one")
    return found[0], [manifest.body for manifest in folder.of_kind("ResourceQuota")]


def read_other_quotas(kubectl: Kubectl, wanted: Json, quotas: list[Json]) -> list[Json]:
    """Returns the quotas of the namespace that would not be applied over.

    Raises:
        KubectlError: the cluster did not answer, or refused to.
    """
    ours = {quota["metadata"]["name"] for quota in quotas}
    found = kubectl.list_objects("resourcequotas", wanted["metadata"]["namespace"])
    return [quota for quota in found if quota["metadata"]["name"] not in ours]


def read_manifests(path: Path) -> Folder:
    """Returns the manifests of a folder, or those that a values file gives.

    Raises:
        ManifestsUnreadableError: the file or a file of the folder has problems; all are named.
    """
    if path.is_dir():
        folder, problems = read_folder(path)
        if problems:
            raise ManifestsUnreadableError("\n".join(f"{path}: {problem}" for problem in problems))
        return folder
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        values = parse_values(load_yaml(text), installed_vllm_args())
    except yaml.YAMLError as error:
        raise ManifestsUnreadableError(f"{path}: not readable as YAML: {error}") from error
    except ConfigError as error:
        lines = "\n".join(f"{path}: {problem}" for problem in error.problems)
        raise ManifestsUnreadableError(lines) from error
    except UnsupportedVllmError as error:
        raise ManifestsUnreadableError(f"{error}") from error
    folder, _ = parse_files(render(values, format_source(path.name, text)))
    return folder
