"""Versions that etcd has compacted away, at an API server without a cache of its own.

With its cache the server still knows what came after such a version, as long as little happens.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from autoscaling.provisioning.errors import ExpiredError
from autoscaling.provisioning.kuberay import KubeRayProvisioner
from autoscaling.provisioning.kubernetes import KubernetesAccess
from autoscaling.provisioning.objects.cluster import worker_pods_selector
from autoscaling.provisioning.objects.wire import Selection
from tests.needs import CRDS, do_without

from .api import Api
from .assets import VARIABLE, missing_binaries, missing_crds
from .proxy import Proxy
from .ray_objects import CLUSTER, SPOT, make_slice, set_count
from .server import ControlPlane
from .shared import define_crds
from .watching import watching

pytestmark = pytest.mark.process

Json = dict[str, Any]
PODS = Selection("api/v1", "pods", labels=worker_pods_selector(CLUSTER))


@pytest.fixture(scope="module")
def control_plane() -> Iterator[ControlPlane]:
    reason = missing_binaries(os.environ) or missing_crds(CRDS)
    if reason is not None:
        do_without(reason)
    with ControlPlane(Path(os.environ[VARIABLE]), (), ["--watch-cache=false"]) as running:
        define_crds(running.api)
        yield running


def compact(control_plane: ControlPlane, latest: Json) -> None:
    """etcd forgets everything before an object's last change."""
    revision = latest["metadata"]["resourceVersion"]
    url = f"{control_plane.etcd_url}/v3/kv/compaction"
    answer = httpx.post(url, json={"revision": revision, "physical": True})
    answer.raise_for_status()


async def test_page_of_a_version_that_is_gone_is_an_error_of_its_own(
    api: Api, cluster: Json, access: KubernetesAccess, control_plane: ControlPlane
) -> None:
    for index in range(3):
        make_slice(api, cluster, SPOT, index)
    async with watching(access) as watch:
        pages = watch.api.pages(PODS)
        assert len((await anext(pages)).items) == 3
        compact(control_plane, make_slice(api, cluster, SPOT, 3)[-1])
        with pytest.raises(ExpiredError, match="410"):
            await anext(pages)
        # What began again, ends.
        assert len([page async for page in watch.api.pages(PODS)]) == 3


async def test_watch_from_a_version_that_is_gone_lists_anew(
    api: Api,
    cluster: Json,
    access: KubernetesAccess,
    proxy: Proxy,
    control_plane: ControlPlane,
    listed: KubeRayProvisioner,
) -> None:
    make_slice(api, cluster, SPOT, 0)
    async with watching(access) as watch:
        await watch.shows(listed)
        num_lists = {name: len(proxy.lists(name)) for name in ("pods", "rayclusters")}
        proxy.go_down()
        for pod in make_slice(api, cluster, SPOT, 1):
            api.delete(pod)
        make_slice(api, cluster, SPOT, 2)
        set_count(api, cluster, SPOT, 2)
        compact(control_plane, make_slice(api, cluster, SPOT, 3)[-1])
        version = re.search(r"resourceVersion=(\d+)", proxy.watches("pods")[-1].target)
        assert version is not None
        with pytest.raises(ExpiredError, match="410"):  # noqa: PT012
            proxy.come_back()
            async with watch.api.watch(PODS, version[1], 5) as events:
                await anext(events)
        await watch.shows(listed)
        assert [each.name for each in (await watch.groups())[SPOT].slices] == [
            f"{SPOT}-0",
            f"{SPOT}-2",
            f"{SPOT}-3",
        ]
        for name, before in num_lists.items():
            assert len(proxy.lists(name)) > before
