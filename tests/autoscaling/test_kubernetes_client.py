"""The client of the Kubernetes API against a real API server: credentials and refusals.

It acts as the head pod's account, with its rights and no others, through a proxy that keeps what
was asked and spoils answers when it is told to.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control_plane.proxy import Fault
from control_plane.server import ControlPlane
from kuberay.accounts import head_rules
from kuberay.by_hand import ClusterByHand
from kuberay.listed import listing, read_one
from kuberay.objects import RAYCLUSTER, raycluster, rayservice, worker_group
from kuberay.webhook import NAME, told_to
from kuberay.webhook_server import Webhook
from ray.autoscaler.v2.instance_manager.cloud_providers.kuberay.cloud_provider import (
    CloudInstance,
    KubeRayProvider,
    NodeKind,
)

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
from autoscaling.provisioning.objects.cluster import WatchedCluster
from autoscaling.provisioning.objects.wire import Selection
from autoscaling.provisioning.plan import Change, Drop, ProvisioningPlan
from autoscaling.provisioning.raycluster import decode_worker_pod, worker_pods_selector
from serving.domain.topology import slice_shape

pytestmark = pytest.mark.process

SHAPE = slice_shape("v6e", "2x4", 4)
GROUP = "v6e-spot"


def made_cluster(**options: Any) -> dict:
    return raycluster(worker_group(GROUP, SHAPE, "spot", max_replicas=5), **options)


@pytest.fixture
def cluster(control_plane: ControlPlane, webhook: Webhook, tmp_path: Path):
    with ClusterByHand(control_plane, made_cluster(), tmp_path) as running:
        yield running


@pytest.fixture
async def api(cluster: ClusterByHand) -> AsyncIterator[KubernetesApi]:
    client = KubernetesApi(cluster.access)
    yield client
    await client.aclose()


async def read(api: KubernetesApi) -> dict:
    return await read_one(api, "rayclusters", RAYCLUSTER)


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
    cluster.proxy.inject(Fault("list", status))
    with pytest.raises(error, match=rf"GET .*/rayclusters: {status}: injected"):
        await read(api)
    assert (await read(api))["metadata"]["name"] == RAYCLUSTER


async def test_retry_after_is_handed_on(cluster: ClusterByHand, api: KubernetesApi) -> None:
    cluster.proxy.inject(Fault("list", 429, retry_after_s=17))
    with pytest.raises(ThrottledError) as thrown:
        await read(api)
    assert thrown.value.retry_after_s == 17.0


async def test_verb_that_was_not_granted_is_refused_with_its_name(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    with ClusterByHand(control_plane, made_cluster(), tmp_path, rules=[]) as cluster:
        api = KubernetesApi(cluster.access)
        with pytest.raises(RefusedError, match="cannot list resource"):
            await read(api)
        await api.aclose()


async def test_rotated_token_is_read_anew(cluster: ClusterByHand, api: KubernetesApi) -> None:
    await read(api)
    assert cluster.access.token_file is not None
    cluster.access.token_file.write_text("another one")
    with pytest.raises(RefusedError, match="401"):
        await read(api)
    cluster.new_token()
    await read(api)


async def test_missing_token_file_is_an_error_and_not_a_request(cluster: ClusterByHand) -> None:
    api = KubernetesApi(replace(cluster.access, token_file=Path("/nowhere/token")))
    with pytest.raises(UnreachableError, match="/nowhere/token"):
        await read(api)
    assert cluster.proxy.requests() == []
    await api.aclose()


async def test_server_that_our_authority_did_not_sign_is_not_trusted(
    cluster: ClusterByHand,
) -> None:
    api = KubernetesApi(replace(cluster.access, ca_file=None))
    with pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
        await read(api)
    await api.aclose()


async def test_server_that_is_down_is_unreachable() -> None:
    api = KubernetesApi(KubernetesAccess("http://127.0.0.1:1", "serving"))
    with pytest.raises(UnreachableError, match="ConnectError"):
        await read(api)
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
        await read(api)
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
        await read(api)
    server.close()
    await server.wait_closed()
    await api.aclose()


async def test_list_follows_its_pages(
    control_plane: ControlPlane, webhook: Webhook, tmp_path: Path
) -> None:
    with ClusterByHand(control_plane, made_cluster(), tmp_path, page_size=3) as cluster:
        with cluster.edit() as stored:
            stored["spec"]["workerGroupSpecs"][0]["replicas"] = 4
        cluster.settle()
        api = KubernetesApi(cluster.access)
        selection = Selection("api/v1", "pods", labels=worker_pods_selector(RAYCLUSTER))
        pages = [page.items async for page in api.pages(selection)]
        await api.aclose()
    pods = {decode_worker_pod(item).observed.name for page in pages for item in page}
    assert (len(pages), len(pods)) == (3, 4 * SHAPE.num_hosts)


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
    provisioner = listing(api, RAYCLUSTER)
    await scale(provisioner, 3)
    cluster.settle()
    hosts = [pod for pod in cluster.pods(GROUP) if told_to(pod)[NAME] == f"{GROUP}-1"]
    await scale(provisioner, 2, f"{GROUP}-1")
    (first, second) = cluster.proxy.requests(verb="patch")
    path = "/spec/workerGroupSpecs/0"
    *count, names = second.body
    uid = cluster.raycluster()["metadata"]["uid"]
    assert count == [
        {"op": "test", "path": "/metadata/uid", "value": uid},
        {"op": "test", "path": f"{path}/groupName", "value": GROUP},
        {"op": "test", "path": f"{path}/replicas", "value": 3},
        {"op": "replace", "path": f"{path}/replicas", "value": 2},
    ]
    assert (names["op"], names["path"]) == ("add", f"{path}/scaleStrategy")
    assert sorted(names["value"]["workersToDelete"]) == [pod["metadata"]["name"] for pod in hosts]
    assert first.body[-1]["value"] == {"workersToDelete": []}


async def test_autoscaler_that_writes_before_the_operator_acts_keeps_the_lower_count(
    cluster: ClusterByHand, api: KubernetesApi
) -> None:
    """It raises a count to the hosts that it sees, but for those that are named: its own code."""
    provisioner = listing(api, RAYCLUSTER)
    await scale(provisioner, 3)
    cluster.settle()
    await scale(provisioner, 1, f"{GROUP}-0", f"{GROUP}-2")
    stored, pods = cluster.raycluster(), cluster.pods(GROUP)
    rays_own: Any = object.__new__(KubeRayProvider)  # no head, no token: what it has read is given
    rays_own._sync_with_api_server = lambda: None
    rays_own._ray_cluster = stored
    rays_own._cached_instances = {
        pod["metadata"]["name"]: CloudInstance(
            cloud_instance_id=pod["metadata"]["name"],
            node_type=GROUP,
            node_kind=NodeKind.WORKER,
            is_running=True,
        )
        for pod in pods
    }
    asked = rays_own._initialize_scale_request(to_launch={}, to_delete_instances=[])
    assert len(pods) == 3 * SHAPE.num_hosts
    assert asked.desired_num_workers[GROUP] == SHAPE.num_hosts


async def test_patch_is_refused_when_groups_were_reordered(
    cluster: ClusterByHand, api: KubernetesApi
) -> None:
    provisioner = listing(api, RAYCLUSTER)
    (group,) = (await provisioner.observe()).groups
    with cluster.edit() as stored:
        other = worker_group("other", SHAPE, "other", max_replicas=1)
        stored["spec"]["workerGroupSpecs"].insert(0, other)
    with pytest.raises(OutdatedError, match="422"):
        await provisioner.apply(ProvisioningPlan((Change(group, 1, (), "because"),)))
    assert cluster.group("other")["replicas"] == 0


async def test_patch_that_landed_though_its_answer_was_lost_is_seen_the_next_time(
    cluster: ClusterByHand, api: KubernetesApi
) -> None:
    cluster.proxy.inject(Fault("patch", 503, lands=True))
    provisioner = listing(api, RAYCLUSTER)
    with pytest.raises(UnreachableError):
        await scale(provisioner, 2)
    (group,) = (await provisioner.observe()).groups
    assert group.replicas == 2


@pytest.fixture
def service_cluster(
    control_plane: ControlPlane, webhook: Webhook, tmp_path: Path
) -> Callable[..., ClusterByHand]:
    def build(*, rules: list[dict] | None = None, **options: Any) -> ClusterByHand:
        made = made_cluster(is_of_service=True)
        service = rayservice(made, **options)
        return ClusterByHand(control_plane, made, tmp_path, service=service, rules=rules)

    return build


def change_service(cluster: ClusterByHand, **fields: Any) -> None:
    """What `kubectl apply` does with a changed RayService."""
    service = cluster.rayservice()
    service["spec"]["upgradeStrategy"] = {"type": "None"}
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0] |= fields
    cluster.api.replace(service)


async def test_count_in_the_rayservice_is_left_alone(
    service_cluster: Callable[..., ClusterByHand],
) -> None:
    """Whoever applies the RayService again changes nothing that runs."""
    with service_cluster() as cluster:
        api = KubernetesApi(cluster.access)
        await scale(listing(api, RAYCLUSTER), 2)
        spec = cluster.rayservice()["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
        assert (cluster.group(GROUP)["replicas"], spec["replicas"]) == (2, 0)
        assert {each.resource for each in cluster.proxy.requests(verb="patch")} == {"rayclusters"}
        await api.aclose()


async def test_bounds_and_templates_of_the_rayservice_reach_its_cluster_and_counts_do_not(
    service_cluster: Callable[..., ClusterByHand],
) -> None:
    with service_cluster() as cluster:
        api = KubernetesApi(cluster.access)
        provisioner = listing(api, RAYCLUSTER)
        await scale(provisioner, 2)
        cluster.settle()
        template = cluster.group(GROUP)["template"]
        template["spec"]["containers"][0]["image"] = "another"
        change_service(cluster, maxReplicas=9, template=template)
        await provisioner.catch_up()
        group = cluster.group(GROUP)
        assert (group["maxReplicas"], group["replicas"]) == (9, 2)
        assert group["template"]["spec"]["containers"][0]["image"] == "another"
        # What runs is of the template before.
        (seen,) = (await provisioner.observe()).groups
        assert [each.is_outdated for each in seen.slices] == [True, True]
        patches = len(cluster.proxy.requests(verb="patch"))
        await provisioner.catch_up()
        assert len(cluster.proxy.requests(verb="patch")) == patches
        await api.aclose()


async def test_provisioner_that_watches_carries_over_what_is_applied(
    service_cluster: Callable[..., ClusterByHand],
) -> None:
    """As `slicewise provision` reads: it keeps of an object what is needed, and no more."""
    with service_cluster() as cluster:
        api = KubernetesApi(cluster.access)
        changed = asyncio.Event()
        async with WatchedCluster(api, RAYCLUSTER, changed.set) as watched:
            provisioner = KubeRayProvisioner(api, RAYCLUSTER, watched)
            await scale(provisioner, 2)
            template = cluster.group(GROUP)["template"]
            template["spec"]["containers"][0]["image"] = "another"
            change_service(cluster, maxReplicas=9, template=template)
            async with asyncio.timeout(60.0):
                while cluster.group(GROUP)["maxReplicas"] != 9:
                    await changed.wait()
                    changed.clear()
                    await provisioner.catch_up()
            group = cluster.group(GROUP)
            assert group["template"]["spec"]["containers"][0]["image"] == "another"
            assert group["replicas"] == 2
            assert (await provisioner.observe()).notes == ()
        await api.aclose()


async def test_nothing_is_carried_over_while_the_service_upgrades(
    service_cluster: Callable[..., ClusterByHand],
) -> None:
    """Two clusters: KubeRay has made the next one from what was applied."""
    for options in ({"pending": "the-next"}, {"active": "the-last", "pending": RAYCLUSTER}):
        with service_cluster(**options) as cluster:
            api = KubernetesApi(cluster.access)
            provisioner = listing(api, RAYCLUSTER)
            before = cluster.group(GROUP)["maxReplicas"]
            change_service(cluster, maxReplicas=9)
            await provisioner.catch_up()
            assert cluster.group(GROUP)["maxReplicas"] == before
            notes = (await provisioner.observe()).notes
            assert any(
                "everything is not carried over: the RayService has" in each for each in notes
            )
            await api.aclose()


async def test_service_that_may_not_be_read_is_noted_and_the_cluster_still_scaled(
    service_cluster: Callable[..., ClusterByHand],
) -> None:
    rules = [rule for rule in head_rules() if "rayservices" not in rule["resources"]]
    with service_cluster(rules=rules) as cluster:
        api = KubernetesApi(cluster.access)
        provisioner = listing(api, RAYCLUSTER)
        (note,) = (await provisioner.observe()).notes
        assert "what is applied to the RayService is not carried over" in note
        assert "cannot list resource" in note
        await scale(provisioner, 2)
        assert cluster.group(GROUP)["replicas"] == 2
        await api.aclose()


async def test_slices_follow_patches_under_a_rayservice(
    service_cluster: Callable[..., ClusterByHand],
) -> None:
    """The API server has KubeRay's schemas: it would refuse what they do not know."""
    with service_cluster() as cluster:
        api = KubernetesApi(cluster.access)
        provisioner = listing(api, RAYCLUSTER)
        await scale(provisioner, 2)
        cluster.settle()
        await scale(provisioner, 1, f"{GROUP}-0")
        cluster.settle()
        assert list(cluster.slices(GROUP)) == [f"{GROUP}-1"]
        await api.aclose()
