"""Turns values into files: every manifest, where it goes, and how it is written. Pure.

The same values give the same bytes: keys are sorted, groups go by name, and no clock is read.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from deployments.manifests import edges, platform
from deployments.manifests.cluster_config import Provisioning, UpgradeKind
from deployments.manifests.compute_classes import compute_classes, control_class
from deployments.manifests.hosts import node_pools
from deployments.manifests.names import Json, serve_service
from deployments.manifests.pods.first_run import first_run_objects
from deployments.manifests.ray_objects import ray_cluster, ray_service, serve_config
from deployments.manifests.redis import redis_objects
from deployments.manifests.slice_groups import SliceGroup, slice_groups
from deployments.manifests.values import Values

# The first words of every rendered file: what has them may be written over.
MARK = "# Rendered by slicewise render"
# Where rendered files are, beside the kustomization of them all.
RENDERED_FOLDERS = ("gke", "kuberay")
KUSTOMIZATION = "kustomization.yaml"
SERVE_CONFIG = "kuberay/raycluster/serve_config.yaml"
_WIDTH = 100


def render(values: Values, source: str) -> dict[str, str]:
    """The text of every file, by path; in the order of the paths.

    `source` names in each file what it comes from. `kubectl apply -k` takes the folder itself
    (a RayService), or its `kuberay/raycluster` (a RayCluster, for who runs `serve deploy`).
    """
    header = f"{MARK} from {source}. Change that and render again.\n"
    files = {path: _dump(objects) for path, objects in manifests(values).items()}
    files |= {
        path: _dump([kustomization]) for path, kustomization in _kustomizations(files).items()
    }
    files[SERVE_CONFIG] = serve_config(values)
    files |= _scripts(values)
    return {path: header + files[path] for path in sorted(files)}


def manifests(values: Values) -> dict[str, list[Json]]:
    """The objects of every file, by path."""
    cluster = values.cluster
    groups = slice_groups(cluster, values.app)
    control = [control_class(cluster)] if cluster.provisioning == Provisioning.AUTO else []
    files = {
        "gke/compute-classes.yaml": [*control, *compute_classes(cluster, groups)],
        "gke/namespace.yaml": [platform.namespace(cluster)],
        "gke/service-accounts.yaml": platform.service_accounts(cluster),
        "gke/priority-classes.yaml": platform.priority_classes(cluster),
        "gke/resource-quota.yaml": [platform.resource_quota(values, groups)],
        "gke/network-policies.yaml": platform.network_policies(values),
        "kuberay/base/slice-provisioner.yaml": platform.provisioner_rights(cluster),
        "kuberay/base/node-reader.yaml": platform.node_reader_rights(cluster),
        "kuberay/base/disruption-budgets.yaml": platform.disruption_budgets(values),
        "kuberay/base/pod-monitors.yaml": edges.pod_monitors(values),
        "kuberay/rayservice/rayservice.yaml": [ray_service(values, groups)],
        "kuberay/raycluster/raycluster.yaml": [ray_cluster(values, groups)],
        "kuberay/base/gateway-service.yaml": [edges.gateway_service(cluster)],
        "kuberay/raycluster/route.yaml": _route(values),
    }
    if first_run := first_run_objects(values, groups):
        # By itself, and in no kustomization but its own.
        files["kuberay/first-run/first-run.yaml"] = first_run
    if cluster.redis.own is not None:
        files["kuberay/base/redis.yaml"] = redis_objects(cluster, cluster.redis.own)
    if cluster.dranet:
        files["gke/network-claims.yaml"] = [platform.network_claims(cluster)]
    # KubeRay makes Gateway and HTTPRoute of its own for an incremental upgrade.
    if cluster.upgrade.kind != UpgradeKind.INCREMENTAL:
        files["kuberay/rayservice/route.yaml"] = _route(values)
    return files


def _route(values: Values) -> list[Json]:
    cluster = values.cluster
    service = serve_service(cluster)
    return [
        edges.gateway(cluster),
        edges.http_route(cluster, service),
        *edges.load_balancer_policies(cluster, service),
    ]


def _kustomizations(paths: Mapping[str, str]) -> dict[str, Json]:
    """Returns one for each folder: bases for overlays of your own."""
    folders: dict[str, list[str]] = {}
    for path in sorted(paths):
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder, []).append(name)
    for kind in ("rayservice", "raycluster"):
        folders[f"kuberay/{kind}"] += ["../../gke", "../base"]
    folders[""] = ["kuberay/rayservice"]
    return {
        f"{folder}/{KUSTOMIZATION}".removeprefix("/"): {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": sorted(resources),
        }
        for folder, resources in folders.items()
    }


def _scripts(values: Values) -> dict[str, str]:
    groups: Sequence[SliceGroup] = slice_groups(values.cluster, values.app)
    scripts = {"gke/workload-policies.sh": node_pools.workload_policies_script(groups)}
    if values.cluster.provisioning == Provisioning.NODE_POOLS:
        scripts["gke/node-pools.sh"] = node_pools.node_pools_script(
            values.cluster, groups, has_claims=values.cluster.dranet
        )
    return {path: text for path, text in scripts.items() if text}


class _Dumper(yaml.SafeDumper):
    """Writes YAML without anchors, and text of several lines as a block."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 # PyYAML's signature
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> Any:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _dump(objects: Sequence[Json]) -> str:
    text: str = yaml.dump_all(
        objects,
        Dumper=_Dumper,
        sort_keys=True,
        allow_unicode=True,
        width=_WIDTH,
        explicit_start=True,
    )
    return text
