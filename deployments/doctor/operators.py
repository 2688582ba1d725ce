"""Checks the versions and feature gates of the KubeRay operator and of the TPU webhook. Pure.

GKE's add-ons choose their own versions, so nothing is assumed: a version is read from the image of
a Deployment, or from what the operator wrote on a cluster that it made.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deployments.doctor.findings import Finding, error, note, ok, warning

# What KubeRay writes on each RayCluster that it makes. Source: recorded from KubeRay 1.7.0.
VERSION_ANNOTATION = "ray.io/kuberay-version"
# The gate of the labels that number slices and hosts: alpha in 1.5, on in 1.6. Source: KubeRay's
# release notes, read 2026-11-20; so is the gate of incremental upgrades, on in 1.7.
INDEX_GATE, INCREMENTAL_GATE = "RayMultiHostIndexing", "RayServiceIncrementalUpgrade"
_GATE_EXISTS, _INDEX_GATE_ON, _INCREMENTAL_GATE_ON = (1, 5, 0), (1, 6, 0), (1, 7, 0)
# The newest that our manifests were recorded with.
_TRIED = (1, 7)
# From here on the webhook goes by our host index of single hosts, and by KubeRay's of several.
# Source: tags of kuberay-tpu-webhook, read 2026-11-22.
_WEBHOOK_INDEX, _WEBHOOK_MULTI_HOST = (1, 3, 0), (1, 3, 1)
_OPERATOR_IMAGE = re.compile(r"(kuberay|ray)[-/]operator(:|@|$)")
_WEBHOOK_IMAGE = re.compile(r"tpu-webhook(:|@|$)")
_TAG = re.compile(r":v?(\d+)\.(\d+)\.(\d+)")

Json = Mapping[str, Any]
Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Needs:
    """What the manifests need of the operator and of the webhook."""

    has_multi_host: bool
    has_single_host: bool
    is_incremental: bool


@dataclass(frozen=True, slots=True)
class FoundVersion:
    """A version and where it was read. `version` is `None` if the source does not tell it."""

    version: Version | None
    source: str
    gates: Mapping[str, bool]

    def has_gate(self, name: str, on_from: Version) -> bool:
        """Returns whether a feature gate is on: as it is set, or else by the version's default."""
        return self.gates.get(name, self.version is not None and self.version >= on_from)


def find_operator(deployments: Iterable[Json], clusters: Iterable[Json]) -> FoundVersion | None:
    """Returns the operator's version; `None` if neither it nor a cluster of its making is seen."""
    for deployment in deployments:
        for container in _containers(deployment):
            image = str(container.get("image", ""))
            if _OPERATOR_IMAGE.search(image):
                gates = _feature_gates(container)
                return FoundVersion(_version(image), f"{_name(deployment)}: {image}", gates)
    for cluster in clusters:
        text = (cluster["metadata"].get("annotations") or {}).get(VERSION_ANNOTATION)
        if text is not None:
            source = f"RayCluster {cluster['metadata']['name']}: made by {text}"
            return FoundVersion(_version(f":{text}"), source, {})
    return None


def check_operator(found: FoundVersion | None, needs: Needs) -> Iterator[Finding]:
    """Checks that the operator knows what our manifests need."""
    what = "KubeRay operator"
    if found is None:
        fix = (
            "install KubeRay, or enable GKE's Ray operator; else look again once a cluster is there"
        )
        yield warning(what, "no Deployment and no cluster of its making is seen", "1.6.0", fix)
        return
    if found.version is None:
        fix = f"look at the operator's log, or at {VERSION_ANNOTATION} of a RayCluster"
        yield warning(what, f"{found.source} tells no version", "1.6.0 or newer", fix)
    elif found.version < _GATE_EXISTS:
        allowed = "1.6.0 or newer: this one does not know labels and resources of groups"
        yield error(what, found.source, allowed, "upgrade the operator and its CRDs")
        return
    elif found.version[:2] > _TRIED:
        tried = ".".join(map(str, _TRIED))
        yield note(what, f"{found.source}; our manifests were tried with up to {tried}")
    else:
        yield ok(what, found.source)
    yield from _check_gates(found, needs)


def _check_gates(found: FoundVersion, needs: Needs) -> Iterator[Finding]:
    what = f"feature gate {INDEX_GATE}"
    if found.version is None and INDEX_GATE not in found.gates:
        yield note(what, "unknown: the operator's version is")
    elif not found.has_gate(INDEX_GATE, _INDEX_GATE_ON):
        fix = f"start the operator with --feature-gates={INDEX_GATE}=true"
        if needs.has_multi_host:
            yield error(what, "off", "on: hosts of a slice get their number by it", fix)
        else:
            yield warning(what, "off", "on: slices of one host get their names by it", fix)
    else:
        yield ok(what, "on")
    if needs.is_incremental and not found.has_gate(INCREMENTAL_GATE, _INCREMENTAL_GATE_ON):
        fix = "switch it on, or choose another cluster.upgrade.kind"
        yield error(f"feature gate {INCREMENTAL_GATE}", "off", "on, for incremental upgrades", fix)


def check_webhook_version(deployments: Iterable[Json], needs: Needs) -> Iterator[Finding]:
    """Checks that the TPU webhook goes by the indices of slices and hosts."""
    what = "TPU webhook version"
    images = [
        str(container.get("image", ""))
        for deployment in deployments
        for container in _containers(deployment)
    ]
    image = next(filter(_WEBHOOK_IMAGE.search, images), None)
    version = None if image is None else _version(image)
    if version is None:
        yield note(what, f"not told by {image}" if image else "no Deployment of it is seen")
        return
    fix = "upgrade the webhook"
    if needs.has_multi_host and version < _WEBHOOK_MULTI_HOST:
        yield error(what, f"{image}", "v1.3.1 or newer, for slices of several hosts", fix)
    elif needs.has_single_host and version < _WEBHOOK_INDEX:
        allowed = "v1.3.0 or newer: older ones name a replacement like a living slice"
        yield warning(what, f"{image}", allowed, fix)
    else:
        yield ok(what, f"{image}")


def _containers(deployment: Json) -> list[Json]:
    spec = ((deployment.get("spec") or {}).get("template") or {}).get("spec") or {}
    containers: list[Json] = spec.get("containers") or []
    return containers


def _name(deployment: Json) -> str:
    metadata = deployment["metadata"]
    return f"{metadata.get('namespace', '')}/{metadata['name']}"


def _version(image: str) -> Version | None:
    found = _TAG.search(image)
    if found is None:
        return None
    major, minor, patch = map(int, found.groups())
    return major, minor, patch


def _feature_gates(container: Json) -> dict[str, bool]:
    """Returns the gates that an operator's command line sets, given in one word or in two."""
    words = [str(word) for word in (container.get("command") or ())]
    words += [str(word) for word in (container.get("args") or ())]
    given = [word.partition("=")[2] for word in words if re.match(r"--?feature-gates=", word)]
    given += [
        value
        for word, value in itertools.pairwise(words)
        if word in ("--feature-gates", "-feature-gates")
    ]
    pairs = (pair.partition("=") for text in given for pair in text.split(",") if pair)
    return {name.strip(): value.strip().lower() == "true" for name, _, value in pairs}
