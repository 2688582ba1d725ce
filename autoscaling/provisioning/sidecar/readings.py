"""Reads what stands around the slices: control pods, quotas, compute classes. Pure.

Owns which fields matter: objects as the Kubernetes API has them in, records out. Does not own when
they are read (`conditions`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from autoscaling.provisioning.errors import UnusableError
from serving.domain.names.gke_names import GKE_COMPUTE_CLASS

# Labels that `slicewise render` gives to pods (`deployments.manifests.names`); Redis has its own.
INSTANCE_LABEL = "app.kubernetes.io/instance"
COMPONENT_LABEL = "app.kubernetes.io/component"
NAME_LABEL = "app.kubernetes.io/name"
HEAD, GATEWAY, CONTROL, REDIS = "head", "gateway", "control", "redis"
REDIS_NAME = "slicewise-redis"
# GKE's word for "this rule cannot be had at present", since 1.36.4-gke.1391000. Source: GKE's page
# on custom compute classes, read 2026-11-20.
SUSPENDED = "ProvisioningSuspended"
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
    """Reads of a RayCluster how many pods off slices it asks for, and the classes of all."""
    spec = _decode(text, _RayCluster).spec
    wanted = {HEAD: 1, GATEWAY: 0}
    for each in spec.worker_group_specs:
        component = each.template.metadata.labels.get(COMPONENT_LABEL)
        if component in (GATEWAY, CONTROL):
            wanted[component] = wanted.get(component, 0) + each.replicas * each.num_of_hosts
    templates = [spec.head_group_spec.template, *(g.template for g in spec.worker_group_specs)]
    classes = {each.spec.node_selector.get(GKE_COMPUTE_CLASS) for each in templates}
    return ClusterWish(wanted, frozenset(name for name in classes if name is not None))


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
