"""Nodes that are objects, and what KWOK does with their pods in a kubelet's place.

A pod that the scheduler has put on such a node is Running and Ready at once: no image, no probe,
no container. A pod that is deleted is gone at once as well, whatever its grace. Where a test wants
to see pods terminate it holds them (`HELD`), as long as the annotation or their grace lasts. A pod
that somebody probes (`PROBED`) is Running and no more: whoever probes it says whether it is Ready.
"""

from collections.abc import Mapping
from typing import Any

import yaml

from serving.domain.names.gke_names import GKE_CHIPS

Json = dict[str, Any]

HELD = "tests.slicewise.io/held"
PROBED = "tests.slicewise.io/probed"
NODE_POOL = "cloud.google.com/gke-nodepool"
NODE_ADDRESS = "10.201.0.1"

_READY = """\
{{- $now := Now }}
phase: Running
startTime: {{ $now | Quote }}
hostIP: {{ NodeIPWith .spec.nodeName | Quote }}
podIP: {{ PodIPWith .spec.nodeName (or .spec.hostNetwork false) (or .metadata.uid "") \
(or .metadata.name "") (or .metadata.namespace "") | Quote }}
conditions:
{{ range list "PodReadyToStartContainers" "Initialized" "Ready" "ContainersReady" }}
- {type: {{ . }}, status: "True", lastTransitionTime: {{ $now | Quote }}}
{{ end }}
{{ if .spec.initContainers }}
initContainerStatuses:
{{ range .spec.initContainers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  imageID: ""
  ready: true
  restartCount: 0
  state: {terminated: {exitCode: 0, reason: Completed, startedAt: {{ $now | Quote }}, \
finishedAt: {{ $now | Quote }}}}
{{ end }}
{{ end }}
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  imageID: ""
  ready: true
  started: true
  restartCount: 0
  state: {running: {startedAt: {{ $now | Quote }}}}
{{ end }}
"""

_UNPROBED = _READY.replace(' "Ready" "ContainersReady"', "").replace(
    "ready: true\n  started", "ready: false\n  started"
)


def stages() -> str:
    """KWOK's configuration for pods, in YAML; for nodes it keeps its own."""
    new = {".metadata.deletionTimestamp": False, ".status.podIP": False}
    ready = _stage("pod-ready", new | {_PROBED_KEY: False})
    ready["spec"]["next"] = {"statusTemplate": _READY}
    probed = _stage("pod-probed", new | {_PROBED_KEY: True})
    probed["spec"]["next"] = {"statusTemplate": _UNPROBED}
    gone = _stage("pod-gone", {".metadata.deletionTimestamp": True, _HELD_KEY: False})
    gone["spec"]["next"] = {"delete": True}
    late = _stage("pod-gone-late", {".metadata.deletionTimestamp": True, _HELD_KEY: True})
    late["spec"]["delay"] = {"durationFrom": {"expressionFrom": ".metadata.deletionTimestamp"}}
    late["spec"]["next"] = {"delete": True}
    text: str = yaml.safe_dump_all([ready, probed, gone, late])
    return text


_HELD_KEY = f'.metadata.annotations["{HELD}"]'
_PROBED_KEY = f'.metadata.annotations["{PROBED}"]'


def _stage(name: str, exists: Mapping[str, bool]) -> Json:
    expressions = [
        {"key": key, "operator": "Exists" if is_there else "DoesNotExist"}
        for key, is_there in exists.items()
    ]
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": name},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": "Pod"},
            "selector": {"matchExpressions": expressions},
        },
    }


def node(
    name: str,
    labels: Mapping[str, str] | None = None,
    *,
    chips: int = 0,
    pool: str | None = None,
    pod_range: str | None = None,
    pods: int = 250,
) -> Json:
    """A node that KWOK keeps Ready, with room for whatever is asked for, in up to `pods` pods.

    With `chips` it is a TPU host: it has that many, and the taint that keeps other pods away.
    `labels` are what pods select: compute class, accelerator, topology. `pool` is the name of the
    node pool. `pod_range` is where its pods get their addresses, such as `10.8.3.0/24`; `None`
    leaves it to KWOK.
    """
    found = {"kubernetes.io/hostname": name, "kubernetes.io/arch": "amd64", **(labels or {})}
    if pool is not None:
        found[NODE_POOL] = pool
    room = {"cpu": "1000", "memory": "10Ti", "ephemeral-storage": "10Ti", "pods": str(pods)}
    if chips:
        room[GKE_CHIPS] = str(chips)
    spec: Json = {}
    if chips:
        spec["taints"] = [{"key": GKE_CHIPS, "value": "present", "effect": "NoSchedule"}]
    if pod_range is not None:
        spec |= {"podCIDR": pod_range, "podCIDRs": [pod_range]}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": found,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
        },
        "spec": spec,
        "status": {"capacity": room, "allocatable": room},
    }
