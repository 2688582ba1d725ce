"""Controllers, scheduler and KWOK: do pods become what they become in a cluster."""

from collections.abc import Iterator

import pytest

from serving.domain.names.gke_names import GKE_ACCELERATOR, GKE_CHIPS, GKE_TOPOLOGY

from .api import Api, Json, RefusedByServerError, reference, wait
from .kubelet import HELD, NODE_POOL, node
from .server import ControlPlane

pytestmark = pytest.mark.process

NAMESPACE = "pods-run"
SHAPE = {GKE_ACCELERATOR: "tpu-v6e-slice", GKE_TOPOLOGY: "2x4"}


@pytest.fixture
def namespace(api: Api) -> Iterator[str]:
    api.apply(reference("Namespace", None, NAMESPACE))
    wait(lambda: api.find("ServiceAccount", NAMESPACE, "default"), "its service account is there")
    yield NAMESPACE
    for pod in api.list("Pod", NAMESPACE):
        api.delete(pod)
    for each in api.list("Node", None, {"tests": NAMESPACE}):
        api.delete(each)


def tpu_node(name: str, pod_range: str | None = None) -> Json:
    return node(
        name, SHAPE | {"tests": NAMESPACE}, chips=4, pool=f"pool-{name}", pod_range=pod_range
    )


def host_pod(name: str, **annotations: str) -> Json:
    body = reference("Pod", NAMESPACE, name)
    body["metadata"] |= {"labels": {"app": "host"}, "annotations": annotations}
    body["spec"] = {
        "nodeSelector": SHAPE,
        "tolerations": [{"key": GKE_CHIPS, "operator": "Exists"}],
        "containers": [
            {"name": "host", "image": "none", "resources": {"limits": {GKE_CHIPS: "4"}}}
        ],
        "terminationGracePeriodSeconds": 2,
    }
    return body


def phase(api: Api, name: str) -> str | None:
    found = api.find("Pod", NAMESPACE, name)
    return None if found is None else found["status"].get("phase")


def test_pod_runs_once_a_node_with_its_chips_is_there(api: Api, namespace: str) -> None:
    api.create(host_pod("host"))

    def is_refused() -> bool:
        conditions = api.get("Pod", namespace, "host")["status"].get("conditions", ())
        return any(each.get("reason") == "Unschedulable" for each in conditions)

    wait(is_refused, "the scheduler has found no node")
    api.create(tpu_node("tpu-0", "10.77.3.0/24"))
    wait(lambda: phase(api, "host") == "Running", "it runs")
    running = api.get("Pod", namespace, "host")
    assert running["spec"]["nodeName"] == "tpu-0"
    assert running["status"]["podIP"].startswith("10.77.3.")
    assert running["status"]["containerStatuses"][0]["ready"]
    assert api.get("Node", None, "tpu-0")["metadata"]["labels"][NODE_POOL] == "pool-tpu-0"


def test_node_has_a_lease(api: Api, namespace: str) -> None:
    """KWOK renews it; without one a node is lost after 40 s, and no test may last longer."""
    api.create(tpu_node("tpu-0"))
    wait(lambda: api.find("Lease", "kube-node-lease", "tpu-0"), "it has a lease")


def test_node_holds_no_more_hosts_than_it_has_chips_for(api: Api, namespace: str) -> None:
    api.create(tpu_node("tpu-0"))
    api.create(host_pod("first"))
    wait(lambda: phase(api, "first") == "Running", "the first runs")
    api.create(host_pod("second"))
    api.create(tpu_node("tpu-1"))
    wait(lambda: phase(api, "second") == "Running", "the second runs")
    assert api.get("Pod", namespace, "second")["spec"]["nodeName"] == "tpu-1"


def test_deleted_pod_goes_at_once_or_after_its_grace(api: Api, namespace: str) -> None:
    for index, pod in enumerate((host_pod("quick"), host_pod("held", **{HELD: "yes"}))):
        api.create(tpu_node(f"tpu-{index}"))
        api.create(pod)
    wait(lambda: phase(api, "quick") == phase(api, "held") == "Running", "both run")
    for name in ("quick", "held"):
        api.delete(reference("Pod", namespace, name), grace_s=None)
    held = api.get("Pod", namespace, "held")
    assert held["metadata"]["deletionGracePeriodSeconds"] == 2
    wait(lambda: phase(api, "quick") is None, "the one is gone")
    wait(lambda: phase(api, "held") is None, "the other is gone")


def test_what_an_object_owns_goes_with_it(api: Api, namespace: str) -> None:
    owner = api.create(reference("ConfigMap", namespace, "owner"))
    owned = reference("ConfigMap", namespace, "owned")
    owned["metadata"]["ownerReferences"] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "name": "owner",
            "uid": owner["metadata"]["uid"],
        }
    ]
    api.create(owned)
    api.delete(owner)
    wait(lambda: api.find("ConfigMap", namespace, "owned") is None, "it is gone")


def test_service_account_may_do_what_it_was_granted_and_nothing_else(
    api: Api, namespace: str, control_plane: ControlPlane
) -> None:
    api.apply(reference("ServiceAccount", namespace, "reader"))
    role = reference("Role", namespace, "reader")
    role["rules"] = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    api.apply(role)
    binding = reference("RoleBinding", namespace, "reader")
    binding["roleRef"] = {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "Role",
        "name": "reader",
    }
    binding["subjects"] = [{"kind": "ServiceAccount", "name": "reader", "namespace": namespace}]
    api.apply(binding)
    reader = control_plane.account(namespace, "reader")

    def may_list() -> bool:
        try:
            return reader.list("Pod", namespace) == []
        except RefusedByServerError:
            return False

    # The server's authorizer learns of a binding a moment after it is stored.
    wait(may_list, "it may list pods")
    with pytest.raises(RefusedByServerError, match=f"{namespace}:reader.*cannot create"):
        reader.create(host_pod("refused"))
