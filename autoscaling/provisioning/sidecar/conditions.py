"""What stands around the slices: control pods, quotas, compute classes. Watched to be shown.

Owns what is read of them and how. Nothing is decided by it, and nothing waits for it: what may not
be read, or does not exist here, is told as unreadable and asked for again, slowly.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from autoscaling.provisioning.errors import ProvisioningError, UnusableError
from autoscaling.provisioning.kubernetes import KubernetesApi
from autoscaling.provisioning.objects.cluster import CLUSTERS, CORE, RAY
from autoscaling.provisioning.objects.collection import STALE_AFTER_S, Collection
from autoscaling.provisioning.objects.wire import Selection
from autoscaling.provisioning.raycluster import CLUSTER_LABEL
from autoscaling.provisioning.sidecar.rounds import failure_kind
from serving.domain.gke_names import GKE_COMPUTE_CLASS

# Labels that `slicewise render` gives to pods (`deployments.manifests.names`); Redis has its own.
INSTANCE_LABEL = "app.kubernetes.io/instance"
COMPONENT_LABEL = "app.kubernetes.io/component"
NAME_LABEL = "app.kubernetes.io/name"
HEAD, GATEWAY, REDIS = "head", "gateway", "redis"
REDIS_NAME = "slicewise-redis"
# GKE's word for "this rule cannot be had at present", since 1.36.4-gke.1391000. Source: GKE's page
# on custom compute classes, read 2026-11-20.
SUSPENDED = "ProvisioningSuspended"
# A list that was refused is asked for again so often: rights do not come by themselves.
RETRY_S = 60.0
# Binary and decimal suffixes of Kubernetes' quantities.
_SUFFIXES = {
    **{
        unit: Decimal(1024) ** power
        for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)
    },
    **{
        unit: Decimal(1000) ** power for power, unit in enumerate(("k", "M", "G", "T", "P", "E"), 1)
    },
    "m": Decimal("0.001"),
}


@dataclass(frozen=True, slots=True)
class ControlPod:
    """A pod of the control plane: its component, and whether Kubernetes calls it ready."""

    component: str
    is_ready: bool


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """One resource of one ResourceQuota, in the resource's own unit. `used`: not counted yet."""

    quota: str
    resource: str
    used: float | None
    hard: float


@dataclass(frozen=True, slots=True)
class ClusterWish:
    """What a RayCluster asks for: pods by component, and the compute classes of all its pods."""

    pods: Mapping[str, int]
    classes: frozenset[str]


@dataclass(frozen=True, slots=True)
class ClassState:
    """A compute class: how many rules it has in its status, and how many GKE has suspended."""

    name: str
    num_priorities: int
    num_suspended: int


@dataclass(frozen=True, slots=True)
class PlatformConditions:
    """What is known. A part that cannot be read is `None`; `problems` says why, by its name.

    `wanted` is how many pods of a component the RayCluster asks for. `classes` are those that it
    names. `parts` are the names of all that is watched.
    """

    pods: tuple[ControlPod, ...] | None
    redis: tuple[ControlPod, ...] | None
    wanted: Mapping[str, int] | None
    quotas: tuple[QuotaUse, ...] | None
    classes: tuple[ClassState, ...] | None
    parts: tuple[str, ...]
    problems: Mapping[str, str]


def quantity(text: str) -> float:
    """Returns a quantity of Kubernetes as a number.

    Raises:
        UnusableError: it is none.
    """
    for suffix, factor in _SUFFIXES.items():
        if text.endswith(suffix):
            text, scale = text.removesuffix(suffix), factor
            break
    else:
        scale = Decimal(1)
    try:
        return float(Decimal(text) * scale)
    except InvalidOperation as error:
        raise UnusableError(f"not a quantity: {text!r}") from error


def read_control_pod(text: msgspec.Raw) -> ControlPod | None:
    """Reads a pod; `None` if it is about to go."""
    pod = _decode(text, _Pod)
    if pod.metadata.deletion_timestamp is not None:
        return None
    labels = pod.metadata.labels
    is_redis = labels.get(NAME_LABEL) == REDIS_NAME
    component = REDIS if is_redis else labels.get(COMPONENT_LABEL, "")
    return ControlPod(component, _holds(pod.status.conditions, "Ready"))


def read_cluster(text: msgspec.Raw) -> ClusterWish:
    """Reads of a RayCluster how many heads and gateways it asks for, and on which classes."""
    spec = _decode(text, _RayCluster).spec
    gateways = (
        each.replicas * each.num_of_hosts
        for each in spec.worker_group_specs
        if each.template.metadata.labels.get(COMPONENT_LABEL) == GATEWAY
    )
    templates = [spec.head_group_spec.template, *(g.template for g in spec.worker_group_specs)]
    classes = {each.spec.node_selector.get(GKE_COMPUTE_CLASS) for each in templates}
    return ClusterWish(
        {HEAD: 1, GATEWAY: sum(gateways)},
        frozenset(name for name in classes if name is not None),
    )


def read_quota(text: msgspec.Raw) -> tuple[QuotaUse, ...]:
    """Reads a ResourceQuota, a resource at a time, in the order of their names."""
    quota = _decode(text, _Quota)
    used = quota.status.used
    return tuple(
        QuotaUse(
            quota.metadata.name,
            resource,
            quantity(used[resource]) if resource in used else None,
            quantity(hard),
        )
        for resource, hard in sorted(quota.spec.hard.items())
    )


def read_class(text: msgspec.Raw) -> ClassState:
    """Reads a ComputeClass. One without a status has no priorities: GKE says nothing of it."""
    found = _decode(text, _ComputeClass)
    priorities = found.status.priority_statuses
    suspended = sum(_holds(each.conditions, SUSPENDED) for each in priorities)
    return ClassState(found.metadata.name, len(priorities), suspended)


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
        of_ray = f"{ours},{COMPONENT_LABEL} in ({HEAD},{GATEWAY}),{CLUSTER_LABEL}={raycluster}"
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


class _Condition(msgspec.Struct):
    type: str
    status: str


def _holds(conditions: list[_Condition], kind: str) -> bool:
    return any(each.type == kind and each.status == "True" for each in conditions)


class _Metadata(msgspec.Struct, rename="camel"):
    name: str
    labels: dict[str, str] = {}
    deletion_timestamp: str | None = None


class _PodStatus(msgspec.Struct):
    conditions: list[_Condition] = []


class _Pod(msgspec.Struct):
    metadata: _Metadata
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


class _TemplateMetadata(msgspec.Struct):
    labels: dict[str, str] = {}


class _PodSpec(msgspec.Struct, rename="camel"):
    node_selector: dict[str, str] = {}


class _Template(msgspec.Struct):
    metadata: _TemplateMetadata = msgspec.field(default_factory=_TemplateMetadata)
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)


class _Group(msgspec.Struct, rename="camel"):
    replicas: int = 0
    num_of_hosts: int = 1
    template: _Template = msgspec.field(default_factory=_Template)


class _HeadGroup(msgspec.Struct):
    template: _Template = msgspec.field(default_factory=_Template)


class _ClusterSpec(msgspec.Struct, rename="camel"):
    head_group_spec: _HeadGroup = msgspec.field(default_factory=_HeadGroup)
    worker_group_specs: list[_Group] = []


class _RayCluster(msgspec.Struct):
    spec: _ClusterSpec = msgspec.field(default_factory=_ClusterSpec)


class _QuotaSpec(msgspec.Struct):
    hard: dict[str, str] = {}


class _QuotaStatus(msgspec.Struct):
    used: dict[str, str] = {}


class _Quota(msgspec.Struct):
    metadata: _Metadata
    spec: _QuotaSpec = msgspec.field(default_factory=_QuotaSpec)
    status: _QuotaStatus = msgspec.field(default_factory=_QuotaStatus)


class _Priority(msgspec.Struct):
    conditions: list[_Condition] = []


class _ClassStatus(msgspec.Struct, rename="camel"):
    priority_statuses: list[_Priority] = []


class _ComputeClass(msgspec.Struct):
    metadata: _Metadata
    status: _ClassStatus = msgspec.field(default_factory=_ClassStatus)


def _decode(text: msgspec.Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise UnusableError(f"not as Kubernetes has it: {error}") from error
