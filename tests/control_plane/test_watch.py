"""The provisioner's watch against a real API server, under the rights that we render.

Whatever happened to connections and versions, what is watched is in the end what a list shows.
"""

import asyncio
import re
import threading
from typing import Any

import pytest

from autoscaling.provisioning.errors import MissingError, OutdatedError, RefusedError
from autoscaling.provisioning.kuberay import KubeRayProvisioner
from autoscaling.provisioning.kubernetes import KubernetesAccess
from autoscaling.provisioning.objects.cluster import ClusterObjects
from autoscaling.provisioning.objects.wire import Selection
from autoscaling.provisioning.plan import Change, Drop, ProvisioningPlan
from deployments.manifests.platform import PROVISIONER_RULES

from .api import Api
from .proxy import Fault, Proxy
from .ray_objects import (
    CLUSTER,
    FINALIZER,
    NUM_HOSTS,
    RESERVED,
    SPOT,
    host_pods,
    make_cluster,
    make_slice,
    run_pod,
    set_count,
)
from .watching import as_awaited, refusal, until, watching

pytestmark = pytest.mark.process

Json = dict[str, Any]


async def test_watch_shows_what_a_list_shows_after_every_kind_of_change(
    api: Api, cluster: Json, access: KubernetesAccess, listed: KubeRayProvisioner
) -> None:
    make_slice(api, cluster, SPOT, 0)
    async with watching(access) as watch:
        await watch.shows(listed)
        first = make_slice(api, cluster, RESERVED, 0, finalizers=[FINALIZER])
        for number, pod in enumerate(first):
            run_pod(api, pod, f"10.1.0.{number + 1}")
        set_count(api, cluster, SPOT, 3)
        await watch.shows(listed)
        seen = await watch.groups()
        assert seen[SPOT].replicas == 3
        assert [each.is_running for each in seen[RESERVED].slices] == [True]
        api.delete(first[0])
        await watch.shows(listed)
        (left,) = (await watch.groups())[RESERVED].slices
        assert len(left.pods) == NUM_HOSTS - 1
        api.merge(first[0], {"metadata": {"finalizers": None}})
        api.delete(make_slice(api, cluster, SPOT, 1)[0])
        await watch.shows(listed)


async def test_provisioner_asks_for_what_its_role_grants_and_nothing_else(
    api: Api, cluster: Json, access: KubernetesAccess, proxy: Proxy
) -> None:
    async with watching(access) as watch:
        spot = (await watch.groups())[SPOT]
        await watch.provisioner.apply(ProvisioningPlan((Change(spot, 2, (), "because"),)))
        found = api.get("RayCluster", access.namespace, CLUSTER)
        counts = {spec["groupName"]: spec["replicas"] for spec in found["spec"]["workerGroupSpecs"]}
        assert counts[SPOT] == 2
        resources = [rule["resources"][0] for rule in PROVISIONER_RULES]
        asked = {
            (each.verb, each.resource) for each in proxy.requests() if each.resource in resources
        }
        assert asked == {
            (verb, rule["resources"][0]) for rule in PROVISIONER_RULES for verb in rule["verbs"]
        }
        for selection in (
            Selection("apis/ray.io/v1", "rayservices"),
            Selection("apis/ray.io/v1", "rayservices", name="another"),
            Selection("api/v1", "secrets"),
        ):
            with pytest.raises(RefusedError, match="cannot list resource"):
                await anext(watch.api.pages(selection))


async def test_cut_watch_goes_on_where_it_was_without_listing(
    api: Api,
    cluster: Json,
    access: KubernetesAccess,
    proxy: Proxy,
    listed: KubeRayProvisioner,
) -> None:
    old = make_slice(api, cluster, SPOT, 0)
    async with watching(access) as watch:
        await watch.shows(listed)
        num_lists = len(proxy.lists("pods"))
        for index in range(1, 6):
            proxy.go_down()
            make_slice(api, cluster, SPOT, index)
            run_pod(api, old[0], f"10.1.0.{index}")
            set_count(api, cluster, SPOT, index)
            proxy.come_back()
            make_slice(api, cluster, RESERVED, index)
            proxy.cut()
            await watch.shows(listed)
        assert len((await watch.groups())[SPOT].slices) == 6
        assert len(proxy.lists("pods")) == num_lists


@pytest.mark.parametrize("status", [410, 500, 429, 403])
async def test_refused_watch_is_made_good(
    api: Api,
    cluster: Json,
    access: KubernetesAccess,
    proxy: Proxy,
    listed: KubeRayProvisioner,
    status: int,
) -> None:
    async with watching(access) as watch:
        await watch.shows(listed)
        await until(lambda: as_awaited(len(proxy.watches("pods")) == 1), lambda: "it watches")
        num_lists = len(proxy.lists("pods"))
        wait_s = 1 if status == 429 else None
        proxy.inject(Fault("watch", status, part="/pods?", retry_after_s=wait_s))
        proxy.cut()
        make_slice(api, cluster, SPOT, 0)
        await watch.shows(listed)
        await until(lambda: as_awaited(len(proxy.watches("pods")) >= 3), lambda: "it watches")
        # Only where the server has forgotten what came after is everything listed anew.
        assert (len(proxy.lists("pods")) > num_lists) == (status == 410)


async def test_list_whose_token_has_expired_begins_again(
    api: Api,
    cluster: Json,
    access: KubernetesAccess,
    proxy: Proxy,
    listed: KubeRayProvisioner,
) -> None:
    for index in range(4):
        make_slice(api, cluster, SPOT, index)
    async with watching(access) as watch:
        await watch.shows(listed)
        proxy.inject(Fault("watch", 410))
        proxy.inject(Fault("list", 410, part="continue="))
        proxy.cut()
        make_slice(api, cluster, RESERVED, 0)
        await watch.shows(listed)
        assert len((await watch.groups())[SPOT].slices) == 4


async def test_bookmarks_carry_the_version_on_where_nothing_of_ours_changes(
    api: Api,
    cluster: Json,
    access: KubernetesAccess,
    proxy: Proxy,
    listed: KubeRayProvisioner,
) -> None:
    """The server sends one 2 s before it ends a watch; so the next one begins after it.

    It sends none if the watch has begun later than that, as on a busy machine.
    """
    async with watching(access, watch_s=8, chance=lambda: 0.0) as watch:
        other = host_pods(cluster, SPOT, 0)[0]
        other["metadata"]["labels"] = {}
        latest = api.create(other)["metadata"]["resourceVersion"]
        before = watch.num_changes

        def versions() -> list[int]:
            return [
                int(re.search(r"resourceVersion=(\d+)", each.target)[1])  # type: ignore[index]
                for each in proxy.watches("pods")
            ]

        await until(
            lambda: as_awaited(max(versions(), default=0) >= int(latest)),
            lambda: f"a watch after {latest}: {versions()}",
        )
        assert min(versions()) < int(latest)
        assert watch.num_changes == before
        assert len(proxy.lists("pods")) == 1
        await watch.shows(listed)


async def test_flood_of_events_is_followed_to_its_end(
    api: Api,
    cluster: Json,
    access: KubernetesAccess,
    proxy: Proxy,
    listed: KubeRayProvisioner,
) -> None:
    def flood(first: int) -> None:
        for index in range(first, first + 15):
            pods = make_slice(api, cluster, SPOT, index)
            for number, pod in enumerate(pods):
                for phase in range(3):
                    run_pod(api, pod, f"10.{index}.{number}.{phase}")
            if index % 3 == 0:
                for pod in pods:
                    api.delete(pod)

    async with watching(access) as watch:
        threads = [threading.Thread(target=flood, args=(first,)) for first in (0, 100, 200)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            proxy.cut()
            await asyncio.sleep(0.3)
        await watch.shows(listed)
        assert len((await watch.groups())[SPOT].slices) == 30


async def test_cluster_made_anew_under_its_name_starts_without_the_old_pods(
    api: Api,
    service: Json,
    cluster: Json,
    access: KubernetesAccess,
    listed: KubeRayProvisioner,
) -> None:
    # Garbage collection can take them away only later.
    held = make_slice(api, cluster, SPOT, 0, finalizers=[FINALIZER])
    async with watching(access) as watch:
        await watch.shows(listed)
        old = (await watch.groups())[SPOT]
        assert len(old.slices) == 1
        api.delete(cluster)
        assert isinstance(await refusal(watch), MissingError)
        anew = make_cluster(api, service)
        assert anew["metadata"]["uid"] != cluster["metadata"]["uid"]
        make_slice(api, anew, SPOT, 0)
        await watch.shows(listed)
        (found,) = (await watch.groups())[SPOT].slices
        assert {pod.name for pod in found.pods}.isdisjoint(pod["metadata"]["name"] for pod in held)
        # The server takes what was planned for this cluster, and not for the one before.
        drop = Drop(old.slices[0], is_condemned=False, reason="unwanted")
        plan = ProvisioningPlan((Change(old, 1, (drop,), "because"),))
        outdated = KubeRayProvisioner(watch.api, CLUSTER, Remembered(cluster))
        await outdated.observe()
        with pytest.raises(OutdatedError):
            await outdated.apply(plan)
        up_to_date = KubeRayProvisioner(watch.api, CLUSTER, Remembered(anew))
        await up_to_date.observe()
        await up_to_date.apply(plan)


class Remembered:
    """Reads a cluster as it once was."""

    def __init__(self, cluster: Json) -> None:
        self._objects = ClusterObjects(cluster, ())

    async def read(self) -> ClusterObjects:
        return self._objects

    def accept(self, resource: str, text: bytes) -> None:
        pass


async def test_cluster_of_another_name_is_not_taken_for_ours(
    api: Api, service: Json, cluster: Json, access: KubernetesAccess
) -> None:
    async with watching(access) as watch:
        other = make_cluster(api, service, "llm-fghij")
        make_slice(api, other, SPOT, 0)
        assert (await watch.groups())[SPOT].slices == ()
        api.delete(cluster)
        assert isinstance(await refusal(watch), MissingError)


async def test_nothing_is_planned_on_a_state_that_is_not_watched(
    api: Api,
    cluster: Json,
    access: KubernetesAccess,
    proxy: Proxy,
    listed: KubeRayProvisioner,
) -> None:
    async with watching(access, stale_after_s=0.5) as watch:
        await watch.shows(listed)
        proxy.go_down()
        error = await refusal(watch)
        assert "not watched for" in str(error)
        make_slice(api, cluster, SPOT, 0)
        proxy.come_back()
        await watch.shows(listed)


async def test_connection_that_nothing_comes_through_is_given_up(
    api: Api,
    cluster: Json,
    access: KubernetesAccess,
    proxy: Proxy,
    listed: KubeRayProvisioner,
) -> None:
    async with watching(access, silence_s=2.0, stale_after_s=0.2) as watch:
        await watch.shows(listed)
        proxy.hold()
        make_slice(api, cluster, SPOT, 0)

        async def is_given_up() -> bool:
            return "ReadTimeout" in str(await refusal(watch))

        await until(is_given_up, lambda: "the silence is the reason")
        proxy.come_back()
        await watch.shows(listed)


async def test_watches_that_end_at_once_prove_nothing(
    api: Api,
    cluster: Json,
    access: KubernetesAccess,
    proxy: Proxy,
    listed: KubeRayProvisioner,
) -> None:
    """However often they are opened, what is known grows old."""
    async with watching(access, stale_after_s=0.5, chance=lambda: 0.01) as watch:
        await watch.shows(listed)
        proxy.inject(Fault("watch", 200, times=100_000))
        proxy.cut()
        make_slice(api, cluster, SPOT, 0)
        assert "not watched for" in str(await refusal(watch))
        proxy.forget_faults()
        await watch.shows(listed)


async def test_own_change_is_seen_at_once_and_an_older_answer_changes_nothing(
    api: Api, cluster: Json, access: KubernetesAccess
) -> None:
    async with watching(access) as watch:
        seen = (await watch.groups())[SPOT]
        await watch.provisioner.apply(ProvisioningPlan((Change(seen, 1, (), "because"),)))
        assert (await watch.groups())[SPOT].replicas == 1
        path = "apis/ray.io/v1", "rayclusters", CLUSTER
        answer = await watch.api.json_patch(*path, [])
        api.delete(cluster)
        assert isinstance(await refusal(watch), MissingError)
        # As when it is on its way while the watch tells of the end.
        watch.reader.accept("rayclusters", answer)
        assert isinstance(await refusal(watch), MissingError)


async def test_change_on_a_count_that_another_writer_has_changed_is_planned_anew(
    api: Api, cluster: Json, access: KubernetesAccess, listed: KubeRayProvisioner
) -> None:
    async with watching(access) as watch:
        seen = (await watch.groups())[SPOT]
        set_count(api, cluster, SPOT, 2)
        with pytest.raises(OutdatedError):
            await watch.provisioner.apply(ProvisioningPlan((Change(seen, 1, (), "because"),)))
        await watch.shows(listed)
        seen = (await watch.groups())[SPOT]
        await watch.provisioner.apply(ProvisioningPlan((Change(seen, 3, (), "because"),)))
        await watch.shows(listed)
        assert (await watch.groups())[SPOT].replicas == 3
