"""The slices that hosts and pods make, and those of them that a replica may take.

Owns which hosts and pods are one slice, and when it is whole. Does not own what is held against a
slice (`faults`), nor the reservation: a slice is free here until its placement group exists, and
only the group decides who has it. Pure.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from serving.domain.inventory import (
    POD_TYPE_LABEL,
    TOPOLOGY_LABEL,
    ZONE_LABEL,
    ObservedHost,
    Slice,
    SliceRequest,
)
from serving.domain.names.gke_names import COMPUTE_CLASS_LABEL
from serving.domain.supply.pods import GroupPods, ObservedSlice
from serving.domain.topology import SliceShape, shapes

# Digits that are shown of a node id's 56: enough to distinguish the nodes of any fleet.
_SHOWN_ID = 12


@dataclass(frozen=True, slots=True)
class FoundSlice:
    """One incarnation of a slice as it was found: its hosts in Ray, and its pods.

    `hosts` are by worker id; they may be fewer than `shape` has, or more. `pods` and `group` are
    `None` where there is no Kubernetes.
    """

    incarnation: str
    name: str
    shape: SliceShape
    hosts: tuple[ObservedHost, ...]
    pods: ObservedSlice | None = None
    group: GroupPods | None = None

    @property
    def compute_class(self) -> str | None:
        """The compute class that its hosts or its pods name; `None` if none do."""
        if self.group is not None:
            return self.group.compute_class
        return next((host.labels.get(COMPUTE_CLASS_LABEL) for host in self.hosts), None)

    @property
    def zone(self) -> str | None:
        """The zone that its hosts or its pods name; `None` if none do."""
        if self.hosts:
            return self.hosts[0].labels.get(ZONE_LABEL)
        return None if self.group is None else self.group.zone

    @property
    def whole(self) -> Slice:
        """The slice that these hosts are; only meaningful while `why_not_whole` is `None`."""
        return Slice(self.name, self.hosts)

    def why_not_whole(self) -> str | None:
        """Returns why these hosts are no slice that an engine could use; `None` if they are."""
        num_hosts = self.shape.num_hosts
        ids = [host.worker_id for host in self.hosts]
        if len(set(ids)) < len(ids):
            return f"two hosts have one worker id (of {ids}): it is being replaced"
        missing = sorted(set(range(num_hosts)) - set(ids))
        if missing:
            return f"host {missing[0]} of {num_hosts} is missing"
        if len(ids) > num_hosts:
            return f"it has {len(ids)} hosts, not {num_hosts}"
        for host in self.hosts:
            if host.num_chips != self.shape.chips_per_host:
                has = f"has {host.num_chips} chips, not {self.shape.chips_per_host}"
                return f"host {host.worker_id} {has}"
        return None

    def why_not_free(self) -> str | None:
        """Returns why nobody may take this slice now; `None` if somebody may."""
        if (reason := self.why_not_whole()) is not None:
            return reason
        for host in self.hosts:
            if host.is_draining:
                return f"host {host.worker_id} drains"
            if host.num_free_chips < host.num_chips:
                return "it is taken"
        return None

    def fits(self, request: SliceRequest) -> bool:
        """Returns whether it is of the kind that is requested, whole or not."""
        wanted = {POD_TYPE_LABEL: request.pod_type, TOPOLOGY_LABEL: request.topology}
        wanted |= request.labels
        return (
            self.shape.num_hosts == request.num_hosts
            and self.shape.chips_per_host == request.chips_per_host
            and self.compute_class in (None, request.compute_class)
            and bool(self.hosts)
            and all(
                host.labels.get(name) == value
                for host in self.hosts
                for name, value in wanted.items()
            )
        )


@dataclass(frozen=True, slots=True)
class SliceMatches:
    """The slices of the requested kind: those that are free, and why each other one is not."""

    free: tuple[Slice, ...]
    refused: Mapping[str, str] = field(hash=False)


def find_slices(
    hosts: Iterable[ObservedHost], groups: Iterable[GroupPods] = ()
) -> list[FoundSlice]:
    """Returns every incarnation of a slice, whole or not, by name.

    `groups` are Kubernetes' pods; a host belongs to the pod that it says it runs in, or else whose
    address it has. Hosts of no such pod make slices by what they were told: their slice's name, or
    each alone where a slice has one host. Hosts and groups of no known shape are left out.
    """
    unclaimed = {host.node_id: host for host in hosts}
    by_pod: dict[str, list[ObservedHost]] = {}
    for host in unclaimed.values():
        by_pod.setdefault(host.instance_id or host.address, []).append(host)
    found = []
    for group in groups:
        shape = _shape_of(group)
        if shape is None:
            continue
        for each in group.slices:
            members = [host for pod in each.pods for host in by_pod.get(pod.name, ())]
            members += [host for pod in each.pods for host in by_pod.get(pod.address or "", ())]
            for host in members:
                unclaimed.pop(host.node_id, None)
            found.append(_of_pods(each, group, shape, members))
    found += _told_slices(unclaimed.values())
    return sorted(found, key=lambda each: (each.name, each.incarnation))


def join_slices(parts: Sequence[FoundSlice]) -> FoundSlice:
    """Returns what was found as `parts` as the one slice that it is, the hosts of all of them.

    It is the part whose pods are there; where none has any, the first.
    """
    whole = next((each for each in parts if each.pods is not None), parts[0])
    hosts = sorted((host for each in parts for host in each.hosts), key=lambda host: host.worker_id)
    return replace(whole, hosts=tuple(hosts))


def match_slices(
    slices: Iterable[FoundSlice],
    request: SliceRequest,
    barred: Mapping[str, str] = MappingProxyType({}),
) -> SliceMatches:
    """Returns the slices of the requested kind, free ones and others, in the order of `slices`.

    `barred` says of incarnations that are free why nobody may take them all the same.
    """
    free, refused = [], {}
    for each in slices:
        if not each.fits(request):
            continue
        reason = each.why_not_free() or barred.get(each.incarnation)
        if reason is None:
            free.append(each.whole)
        else:
            refused[each.name] = reason
    return SliceMatches(tuple(free), refused)


def _of_pods(
    each: ObservedSlice, group: GroupPods, shape: SliceShape, members: Iterable[ObservedHost]
) -> FoundSlice:
    named = [
        # A webhook may have told a single host that it is worker 1.
        replace(host, slice_name=each.name, worker_id=host.worker_id if shape.num_hosts > 1 else 0)
        for host in members
    ]
    ordered = tuple(sorted(named, key=lambda host: host.worker_id))
    return FoundSlice(each.incarnation, each.name, shape, ordered, each, group)


def _shape_of(group: GroupPods) -> SliceShape | None:
    """Returns the shape of a group's slices; a topology alone may have hosts of two sizes."""
    for shape in shapes(group.generation):
        if (shape.topology, shape.num_hosts) == (group.topology, group.num_hosts):
            return shape
    return None


def _told_slices(hosts: Iterable[ObservedHost]) -> Iterator[FoundSlice]:
    """Yields the slices of hosts that no pod is known of."""
    by_name: dict[tuple[str, str, str], list[ObservedHost]] = {}
    alone: list[tuple[ObservedHost, SliceShape]] = []
    shapes_of: dict[tuple[str, str, str], SliceShape] = {}
    for host in hosts:
        shape = host.shape
        key = (host.slice_name, host.labels[POD_TYPE_LABEL], host.labels.get(TOPOLOGY_LABEL, ""))
        if shape is None:
            continue
        by_name.setdefault(key, []).append(host)
        if shape.num_hosts > 1:
            shapes_of[key] = shape
    for key, members in by_name.items():
        if (joined := shapes_of.get(key)) is not None:
            ordered = tuple(sorted(members, key=lambda host: (host.worker_id, host.node_id)))
            yield FoundSlice(_incarnation(ordered), key[0], joined, ordered)
            continue
        alone += [(host, shape) for host in members if (shape := host.shape) is not None]
    yield from _each_alone(alone)


def _each_alone(hosts: Iterable[tuple[ObservedHost, SliceShape]]) -> Iterator[FoundSlice]:
    """Yields every host as a slice of its own, regardless of its name and worker id.

    A worker 0 keeps its name unless another has it too. All others get their node's id appended.
    """
    hosts = list(hosts)
    num_firsts = Counter(host.slice_name for host, _ in hosts if host.worker_id == 0)
    for host, shape in hosts:
        name = host.slice_name
        if host.worker_id != 0 or num_firsts[name] > 1:
            name = f"{name}-{host.node_id[:_SHOWN_ID]}"
        member = replace(host, slice_name=name, worker_id=0)
        yield FoundSlice(_incarnation((member,)), name, shape, (member,))


def _incarnation(hosts: Iterable[ObservedHost]) -> str:
    """Returns what stands for an incarnation without pods: its first host, which is never twice."""
    first = min(hosts, key=lambda host: (host.worker_id, host.node_id))
    return first.instance_id or f"node-{first.node_id}"
