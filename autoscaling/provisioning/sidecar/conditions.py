"""Watches what stands around the slices, to be shown.

Owns what is watched, and what follows from what cannot be. Nothing is decided by it, and nothing
waits for it: what may not be read, or does not exist here, is told as unreadable and asked for
again, slowly. What is read of an object is `readings`'.
"""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec

from autoscaling.provisioning.errors import ProvisioningError
from autoscaling.provisioning.kubernetes import KubernetesApi
from autoscaling.provisioning.objects.cluster import CLUSTERS, CORE, RAY
from autoscaling.provisioning.objects.collection import STALE_AFTER_S, Collection
from autoscaling.provisioning.objects.wire import Selection
from autoscaling.provisioning.raycluster import CLUSTER_LABEL
from autoscaling.provisioning.sidecar.readings import (
    COMPONENT_LABEL,
    CONTROL,
    GATEWAY,
    HEAD,
    INSTANCE_LABEL,
    NAME_LABEL,
    REDIS_NAME,
    ClusterWish,
    ControlPod,
    PlatformConditions,
    read_class,
    read_cluster,
    read_control_pod,
    read_quota,
)
from autoscaling.provisioning.sidecar.rounds import failure_kind

# A list that was refused is asked for again so often: rights do not come by themselves.
RETRY_S = 60.0


class ConditionWatch:
    """Watches what stands around one installation. Used from one event loop.

    `installation` is the name under which it was rendered.
    """

    def __init__(
        self,
        api: KubernetesApi,
        raycluster: str,
        installation: str,
        *,
        retry_s: float = RETRY_S,
        stale_after_s: float = STALE_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._retry_s = retry_s

        def collection(selection: Selection, read: Callable[[msgspec.Raw], Any]) -> Collection[Any]:
            return Collection(
                api,
                selection,
                read,
                on_change=_ignore,
                clock=clock,
                chance=chance,
                stale_after_s=stale_after_s,
            )

        ours = f"{INSTANCE_LABEL}={installation}"
        components = ",".join((HEAD, GATEWAY, CONTROL))
        of_ray = f"{ours},{COMPONENT_LABEL} in ({components}),{CLUSTER_LABEL}={raycluster}"
        of_redis = f"{ours},{NAME_LABEL}={REDIS_NAME}"
        self._parts: dict[str, Collection[Any]] = {
            "pods": collection(Selection(CORE, "pods", labels=of_ray), read_control_pod),
            "redis": collection(Selection(CORE, "pods", labels=of_redis), read_control_pod),
            CLUSTERS: collection(Selection(RAY, CLUSTERS, name=raycluster), read_cluster),
            "resourcequotas": collection(Selection(CORE, "resourcequotas"), read_quota),
            "computeclasses": collection(
                Selection("apis/cloud.google.com/v1", "computeclasses", is_namespaced=False),
                read_class,
            ),
        }

    async def follow(self) -> None:
        """Keeps all of it current until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for part in self._parts.values():
                group.create_task(self._follow(part), name=f"show {part.selection.resource}")

    def current(self) -> PlatformConditions:
        """Returns what is known now."""
        known: dict[str, tuple[Any, ...]] = {}
        problems: dict[str, str] = {}
        for name, part in self._parts.items():
            try:
                known[name] = part.current()
            except ProvisioningError as error:
                problems[name] = failure_kind(error)
        quotas, clusters = known.get("resourcequotas"), known.get(CLUSTERS)
        wish: ClusterWish | None = clusters[0] if clusters else None
        classes = known.get("computeclasses")
        return PlatformConditions(
            pods=_there(known.get("pods")),
            redis=_there(known.get("redis")),
            wanted=None if wish is None else wish.pods,
            quotas=None if quotas is None else tuple(use for each in quotas for use in each),
            # Others in the cluster have classes of their own.
            classes=None
            if wish is None or classes is None
            else tuple(each for each in classes if each.name in wish.classes),
            parts=tuple(self._parts),
            problems=problems,
        )

    async def _follow(self, part: Collection[Any]) -> None:
        while True:
            try:
                await part.refresh()
                break
            except ProvisioningError as error:
                part.note_failure(error)
            await asyncio.sleep(self._retry_s)
        await part.follow()


def _ignore() -> None:
    """Nobody plans by it."""


def _there(pods: tuple[ControlPod | None, ...] | None) -> tuple[ControlPod, ...] | None:
    return None if pods is None else tuple(pod for pod in pods if pod is not None)
