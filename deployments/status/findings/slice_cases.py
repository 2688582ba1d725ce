"""Joins what is known of each slice: the directory's record, its pods, its group. Pure.

A record and pods are of one slice if the record names one of the pods. What only one side knows is
a case of its own.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autoscaling.provisioning.groups import WorkerGroup
from deployments.status.cluster.pods import PodReading, SlicePlace
from deployments.status.cluster.reading import ClusterReading
from deployments.status.reports import ReportedFleet, ReportedOrder, ReportedSupply


@dataclass(frozen=True, slots=True)
class SliceCase:
    """One slice. `record` is `None` where the directory does not know it, or was not asked.

    `num_hosts` is how many it should have; `None` where no worker group says so. `pods` are by
    worker, those being deleted included; `None` where Kubernetes was not asked.
    `order` is an operator's that it be kept from replicas or replaced; `twin` another living slice
    of the same name. `is_reported` says whether a directory was asked at all, `has_own_name` that
    no other slice has its name, not even one that goes.
    """

    name: str
    num_hosts: int | None
    record: ReportedSupply | None
    pods: tuple[PodReading, ...] | None
    group: str | None
    order: ReportedOrder | None = None
    twin: "SliceCase | None" = None
    is_reported: bool = True
    has_own_name: bool = True

    @property
    def staying(self) -> tuple[PodReading, ...]:
        """The pods that nobody wants gone."""
        return tuple(pod for pod in self.pods or () if pod.due_at_s is None)

    @property
    def incarnation(self) -> str:
        """What tells it from another one of its name."""
        if self.record is not None and self.record.incarnation is not None:
            return self.record.incarnation
        return self.pods[0].name if self.pods else self.name

    @property
    def order_name(self) -> str:
        """What `slicewise order` is to be told: the name where that is enough."""
        return self.name if self.has_own_name else self.incarnation


def slice_cases(
    fleet: ReportedFleet | None, cluster: ClusterReading | None
) -> tuple[SliceCase, ...]:
    """Returns every slice that somebody knows, by name."""
    supply = fleet.supply if fleet is not None else ()
    orders = {
        order.about: order
        for order in (fleet.orders if fleet is not None else ())
        if order.kind in ("quarantine", "condemn")
    }
    seen = _seen(cluster)
    by_pod = {pod.name: replica for replica, (_, pods) in seen.items() for pod in pods}
    cases, known = [], set()
    for record in supply:
        names = [host.pod for host in record.hosts] + [record.incarnation]
        replica = next((by_pod[name] for name in names if name in by_pod), None)
        pods: tuple[PodReading, ...] | None = () if cluster is not None else None
        if replica is not None:
            known.add(replica)
            pods = seen[replica][1]
        order = orders.get(record.incarnation or "")
        num_hosts = seen[replica][0].num_hosts if replica is not None else None
        cases.append(SliceCase(record.name, num_hosts, record, pods, record.group, order))
    for replica, (group, pods) in seen.items():
        if replica not in known:
            # As the provisioner names it, unless every pod of it goes.
            called = {pod.name: each.name for each in group.slices for pod in each.pods}
            known_by = (called[pod.name] for pod in pods if pod.name in called)
            name = next(known_by, _place(pods[0]).slice_name)
            is_reported = fleet is not None
            cases.append(
                SliceCase(name, group.num_hosts, None, pods, group.name, is_reported=is_reported)
            )
    return tuple(sorted(_with_twins(cases), key=lambda case: (case.name, case.incarnation)))


def _seen(
    cluster: ClusterReading | None,
) -> Mapping[str, tuple[WorkerGroup, tuple[PodReading, ...]]]:
    """Returns the pods of each slice in Kubernetes with its group, by KubeRay's replica."""
    if cluster is None:
        return {}
    groups = {group.name: group for group in cluster.groups}
    found: dict[str, list[PodReading]] = {}
    for pod in cluster.pods:
        if pod.place is not None and pod.place.group in groups:
            found.setdefault(pod.place.replica, []).append(pod)
    return {
        replica: (
            groups[_place(pods[0]).group],
            tuple(sorted(pods, key=lambda pod: (_place(pod).worker_id, pod.name))),
        )
        for replica, pods in found.items()
    }


def _place(pod: PodReading) -> SlicePlace:
    assert pod.place is not None  # only pods of slices come here
    return pod.place


def _with_twins(cases: Iterable[SliceCase]) -> list[SliceCase]:
    """Names to each living slice another one of its name; what replaces one that goes is none."""
    living: dict[str, list[SliceCase]] = {}
    cases = list(cases)
    for case in cases:
        if _lives(case):
            living.setdefault(case.name, []).append(case)
    counts = Counter(case.name for case in cases)
    found = []
    for case in cases:
        others = [each for each in living.get(case.name, ()) if each is not case]
        is_double = bool(others) and _lives(case)
        twin = others[0] if is_double else None
        found.append(replace(case, twin=twin, has_own_name=counts[case.name] == 1))
    return found


def _lives(case: SliceCase) -> bool:
    if case.record is not None:
        return case.record.state != "condemned"
    return bool(case.staying)
