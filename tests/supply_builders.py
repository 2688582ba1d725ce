"""Hosts, pods and lives in few words, for tests of the supply of slices."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from serving.domain.inventory import (
    POD_TYPE_LABEL,
    SLICE_NAME_LABEL,
    TOPOLOGY_LABEL,
    WORKER_ID_LABEL,
    ObservedHost,
)
from serving.domain.names.gke_names import COMPUTE_CLASS_LABEL
from serving.domain.plan_report import ModelPlan, PlanReport, encode_report
from serving.domain.slice_lifecycle import EndCause, SliceLifecycle, SliceState
from serving.domain.slice_records import HostRecord, SliceRecord
from serving.domain.supply.pods import GroupPods, ObservedPod, ObservedSlice, PodPhase

_WAY = (SliceState.RESERVED, SliceState.LOADING, SliceState.READY)


def host(pod: str, worker_id: int = 0, **changes: object) -> ObservedHost:
    """A free host of a v6e 2x4 slice of two, as Ray has it."""
    compute_class = changes.pop("compute_class", "spot")
    labels = {
        POD_TYPE_LABEL: "v6e-8",
        TOPOLOGY_LABEL: "2x4",
        WORKER_ID_LABEL: str(worker_id),
        SLICE_NAME_LABEL: "as-told",
    }
    if compute_class is not None:
        labels[COMPUTE_CLASS_LABEL] = str(compute_class)
    made = ObservedHost(
        node_id=f"node-of-{pod}",
        address=f"address-of-{pod}",
        slice_name="as-told",
        worker_id=worker_id,
        num_chips=4,
        num_free_chips=4,
        is_draining=False,
        labels=labels,
        instance_id=pod,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def hosts_of(name: str, **changes: object) -> list[ObservedHost]:
    """Both hosts of the slice `name`."""
    return [host(f"{name}-pod-{index}", index, **changes) for index in (0, 1)]


def pods_of(name: str, **changes: object) -> ObservedSlice:
    """Both pods of the slice `name`: they run on machines of their own."""
    pods = tuple(
        replace(
            ObservedPod(
                f"{name}-pod-{index}",
                PodPhase.RUNNING,
                f"address-of-{name}-pod-{index}",
                machine=f"machine-of-{name}-{index}",
            ),
            **changes,  # type: ignore[arg-type]
        )
        for index in (0, 1)
    )
    return ObservedSlice(name, pods)


def group_of(*slices: ObservedSlice, name: str = "v6e-2x4-spot") -> GroupPods:
    """A worker group with these slices."""
    return GroupPods(name, "spot", "v6e", "2x4", None, 2, slices)


def life(
    replica_id: str,
    hosts: Iterable[ObservedHost] = (),
    state: SliceState = SliceState.READY,
    *,
    at_s: float = 0.0,
    drain_deadline_s: float | None = None,
    model: str = "demo",
    ends_at_s: float | None = None,
) -> SliceRecord:
    """The record of a replica that has `hosts`; without any it waits."""
    hosts = tuple(hosts)
    made = SliceLifecycle.begin(at_s).enter(SliceState.PROVISIONING, at_s, "none is free")
    if hosts:
        way = _WAY if state in _WAY else (*_WAY, state)
        for step in way[: way.index(state) + 1]:
            made = made.enter(step, at_s, "so it goes", slice_name="s")
    return SliceRecord(
        replica_id=replica_id,
        model=model,
        compute_class="spot",
        life=made,
        generation="v6e",
        topology="2x4",
        hosts=tuple(
            HostRecord(
                each.worker_id, each.node_id, each.address, each.num_chips, ends_at_s=ends_at_s
            )
            for each in hosts
        ),
        drain_deadline_s=drain_deadline_s,
    )


def ended(record: SliceRecord, cause: EndCause, at_s: float = 10.0) -> SliceRecord:
    """The last report of a life."""
    return replace(record, life=record.life.end(cause, at_s, "so it ended"))


def with_engine(name: str) -> SliceRecord:
    """A replica on a slice of its own, with an engine that can be taken over."""
    return replace(
        life(name, hosts_of(name)),
        engine_id=f"engine of {name}",
        control=("10.0.0.1", 1),
        fingerprint="f",
    )


def plan_that_drains(model: str, replica_ids: Sequence[str], now_s: float) -> bytes:
    """A plan for one slice that gives up those of these replicas first, as the policy stores it."""
    plan = ModelPlan(
        model=model,
        decided_at_s=now_s,
        changed_at_s=None,
        targets={"spot": 1},
        demand_slices=1.0,
        next_slice_at_s=None,
        arithmetic="one is needed",
        changes=(),
        refusals=(),
        alerts=(),
        num_failures=0,
        drain_order=tuple(replica_ids),
    )
    return encode_report(PlanReport(written_at_s=now_s, models=(plan,)))
