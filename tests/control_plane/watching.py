"""A provisioner that watches, for tests: what it shows, and ways to wait for it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from autoscaling.provisioning.errors import ProvisioningError, RefusedError
from autoscaling.provisioning.groups import WorkerGroup
from autoscaling.provisioning.kuberay import KubeRayProvisioner
from autoscaling.provisioning.kubernetes import KubernetesAccess, KubernetesApi
from autoscaling.provisioning.objects.cluster import WatchedCluster
from autoscaling.provisioning.objects.wire import Selection

from .ray_objects import CLUSTER

WITHIN_S = 120.0
_POLL_S = 0.02


class Watch:
    """A provisioner that watches; counts what it is told."""

    def __init__(self, access: KubernetesAccess, silence_s: float, **options: Any) -> None:
        self.num_changes = 0
        self.api = KubernetesApi(access, silence_s=silence_s, page_size=3)
        self.reader = WatchedCluster(self.api, CLUSTER, self._note, **options)
        self.provisioner = KubeRayProvisioner(self.api, CLUSTER, self.reader)

    def _note(self) -> None:
        self.num_changes += 1

    async def groups(self) -> dict[str, WorkerGroup]:
        return {each.name: each for each in (await self.provisioner.observe()).groups}

    async def shows(self, listed: KubeRayProvisioner) -> None:
        """Waits until it shows what a list shows."""
        seen: object = None
        expected: object = None

        async def is_so() -> bool:
            nonlocal seen, expected
            expected = _in_order(await listed.observe())
            seen = _in_order(await self.provisioner.observe())
            return seen == expected

        await until(is_so, lambda: f"{seen} is not {expected}")


def _in_order(observation: Any) -> Any:
    return replace(observation, groups=tuple(sorted(observation.groups, key=lambda g: g.name)))


@asynccontextmanager
async def watching(
    access: KubernetesAccess, silence_s: float = 60.0, **options: Any
) -> AsyncIterator[Watch]:
    watch = Watch(access, silence_s, **options)
    try:
        async with watch.reader:
            # Not by one look: on a busy machine the list is old before the first watches open.
            await until(watch.groups, lambda: "a cluster is seen")
            yield watch
    finally:
        await watch.api.aclose()


async def until(is_so: Callable[[], Any], what: Callable[[], str]) -> None:
    """Waits until it is so; a provisioner that shows nothing meanwhile is asked again."""
    try:
        async with asyncio.timeout(WITHIN_S):
            while True:
                try:
                    if await is_so():
                        return
                except ProvisioningError:
                    pass
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise AssertionError(what()) from None


async def refusal(watch: Watch) -> ProvisioningError:
    """Waits until nothing may be planned; the reason."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                await watch.provisioner.observe()
            except ProvisioningError as error:
                return error
            await asyncio.sleep(_POLL_S)


async def may_list(api: KubernetesApi) -> bool:
    """The server's authorizer learns of a binding a moment after it is stored."""
    try:
        async for _ in api.pages(Selection("api/v1", "pods")):
            return True
    except RefusedError:
        pass
    return False


async def as_awaited(value: bool) -> bool:
    return value
