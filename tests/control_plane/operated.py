"""What we render, applied to a real API server, with the emulated operator that acts on it."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kuberay.by_hand import NamespaceByHand
from kuberay.cloud import NAMESPACE_LABEL
from kuberay.namespaces import own_namespace

from deployments.manifests.compute_classes import control_class_name
from deployments.manifests.names import CONTROL_GROUP, GATEWAY_GROUP, Component, component_labels
from deployments.manifests.values import Values
from serving.domain.names.gke_names import GKE_COMPUTE_CLASS
from tests.deployments.manifests.examples import as_folder, parsed, rendered

from .api import Api, Json, reference
from .kubelet import NODE_POOL, node
from .test_manifests_are_taken import applied, variant

HEAD_GROUP = "headgroup"
_RUNNING = {"slicewise": {"status": "RUNNING", "serveDeploymentStatuses": {}}}


@dataclass
class Operated:
    """An installation: what was rendered, and the hand that moves operator and cloud."""

    api: Api
    values: Values
    hand: NamespaceByHand

    @property
    def namespace(self) -> str:
        return self.hand.namespace

    def pods(self, component: Component) -> list[Json]:
        """The pods of a component that stay, those that wait for a node included."""
        labels = component_labels(self.values.cluster, component)
        found = self.api.list("Pod", self.namespace, labels)
        return [each for each in found if "deletionTimestamp" not in each["metadata"]]

    def control_node(self, name: str) -> Json:
        """Makes a node of the control pool; its end is the namespace's."""
        labels = {
            GKE_COMPUTE_CLASS: control_class_name(self.values.cluster),
            NAMESPACE_LABEL: self.namespace,
        }
        return self.api.create(node(f"{self.namespace}-{name}", labels, pool="control"))

    def control_nodes(self) -> list[Json]:
        """The nodes of the control pool."""
        return self.api.list("Node", None, {NODE_POOL: "control", NAMESPACE_LABEL: self.namespace})

    def cordon(self, found: Json, *, is_closed: bool = True) -> None:
        """Lets no new pod on a node; with `is_closed` of false it does again."""
        self.api.merge(found, {"spec": {"unschedulable": is_closed or None}})

    def settle(self) -> None:
        """Until nothing moves and every pod runs."""
        self.hand.settle(is_done=self.all_run)

    def all_run(self) -> bool:
        """Whether every pod of Ray runs."""
        return all(pod["status"].get("phase") == "Running" for pod in self.hand.pods())


@contextmanager
def operated(api: Api, raw: Mapping[str, Any], num_nodes: int = 3) -> Iterator[Operated]:
    """Applies what a values file renders, in a namespace of its own; gone afterwards.

    Operator, cloud and the control plane have done what follows; the control pool has `num_nodes`
    nodes. Nodes of slices come when pods wait for them.
    """
    with own_namespace(api, "operated") as namespace:
        own = copy.deepcopy(dict(raw))
        own["cluster"] |= {"namespace": namespace}
        with applied(api, variant(as_folder(rendered(own)), "rayservice")):
            hand = NamespaceByHand(api, namespace)
            hand.dashboard.statuses[""] = _RUNNING
            # The control pool is the test's, and no cloud brings nodes for it.
            hand.cloud.delays_s |= dict.fromkeys((GATEWAY_GROUP, CONTROL_GROUP, HEAD_GROUP))
            made = Operated(api, parsed(own), hand)
            for number in range(num_nodes):
                made.control_node(f"control-{number}")
            made.settle()
            yield made


def disk(namespace: str, gib: int) -> Json:
    """A disk for whoever asks for one of this size without a class; nobody here makes them."""
    body = reference("PersistentVolume", None, f"disk-of-{namespace}")
    body["spec"] = {
        "accessModes": ["ReadWriteOnce"],
        "capacity": {"storage": f"{gib}Gi"},
        "hostPath": {"path": "/nowhere"},
        "persistentVolumeReclaimPolicy": "Retain",
    }
    return body
