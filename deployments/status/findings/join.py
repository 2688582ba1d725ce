"""Says what is wrong in a fleet, from what a gateway and Kubernetes say of it at once. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from deployments.status.cluster.reading import ClusterReading
from deployments.status.findings.finding import FleetFinding, Severity, in_order, short
from deployments.status.findings.fleet import fleet_findings
from deployments.status.findings.platform import platform_findings
from deployments.status.findings.pod_rules import PodScene, first_of_pods
from deployments.status.findings.record_rules import (
    EXPLAINED_RULES,
    OWN_RULES,
    first_of_record,
)
from deployments.status.findings.slice_cases import SliceCase, slice_cases
from deployments.status.reports import ReportedFleet

# What an operator would wait for without looking: a machine comes in 3 to 5 minutes.
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class StatusReadings:
    """What was read. A side is `None` if it was not asked, or was in vain: its problem says why."""

    fleet: ReportedFleet | None = None
    cluster: ClusterReading | None = None
    fleet_problem: str | None = None
    cluster_problem: str | None = None


def find_faults(
    readings: StatusReadings, now_s: float, patience_s: float = PATIENCE_S
) -> tuple[FleetFinding, ...]:
    """Returns what is wrong, the worst first; nothing if nothing is.

    `now_s` is wall-clock time. What has lasted for less than `patience_s` and may be on its way is
    not told. One fault is told once: with the pods of a slice, if they show it, or else with its
    record.
    """
    return in_order(_findings(readings, now_s, patience_s))


def _findings(readings: StatusReadings, now_s: float, patience_s: float) -> Iterator[FleetFinding]:
    yield from _unread(readings)
    fleet, cluster = readings.fleet, readings.cluster
    if cluster is not None:
        yield from platform_findings(cluster, now_s, patience_s)
    if fleet is not None:
        yield from fleet_findings(fleet, patience_s)
    namespace = cluster.namespace if cluster is not None else ""
    machines = cluster.machines if cluster is not None else None
    scene = PodScene(namespace, machines, now_s, patience_s)
    for case in slice_cases(fleet, cluster):
        yield from _slice_findings(case, scene)


def _unread(readings: StatusReadings) -> Iterator[FleetFinding]:
    if readings.fleet_problem is not None:
        yield FleetFinding(
            Severity.CRITICAL,
            "gateway",
            f"it did not answer, so only pods are looked at: {short(readings.fleet_problem)}",
            "is --url right, does a port-forward run? What follows says how the gateways' pods are",
        )
    if readings.cluster_problem is not None:
        yield FleetFinding(
            Severity.WARNING,
            "kubectl",
            "the cluster was not read, so only the fleet is looked at: "
            f"{short(readings.cluster_problem)}",
            "is the context right (kubectl config current-context), may you read there?",
        )


def _slice_findings(case: SliceCase, scene: PodScene) -> Iterator[FleetFinding]:
    by_pods = first_of_pods(case, scene)
    if by_pods is not None:
        yield by_pods
    own = [
        found
        for rule in OWN_RULES
        if (found := first_of_record(case, scene.patience_s, (rule,))) is not None
    ]
    yield from own
    if by_pods is None:
        explained = first_of_record(case, scene.patience_s, EXPLAINED_RULES)
        if explained is not None:
            yield explained
