"""Collects every problem of a folder of manifests. Pure, but for the reading of files."""

from deployments.validation.cluster import cluster_problems
from deployments.validation.compute_classes import class_problems
from deployments.validation.control_pool import control_pool_problems
from deployments.validation.documents import Folder
from deployments.validation.edges import edge_problems
from deployments.validation.groups import group_problems
from deployments.validation.labels import label_problems
from deployments.validation.redis import redis_problems
from deployments.validation.references import reference_problems
from deployments.validation.serving import serving_problems
from serving.domain.errors import Problem

_CHECKS = (
    group_problems,
    label_problems,
    class_problems,
    cluster_problems,
    edge_problems,
    redis_problems,
    serving_problems,
    control_pool_problems,
    reference_problems,
)


def folder_problems(folder: Folder) -> list[Problem]:
    """Returns what every check reports, each problem once."""
    found = [problem for check in _CHECKS for problem in check(folder)]
    if not folder.of_kind("RayService", "RayCluster"):
        needed = "required: a RayService or RayCluster"
        found.append(Problem("(folder)", "no Ray cluster in it", needed))
    return list(dict.fromkeys(found))
