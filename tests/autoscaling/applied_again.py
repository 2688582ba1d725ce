"""A RayService that was applied three times, and the cluster that KubeRay made of the first."""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "data" / "kuberay" / "13-applied-again.json"

Json = dict[str, Any]


@dataclass
class Applied:
    """The recorded objects; each test changes its own."""

    service: Json
    cluster: Json
    pods: list[Json] = field(default_factory=list)

    @property
    def wanted(self) -> Json:
        """The cluster's spec as the RayService has it."""
        spec: Json = self.service["spec"]["rayClusterConfig"]
        return spec

    def group(self, name: str, *, is_live: bool = False) -> Json:
        """A worker group: of the RayService, or of the cluster."""
        spec = self.cluster["spec"] if is_live else self.wanted
        (found,) = (group for group in spec["workerGroupSpecs"] if group["groupName"] == name)
        group: Json = found
        return group


def applied_again() -> Applied:
    """As recorded: a higher maximum, a new image and a group more, none of which came over."""
    read = json.loads(_FILE.read_text())
    return Applied(read["rayservices"][0], read["rayclusters"][0], read["pods"])


def applied_once() -> Applied:
    """The same with a RayService that has what its cluster has."""
    applied = applied_again()
    applied.service["spec"]["rayClusterConfig"] = copy.deepcopy(applied.cluster["spec"])
    return applied
