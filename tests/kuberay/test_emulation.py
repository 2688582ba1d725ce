"""The emulation itself: does it refuse and delete as the real parts do. No Ray."""

import random
import ssl
from pathlib import Path

import httpx
import pytest

from serving.domain.topology import slice_shape

from .api_server import HEAD_POD_GRANTS, NAMESPACE, Fault
from .by_hand import TOKEN, ClusterByHand
from .json_patch import PatchError, apply_patch
from .objects import RAYCLUSTER, raycluster, rayservice, worker_group
from .operator import Operator
from .schema import crd_schema
from .store import InvalidError, Store
from .webhook import NAME, told_to

SHAPE = slice_shape("v6e", "2x4", 4)
CLUSTERS = f"apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters"
REPLICAS = "/spec/workerGroupSpecs/0/replicas"
SCALE_STRATEGY = "/spec/workerGroupSpecs/0/scaleStrategy"


def group(max_replicas: int = 4, **options: int) -> dict:
    return worker_group("v6e-spot", SHAPE, "spot", max_replicas=max_replicas, **options)


@pytest.fixture
def cluster(tmp_path: Path):
    with ClusterByHand(raycluster(group()), tmp_path, grants=HEAD_POD_GRANTS) as running:
        yield running


@pytest.fixture
def client(cluster: ClusterByHand):
    verify = ssl.create_default_context(cafile=str(cluster.api.ca_file))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=cluster.api.url, verify=verify, headers=headers) as speaking:
        yield speaking


def patch(client: httpx.Client, *operations: dict, path: str = "") -> httpx.Response:
    return client.patch(
        path or f"{CLUSTERS}/{RAYCLUSTER}",
        json=list(operations),
        headers={"Content-Type": "application/json-patch+json"},
    )


def set_replicas(cluster: ClusterByHand, count: int, *doomed: str) -> None:
    cluster.store.patch(
        "rayclusters",
        RAYCLUSTER,
        [
            {"op": "replace", "path": REPLICAS, "value": count},
            {"op": "add", "path": SCALE_STRATEGY, "value": {"workersToDelete": list(doomed)}},
        ],
    )
    cluster.settle()


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ({"op": "test", "path": "/a/0", "value": 1}, {"a": [1, 2], "b/c": 3}),
        ({"op": "replace", "path": "/a/1", "value": 9}, {"a": [1, 9], "b/c": 3}),
        ({"op": "add", "path": "/a/-", "value": 9}, {"a": [1, 2, 9], "b/c": 3}),
        ({"op": "add", "path": "/a/0", "value": 9}, {"a": [9, 1, 2], "b/c": 3}),
        ({"op": "add", "path": "/d", "value": 9}, {"a": [1, 2], "b/c": 3, "d": 9}),
        ({"op": "remove", "path": "/b~1c"}, {"a": [1, 2]}),
    ],
)
def test_patch_operation_gives_a_patched_copy(operation: dict, expected: dict) -> None:
    before = {"a": [1, 2], "b/c": 3}
    assert apply_patch(before, [operation]) == expected
    assert before == {"a": [1, 2], "b/c": 3}


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "test", "path": "/a", "value": 2},
        {"op": "replace", "path": "/missing", "value": 1},
        {"op": "remove", "path": "/missing"},
        {"op": "add", "path": "/list/5", "value": 1},
        {"op": "add", "path": "/no/where", "value": 1},
        {"op": "copy", "path": "/a", "from": "/list"},
    ],
)
def test_patch_operation_that_does_not_apply_is_refused(operation: dict) -> None:
    with pytest.raises(PatchError):
        apply_patch({"a": 1, "list": []}, [operation])


def test_api_unknown_token_is_401(client: httpx.Client) -> None:
    answer = client.get(f"{CLUSTERS}/{RAYCLUSTER}", headers={"Authorization": "Bearer other"})
    assert answer.status_code == 401


def test_api_verb_that_was_not_granted_is_403(client: httpx.Client, cluster: ClusterByHand) -> None:
    cluster.store.create("rayservices", rayservice(raycluster(group())))
    answer = client.get(f"apis/ray.io/v1/namespaces/{NAMESPACE}/rayservices/llm-tpu")
    assert answer.status_code == 403
    assert 'cannot get resource "rayservices"' in answer.json()["message"]


def test_api_object_that_is_not_there_is_404(client: httpx.Client) -> None:
    assert client.get(f"{CLUSTERS}/other").status_code == 404
    assert client.get(f"/apis/ray.io/v1/namespaces/other/rayclusters/{RAYCLUSTER}").is_error


def test_api_patch_whose_test_fails_is_422_and_changes_nothing(
    client: httpx.Client, cluster: ClusterByHand
) -> None:
    answer = patch(
        client,
        {"op": "replace", "path": REPLICAS, "value": 3},
        {"op": "test", "path": "/spec/workerGroupSpecs/0/groupName", "value": "other"},
    )
    assert answer.status_code == 422
    assert cluster.group("v6e-spot")["replicas"] == 0


def test_api_patch_of_an_old_version_is_409(client: httpx.Client) -> None:
    old = client.get(f"{CLUSTERS}/{RAYCLUSTER}").json()["metadata"]["resourceVersion"]
    assert patch(client, {"op": "replace", "path": REPLICAS, "value": 1}).status_code == 200
    late = {"op": "replace", "path": "/metadata/resourceVersion", "value": old}
    assert patch(client, late).status_code == 409


def test_api_throttles_on_command(client: httpx.Client, cluster: ClusterByHand) -> None:
    cluster.api.inject(Fault("get", 429, retry_after_s=7))
    answer = client.get(f"{CLUSTERS}/{RAYCLUSTER}")
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "7")
    assert client.get(f"{CLUSTERS}/{RAYCLUSTER}").status_code == 200


def test_api_lists_pods_by_label(client: httpx.Client, cluster: ClusterByHand) -> None:
    set_replicas(cluster, 2)
    pods = f"api/v1/namespaces/{NAMESPACE}/pods"
    selector = f"ray.io/cluster={RAYCLUSTER},ray.io/node-type=worker"
    answer = client.get(pods, params={"labelSelector": selector}).json()
    assert len(answer["items"]) == 2 * SHAPE.num_hosts
    assert len(client.get(pods).json()["items"]) == 2 * SHAPE.num_hosts + 1


def test_client_without_our_authority_does_not_trust_the_server(cluster: ClusterByHand) -> None:
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{cluster.api.url}/{CLUSTERS}/{RAYCLUSTER}")


def test_operator_new_replicas_take_the_lowest_free_index(cluster: ClusterByHand) -> None:
    set_replicas(cluster, 3)
    first = cluster.pods("v6e-spot")[0]
    set_replicas(cluster, 2, first["metadata"]["name"])
    assert told_to(first)[NAME] not in cluster.slices("v6e-spot")
    set_replicas(cluster, 3)
    assert cluster.slices("v6e-spot") == {f"v6e-spot-{index}": 2 for index in range(3)}


def test_operator_naming_one_pod_deletes_its_whole_slice(cluster: ClusterByHand) -> None:
    set_replicas(cluster, 2)
    doomed = cluster.pods("v6e-spot")[1]
    set_replicas(cluster, 1, doomed["metadata"]["name"])
    left = {told_to(pod)[NAME] for pod in cluster.pods("v6e-spot")}
    assert len(left) == 1
    assert told_to(doomed)[NAME] not in left


def test_operator_lower_count_without_a_name_deletes_nothing(cluster: ClusterByHand) -> None:
    set_replicas(cluster, 2)
    set_replicas(cluster, 0)
    assert len(cluster.slices("v6e-spot")) == 2


def test_operator_without_autoscaler_deletes_surplus_at_random(tmp_path: Path) -> None:
    """A lower count without a name takes a slice that nobody chose: a held one, by chance."""
    deleted = set()
    for seed in range(8):
        store = Store({})
        store.create("rayclusters", raycluster(group(), has_autoscaler=False))
        operator = Operator(store, random.Random(seed))
        for count in (2, 1):
            with store.edit("rayclusters", RAYCLUSTER) as stored:
                stored["spec"]["workerGroupSpecs"][0]["replicas"] = count
            operator.step()
        deleted |= {
            told_to(pod)[NAME]
            for pod in store.list("pods")
            if "deletionTimestamp" in pod["metadata"]
        }
    assert deleted == {"v6e-spot-0", "v6e-spot-1"}


def test_operator_lost_host_replaces_the_whole_slice(cluster: ClusterByHand) -> None:
    set_replicas(cluster, 1)
    before = {pod["metadata"]["name"] for pod in cluster.pods("v6e-spot")}
    cluster.cloud.preempt("v6e-spot-0", host=1)
    cluster.settle()
    after = {pod["metadata"]["name"] for pod in cluster.pods("v6e-spot")}
    assert len(after) == SHAPE.num_hosts
    assert not before & after
    assert cluster.slices("v6e-spot") == {"v6e-spot-0": 2}


def test_cloud_delivers_a_slice_whole_and_late(cluster: ClusterByHand) -> None:
    cluster.cloud.delays_s["v6e-spot"] = 30.0
    set_replicas(cluster, 1)
    cluster.settle(now_s=29.0)
    assert cluster.slices("v6e-spot") == {"v6e-spot-0": 0}
    cluster.settle(now_s=30.0)
    assert cluster.slices("v6e-spot") == {"v6e-spot-0": 2}


def test_cloud_in_a_stock_out_delivers_nothing(cluster: ClusterByHand) -> None:
    cluster.cloud.delays_s["v6e-spot"] = None
    set_replicas(cluster, 1)
    cluster.settle(now_s=1e6)
    assert cluster.slices("v6e-spot") == {"v6e-spot-0": 0}
    cluster.cloud.delays_s["v6e-spot"] = 0.0
    cluster.settle(now_s=1e6)
    assert cluster.slices("v6e-spot") == {"v6e-spot-0": 2}


@pytest.mark.needs("crds")
def test_schema_refuses_what_the_crd_does_not_know() -> None:
    store = Store({"rayclusters": crd_schema("rayclusters")})
    store.create("rayclusters", raycluster(group()))
    for operation in (
        {"op": "replace", "path": REPLICAS, "value": "3"},
        {"op": "add", "path": "/spec/workerGroupSpecs/0/replicaz", "value": 3},
        {"op": "add", "path": SCALE_STRATEGY, "value": {"workersToDelete": "pod"}},
        {"op": "remove", "path": "/spec/workerGroupSpecs/0/template"},
    ):
        with pytest.raises(InvalidError):
            store.patch("rayclusters", RAYCLUSTER, [operation])
