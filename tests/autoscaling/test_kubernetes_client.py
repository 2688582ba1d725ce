"""The client of the Kubernetes API against a real server on loopback: credentials and refusals."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kuberay.api_server import HEAD_POD_GRANTS, MIRROR_GRANTS, Fault
from kuberay.by_hand import USER, ClusterByHand
from kuberay.objects import RAYCLUSTER, RAYSERVICE, raycluster, rayservice, worker_group
from kuberay.schema import crd_schema
from kuberay.webhook import NAME, told_to

from autoscaling.provisioning.errors import (
    MissingError,
    OutdatedError,
    ProvisioningError,
    RefusedError,
    ThrottledError,
    UnreachableError,
    UnusableError,
)
from autoscaling.provisioning.kuberay import KubeRayProvisioner
from autoscaling.provisioning.kubernetes import KubernetesAccess, KubernetesApi
from autoscaling.provisioning.plan import Change, Drop, ProvisioningPlan
from serving.domain.topology import slice_shape

pytestmark = pytest.mark.slow

SHAPE = slice_shape("v6e", "2x4", 4)
GROUP = "v6e-spot"
RAY = "apis/ray.io/v1"


def made_cluster(**options: Any) -> dict:
    return raycluster(worker_group(GROUP, SHAPE, "spot", max_replicas=5), **options)


@pytest.fixture
def cluster(tmp_path: Path):
    with ClusterByHand(made_cluster(), tmp_path) as running:
        yield running


@pytest.fixture
async def api(cluster: ClusterByHand) -> AsyncIterator[KubernetesApi]:
    client = KubernetesApi(cluster.access)
    yield client
    await client.aclose()


async def get(api: KubernetesApi) -> dict:
    return await api.get(RAY, "rayclusters", RAYCLUSTER)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, RefusedError),
        (403, RefusedError),
        (404, MissingError),
        (409, OutdatedError),
        (422, OutdatedError),
        (429, ThrottledError),
        (500, UnreachableError),
        (503, UnreachableError),
        (302, UnusableError),
        (400, UnusableError),
    ],
)
async def test_status_becomes_an_error_that_says_what_failed(
    cluster: ClusterByHand, api: KubernetesApi, status: int, error: type[ProvisioningError]
) -> None:
    cluster.api.inject(Fault("get", status))
    with pytest.raises(error, match=rf"GET .*/rayclusters/{RAYCLUSTER}: {status}: injected"):
        await get(api)
    assert (await get(api))["kind"] == "RayCluster"


async def test_retry_after_is_handed_on(cluster: ClusterByHand, api: KubernetesApi) -> None:
    cluster.api.inject(Fault("get", 429, retry_after_s=17))
    with pytest.raises(ThrottledError) as thrown:
        await get(api)
    assert thrown.value.retry_after_s == 17.0


async def test_verb_that_was_not_granted_is_refused_with_its_name(tmp_path: Path) -> None:
    with ClusterByHand(made_cluster(), tmp_path, grants=[]) as cluster:
        api = KubernetesApi(cluster.access)
        with pytest.raises(RefusedError, match="cannot get resource"):
            await get(api)
        await api.aclose()


async def test_rotated_token_is_read_anew(cluster: ClusterByHand, api: KubernetesApi) -> None:
    await get(api)
    assert cluster.access.token_file is not None
    cluster.access.token_file.write_text("another one")
    with pytest.raises(RefusedError, match="401"):
        await get(api)
    cluster.api.grant(USER, HEAD_POD_GRANTS, "another one")
    await get(api)


async def test_missing_token_file_is_an_error_and_not_a_request(cluster: ClusterByHand) -> None:
    api = KubernetesApi(replace(cluster.access, token_file=Path("/nowhere/token")))
    with pytest.raises(UnreachableError, match="/nowhere/token"):
        await get(api)
    assert cluster.api.requests() == []
    await api.aclose()


async def test_server_that_our_authority_did_not_sign_is_not_trusted(
    cluster: ClusterByHand,
) -> None:
    api = KubernetesApi(replace(cluster.access, ca_file=None))
    with pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
        await get(api)
    await api.aclose()


async def test_server_that_is_down_is_unreachable() -> None:
    api = KubernetesApi(KubernetesAccess("http://127.0.0.1:1", "serving"))
    with pytest.raises(UnreachableError, match="ConnectError"):
        await get(api)
    await api.aclose()


async def test_server_that_does_not_answer_in_time_is_unreachable() -> None:
    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await done.wait()
        writer.close()

    done = asyncio.Event()
    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    api = KubernetesApi(KubernetesAccess(f"http://127.0.0.1:{port}", "serving"), timeout_s=0.2)
    with pytest.raises(UnreachableError, match="ReadTimeout"):
        await get(api)
    done.set()
    server.close()
    await server.wait_closed()
    await api.aclose()


async def test_answer_that_is_no_object_is_unusable() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    api = KubernetesApi(KubernetesAccess(f"http://127.0.0.1:{port}", "serving"))
    with pytest.raises(UnusableError):
        await get(api)
    server.close()
    await server.wait_closed()
    await api.aclose()


async def test_list_follows_its_pages(tmp_path: Path) -> None:
    with ClusterByHand(made_cluster(), tmp_path, page_size=3) as cluster:
        with cluster.store.edit("rayclusters", RAYCLUSTER) as stored:
            stored["spec"]["workerGroupSpecs"][0]["replicas"] = 4
        cluster.settle()
        api = KubernetesApi(cluster.access)
        pods = await api.list(
            "api/v1", "pods", f"ray.io/cluster={RAYCLUSTER},ray.io/node-type=worker"
        )
        await api.aclose()
    assert len({pod["metadata"]["name"] for pod in pods}) == 4 * SHAPE.num_hosts


def test_access_in_a_pod_is_what_kubernetes_says(tmp_path: Path) -> None:
    environment = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT_HTTPS": "6443"}
    access = KubernetesAccess.in_pod(environment, "serving", tmp_path)
    assert access.base_url == "https://10.96.0.1:6443"
    assert (access.token_file, access.ca_file) == (tmp_path / "token", tmp_path / "ca.crt")
    six = KubernetesAccess.in_pod({"KUBERNETES_SERVICE_HOST": "fd00::1"}, "serving", tmp_path)
    assert six.base_url == "https://[fd00::1]:443"
    with pytest.raises(KeyError):
        KubernetesAccess.in_pod({}, "serving", tmp_path)


# -- the patches of the KubeRay provisioner --


async def scale(provisioner: KubeRayProvisioner, replicas: int, *dropped: str) -> None:
    (group,) = (await provisioner.observe()).groups
    drops = tuple(
        Drop(each, is_condemned=False, reason="unwanted")
        for each in group.slices
        if each.name in dropped
    )
    await provisioner.apply(ProvisioningPlan((Change(group, replicas, drops, "because"),)))


async def test_count_and_names_travel_in_one_guarded_patch(
    cluster: ClusterByHand, api: KubernetesApi
) -> None:
    provisioner = KubeRayProvisioner(api, RAYCLUSTER)
    await scale(provisioner, 3)
    cluster.settle()
    pod = cluster.pods(GROUP)[2]
    doomed = pod["metadata"]
    await scale(provisioner, 2, told_to(pod)[NAME])
    (first, second) = cluster.api.requests(verb="patch")
    path = "/spec/workerGroupSpecs/0"
    assert second.body == [
        {"op": "test", "path": f"{path}/groupName", "value": GROUP},
        {"op": "test", "path": f"{path}/replicas", "value": 3},
        {"op": "replace", "path": f"{path}/replicas", "value": 2},
        {
            "op": "add",
            "path": f"{path}/scaleStrategy",
            "value": {"workersToDelete": [doomed["name"]]},
        },
    ]
    assert first.body[-1]["value"] == {"workersToDelete": []}


async def test_patch_is_refused_when_groups_were_reordered(
    cluster: ClusterByHand, api: KubernetesApi
) -> None:
    provisioner = KubeRayProvisioner(api, RAYCLUSTER)
    (group,) = (await provisioner.observe()).groups
    with cluster.store.edit("rayclusters", RAYCLUSTER) as stored:
        other = worker_group("other", SHAPE, "other", max_replicas=1)
        stored["spec"]["workerGroupSpecs"].insert(0, other)
    with pytest.raises(OutdatedError, match="groupName"):
        await provisioner.apply(ProvisioningPlan((Change(group, 1, (), "because"),)))
    assert cluster.group("other")["replicas"] == 0


async def test_patch_that_landed_though_its_answer_was_lost_is_seen_the_next_time(
    cluster: ClusterByHand, api: KubernetesApi
) -> None:
    cluster.api.inject(Fault("patch", 503, lands=True))
    provisioner = KubeRayProvisioner(api, RAYCLUSTER)
    with pytest.raises(UnreachableError):
        await scale(provisioner, 2)
    (group,) = (await provisioner.observe()).groups
    assert group.replicas == 2


@pytest.fixture
def service_cluster(tmp_path: Path) -> Callable[..., ClusterByHand]:
    def build(**options: Any) -> ClusterByHand:
        grants = options.pop("grants", HEAD_POD_GRANTS | MIRROR_GRANTS)
        made = made_cluster(is_of_service=True)
        service = rayservice(made, **options)
        return ClusterByHand(made, tmp_path, service=service, grants=grants)

    return build


def mirrored_count(cluster: ClusterByHand) -> int:
    spec = cluster.store.get("rayservices", RAYSERVICE)["spec"]["rayClusterConfig"]
    count: int = spec["workerGroupSpecs"][0]["replicas"]
    return count


async def test_count_is_mirrored_into_the_rayservice(
    service_cluster: Callable[..., ClusterByHand],
) -> None:
    with service_cluster() as cluster:
        api = KubernetesApi(cluster.access)
        await scale(KubeRayProvisioner(api, RAYCLUSTER), 2)
        assert (cluster.group(GROUP)["replicas"], mirrored_count(cluster)) == (2, 2)
        await api.aclose()


async def test_mirror_that_failed_is_made_good_without_touching_the_cluster(
    service_cluster: Callable[..., ClusterByHand],
) -> None:
    with service_cluster() as cluster:
        api = KubernetesApi(cluster.access)
        provisioner = KubeRayProvisioner(api, RAYCLUSTER)
        await scale(provisioner, 2)
        with cluster.store.edit("rayservices", RAYSERVICE) as stored:
            stored["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"] = 0
        patches = len(cluster.api.requests(verb="patch"))
        await scale(provisioner, 2)
        (last,) = cluster.api.requests(verb="patch")[patches:]
        assert (last.resource, mirrored_count(cluster)) == ("rayservices", 2)
        await api.aclose()


async def test_count_is_not_mirrored_while_the_service_upgrades(
    service_cluster: Callable[..., ClusterByHand],
) -> None:
    """Two clusters, each with its own provisioner: they would overwrite each other's count."""
    for options in ({"pending": "the-next"}, {"active": "the-last", "pending": RAYCLUSTER}):
        with service_cluster(**options) as cluster:
            api = KubernetesApi(cluster.access)
            await scale(KubeRayProvisioner(api, RAYCLUSTER), 2)
            assert (cluster.group(GROUP)["replicas"], mirrored_count(cluster)) == (2, 0)
            await api.aclose()


async def test_service_that_may_not_be_read_is_noted_and_the_cluster_still_scaled(
    service_cluster: Callable[..., ClusterByHand],
) -> None:
    with service_cluster(grants=HEAD_POD_GRANTS) as cluster:
        api = KubernetesApi(cluster.access)
        provisioner = KubeRayProvisioner(api, RAYCLUSTER)
        (note,) = (await provisioner.observe()).notes
        assert "counts are not mirrored into the RayService" in note
        assert "cannot get resource" in note
        await scale(provisioner, 2)
        assert cluster.group(GROUP)["replicas"] == 2
        await api.aclose()


@pytest.mark.needs("crds")
async def test_patched_objects_are_valid_by_kuberays_schema(tmp_path: Path) -> None:
    schemas = {name: crd_schema(name) for name in ("rayclusters", "rayservices")}
    made = made_cluster(is_of_service=True)
    with ClusterByHand(made, tmp_path, service=rayservice(made), schemas=schemas) as cluster:
        api = KubernetesApi(cluster.access)
        provisioner = KubeRayProvisioner(api, RAYCLUSTER)
        await scale(provisioner, 2)
        cluster.settle()
        await scale(provisioner, 1, f"{GROUP}-0")
        cluster.settle()
        assert (list(cluster.slices(GROUP)), mirrored_count(cluster)) == ([f"{GROUP}-1"], 1)
        await api.aclose()
